"""Confidence intervals of means and ratios over correlated tokens, by resampling documents or blocks of tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Protocol

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import NDArray
from scipy import special  # pyright: ignore[reportMissingTypeStubs]

from replayeval.arrays import Array

Series = Float64[Array[np.float64], " tokens"]

LEVEL = 0.95
RESAMPLES = 4000
FEW_DOCUMENTS = 10
_BLOCK_STREAM = 1
_DOCUMENT_STREAM = 2


class IntervalMethod(StrEnum):
    """How an interval came about."""

    DOCUMENTS = "documents_bca"
    TOKEN_BLOCKS = "token_blocks_percentile"


@dataclass(frozen=True, kw_only=True, eq=False)
class Totals:
    """The sum of a per-token quantity, as observed and in every resample.

    Attributes:
        observed: Sum over the data.
        replicates: Sum in each resample; entry `r` of two totals of one resampler comes from the same resample.
        leave_one_out: Sum without each document in turn, or None where blocks of tokens are resampled.
    """

    observed: float
    replicates: Float64[Array[np.float64], " resamples"]
    leave_one_out: Float64[Array[np.float64], " documents"] | None


class Resampler(Protocol):
    """Draws the same resamples for every quantity that it is asked about, which pairs arms with each other."""

    @property
    def method(self) -> IntervalMethod:
        """What is resampled."""
        ...

    @property
    def units(self) -> int:
        """How many documents, or how many blocks, one resample is made of."""
        ...

    def totals(self, series: Sequence[Series]) -> Totals:
        """Return the totals of a quantity given per document and token."""
        ...


class DocumentResampler:
    """Resamples whole documents: tokens of one document are correlated, documents are not."""

    method = IntervalMethod.DOCUMENTS

    def __init__(self, documents: int, *, seed: int, resamples: int = RESAMPLES) -> None:
        """Draw how often each of `documents` (at least two) occurs in each resample."""
        if documents < 2:
            raise ValueError(
                f"resampling documents takes at least 2, got {documents}; resample blocks of tokens instead"
            )
        self._counts = _document_counts(documents, seed, resamples)

    @property
    def units(self) -> int:
        """Number of documents."""
        return int(self._counts.shape[1])

    def totals(self, series: Sequence[Series]) -> Totals:
        """Return the totals of a quantity given per document and token.

        Raises:
            ValueError: The number of documents is not the one that was announced.
        """
        if len(series) != self.units:
            raise ValueError(f"expected {self.units} documents, got {len(series)}")
        sums = np.array([values.sum() for values in series], dtype=np.float64)
        total = float(sums.sum())
        return Totals(observed=total, replicates=self._counts @ sums, leave_one_out=total - sums)


# Every length of every cell of a sweep asks for the same draws, and drawing takes longer than using them.
@lru_cache(maxsize=4)
def _document_counts(documents: int, seed: int, resamples: int) -> Float64[Array[np.float64], "resamples documents"]:
    generator = np.random.default_rng([seed, _DOCUMENT_STREAM, documents])
    even = np.full(documents, 1.0 / documents)
    counts = generator.multinomial(documents, even, size=resamples).astype(np.float64)
    counts.flags.writeable = False
    return counts


class BlockResampler:
    """Resamples blocks of consecutive tokens of a single document, which is closed to a circle.

    The interval then speaks of other stretches of this document, not of other documents. The last block of a resample
    is cut so that every resample has as many tokens as the document.
    """

    method = IntervalMethod.TOKEN_BLOCKS

    def __init__(self, tokens: int, *, block_tokens: int, seed: int, resamples: int = RESAMPLES) -> None:
        """Draw the first token of every block of every resample."""
        if not 1 <= block_tokens <= tokens:
            raise ValueError(f"expected a block of 1 to {tokens} tokens, got {block_tokens}")
        self.tokens, self.block_tokens = tokens, block_tokens
        blocks = math.ceil(tokens / block_tokens)
        generator = np.random.default_rng([seed, _BLOCK_STREAM, tokens, block_tokens])
        self._starts: Int64[Array[np.int64], "resamples blocks"] = generator.integers(
            0, tokens, size=(resamples, blocks), dtype=np.int64
        )

    @property
    def units(self) -> int:
        """Blocks per resample."""
        return int(self._starts.shape[1])

    def totals(self, series: Sequence[Series]) -> Totals:
        """Return the totals of a quantity given per token of the one document.

        Raises:
            ValueError: There are several documents, or another number of tokens than announced.
        """
        if len(series) != 1 or series[0].shape[0] != self.tokens:
            raise ValueError(f"expected one document of {self.tokens} tokens, got {[len(s) for s in series]}")
        running = np.concatenate([[0.0], np.cumsum(np.concatenate([series[0], series[0]]))])
        last = self.tokens - (self.units - 1) * self.block_tokens
        whole, cut = self._starts[:, :-1], self._starts[:, -1]
        replicates = (
            (running[whole + self.block_tokens] - running[whole]).sum(axis=1) + running[cut + last] - running[cut]
        )
        return Totals(observed=float(series[0].sum()), replicates=replicates, leave_one_out=None)


def block_length(series: Sequence[Series]) -> int:
    """Return a block length for several quantities of one document that are to be resampled together.

    The automatic choice for the circular block bootstrap of a mean, the largest over the quantities, held between √n
    and 3√n for n tokens: states remember far, so that short blocks would understate the spread.

    Source: Politis and White 2004 with the correction of Patton, Politis and White 2009.
    """
    tokens = series[0].shape[0]
    low = math.ceil(math.sqrt(tokens))
    high = max(1, min(3 * low, tokens // 3))
    automatic = max(_automatic_block_length(values) for values in series)
    return min(max(math.ceil(automatic), low), high)


def ratio_interval(
    numerator: Totals, denominator: Totals, *, units: int, level: float = LEVEL, small_sample: bool = True
) -> tuple[float, float] | None:
    """Return the interval of a ratio of two totals; a mean is a total over the total count of tokens.

    Bias-corrected and accelerated (BCa) where documents were resampled, percentiles where blocks were.

    Args:
        numerator: Total above the line.
        denominator: Total below the line, from the same resampler.
        units: Documents or blocks in one resample.
        level: Coverage aimed at.
        small_sample: Widen the interval for few units as Student's t does for a mean: the normal quantile is replaced
            by t with `units - 1` degrees of freedom times √(units / (units - 1)).

    Returns:
        Low and high end, or None when the denominator vanishes in some resample.

    Source: Efron 1987 for BCa; Hesterberg 2015, "expanded percentile interval", for few units.
    """
    if denominator.observed == 0 or (denominator.replicates == 0).any():
        return None
    observed = numerator.observed / denominator.observed
    replicates = numerator.replicates / denominator.replicates
    if replicates.min() == replicates.max():
        return float(replicates[0]), float(replicates[0])
    tail = (1 - level) / 2
    z = -float(special.ndtri(tail))
    if small_sample and units > 1:
        z = -float(special.stdtrit(units - 1, tail)) * math.sqrt(units / (units - 1))
    low, high = -z, z
    if numerator.leave_one_out is not None and denominator.leave_one_out is not None:
        if (denominator.leave_one_out == 0).any():
            return None
        bias = _bias(observed, replicates)
        acceleration = _acceleration(numerator.leave_one_out / denominator.leave_one_out)
        low, high = _accelerated(low, bias, acceleration), _accelerated(high, bias, acceleration)
    ends = np.quantile(replicates, [special.ndtr(low), special.ndtr(high)])
    return float(ends[0]), float(ends[1])


def _bias(observed: float, replicates: NDArray[np.float64]) -> float:
    below = (np.mean(replicates < observed) + np.mean(replicates <= observed)) / 2
    edge = 0.5 / replicates.shape[0]
    return float(special.ndtri(min(max(float(below), edge), 1 - edge)))


def _acceleration(leave_one_out: NDArray[np.float64]) -> float:
    deviations = leave_one_out.mean() - leave_one_out
    spread = float((deviations**2).sum())
    return float((deviations**3).sum()) / (6 * spread**1.5) if spread > 0 else 0.0


def _accelerated(z: float, bias: float, acceleration: float) -> float:
    shifted = bias + z
    slack = 1 - acceleration * shifted
    # Past the pole the formula would swing to the other side; its limit there is the extreme resample.
    return bias + shifted / slack if slack > 0 else math.copysign(math.inf, shifted)


def _automatic_block_length(values: Series) -> float:
    tokens = values.shape[0]
    centred = values - values.mean()
    power = np.abs(np.fft.rfft(centred, n=2 * tokens)) ** 2
    covariance = np.fft.irfft(power)[:tokens] / tokens
    if tokens < 8 or covariance[0] <= 1e-30 * float(np.mean(values**2)):
        return 1.0
    correlation = covariance / covariance[0]
    run = max(5, math.ceil(math.log10(tokens)))
    furthest = min(tokens - 1, math.ceil(math.sqrt(tokens)) + run)
    small = np.abs(correlation[1 : furthest + 1]) < 2 * math.sqrt(math.log10(tokens) / tokens)
    runs = np.convolve(small.astype(np.float64), np.ones(run), mode="valid") >= run
    bandwidth = min(2 * max(int(np.argmax(runs)), 1) if runs.any() else furthest, furthest)
    lags = np.arange(1, bandwidth + 1)
    taper = np.clip(2 * (1 - lags / bandwidth), 0, 1)
    weighted = 2 * float((taper * lags * covariance[lags]).sum())
    spectrum = float(covariance[0]) + 2 * float((taper * covariance[lags]).sum())
    if spectrum <= 0:
        return 1.0
    return float((2 * weighted**2 / (4 / 3 * spectrum**2)) ** (1 / 3) * tokens ** (1 / 3))
