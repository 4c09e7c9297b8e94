"""From the results of a sweep to the cells of a night: one number per document for everything that is followed."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

from replayeval.nightly.record import Metric, NightCell
from replayeval.report.cells import AnyReport, lengths_of
from replayeval.report.schema import KLReport
from replayeval.report.tasks_schema import TasksReport
from replayeval.stats.scope import TokenScores
from replayeval.store.identity import fingerprint
from replayeval.store.sweeps import SweepCell

_NOT_IDENTITY = frozenset({"arms", "lengths", "docs", "limit", "floor_arm"})
"""Settings that may change between two nights: arms, lengths and documents that both have are still comparable."""


class CellResult(Protocol):
    """What is read of a cell of a sweep; `replayeval.sweep.collect.CellResult` is one."""

    @property
    def cell(self) -> SweepCell:
        """Its label and settings."""
        ...

    @property
    def report(self) -> AnyReport:
        """Its record."""
        ...

    @property
    def scores(self) -> Sequence[TokenScores]:
        """Its numbers per token; empty for tasks."""
        ...


def night_cell(result: CellResult) -> NightCell:
    """Return what is kept of a cell."""
    identity = {name: value for name, value in result.cell.settings.items() if name not in _NOT_IDENTITY}
    identity["kind"] = result.cell.kind
    common: dict[str, Any] = {
        "key": fingerprint(identity)[:16],
        "label": result.cell.label,
        "identity": identity,
        "window": result.report.window,
    }
    if isinstance(result.report, KLReport):
        return NightCell(**common, **_of_scores(result.scores, result.report))
    return NightCell(**common, **_of_tasks(result.report))


def name_of(metric: Metric, where: object) -> str:
    """Return the key of a followed number within a policy."""
    return f"{metric}/{where}"


def _of_scores(scores: Sequence[TokenScores], report: KLReport) -> dict[str, Any]:
    lengths = lengths_of(report)
    values: dict[str, dict[str, tuple[float | None, ...]]] = {}
    exact: dict[str, str] = {}
    for row, policy in enumerate(scores[0].arms if scores else ()):
        found: dict[str, tuple[float | None, ...]] = {}
        for n in lengths:
            found[name_of(Metric.KL, n)] = tuple(_mean(s, s.kl_nats[row], n, row) for s in scores)
        # Agreement and likelihood are followed where most tokens are: every further series costs power for all.
        last = lengths[-1]
        found[name_of(Metric.FLIPS, last)] = tuple(_mean(s, 1.0 - s.top1_agrees[row], last, row) for s in scores)
        found[name_of(Metric.NLL, last)] = tuple(
            _mean(s, s.nll_nats[row] - s.nll_reference_nats, last, row) for s in scores
        )
        values[policy] = found
        digest = hashlib.sha256()
        for document in scores:
            digest.update(np.ascontiguousarray(document.kl_nats[row]).tobytes())
        exact[policy] = digest.hexdigest()[:16]
    return {
        "documents": tuple(s.doc_id for s in scores),
        "values": values,
        "exact": exact,
        "diverged": {arm.policy: arm.diverged_at for arm in report.arms if arm.diverged_at is not None},
    }


def _mean(scores: TokenScores, series: Any, n: int, row: int) -> float | None:
    diverged = scores.diverged_at[row]
    if scores.tokens < n or (diverged is not None and diverged <= n):
        return None
    return float(np.nanmean(cast(np.ndarray[Any, Any], series)[:n]))


def _of_tasks(report: TasksReport) -> dict[str, Any]:
    """Tasks keep no number per document: a night is one number, the drop of all documents together."""
    values: dict[str, dict[str, tuple[float | None, ...]]] = {}
    exact: dict[str, list[Any]] = {}
    # A group stands for its members: every further series costs power for all.
    members = {member for task in report.tasks for member in task.members}
    for task in (task for task in report.tasks if task.task not in members):
        for arm in task.arms:
            drop = None if arm.delta_pp is None else -arm.delta_pp
            values.setdefault(arm.policy, {})[name_of(Metric.DROP, task.task)] = (drop,)
            exact.setdefault(arm.policy, []).append(
                [task.task, task.n, arm.accuracy, arm.output_tokens_mean, arm.flips_to_wrong, arm.flips_to_right]
            )
    digests = {policy: fingerprint({"numbers": numbers})[:16] for policy, numbers in exact.items()}
    return {"documents": ("all",), "values": values, "exact": digests}


def restarts(cells: Sequence[NightCell], before: Sequence[NightCell]) -> tuple[str, ...]:
    """Return, for cells that were measured before under another identity, what differs."""
    lines: list[str] = []
    known = {cell.key for cell in before}
    for cell in cells:
        old = next((other for other in before if other.label == cell.label), None)
        if cell.key not in known and old is not None:
            changed = sorted(_different(old.identity, cell.identity))
            lines.append(f"{cell.label}: {', '.join(changed)} changed, so its series begin anew")
    return tuple(lines)


def _different(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> set[str]:
    names: set[str] = set()
    for name in old.keys() | new.keys():
        before, now = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            names |= _different(cast(Mapping[str, Any], before), cast(Mapping[str, Any], now), f"{prefix}{name}.")
        elif before != now:
            names.add(prefix + name)
    return names
