"""The numbers that the ReplaySSM paper publishes, and what was measured beside them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from replayeval.errors import ConfigError
from replayeval.report.schema import KLReport
from replayeval.report.tasks_schema import Answers, TaskReport, TasksReport

WINDOW = 16
"""Replay window of every published number."""

QUANTITIES = {
    "rtn_over_sr_kl": "RTN/SR ratio of KL",
    "delta_pp": "change (pp)",
    "accuracy_percent": "accuracy (%)",
    "output_tokens_mean": "mean output (tokens)",
    "output_tokens_p90": "90th percentile of output (tokens)",
}


@dataclass(frozen=True, kw_only=True)
class PublishedNumber:
    """One published number.

    Attributes:
        table: Name of the table, such as "table11".
        model: Name of the model there.
        policy: State policy, without its window.
        quantity: One of `QUANTITIES`.
        at: Generation length in tokens, or short name of the task.
        value: The number, or None where `note` stands in its place.
        note: What stands in place of a number.
    """

    table: str
    model: str
    policy: str
    quantity: str
    at: int | str
    value: float | None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A published number and what was measured for it.

    Attributes:
        published: The published number.
        measured: The measured one, or None.
        ci95: Its 95% interval, or None.
        reason: Why `measured` is None.
    """

    published: PublishedNumber
    measured: float | None = None
    ci95: tuple[float, float] | None = None
    reason: str | None = None

    @property
    def difference(self) -> float | None:
        """Measured minus published, or None where either is missing."""
        if self.measured is None or self.published.value is None:
            return None
        return self.measured - self.published.value

    @property
    def inside(self) -> bool | None:
        """Whether the published number lies in the interval of the measured one; None where that cannot be said."""
        if self.ci95 is None or self.published.value is None:
            return None
        return self.ci95[0] <= self.published.value <= self.ci95[1]


def citation() -> str:
    """Return where the numbers come from."""
    return str(_file()["citation"])


def published_tables() -> dict[str, str]:
    """Return the titles of the published tables, by name."""
    return dict(cast(Mapping[str, str], _file()["tables"]))


def published_numbers(tables: Sequence[str]) -> list[PublishedNumber]:
    """Return the numbers of some tables.

    Raises:
        ConfigError: There is no such table.
    """
    unknown = sorted(set(tables) - set(published_tables()))
    if unknown:
        raise ConfigError(f"expected published tables out of {', '.join(published_tables())}, got {unknown[0]!r}")
    rows = cast(list[dict[str, Any]], _file()["numbers"])
    return [PublishedNumber(**row) for row in rows if row["table"] in tables]


def compare(
    reports: Sequence[KLReport | TasksReport], tables: Sequence[str], *, models: Mapping[str, str]
) -> list[Comparison]:
    """Put what was measured beside what was published; numbers of models that were not measured are left out.

    Args:
        reports: Records.
        tables: Names of published tables.
        models: Published name of a model by the name that the records call it.

    Raises:
        ConfigError: There is no such table.
    """
    found: list[Comparison] = []
    names = {models.get(report.model, report.model) for report in reports}
    for number in published_numbers(tables):
        if number.model not in names:
            continue
        mine = [r for r in reports if models.get(r.model, r.model) == number.model and r.window == WINDOW]
        measured = next((c for report in mine for c in _measured(report, number)), None)
        found.append(measured or Comparison(published=number, reason="not measured"))
    return found


def _measured(report: KLReport | TasksReport, number: PublishedNumber) -> Iterator[Comparison]:
    policy = f"{number.policy}@L={WINDOW}"
    if isinstance(report, KLReport):
        if number.quantity != "rtn_over_sr_kl":
            return
        for pair in report.rounding_ratios:
            for point in pair.by_length:
                if pair.nearest == policy and point.n == number.at:
                    reason = point.notes.get("ratio")
                    yield Comparison(published=number, measured=point.ratio, ci95=point.ci95, reason=reason)
        return
    for task in report.tasks:
        if task.task == number.at:
            yield from _of_task(task, number, policy)


def _of_task(task: TaskReport, number: PublishedNumber, policy: str) -> Iterator[Comparison]:
    if number.policy.startswith("conventional:"):
        if task.reference.policy == number.policy:
            yield _answers(task.reference, number)
        return
    for arm in task.arms:
        if arm.policy != policy:
            continue
        if number.quantity == "delta_pp":
            reason = arm.notes.get("delta_pp")
            yield Comparison(published=number, measured=arm.delta_pp, ci95=arm.ci95, reason=reason)
        else:
            yield _answers(arm, number)


def _answers(answers: Answers, number: PublishedNumber) -> Comparison:
    if number.quantity == "accuracy_percent":
        accuracy, interval = answers.accuracy, answers.accuracy_ci95
        return Comparison(
            published=number,
            measured=None if accuracy is None else 100 * accuracy,
            ci95=None if interval is None else (100 * interval[0], 100 * interval[1]),
            reason=answers.notes.get("accuracy"),
        )
    value = cast(float | None, getattr(answers, number.quantity))
    return Comparison(published=number, measured=value, reason=answers.notes.get(number.quantity))


@cache
def _file() -> Mapping[str, Any]:
    path = Path(__file__).parent / "published.json"
    return cast(Mapping[str, Any], json.loads(path.read_text(encoding="utf-8")))
