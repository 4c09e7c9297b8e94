"""Tests of paired differences: McNemar's exact test, its generalisation to documents, and Holm's correction."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

import numpy as np
from jaxtyping import Float64
from scipy import special  # pyright: ignore[reportMissingTypeStubs]

from replayeval.arrays import Array

MONTE_CARLO_FLIPS = 20_000
_FLIP_STREAM = 3
_LARGEST_DENOMINATOR = 5_000
_LARGEST_TABLE = 2_000_000
_LARGEST_WORK = 2_000_000_000


class PairedTest(StrEnum):
    """How a p-value came about."""

    MCNEMAR_EXACT = "mcnemar_exact"
    SIGN_FLIP_EXACT = "sign_flip_exact"
    SIGN_FLIP_MONTE_CARLO = "sign_flip_monte_carlo"


@dataclass(frozen=True, kw_only=True)
class TestResult:
    """A two-sided p-value and the test behind it."""

    __test__ = False

    p: float
    test: PairedTest


def mcnemar_exact(to_wrong: int, to_right: int) -> float:
    """Return the two-sided p of McNemar's exact test: twice the smaller binomial tail, at most 1.

    Args:
        to_wrong: Documents right under the reference only.
        to_right: Documents right under the arm only.

    Raises:
        ValueError: A negative count.

    Source: McNemar 1947 in its exact, conditional form.
    """
    if to_wrong < 0 or to_right < 0:
        raise ValueError(f"expected counts of at least 0, got {to_wrong} and {to_right}")
    tail = float(special.bdtr(min(to_wrong, to_right), to_wrong + to_right, 0.5))
    return min(1.0, 2 * tail) if to_wrong + to_right else 1.0


def sign_flip(differences: Float64[Array[np.float64], " documents"], *, seed: int) -> TestResult:
    """Test whether the documents' differences are symmetric around 0, by flipping the sign of each.

    Under the hypothesis that reference and arm are exchangeable within each document, every pattern of signs is
    equally likely; p is the share of patterns whose sum is at least as far from 0 as the one observed. Samples of one
    document are averaged first and flip together, so that their correlation does no harm. Differences that are
    fractions of a small common denominator are enumerated exactly; with differences of -1, 0 and 1 that is McNemar's
    exact test.

    Args:
        differences: Score of the arm minus that of the reference, averaged over the samples of each document.
        seed: Seed of the random signs where enumeration would be too long.

    Raises:
        ValueError: A difference that is not finite.

    Source: Fisher 1935, randomisation test for matched pairs.
    """
    if not np.isfinite(differences).all():
        raise ValueError("expected finite differences")
    sizes = np.abs(differences[differences != 0])
    if sizes.size == 0:
        return TestResult(p=1.0, test=PairedTest.SIGN_FLIP_EXACT)
    units = _common_units(sizes)
    if units is None:
        return TestResult(p=_monte_carlo(differences, seed), test=PairedTest.SIGN_FLIP_MONTE_CARLO)
    whole, scale = units
    observed = round(float(differences.sum()) * scale)
    return TestResult(p=_enumerated(whole, abs(observed)), test=PairedTest.SIGN_FLIP_EXACT)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted by Holm's step-down procedure; None stays None and does not count.

    Source: Holm 1979.
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, index) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * p))
        adjusted[index] = highest
    return adjusted


def _common_units(sizes: Float64[Array[np.float64], " documents"]) -> tuple[list[int], int] | None:
    """Write the sizes as whole numbers of a common unit, or None where that takes too large a table."""
    fractions: dict[float, Fraction] = {}
    for size in np.unique(sizes).tolist():
        fraction = Fraction(size).limit_denominator(_LARGEST_DENOMINATOR)
        if abs(float(fraction) - size) > 1e-12:
            return None
        fractions[size] = fraction
    scale = math.lcm(*(fraction.denominator for fraction in fractions.values()))
    if scale > _LARGEST_DENOMINATOR:
        return None
    whole = [int(fractions[size] * scale) for size in sizes.tolist()]
    total = sum(whole)
    if total > _LARGEST_TABLE or total * len(whole) > _LARGEST_WORK:
        return None
    return whole, scale


def _enumerated(sizes: list[int], observed: int) -> float:
    """Return P(|sum of ±size| >= observed) for independent fair signs."""
    if len(set(sizes)) == 1:
        apart = observed // sizes[0]
        fewer = (len(sizes) - apart) // 2
        return mcnemar_exact(fewer, len(sizes) - fewer)
    total = sum(sizes)
    # chance[t]: that the sizes with a plus sign sum to t; the signed sum is then 2 t - total.
    chance = np.zeros(total + 1)
    chance[0] = 1.0
    reached = 0
    for size in sizes:
        moved = chance[: reached + 1].copy()
        chance[: reached + 1] *= 0.5
        chance[size : reached + size + 1] += 0.5 * moved
        reached += size
    far = np.abs(2 * np.arange(total + 1) - total) >= observed
    return min(1.0, float(chance[far].sum()))


def _monte_carlo(differences: Float64[Array[np.float64], " documents"], seed: int) -> float:
    """Return (1 + patterns at least as far) / (1 + patterns drawn), which never understates p."""
    sizes = differences[differences != 0]
    generator = np.random.default_rng([seed, _FLIP_STREAM, sizes.size])
    observed = abs(float(sizes.sum()))
    tolerance = 1e-9 * float(np.abs(sizes).sum())
    far = 0
    rows = max(1, 4_000_000 // sizes.size)
    for start in range(0, MONTE_CARLO_FLIPS, rows):
        signs = generator.integers(0, 2, size=(min(rows, MONTE_CARLO_FLIPS - start), sizes.size), dtype=np.int8)
        sums = (2.0 * signs - 1.0) @ sizes
        far += int((np.abs(sums) >= observed - tolerance).sum())
    return (1 + far) / (1 + MONTE_CARLO_FLIPS)
