"""Which answers of recall books each state policy still gets right, under teacher forcing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from replayeval.arrays import Array
from replayeval.engine.forcing import Forcing, forced_hidden_states
from replayeval.errors import ConfigError
from replayeval.models.builtin.documents import BuiltinDocument
from replayeval.models.head import OutputHead


@dataclass(frozen=True, kw_only=True, eq=False)
class RecalledAnswers:
    """What was recalled of one document.

    Attributes:
        doc_id: The document.
        policies: The reference, then the arms.
        right: Whether each answer was recalled, in the order of the document's answers.
    """

    doc_id: str
    policies: tuple[str, ...]
    right: Bool[Array[np.bool_], "policies answers"]


def recalled_answers(
    head: OutputHead,
    documents: Sequence[BuiltinDocument],
    forcing: Forcing,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[RecalledAnswers]:
    """Force recall books through a model and say which answers it has right under the reference and every arm.

    An answer is right when each of its tokens is the most likely one given the true text before it. Up to the first
    wrong token that is what greedy decoding gives, so teacher forcing decides it exactly.

    Args:
        head: The model; its tokens must be those of the documents.
        documents: Documents with answers; the place of each is the sequence number of its random bits.
        forcing: Arms, engine and seed; without a prompt.
        progress: Called with the number of tokens of each finished pass.

    Returns:
        One entry per document.

    Raises:
        ConfigError: A document without answers, or a prompt.
    """
    if forcing.prefill_tokens:
        raise ConfigError(f"expected recall books without a prompt, got prefill_tokens {forcing.prefill_tokens}")
    return [_one(head, document, i, forcing, progress) for i, document in enumerate(documents)]


def _one(
    head: OutputHead,
    document: BuiltinDocument,
    sequence: int,
    forcing: Forcing,
    progress: Callable[[int], None] | None,
) -> RecalledAnswers:
    if not document.answers:
        raise ConfigError(f"expected a document with answers, got {document.doc_id}, which asks nothing")
    asked = np.zeros(len(document.ids), dtype=np.bool_)
    for answer in document.answers:
        asked[answer.start - 1 : answer.stop - 1] = True
    greedy = np.full((len(forcing.policies), len(document.ids)), -1, dtype=np.int64)

    def collect(position: int, hidden: Float[Tensor, "policies time hidden"]) -> None:
        places = np.flatnonzero(asked[position : position + hidden.shape[1]])
        if len(places):
            logits = head.logits(hidden[:, torch.as_tensor(places, device=hidden.device)])
            # The most likely of logits that are not numbers is no answer.
            best = logits.argmax(-1).masked_fill(~logits.amax(-1).isfinite(), -1)
            greedy[:, position + places] = best.cpu().numpy()
        if progress is not None:
            progress(hidden.shape[1])

    forced_hidden_states(head, [document.ids], forcing, sequences=[sequence], chunk_done=collect)
    hit = greedy[:, :-1] == document.ids[1:]
    right = np.stack([hit[:, a.start - 1 : a.stop - 1].all(axis=1) for a in document.answers], axis=1)
    return RecalledAnswers(doc_id=document.doc_id, policies=tuple(str(p) for p in forcing.policies), right=right)
