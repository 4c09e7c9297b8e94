"""A range of generation lengths over documents, with the resamples that every quantity in it shares."""

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float64

from replayeval.arrays import Array
from replayeval.stats.bootstrap import (
    FEW_DOCUMENTS,
    BlockResampler,
    DocumentResampler,
    IntervalMethod,
    Resampler,
    Series,
    Totals,
    block_length,
    ratio_interval,
)


class TokenScores(Protocol):
    """What the statistics read of one document under all arms; `replayeval.store.DocumentScores` is one."""

    @property
    def doc_index(self) -> int:
        """Place of the document in the run."""
        ...

    @property
    def doc_id(self) -> str:
        """Identity of the document."""
        ...

    @property
    def arms(self) -> tuple[str, ...]:
        """Canonical policy texts."""
        ...

    @property
    def tokens(self) -> int:
        """Decoded tokens."""
        ...

    @property
    def kl_nats(self) -> Float64[Array[np.float64], "arms time"]:
        """KL(reference || arm) in nats; NaN from the position of divergence."""
        ...

    @property
    def nll_nats(self) -> Float64[Array[np.float64], "arms time"]:
        """NLL of the true next token under the arm; NaN where unknown or diverged."""
        ...

    @property
    def nll_reference_nats(self) -> Float64[Array[np.float64], " time"]:
        """NLL under the reference; NaN where the next token is unknown."""
        ...

    @property
    def top1_agrees(self) -> Bool[Array[np.bool_], "arms time"]:
        """Whether arm and reference rank the same token first."""
        ...

    @property
    def diverged_at(self) -> tuple[int | None, ...]:
        """Per arm the generation length of its first non-finite output, or None."""
        ...


class Scope:
    """The decoded positions `start … stop - 1` of some documents.

    A quantity is given as one array per document. NaN marks tokens that it does not exist for, such as the NLL where
    the next token is unknown: they count neither above nor below the line of a mean.
    """

    def __init__(
        self,
        scores: Sequence[TokenScores],
        start: int,
        stop: int,
        *,
        only_reaching: int = 0,
        seed: int,
        resamples: int,
    ) -> None:
        """Take the documents of at least `only_reaching` decoded tokens."""
        self._scores = [document for document in scores if document.tokens >= only_reaching]
        self._longest = max(document.tokens for document in scores)
        self._range = slice(start, stop)
        self._seed, self._resamples = seed, resamples
        self._known: dict[tuple[bytes, ...], Totals] = {}

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self._scores)

    @property
    def tokens(self) -> int:
        """Number of tokens over all documents."""
        return sum(values.shape[0] for values in self.nll_reference())

    @property
    def method(self) -> IntervalMethod:
        """How intervals come about here."""
        return IntervalMethod.DOCUMENTS if self.documents > 1 else IntervalMethod.TOKEN_BLOCKS

    def empty_reason(self, n: int) -> str | None:
        """Return why there is nothing at generation length `n`, or None."""
        return None if self._scores else f"no document decodes {n} tokens; the longest decodes {self._longest}"

    def kl(self, row: int) -> list[Series]:
        """KL of an arm in nats."""
        return [document.kl_nats[row, self._range] for document in self._scores]

    def nll(self, row: int) -> list[Series]:
        """NLL of an arm in nats."""
        return [document.nll_nats[row, self._range] for document in self._scores]

    def nll_reference(self) -> list[Series]:
        """NLL of the reference in nats."""
        return [document.nll_reference_nats[self._range] for document in self._scores]

    def nll_delta(self, row: int) -> list[Series]:
        """NLL of an arm minus that of the reference, token by token."""
        return [arm - reference for arm, reference in zip(self.nll(row), self.nll_reference(), strict=True)]

    def top1(self, row: int) -> list[Series]:
        """1 where an arm ranks the same token first as the reference, else 0."""
        return [document.top1_agrees[row, self._range].astype(np.float64) for document in self._scores]

    def totals(self, series: Sequence[Series]) -> Totals:
        """Return the total of a quantity, observed and resampled."""
        # Copying is what costs here, with many short documents; most have nothing to replace.
        known = [values if np.isfinite(values).all() else np.nan_to_num(values, nan=0.0) for values in series]
        return self._resampler.totals(known)

    def mean(
        self, series: Sequence[Series], value: str, interval: str | None, undefined: dict[str, str]
    ) -> tuple[float | None, tuple[float, float] | None]:
        """Return the mean over tokens and its interval; what is undefined gets its reason under its name."""
        counts = [(~np.isnan(values)).astype(np.float64) for values in series]
        if not any(count.any() for count in counts):
            undefined.update(dict.fromkeys([value, *([interval] if interval else [])], "no token has this number"))
            return None, None
        if interval is None:
            return float(np.nansum(np.concatenate(series)) / sum(count.sum() for count in counts)), None
        return self.ratio(self.totals(series), self._count_totals(counts), value, interval, undefined)

    def ratio(
        self, above: Totals, below: Totals, value: str, interval: str, undefined: dict[str, str]
    ) -> tuple[float | None, tuple[float, float] | None]:
        """Return the ratio of two totals and its interval; what is undefined gets its reason under its name."""
        if below.observed == 0:
            undefined.update(dict.fromkeys((value, interval), "what it is divided by is exactly 0"))
            return None, None
        bounds = ratio_interval(above, below, units=self._resampler.units)
        if bounds is None:
            undefined[interval] = "what it is divided by is exactly 0 in some resample"
        return above.observed / below.observed, bounds

    def _count_totals(self, counts: Sequence[Series]) -> Totals:
        # Nearly all quantities exist for the same tokens, and resampling 1s costs as much as resampling numbers.
        key = tuple(count.astype(np.bool_).tobytes() for count in counts)
        if key not in self._known:
            self._known[key] = self._resampler.totals(counts)
        return self._known[key]

    @cached_property
    def _resampler(self) -> Resampler:
        if self.documents > 1:
            return DocumentResampler(self.documents, seed=self._seed, resamples=self._resamples)
        arms = range(len(self._scores[0].arms))
        finite = [values for row in arms for values in self.kl(row) if np.isfinite(values).all()]
        tokens = self.nll_reference()[0].shape[0]
        length = block_length(finite) if finite else 1
        return BlockResampler(tokens, block_tokens=length, seed=self._seed, resamples=self._resamples)


def document_count_note(documents: int) -> str | None:
    """Return why intervals from so few documents deserve distrust, or None."""
    if documents == 1:
        return "one document: the interval speaks of other stretches of this document, not of other documents"
    if documents < FEW_DOCUMENTS:
        return f"only {documents} documents: the interval covers the truth less often than it says"
    return None
