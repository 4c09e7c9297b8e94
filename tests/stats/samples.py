"""Scores with known statistics."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from replayeval.store import DocumentScores


def scores_of(kl: Any, *, index: int = 0, arms: Sequence[str] | None = None, **changes: Any) -> DocumentScores:
    """Scores of one document with the KL given, [arms, time]; agreement everywhere and NLLs of 0 unless given."""
    kl = np.atleast_2d(np.asarray(kl, dtype=np.float64))
    count, time = kl.shape
    fields: dict[str, Any] = {
        "doc_index": index,
        "doc_id": f"document-{index}",
        "prefill_tokens": 0,
        "arms": tuple(arms or (f"shared:f{row}@L=16" for row in range(count))),
        "kl_nats": kl,
        "nll_nats": np.where(np.isnan(kl), np.nan, 0.0),
        "nll_reference_nats": np.zeros(time),
        "top1_agrees": ~np.isnan(kl),
        "diverged_at": tuple(int(np.argmax(np.isnan(row))) + 1 if np.isnan(row).any() else None for row in kl),
    }
    return DocumentScores(**(fields | changes))


def clustered(
    generator: np.random.Generator, documents: int, tokens: int, *, between: float = 0.5, within: float = 0.5
) -> list[np.ndarray]:
    """Series whose documents have levels of their own; the mean over all documents to come is exp(between²/2)."""
    levels = generator.lognormal(0, between, documents)
    noise = generator.gamma(1 / within**2, within**2, (documents, tokens))
    return [level * row for level, row in zip(levels, noise, strict=True)]
