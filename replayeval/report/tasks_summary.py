"""From paired statistics to the parts of the record of tasks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import JsonValue

from replayeval.report.schema import Intervals
from replayeval.report.tasks_schema import Answers, QuartileAccuracy, TaskArm, TaskReport

if TYPE_CHECKING:
    from replayeval.stats import paired

METHOD = "documents_bca"


def task_report(
    comparison: "paired.Comparison",
    *,
    task: str,
    members: tuple[str, ...] = (),
    metric: str,
    samples_per_document: int | None,
    dataset: Mapping[str, JsonValue],
    settings: Mapping[str, JsonValue],
    caution: str | None,
) -> TaskReport:
    """Return the part of the record about one task or group.

    Args:
        comparison: What the statistics say.
        task: Its name.
        members: Tasks whose documents are pooled.
        metric: Score of an answer.
        samples_per_document: Answers per document, or None where members differ.
        dataset: Where the documents came from.
        settings: How they were asked.
        caution: Why to distrust the comparison.
    """
    return TaskReport(
        task=task,
        members=members,
        metric=metric,
        n=comparison.reference.documents,
        samples_per_document=samples_per_document,
        dataset=dict(dataset),
        settings=dict(settings),
        reference=Answers.model_validate(_answers(comparison.reference)),
        arms=tuple(_arm(arm) for arm in comparison.arms),
        caution=caution,
        notes={} if samples_per_document is not None else {"samples_per_document": "the members of the group differ"},
    )


def intervals_report(comparison: "paired.Comparison", *, seed: int) -> Intervals:
    """Return the part of the record about the intervals."""
    return Intervals(level=comparison.level, method=METHOD, resamples=comparison.resamples, seed=seed, caution=None)


def _answers(summary: "paired.AnswerSummary") -> dict[str, object]:
    return {
        "policy": summary.policy,
        "n": summary.documents,
        "samples": summary.samples,
        "accuracy": summary.accuracy,
        "accuracy_ci95": summary.accuracy_ci95,
        "output_tokens_mean": summary.output_tokens_mean,
        "output_tokens_p90": summary.output_tokens_p90,
        "extraction_failures": summary.extraction_failures,
        "truncations": summary.truncations,
        "notes": dict(summary.undefined),
    }


def _arm(arm: "paired.PairedSummary") -> TaskArm:
    answers = _answers(arm.answers)
    return TaskArm.model_validate(
        {
            **answers,
            "delta_pp": _points(arm.delta),
            "ci95": _points_interval(arm.ci95),
            "p_value": arm.p,
            "test": None if arm.test is None else str(arm.test),
            "mcnemar_p": arm.mcnemar_p,
            "p_holm": arm.p_holm,
            "flips_to_wrong": arm.to_wrong,
            "flips_to_right": arm.to_right,
            "discordant": arm.discordant,
            "mde_pp": _points(arm.detectable),
            "by_quartile": tuple(_quartile(quartile) for quartile in arm.quartiles),
            "notes": {**arm.answers.undefined, **arm.undefined},
        }
    )


def _quartile(quartile: "paired.QuartileSummary") -> QuartileAccuracy:
    return QuartileAccuracy(
        quartile=quartile.quartile,
        n=quartile.documents,
        reference_tokens=quartile.reference_tokens,
        accuracy_reference=quartile.accuracy_reference,
        accuracy=quartile.accuracy,
        delta_pp=_points(quartile.delta),
        ci95=_points_interval(quartile.ci95),
        notes=dict(quartile.undefined),
    )


def _points(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


def _points_interval(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if interval is None else (100 * interval[0], 100 * interval[1])
