"""What a paired benchmark can see: power of McNemar's exact test and minimum detectable differences."""

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from jaxtyping import Float64, Int64
from scipy import special  # pyright: ignore[reportMissingTypeStubs]
from scipy.stats import binom as _binom  # pyright: ignore[reportMissingTypeStubs]

from replayeval.arrays import Array

binom = cast(Any, _binom)  # its types are not complete

ALPHA = 0.05
POWER = 0.8
_STEPS = 60
_LARGEST = 10_000_000
_NEGLIGIBLE = 1e-12


@dataclass(frozen=True, kw_only=True)
class Detectable:
    """The answer to "how small a difference would have been found?".

    Attributes:
        difference: Smallest difference of accuracies, as a fraction, found with the power asked for; None if undefined.
        reason: Why it is undefined.
    """

    difference: float | None
    reason: str | None = None


def mcnemar_power(*, n: int, discordant: float, difference: float, alpha: float = ALPHA) -> float:
    """Return the probability that McNemar's exact two-sided test finds a difference.

    Each of `n` documents, independently, flips one way with probability `(psi + difference) / 2`, the other way with
    `(psi - difference) / 2`, where psi is the larger of `discordant` and `|difference|`: accuracy cannot change by more
    than answers do. Exact: a sum over the number of flips.

    Args:
        n: Documents, one right-or-wrong answer each.
        discordant: Expected fraction of documents on which two arms differ.
        difference: True difference of the accuracies, as a fraction.
        alpha: Level of the test.

    Raises:
        ValueError: Numbers that are no sizes, fractions or levels.

    Source: Lachenbruch 1992, unconditional power of McNemar's test, here with the exact conditional test.
    """
    _check(n=n, discordant=discordant, alpha=alpha)
    if not -1 <= difference <= 1:
        raise ValueError(f"expected a difference between -1 and 1, got {difference}")
    psi = max(discordant, abs(difference))
    if psi == 0:
        return 0.0
    flips, weights = _flips(n, psi)
    one_way = (psi + difference) / (2 * psi)
    critical = _critical(flips, alpha)
    # The most flips that still reject on the low side; -1 where no outcome of so few flips can reject.
    low = np.where(critical >= 0, binom.cdf(critical, flips, one_way), 0.0)
    high = np.where(critical >= 0, binom.sf(flips - critical - 1, flips, one_way), 0.0)
    return float(np.sum(weights * (low + high)))


def minimum_detectable(*, n: int, discordant: float, alpha: float = ALPHA, power: float = POWER) -> Detectable:
    """Return the smallest difference that McNemar's exact test finds with probability `power`.

    Args:
        n: Documents, one right-or-wrong answer each.
        discordant: Expected fraction of documents on which two arms differ without that difference.
        alpha: Level of the test.
        power: Probability asked for.

    Raises:
        ValueError: Numbers that are no sizes, fractions or levels.
    """
    _check(n=n, discordant=discordant, alpha=alpha, power=power)
    if mcnemar_power(n=n, discordant=discordant, difference=1.0, alpha=alpha) < power:
        fewest = flips_needed(alpha)
        return Detectable(
            difference=None,
            reason=f"not even {fewest} flips all in one direction, the fewest that are significant, fit {n} documents"
            if n < fewest
            else f"no difference is found with power {power:g} on {n} documents",
        )
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if mcnemar_power(n=n, discordant=discordant, difference=middle, alpha=alpha) >= power:
            high = middle
        else:
            low = middle
        if high - low < 1e-7:
            break
    return Detectable(difference=high)


def documents_needed(*, discordant: float, difference: float, alpha: float = ALPHA, power: float = POWER) -> int | None:
    """Return how many documents McNemar's exact test needs to find a difference with probability `power`.

    The test is discrete, so that power can dip a little below `power` again at slightly larger numbers.

    Args:
        discordant: Expected fraction of documents on which two arms differ.
        difference: True difference of the accuracies, as a fraction other than 0.
        alpha: Level of the test.
        power: Probability asked for.

    Returns:
        The number, or None beyond ten million.

    Raises:
        ValueError: Numbers that are no fractions or levels, or a difference of 0, which no test can find.
    """
    _check(n=1, discordant=discordant, alpha=alpha, power=power)
    if difference == 0:
        raise ValueError("expected a difference other than 0: no number of documents finds none")

    def enough(n: int) -> bool:
        return mcnemar_power(n=n, discordant=discordant, difference=difference, alpha=alpha) >= power

    high = 1
    while not enough(high):
        high *= 2
        if high > _LARGEST:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def minimum_detectable_mean(*, n: int, spread: float, alpha: float = ALPHA, power: float = POWER) -> Detectable:
    """Return the smallest mean difference that a paired test on documents finds with probability `power`.

    For several samples per document or scores between 0 and 1, where McNemar's test does not apply: the approximation
    `(t_(1-alpha/2) + t_power) * spread / sqrt(n)` with `n - 1` degrees of freedom.

    Args:
        n: Documents.
        spread: Standard deviation of the documents' differences.
        alpha: Level of the test.
        power: Probability asked for.

    Raises:
        ValueError: Numbers that are no sizes, spreads or levels.
    """
    _check(n=n, discordant=0.0, alpha=alpha, power=power)
    if spread < 0 or not math.isfinite(spread):
        raise ValueError(f"expected a spread of at least 0, got {spread}")
    if n < 2:
        return Detectable(difference=None, reason="one document has no spread")
    if spread == 0:
        return Detectable(difference=None, reason="all documents differ by the same amount, so the spread is unknown")
    quantiles = float(special.stdtrit(n - 1, 1 - alpha / 2)) + float(special.stdtrit(n - 1, power))
    difference = quantiles * spread / math.sqrt(n)
    if difference > 1:
        return Detectable(difference=None, reason=f"no difference is found with power {power:g} on {n} documents")
    return Detectable(difference=difference)


def flips_needed(alpha: float = ALPHA) -> int:
    """Return the fewest flips, all in one direction, that McNemar's exact two-sided test calls significant."""
    return max(1, math.ceil(math.log2(2 / alpha)))


def _check(*, n: int, discordant: float, alpha: float, power: float = POWER) -> None:
    if n < 1:
        raise ValueError(f"expected at least 1 document, got {n}")
    if not 0 <= discordant <= 1:
        raise ValueError(f"expected a discordant fraction between 0 and 1, got {discordant}")
    if not 0 < alpha < 1 or not 0 < power < 1:
        raise ValueError(f"expected a level and a power between 0 and 1, got {alpha} and {power}")


def _flips(n: int, psi: float) -> tuple[Int64[Array[np.int64], " counts"], Float64[Array[np.float64], " counts"]]:
    """Return the numbers of flips that are not negligibly rare, and their probabilities."""
    ends = binom.ppf([_NEGLIGIBLE, 1 - _NEGLIGIBLE], n, psi)
    flips = np.arange(int(ends[0]), int(ends[1]) + 1, dtype=np.int64)
    return flips, np.asarray(binom.pmf(flips, n, psi), dtype=np.float64)


def _critical(flips: Int64[Array[np.int64], " counts"], alpha: float) -> Int64[Array[np.int64], " counts"]:
    """Return, for each number of flips, the largest count one way that rejects: `2 P(X <= c) <= alpha`, or -1."""
    # ppf gives the smallest c with P(X <= c) >= alpha / 2, which may be equal; step to the largest that still rejects.
    c = np.asarray(binom.ppf(alpha / 2, flips, 0.5), dtype=np.int64)
    c = np.where(2 * binom.cdf(c, flips, 0.5) <= alpha, c, c - 1)
    # An even split would count twice.
    return np.where(2 * c >= flips, -1, c).astype(np.int64)
