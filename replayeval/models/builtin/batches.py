"""Training documents: each step's batch depends on the configuration and the step alone."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from replayeval.models.builtin.config import TrainConfig
from replayeval.models.builtin.filler import WordPairs
from replayeval.models.builtin.recall import BookStyle, Draws, write_book
from replayeval.models.builtin.text import English, training_english
from replayeval.models.builtin.tokenizer import encode

# Evaluation seeds are small numbers: no training document can be an evaluation document.
_SEED_OFFSET = 1 << 40
# Of generated filler, about; what falls short is read again from a drawn place.
_CHARACTERS_PER_TOKEN = 3


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's documents.

    Attributes:
        ids: Token ids, `[rows, tokens]`.
        is_answer: Whether a token belongs to an answer, `[rows, tokens]`.
        is_english: Whether a document is plain English, `[rows]`.
    """

    ids: NDArray[np.int64]
    is_answer: NDArray[np.bool_]
    is_english: NDArray[np.bool_]


def _training_style(draws: Draws, tokens: int) -> BookStyle:
    # Books with few facts alive teach recall first; those with many then stretch it.
    live = 2 + draws.below(11)
    spacing = 60.0 * (max(tokens / 6, 240.0) / 60.0) ** draws.uniform()
    return BookStyle(
        tokens_per_fact=int(spacing),
        questions_per_fact=(2.0 + 3.0 * draws.uniform()) * min(2.0, max(1.0, spacing / 150.0)),
        opening_facts=draws.below(live + 1),
        live_facts=live,
        max_distance_tokens=1 << 30,
        noise_share=0.08,
    )


def _english_run(draws: Draws, english: English, tokens: int) -> NDArray[np.int64]:
    texts = english.chapter_texts
    start = draws.below(len(texts))
    run: list[int] = []
    first = 0
    for offset in range(len(texts)):
        run += encode(texts[(start + offset) % len(texts)])
        first = first or len(run)
        if len(run) >= tokens + first:
            break
    begin = draws.below(max(1, min(len(run) - tokens, first)))
    return np.resize(np.array(run, dtype=np.int64)[begin:], tokens)


@functools.cache
def _training_pairs() -> WordPairs:
    return WordPairs(training_english().verses)


def training_batch(config: TrainConfig, step: int, english: English) -> Batch:
    """Write the documents of one step.

    Args:
        config: The training configuration.
        step: The step, from 0.
        english: Text to train on.

    Returns:
        The batch.
    """
    stage, first = config.stage_at(step)
    seed = _SEED_OFFSET + config.seed
    ids = np.empty((stage.rows, stage.tokens), dtype=np.int64)
    is_answer = np.zeros((stage.rows, stage.tokens), dtype=np.bool_)
    is_english = np.zeros(stage.rows, dtype=np.bool_)
    for row in range(stage.rows):
        draws = Draws(seed, first + row, 3)
        if draws.uniform() < config.english_share:
            is_english[row] = True
            ids[row] = _english_run(draws, english, stage.tokens)
            continue
        style = _training_style(draws, stage.tokens)
        verses: Sequence[str] = english.verses
        if draws.uniform() < config.generated_share:
            verses = _training_pairs().verses(draws, _CHARACTERS_PER_TOKEN * stage.tokens)
        book = write_book(seed=seed, index=first + row, tokens=stage.tokens, verses=verses, style=style)
        ids[row] = book.ids
        for answer in book.answers:
            is_answer[row, answer.start : answer.stop] = True
    return Batch(ids=ids, is_answer=is_answer, is_english=is_english)


class _Steps(Dataset[Batch]):
    def __init__(self, config: TrainConfig, first_step: int) -> None:
        self._config = config
        self._first_step = first_step

    def __len__(self) -> int:
        return self._config.total_steps - self._first_step

    def __getitem__(self, index: int) -> Batch:
        return training_batch(self._config, self._first_step + index, training_english())


def _only(batches: list[Batch]) -> Batch:
    return batches[0]


def training_batches(config: TrainConfig, first_step: int) -> Iterator[Batch]:
    """Yield the batches from a step to the end, written ahead by worker processes, in order.

    Args:
        config: The training configuration.
        first_step: The step to start from.

    Yields:
        One batch per step.
    """
    # Built before the workers start, so that they share it.
    training_english()
    _training_pairs()
    loader: DataLoader[Batch] = DataLoader(
        _Steps(config, first_step),
        batch_size=1,
        shuffle=False,
        num_workers=config.workers,
        collate_fn=_only,
        prefetch_factor=8 if config.workers else None,
    )
    yield from loader
