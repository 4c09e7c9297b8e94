"""The intervals that a gate decides on: those of the record, widened where resampling sees no flips."""

import math
from collections.abc import Callable

from replayeval.report.schema import Interval, KLAtLength
from replayeval.report.tasks_schema import TaskArm
from replayeval.stats.gate import binomial_interval, widened


def agreement_interval(point: KLAtLength) -> Interval | None:
    """Return the interval of top-1 agreement, no shorter than that of as many independent tokens."""
    if point.top1_agreement is None or point.top1_agreement_ci95 is None or not point.tokens:
        return None
    # Where hardly any token flips, resampling sees no spread: documents without a flip would prove agreement.
    independent = binomial_interval(point.top1_agreement * point.tokens, point.tokens)
    return widened(point.top1_agreement_ci95, independent)


def mirrored(interval: Interval | None) -> Interval | None:
    """Return the interval of one minus a share."""
    return None if interval is None else (1 - interval[1], 1 - interval[0])


def drop_interval(arm: TaskArm, documents: int) -> Interval | None:
    """Return the interval of the drop in points, which allows for flips that were not seen."""
    if arm.delta_pp is None or not documents or (arm.ci95 is None and arm.discordant):
        return None
    drop = -arm.delta_pp
    low, high = unseen_flips(arm, drop)(documents)
    sampled = sampled_drop(arm, drop)
    return min(sampled[0], low), max(sampled[1], high)


def sampled_drop(arm: TaskArm, drop: float) -> Interval:
    """Return the record's own interval of the drop in points."""
    return (drop, drop) if arm.ci95 is None else (-arm.ci95[1], -arm.ci95[0])


def unseen_flips(arm: TaskArm, drop: float) -> Callable[[int], tuple[float, float]]:
    """Return the ends, by number of documents, that the interval of the drop has at least; infinite where none."""

    # Resampling sees no flips but those that happened: none in n documents still allows a share of 1 - 0.025^(1/n).
    def bound(documents: int) -> tuple[float, float]:
        unseen = 100 * binomial_interval(0, documents)[1]
        return (
            math.inf if arm.flips_to_right else drop - unseen,
            -math.inf if arm.flips_to_wrong else drop + unseen,
        )

    return bound
