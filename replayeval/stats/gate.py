"""Decide on an interval, not on a mean, whether a quantity keeps to a limit; and how many more documents would tell."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from scipy import special  # pyright: ignore[reportMissingTypeStubs]

from replayeval.stats.bootstrap import FEW_DOCUMENTS, LEVEL

FEWEST_TO_FAIL = 4
"""Documents from which on an interval above the limit fails an arm.

With skewed documents the interval errs on the low side: at 4 documents its low end lay above the truth in 2% of
simulated samples (aim: 2.5%), its high end below the truth in 10% to 24%. So a few documents can fail an arm, and more
are needed to pass it.
"""
MOST_DOCUMENTS = 1_000_000
NO_NUMBER = "no number of documents can prove that nothing ever flips"
"""Why a limit of no flips at all stays undecided while none was seen."""
_POWER = 0.8


class Outcome(StrEnum):
    """What a gate says."""

    PASS = "pass"
    FAIL = "fail"
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One quantity against one limit.

    Attributes:
        outcome: Pass when the whole interval keeps to the limit, fail when the whole interval breaks it.
        reason: Why, in words, without the numbers themselves.
        more_documents: Where undecided: about how many more documents decide with a chance of 80%, if the mean and the
            spread of the documents stay as they are; None where that cannot be told.
    """

    outcome: Outcome
    reason: str
    more_documents: int | None = None


def decide(
    value: float,
    interval: tuple[float, float] | None,
    limit: float,
    *,
    documents: int,
    fewest_to_pass: int = FEW_DOCUMENTS,
    sampled: tuple[float, float] | None = None,
    bound: Callable[[int], tuple[float, float]] | None = None,
) -> Decision:
    """Decide whether a quantity is at most `limit`.

    Args:
        value: Its estimate.
        interval: Its two-sided 95% interval, or None where there is none.
        limit: What it may be at most, in the same unit.
        documents: Documents that the interval rests on.
        fewest_to_pass: Documents below which nothing passes, since intervals from few skewed documents are too short
            on the high side.
        sampled: The interval from resampling, where `interval` was widened to a binomial bound.
        bound: That bound by number of documents; see `documents_to_decide`.

    Returns:
        The decision. An arm that truly lies on the limit passes with a chance of about 2.5%, and fails with as much.
    """
    if interval is None:
        return Decision(outcome=Outcome.UNDECIDED, reason="there is no interval to decide on")
    low, high = interval
    fewest_to_fail = min(FEWEST_TO_FAIL, fewest_to_pass)
    if low > limit and documents >= fewest_to_fail:
        return Decision(outcome=Outcome.FAIL, reason="the whole interval breaks the limit")
    if high <= limit and documents >= fewest_to_pass:
        return Decision(outcome=Outcome.PASS, reason="the whole interval keeps to the limit")
    if low > limit:
        return _too_few(documents, fewest_to_fail)
    if high <= limit:
        return _too_few(documents, fewest_to_pass)
    needed = documents_to_decide(value, sampled or interval, limit, documents=documents, bound=bound)
    floor = fewest_to_pass if value <= limit else fewest_to_fail
    return Decision(
        outcome=Outcome.UNDECIDED,
        reason="the interval contains the limit",
        more_documents=None if needed is None else max(needed, floor) - documents,
    )


def documents_to_decide(
    value: float,
    interval: tuple[float, float],
    limit: float,
    *,
    documents: int,
    power: float = _POWER,
    bound: Callable[[int], tuple[float, float]] | None = None,
) -> int | None:
    """Return how many documents in all an interval needs to leave out the limit.

    The half-width towards the limit shrinks as Student's t does for a mean: with `1/√n`, with the quantile for `n - 1`
    degrees of freedom and with the factor `√(n / (n - 1))` of the bootstrap's small-sample correction. A binomial bound
    shrinks otherwise, with `1/n` where nothing was seen to flip, and is looked up at n itself.

    Args:
        value: The estimate so far.
        interval: Its two-sided 95% interval from resampling.
        limit: What it is held against.
        documents: Documents so far.
        power: Chance of a decision with the number returned, if value and spread stay as they are.
        bound: A further interval, by number of documents, that has to leave out the limit too: one that a sample of so
            many keeps to with the chance `power`, such as `binomial_outlook`.

    Returns:
        The number, at least `documents + 1`, or None: with one document the spread between documents is unknown, with
        the value on the limit no number would do, and more than a million is as good as none.
    """
    gap = abs(limit - value)
    half = interval[1] - value if value <= limit else value - interval[0]
    if documents < 2 or gap == 0 or (half <= 0 and bound is None):
        return None
    deviation = max(half, 0.0) / _quantile(documents) * math.sqrt(documents)
    spare = float(special.ndtri(power))

    def enough(number: int) -> bool:
        if deviation / math.sqrt(number) * (_quantile(number) + spare) > gap:
            return False
        if bound is None:
            return True
        low, high = bound(number)
        return high <= limit if value <= limit else low > limit

    if not enough(MOST_DOCUMENTS):
        return None
    too_few, found = documents, MOST_DOCUMENTS
    while found - too_few > 1:
        middle = (too_few + found) // 2
        too_few, found = (too_few, middle) if enough(middle) else (middle, found)
    return found


def binomial_interval(events: float, trials: int, *, level: float = LEVEL) -> tuple[float, float]:
    """Return the Clopper-Pearson interval of a proportion.

    Args:
        events: How often it happened; a mean times the trials, so that rounding is forgiven.
        trials: Out of how many.
        level: Coverage, at least.

    Raises:
        ValueError: No trials, or more events than trials.
    """
    count = round(events)
    if trials < 1 or not 0 <= count <= trials:
        raise ValueError(f"expected 0 to {trials} events in at least 1 trial, got {events}")
    tail = (1 - level) / 2
    low = 0.0 if count == 0 else float(special.betaincinv(count, trials - count + 1, tail))
    high = 1.0 if count == trials else float(special.betaincinv(count + 1, trials - count, 1 - tail))
    return low, high


def binomial_outlook(share: float, trials: int, *, power: float = _POWER) -> tuple[float, float]:
    """Return bounds that the ends of the Clopper-Pearson interval of a coming sample keep to, each with a chance.

    Args:
        share: Probability of an event.
        trials: Size of the sample.
        power: The chance that its interval ends no higher than the high bound, and that it begins no lower than
            the low one.

    Raises:
        ValueError: No trials.
    """
    return (
        binomial_interval(_events(share, trials, 1 - power), trials)[0],
        binomial_interval(_events(share, trials, power), trials)[1],
    )


def widened(interval: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """Return the shortest interval that contains both."""
    return min(interval[0], other[0]), max(interval[1], other[1])


def _too_few(documents: int, fewest: int) -> Decision:
    return Decision(
        outcome=Outcome.UNDECIDED,
        reason=f"an interval from fewer than {fewest} documents is too short to decide on",
        more_documents=fewest - documents,
    )


def _quantile(documents: int) -> float:
    tail = (1 - LEVEL) / 2
    return -float(special.stdtrit(documents - 1, tail)) * math.sqrt(documents / (documents - 1))


def _events(share: float, trials: int, chance: float) -> int:
    """Quantile of the number of events."""
    if share <= 0 or share >= 1:
        return 0 if share <= 0 else trials
    return min(trials, math.ceil(float(special.bdtrik(chance, trials, share))))
