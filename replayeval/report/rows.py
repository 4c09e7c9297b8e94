"""Records as flat rows, one number per column, for CSV files: everything that a report shows, in full precision."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from replayeval.report.cells import Source, data_label, provenance_line
from replayeval.report.gate import GateReport
from replayeval.report.published import Comparison
from replayeval.report.schema import KLReport
from replayeval.report.tasks_schema import TasksReport

Row: TypeAlias = Mapping[str, Any]


def kl_rows(sources: Sequence[Source]) -> Iterator[Row]:
    """Return one row per record, arm and generation length."""
    for source in sources:
        report = source.report
        if not isinstance(report, KLReport):
            continue
        common = _common(source)
        for arm in report.arms:
            for point in arm.by_length:
                yield {
                    **common,
                    "data": data_label(report),
                    "window": report.window,
                    "policy": arm.policy,
                    "bits_per_element": arm.bits_per_element,
                    "n": point.n,
                    "documents": point.documents,
                    "tokens": point.tokens,
                    **_with_interval("kl_nats", point.mean, point.ci95),
                    **_with_interval("local_kl_nats", point.local_mean, point.local_ci95),
                    **_with_interval("top1_agreement", point.top1_agreement, point.top1_agreement_ci95),
                    **_with_interval("nll_delta_nats", point.nll_delta, point.nll_delta_ci95),
                    "ratio_to_floor": point.ratio_to_floor,
                    "diverged_at": arm.diverged_at,
                    "provenance": provenance_line(report),
                }


def drift_rows(sources: Sequence[Source]) -> Iterator[Row]:
    """Return one row per run directory, arm and bin of positions."""
    for source in sources:
        for policy, points in (source.drift or {}).items():
            for point in points:
                yield {
                    **_common(source),
                    "policy": policy,
                    "start": point.start,
                    "stop": point.stop,
                    "documents": point.documents,
                    **_with_interval("kl_nats", point.mean, point.ci95),
                }


def ratio_rows(sources: Sequence[Source]) -> Iterator[Row]:
    """Return one row per record, pair of roundings and generation length."""
    for source in sources:
        report = source.report
        if not isinstance(report, KLReport):
            continue
        for pair in report.rounding_ratios:
            for point in pair.by_length:
                yield {
                    **_common(source),
                    "nearest": pair.nearest,
                    "stochastic": pair.stochastic,
                    "n": point.n,
                    "documents": point.documents,
                    **_with_interval("ratio", point.ratio, point.ci95),
                    **_with_interval("local_ratio", point.local_ratio, point.local_ci95),
                }


def task_rows(sources: Sequence[Source]) -> Iterator[Row]:
    """Return one row per record, task and arm."""
    for source in sources:
        report = source.report
        if not isinstance(report, TasksReport):
            continue
        for task in report.tasks:
            for arm in task.arms:
                yield {
                    **_common(source),
                    "task": task.task,
                    "metric": task.metric,
                    "policy": arm.policy,
                    "documents": task.n,
                    "samples": arm.samples,
                    **_with_interval("accuracy", arm.accuracy, arm.accuracy_ci95),
                    "accuracy_reference": task.reference.accuracy,
                    **_with_interval("delta_pp", arm.delta_pp, arm.ci95),
                    "p_value": arm.p_value,
                    "test": arm.test,
                    "p_holm": arm.p_holm,
                    "flips_to_wrong": arm.flips_to_wrong,
                    "flips_to_right": arm.flips_to_right,
                    "mde_pp": arm.mde_pp,
                    "output_tokens_mean": arm.output_tokens_mean,
                    "output_tokens_p90": arm.output_tokens_p90,
                    "extraction_failures": arm.extraction_failures,
                    "truncations": arm.truncations,
                    "caution": task.caution,
                    "provenance": provenance_line(report),
                }


def quartile_rows(sources: Sequence[Source]) -> Iterator[Row]:
    """Return one row per record, task, arm and quartile of the reference's output length."""
    for source in sources:
        report = source.report
        if not isinstance(report, TasksReport):
            continue
        for task in report.tasks:
            for arm in task.arms:
                for part in arm.by_quartile:
                    low, high = part.reference_tokens or (None, None)
                    yield {
                        **_common(source),
                        "task": task.task,
                        "policy": arm.policy,
                        "quartile": part.quartile,
                        "documents": part.n,
                        "reference_tokens_low": low,
                        "reference_tokens_high": high,
                        "accuracy": part.accuracy,
                        "accuracy_reference": part.accuracy_reference,
                        **_with_interval("delta_pp", part.delta_pp, part.ci95),
                    }


def published_rows(comparisons: Iterable[Comparison]) -> Iterator[Row]:
    """Return one row per published number, with what was measured for it."""
    for found in comparisons:
        number = found.published
        yield {
            "table": number.table,
            "model": number.model,
            "policy": number.policy,
            "quantity": number.quantity,
            "at": number.at,
            "published": number.value,
            "published_note": number.note,
            **_with_interval("measured", found.measured, found.ci95),
            "difference": found.difference,
            "published_inside_interval": found.inside,
            "reason": found.reason,
        }


def verdict_rows(verdict: GateReport) -> Iterator[Row]:
    """Return one row per model, arm and check, cheapest first."""
    for arm in verdict.arms:
        for check in arm.checks:
            yield {
                "model": arm.model,
                "policy": arm.policy,
                "bits_per_element": arm.bits_per_element,
                "verdict": arm.outcome,
                "metric": check.metric,
                "where": check.where,
                "source": check.source,
                "documents": check.documents,
                **_with_interval("value", check.value, check.ci95),
                "limit": check.limit,
                "outcome": check.outcome,
                "reason": check.reason,
                "more_documents": check.more_documents,
            }


def csv_text(rows: Iterable[Row]) -> str | None:
    """Return rows as CSV with a header, or None where there are none.

    A text that a spreadsheet would take for a formula gets an apostrophe before it: names come from foreign files.
    """
    stream = io.StringIO()
    writer: Any = None
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(stream, fieldnames=list(row), lineterminator="\n")
            writer.writeheader()
        writer.writerow({name: _inert(value) for name, value in row.items()})
    return stream.getvalue() if writer is not None else None


def _inert(value: Any) -> Any:
    return "'" + value if isinstance(value, str) and value[:1] in {"=", "+", "-", "@", "\t", "\r"} else value


def _common(source: Source) -> dict[str, Any]:
    return {"source": source.where, "model": source.report.model}


def _with_interval(name: str, value: float | None, interval: tuple[float, float] | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {name: value, f"{name}_low": low, f"{name}_high": high}
