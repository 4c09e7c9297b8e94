"""From what the statistics return to the parts of the record."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from replayeval.report.schema import (
    ArmReport,
    Intervals,
    KLAtLength,
    KLStatistics,
    RatioAtLength,
    RoundingRatio,
    Timing,
)

if TYPE_CHECKING:
    from replayeval import stats
    from replayeval.store import DocumentScores


def arm_report(summary: "stats.ArmSummary", *, bits_per_element: float | None) -> ArmReport:
    """Return the part of the record about one arm.

    Args:
        summary: What the statistics say about it.
        bits_per_element: Stored bits per state element, or None where layers have different shapes.
    """
    return ArmReport(
        policy=summary.policy,
        bits_per_element=bits_per_element,
        kl=KLStatistics(
            mean=summary.kl.mean,
            ci95=summary.kl.ci95,
            p50=summary.kl.p50,
            p90=summary.kl.p90,
            p99=summary.kl.p99,
            p999=summary.kl.p999,
            max=summary.kl.max,
            notes=dict(summary.kl.undefined),
        ),
        by_length=tuple(_at_length(point) for point in summary.by_length),
        top1_agreement=summary.top1_agreement,
        top1_agreement_ci95=summary.top1_ci95,
        nll_delta=summary.nll_delta,
        nll_delta_ci95=summary.nll_delta_ci95,
        ppl=summary.ppl,
        ppl_reference=summary.ppl_reference,
        diverged_at=summary.diverged_at,
        diverged_documents=summary.diverged_documents,
        ratio_to_floor=summary.ratio_to_floor,
        ratio_to_floor_ci95=summary.ratio_to_floor_ci95,
        notes=_renamed(summary.undefined),
    )


def rounding_report(summary: "stats.RoundingRatio") -> RoundingRatio:
    """Return the part of the record about one pair of arms that differ only in stochastic rounding."""
    return RoundingRatio(
        nearest=summary.nearest,
        stochastic=summary.stochastic,
        by_length=tuple(
            RatioAtLength(
                n=point.n,
                documents=point.documents,
                ratio=point.ratio,
                ci95=point.ci95,
                local_ratio=point.local_ratio,
                local_ci95=point.local_ci95,
                notes=dict(point.undefined),
            )
            for point in summary.by_length
        ),
    )


def timing_report(scores: "Sequence[DocumentScores]", *, rows: int) -> Timing:
    """Return the part of the record about the cost: over all documents, those of earlier attempts included.

    Args:
        scores: The documents, at least one; those on disk may lack a counter.
        rows: Arms that ran side by side, the reference included.
    """
    seconds = sum(document.counters.get("seconds", 0.0) for document in scores)
    tokens = sum(document.counters.get("tokens", 0.0) for document in scores)
    peak = max(document.counters.get("peak_memory_bytes", 0.0) for document in scores)
    rate = tokens / seconds if seconds > 0 else None
    return Timing(
        seconds=seconds,
        tokens_per_s=rate,
        tokens_per_s_per_arm=None if rate is None else rate * rows,
        peak_memory_bytes=int(peak) or None,
    )


def intervals_report(summary: "stats.KLSummary") -> Intervals:
    """Return the part of the record about the intervals."""
    return Intervals(
        level=summary.ci_level,
        method=summary.ci_method,
        resamples=summary.resamples,
        seed=summary.seed,
        caution=summary.ci_note,
    )


def _at_length(point: "stats.LengthSummary") -> KLAtLength:
    return KLAtLength(
        n=point.n,
        documents=point.documents,
        tokens=point.tokens,
        mean=point.mean,
        ci95=point.ci95,
        local_mean=point.local_mean,
        local_ci95=point.local_ci95,
        top1_agreement=point.top1_agreement,
        top1_agreement_ci95=point.top1_ci95,
        nll_delta=point.nll_delta,
        nll_delta_ci95=point.nll_delta_ci95,
        ratio_to_floor=point.ratio_to_floor,
        notes=_renamed(point.undefined),
    )


def _renamed(undefined: Mapping[str, str]) -> dict[str, str]:
    return {"top1_agreement_ci95" if name == "top1_ci95" else name: reason for name, reason in undefined.items()}
