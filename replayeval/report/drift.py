"""How KL drifts along a generation, in bins of a quarter octave."""

from collections.abc import Sequence

from replayeval.report.cells import DriftPoint
from replayeval.stats.bootstrap import RESAMPLES
from replayeval.stats.scope import Scope, TokenScores

_PER_OCTAVE = 4
_FIRST_TOKENS = 16


def drift_edges(longest: int) -> list[int]:
    """Return increasing bin edges 0, 16, 19, 23, … `longest`: the first bin whole, then quarters of octaves."""
    edges = [0]
    step = 0
    while True:
        edge = round(_FIRST_TOKENS * 2 ** (step / _PER_OCTAVE))
        if edge >= longest:
            return [*edges, longest]
        edges.append(edge)
        step += 1


def drift_by_arm(
    scores: Sequence[TokenScores], *, longest: int, seed: int, resamples: int = RESAMPLES // 4
) -> dict[str, tuple[DriftPoint, ...]]:
    """Return mean KL by position for every arm, with bootstrap intervals over documents.

    A bin holds the documents that reach its end. An arm that diverged has no bins from there on.

    Args:
        scores: Documents under the same arms.
        longest: Generation length in tokens up to which bins are made.
        seed: Seed of the resamples.
        resamples: Resamples per interval.
    """
    arms = scores[0].arms
    reach = min(longest, max(document.tokens for document in scores))
    edges = drift_edges(reach)
    points: dict[str, list[DriftPoint]] = {arm: [] for arm in arms}
    for start, stop in zip(edges, edges[1:], strict=False):
        scope = Scope(scores, start, stop, only_reaching=stop, seed=seed, resamples=resamples)
        if not scope.documents:
            continue
        for row, arm in enumerate(arms):
            first = min((at for document in scores if (at := document.diverged_at[row]) is not None), default=None)
            if first is not None and first <= stop:
                continue
            mean, interval = scope.mean(scope.kl(row), "mean", "ci95", {})
            if mean is not None:
                points[arm].append(
                    DriftPoint(start=start, stop=stop, documents=scope.documents, mean=mean, ci95=interval)
                )
    return {arm: tuple(found) for arm, found in points.items()}
