"""Slow, literal definitions of paired statistics: everything that can happen is enumerated."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

from scipy import stats


def mcnemar(to_wrong: int, to_right: int) -> float:
    """Two-sided exact p: the chance of a split at least as uneven, over all outcomes of fair coins."""
    flips = to_wrong + to_right
    uneven = abs(to_wrong - to_right)
    favourable = sum(math.comb(flips, k) for k in range(flips + 1) if abs(flips - 2 * k) >= uneven)
    return favourable / 2**flips


def sign_flip(differences: Sequence[Fraction]) -> float:
    """Share of all patterns of signs whose sum is at least as far from 0; exact arithmetic."""
    observed = abs(sum(differences, Fraction(0)))
    patterns = list(itertools.product((1, -1), repeat=len(differences)))
    far = sum(abs(sum((s * d for s, d in zip(p, differences, strict=True)), Fraction(0))) >= observed for p in patterns)
    return far / len(patterns)


def holm(p_values: Sequence[float]) -> list[float]:
    """Closed testing with Bonferroni for every intersection: the definition behind Holm's shortcut."""
    indices = range(len(p_values))
    adjusted: list[float] = []
    for index in indices:
        worst = 0.0
        for size in range(1, len(p_values) + 1):
            for subset in itertools.combinations(indices, size):
                if index in subset:
                    worst = max(worst, min(1.0, size * min(p_values[i] for i in subset)))
        adjusted.append(worst)
    return adjusted


def power(*, n: int, discordant: float, difference: float, alpha: float) -> float:
    """Chance that McNemar's exact test rejects, over all numbers of flips each way."""
    psi = max(discordant, abs(difference))
    right, wrong = (psi + difference) / 2, (psi - difference) / 2
    total = 0.0
    for b in range(n + 1):
        for c in range(n + 1 - b):
            if mcnemar(b, c) <= alpha:
                ways = math.comb(n, b) * math.comb(n - b, c)
                total += ways * wrong**b * right**c * (1 - psi) ** (n - b - c)
    return total


def bca_of_mean(values: Sequence[float], *, level: float = 0.95) -> tuple[float, float]:
    """BCa interval of a mean from the whole bootstrap distribution, with Student's t for the normal quantile.

    The distribution is enumerated by convolution, so nothing is drawn. Values must be multiples of 1/8.
    """
    n = len(values)
    units = [round(8 * v) for v in values]
    distribution = {0: 1.0}
    for _ in range(n):
        step: dict[int, float] = {}
        for total, chance in distribution.items():
            for unit in set(units):
                key = total + unit
                step[key] = step.get(key, 0.0) + chance * units.count(unit) / n
        distribution = step
    observed = sum(units)
    below = sum(p for t, p in distribution.items() if t < observed)
    upto = sum(p for t, p in distribution.items() if t <= observed)
    bias = stats.norm.ppf((below + upto) / 2)
    mean = observed / n
    cubes = sum((u - mean) ** 3 for u in units)
    squares = sum((u - mean) ** 2 for u in units)
    # Leaving document i out moves the mean by (mean - u_i) / (n - 1).
    acceleration = cubes / (6 * squares**1.5)
    z = stats.t.ppf(1 - (1 - level) / 2, n - 1) * math.sqrt(n / (n - 1))
    ends: list[float] = []
    for sign in (-1, 1):
        shifted = bias + sign * z
        target = stats.norm.cdf(bias + shifted / (1 - acceleration * shifted))
        running = 0.0
        for total in sorted(distribution):
            running += distribution[total]
            if running >= target:
                ends.append(total / (8 * n))
                break
    return ends[0], ends[1]
