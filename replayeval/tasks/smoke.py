"""Small offline tasks for the built-in checkpoints: questions of recall books, asked as lm-eval asks.

A document is a recall book cut off where an answer begins (see docs/builtin.md). The models were trained on such books
with other seeds, and the answer stands some hundred tokens back or more, so it has to come out of the recurrent state.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import datasets  # pyright: ignore[reportMissingTypeStubs]

from replayeval.errors import ConfigError
from replayeval.models.builtin.recall import AnswerSpan, BookStyle, Draws, RecallBook, TaskKind, new_value, write_book
from replayeval.models.builtin.text import held_out_english
from replayeval.models.builtin.tokenizer import decode
from replayeval.tasks.sources import Row

CHOICES = 4
_SEED_STREAM = 71
_MOST_BOOKS_PER_DOCUMENT = 50


def recall_questions(
    *,
    kinds: Sequence[str],
    documents: int,
    tokens: int,
    least_distance: int,
    live_facts: int,
    book_seed: int = 4711,
    samples: int | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Return questions of recall books, one per book.

    Args:
        kinds: Kinds of facts that are asked (see `TaskKind`).
        documents: How many documents.
        tokens: Length of a book in tokens; the question stands in its second half.
        least_distance: Fewest tokens between the latest place that spells the answer out and the question.
        live_facts: Facts that can be asked at a time; more are harder to keep apart.
        book_seed: Seed of the books.
        samples: Take only the first so many documents.

    Raises:
        ConfigError: Values that no book can follow.
    """
    try:
        wanted = {TaskKind(kind) for kind in kinds}
        style = BookStyle(
            live_facts=live_facts, opening_facts=live_facts, tokens_per_fact=max(1, tokens // 4), noise_share=0.0
        )
    except ValueError as error:
        raise ConfigError(f"smoke: {error}") from None
    count = documents if samples is None else min(documents, samples)
    found = _questions(count, wanted, style, tokens=tokens, least_distance=least_distance, seed=book_seed)
    return {"test": cast(Any, datasets).Dataset.from_list(list(found))}


def question_prompt(doc: Mapping[str, Any]) -> str:
    """Return the book up to the answer."""
    return doc["prompt"]


def recall_score(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return 1 for the exact answer, else 0."""
    return {"exact_match": float(results[0].strip() == doc["answer"])}


def _questions(
    count: int, kinds: set[TaskKind], style: BookStyle, *, tokens: int, least_distance: int, seed: int
) -> Iterator[Row]:
    verses = held_out_english().verses
    made = 0
    for index in range(_MOST_BOOKS_PER_DOCUMENT * count):
        if made == count:
            return
        book = write_book(seed=seed, index=index, tokens=tokens, verses=verses, style=style)
        draws = Draws(seed, index, _SEED_STREAM)
        asked = [
            answer
            for answer in book.answers
            if answer.kind in kinds and answer.start > tokens // 2 and answer.distance_tokens >= least_distance
        ]
        if asked:
            made += 1
            yield _document(book, draws.pick(asked), draws)
    if made < count:
        raise ConfigError(
            f"smoke: {tokens} tokens with answers {least_distance} tokens back give {made} questions in "
            f"{_MOST_BOOKS_PER_DOCUMENT * count} books; take longer books or shorter distances."
        )


def _document(book: RecallBook, asked: AnswerSpan, draws: Draws) -> Row:
    def spelled(answer: AnswerSpan) -> str:
        return decode(book.ids[answer.start : answer.stop])

    right = spelled(asked)
    # Other values of the book are the tempting ones; random ones fill up.
    options = sorted({spelled(answer) for answer in book.answers if answer.kind is asked.kind} - {right})
    draws.shuffle(options)
    options = options[: CHOICES - 1]
    space = " " if right.startswith(" ") else ""
    while len(options) < CHOICES - 1:
        filler = space + new_value(draws, asked.kind)
        if filler != right and filler not in options:
            options.append(filler)
    place = draws.below(CHOICES)
    options.insert(place, right)
    return {
        "prompt": decode(book.ids[: asked.start]),
        "answer": right.strip(),
        "choices": options,
        "gold": place,
        "kind": str(asked.kind),
        "distance_tokens": asked.distance_tokens,
    }
