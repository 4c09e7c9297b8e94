"""What a built-in model can do: English perplexity, recall by kind and distance, and the decays of its heads."""

# torch and its companions ship partial types: what comes out of them is unknown by no fault of this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from replayeval.models.builtin.documents import BuiltinDocument, DocumentKind, builtin_corpus
from replayeval.models.builtin.recall import AnswerSpan, TaskKind
from replayeval.models.builtin.tokenizer import token_bytes

Logits = Callable[[Int64[Tensor, "rows time"]], Float[Tensor, "rows time vocab"]]
DISTANCE_EDGES: tuple[int, ...] = (0, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Right answers out of all answers of one kind or distance; an answer counts when each of its tokens is right."""

    right: int
    answers: int

    @property
    def accuracy(self) -> float | None:
        """Share of right answers; None without any answer."""
        return self.right / self.answers if self.answers else None


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """Measurements on built-in documents of one length.

    Attributes:
        tokens: Length of the documents.
        recall: All answers.
        recall_by_book: The answers of each recall book, which are not independent of each other.
        not_latest: The answers that are not the newest value of their kind, which need the key (`AnswerSpan.latest`).
        by_kind: Answers by task.
        by_distance: Answers by distance, under the lower edge of the octave.
        english_bits_per_byte: Mean over held-out English.
        english_bits_by_position: The same by quarter of the document.
    """

    tokens: int
    recall: Tally
    recall_by_book: tuple[Tally, ...]
    not_latest: Tally
    by_kind: dict[str, Tally]
    by_distance: dict[int, Tally]
    english_bits_per_byte: float | None
    english_bits_by_position: tuple[float, ...]

    def to_json(self) -> dict[str, object]:
        """Return plain values for a log or a model card."""
        return {
            "tokens": self.tokens,
            "recall": self.recall.accuracy,
            "answers": self.recall.answers,
            "by_book": [[tally.right, tally.answers] for tally in self.recall_by_book],
            "not_latest": [self.not_latest.accuracy, self.not_latest.answers],
            "by_kind": {kind: [tally.accuracy, tally.answers] for kind, tally in self.by_kind.items()},
            "by_distance": {str(edge): [tally.accuracy, tally.answers] for edge, tally in self.by_distance.items()},
            "english_bits_per_byte": self.english_bits_per_byte,
            "english_bits_by_position": list(self.english_bits_by_position),
        }


def answers_right(document: BuiltinDocument, greedy: NDArray[np.int64]) -> list[bool]:
    """Say for each answer whether greedy decoding reproduces it.

    Args:
        document: The document.
        greedy: Most likely token at each position for the next one, `[time]`. With the true text before it
            teacher forcing and free running agree up to the first wrong token, so this is exact.

    Returns:
        One truth value per answer, in the document's order.
    """
    return [
        bool(np.array_equal(greedy[answer.start - 1 : answer.stop - 1], document.ids[answer.start : answer.stop]))
        for answer in document.answers
    ]


def _tally(hits: Sequence[bool]) -> Tally:
    return Tally(right=sum(hits), answers=len(hits))


def _edge(distance: int) -> int:
    return max(edge for edge in DISTANCE_EDGES if edge <= distance)


def evaluate(
    logits: Logits, *, docs: int, tokens: int, seed: int = 0, device: torch.device, rows: int = 8
) -> ModelReport:
    """Measure a model on built-in documents, recall books and English in equal numbers.

    Args:
        logits: The model as a function.
        docs: Number of documents.
        tokens: Length of each.
        seed: Seed of the corpus.
        device: Where the model runs.
        rows: Documents per forward.

    Returns:
        The report.
    """
    documents = builtin_corpus(docs, tokens, seed)
    hits: list[tuple[AnswerSpan, bool]] = []
    books: list[Tally] = []
    losses: list[NDArray[np.float64]] = []
    sizes: list[NDArray[np.int64]] = []
    bytes_of = np.array([len(token) for token in token_bytes()])
    for start in range(0, len(documents), rows):
        part = documents[start : start + rows]
        ids = torch.from_numpy(np.stack([document.ids for document in part])).to(device)
        with torch.no_grad():
            out = logits(ids)
            greedy = out.argmax(-1).cpu().numpy()
            nll = functional.cross_entropy(out[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none")
        nll_values = nll.double().cpu().numpy()
        for row, document in enumerate(part):
            if document.kind is DocumentKind.ENGLISH:
                losses.append(nll_values[row])
                sizes.append(bytes_of[document.ids[1:]])
            right = answers_right(document, greedy[row])
            hits += zip(document.answers, right, strict=True)
            if document.kind is DocumentKind.RECALL:
                books.append(_tally(right))
    quarters = (
        [
            float(part.sum() / size.sum()) / math.log(2)
            for part, size in zip(*(np.array_split(np.stack(x), 4, axis=1) for x in (losses, sizes)), strict=True)
        ]
        if losses
        else []
    )
    nats, size = sum(float(x.sum()) for x in losses), sum(int(x.sum()) for x in sizes)
    return ModelReport(
        tokens=tokens,
        recall=_tally([ok for _, ok in hits]),
        recall_by_book=tuple(books),
        not_latest=_tally([ok for answer, ok in hits if not answer.latest]),
        by_kind={kind.value: _tally([ok for answer, ok in hits if answer.kind is kind]) for kind in TaskKind},
        by_distance={
            edge: _tally([ok for answer, ok in hits if _edge(answer.distance_tokens) == edge])
            for edge in DISTANCE_EDGES
        },
        english_bits_per_byte=nats / size / math.log(2) if losses else None,
        english_bits_by_position=tuple(quarters),
    )


@dataclass(frozen=True, kw_only=True)
class HeadDecay:
    """Decay of one head over a text.

    Attributes:
        layer: Layer index.
        head: Value head.
        half_life_tokens: Tokens after which the product of decays has fallen to one half, at the mean log decay.
    """

    layer: int
    head: int
    half_life_tokens: float


def decay_spectrum(model: nn.Module, ids: Int64[Tensor, "rows time"]) -> list[HeadDecay]:
    """Measure how fast each head forgets on real input.

    Args:
        model: A training model (`GDNTrainer` or `Mamba2Trainer`).
        ids: Text to run.

    Returns:
        One entry per layer and head; heads differ by orders of magnitude when slow ones are alive.
    """
    entries: list[HeadDecay] = []
    for name, module in model.named_modules():
        if not isinstance(getattr(module, "A_log", None), nn.Parameter):
            continue
        rates: list[Tensor] = []
        projection = module.get_submodule("in_proj_a" if hasattr(module, "in_proj_a") else "in_proj")

        def keep(_module: nn.Module, _inputs: object, output: Tensor, rates: list[Tensor] = rates) -> None:
            rates.append(output.detach().float())

        handle = projection.register_forward_hook(keep)
        try:
            with torch.no_grad():
                model(ids)
        finally:
            handle.remove()
        a_log, dt_bias = module.get_parameter("A_log").float(), module.get_parameter("dt_bias").float()
        steps = functional.softplus(rates[0][..., -a_log.numel() :] + dt_bias)
        rate = (steps * a_log.exp()).double().mean(dim=(0, 1))
        layer = int(name.split("layers.")[1].split(".")[0])
        for head, value in enumerate(rate.tolist()):
            entries.append(HeadDecay(layer=layer, head=head, half_life_tokens=math.log(2) / max(value, 1e-12)))
    return entries
