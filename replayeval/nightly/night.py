"""One night: run the plan, compare, write the record and the report."""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, cast

from replayeval.errors import ConfigError
from replayeval.nightly.cells import CellResult, night_cell, restarts
from replayeval.nightly.compare import TOLERANCE, compare
from replayeval.nightly.page import night_page
from replayeval.nightly.record import NIGHTS, RUN, History, NightCell, NightRecord, night_name
from replayeval.report.cells import AnyReport
from replayeval.report.gate import Limits, gate
from replayeval.report.schema import KLReport
from replayeval.report.verdict import default_limits
from replayeval.report.write import check_folder, write_report
from replayeval.stats.history import ALPHA
from replayeval.store.files import Folder
from replayeval.store.provenance import provenance

REPORT = "report"
_STARTED = "started.json"


class Runner(Protocol):
    """Runs a plan into a store and returns the results of its cells."""

    def __call__(self, plan: Any, out: Path, *, resume: bool) -> Iterable[CellResult]:
        """Run what is missing of the plan.

        Args:
            plan: The plan.
            out: Store of this night.
            resume: Go on with what an interrupted attempt left there.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Night:
    """What `run_night` returns.

    Attributes:
        record: The record of the night.
        page: The report's page.
    """

    record: NightRecord
    page: Path

    @property
    def passed(self) -> bool:
        """Whether no regression is there, new or open."""
        return not self.record.regressions


def sweep_runner(executor: str, progress: Callable[[Any], None] | None = None) -> Runner:
    """Return the runner that measures: a sweep.

    Args:
        executor: `local`, `ray` or `ray:ADDRESS`.
        progress: Called with the progress of the sweep.
    """

    def run(plan: Any, out: Path, *, resume: bool) -> Iterable[CellResult]:
        from replayeval import sweep
        from replayeval.sweep.collect import cells

        done = sweep.run(plan, out, executor, resume, progress=progress)
        done.raise_failures()
        return cast(Iterable[CellResult], cells(done.path))

    return run


def run_night(
    plan: Any,
    history: Path,
    *,
    name: str,
    runner: Runner,
    alpha: float = ALPHA,
    tolerance: float = TOLERANCE,
    limits: Limits | None = None,
    now: datetime | None = None,
) -> Night:
    """Run a plan, compare it with the nights before, and write record and report into the history.

    A night that was interrupted is gone on with, if neither code nor versions have changed since it began: its finished
    units are kept. The record is written last; until then the night does not count.

    Args:
        plan: What the runner takes.
        history: Directory of the nights, made where missing.
        name: Name of the plan; nights of another plan in the same history are refused.
        runner: Runs the plan.
        alpha: Chance of any false finding in a night without a change.
        tolerance: Relative change of KL that is of no interest.
        limits: Limits of the report's verdict; defaults where left out.
        now: When the night starts.

    Raises:
        ConfigError: The history belongs to another plan, the plan has no cell, or the folder of the report holds files
            that no report wrote.
        StoreError: The history cannot be written, is in use, or is damaged.
    """
    nights = History(history)
    with ExitStack() as stack:
        lock = nights.lock()
        if lock is not None:
            stack.enter_context(lock)
        check_folder(history / REPORT)
        before = nights.load()
        other = next((record for record in before if record.plan != name), None)
        if other is not None:
            raise ConfigError(
                f"{history} holds nights of the plan {other.plan!r}, not of {name!r}; give each plan its own --history."
            )
        found = provenance(device="see the records")
        night, resume = _begin(nights, found, now or datetime.now(UTC))
        cells: list[NightCell] = []
        reports: list[AnyReport] = []
        # One cell at a time: together their tokens may not fit into memory.
        for result in runner(plan, nights.night(night) / RUN, resume=resume):
            cells.append(night_cell(result))
            reports.append(result.report)
        if not cells:
            raise ConfigError("the plan measured nothing; expected at least one cell.")
        comparison = compare(cells, before, night=night, alpha=alpha, tolerance=tolerance)
        record = NightRecord(
            night=night,
            plan=name,
            cells=tuple(cells),
            findings=comparison.findings,
            tested=comparison.tested,
            untested=comparison.untested,
            restarted=restarts(cells, before[-1].cells if before else ()),
            alpha=alpha,
            tolerance=tolerance,
            provenance=found,
        )
        page = write_night(history, [*before, record], reports, limits=limits)
        nights.save(record)
    return Night(record=record, page=page)


def write_night(
    history: Path, nights: Sequence[NightRecord], reports: Sequence[AnyReport], *, limits: Limits | None = None
) -> Path:
    """Write the report of the last of some nights, with the trends over all of them, and return its page.

    Raises:
        ConfigError: It cannot be written.
    """
    record = nights[-1]
    content = night_page(nights, reports)
    if limits is None:
        kl = [isinstance(report, KLReport) for report in reports]
        limits = default_limits(kl=any(kl), tasks=not all(kl))
    verdict = gate(content.sources, limits)
    return write_report(
        history / REPORT,
        content.sources,
        verdict,
        title=f"{record.plan}, night of {record.night[:10]}",
        footer=content.footer,
        markdown=content.markdown,
        extra=content.section,
        trends=content.trends,
    )


def accept(history: Path) -> NightRecord:
    """Declare every regression that is there after the last night the new level, and return that night's record.

    Raises:
        ConfigError: There is no finished night.
        StoreError: The history cannot be written, is in use, or is damaged.
    """
    nights = History(history)
    if not nights.finished():
        raise ConfigError(f"{history} holds no finished night; run one first.")
    with ExitStack() as stack:
        lock = nights.lock()
        if lock is not None:
            stack.enter_context(lock)
        (record,) = nights.load(nights.finished()[-1:])
        taken = (*record.accepted, *(finding.series for finding in record.regressions))
        record = record.model_copy(update={"accepted": taken})
        nights.save(record)
    return record


def _begin(nights: History, found: dict[str, Any], now: datetime) -> tuple[str, bool]:
    """Return the name of the night, and whether an interrupted one is gone on with."""
    same = {name: found[name] for name in ("versions", "git", "python")}
    finished = set(nights.finished())
    for name in reversed(nights.names()):
        if name in finished:
            break
        try:
            started = json.loads((nights.night(name) / _STARTED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        # With uncommitted changes the commit does not say which code measured the units that are there.
        clean = not cast(dict[str, Any], found["git"] or {}).get("dirty", False)
        if started == same and clean:
            return name, (nights.night(name) / RUN).exists()
    night = night_name(now)
    if night in nights.names():
        raise ConfigError(f"{nights.night(night)} exists already; wait a second, then run again.")
    Folder(nights.path).write(f"{NIGHTS}/{night}/{_STARTED}", (json.dumps(same) + "\n").encode())
    return night, False
