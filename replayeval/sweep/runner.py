"""Run a plan: what is missing is measured, written unit by unit, and nothing is ever measured twice."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from replayeval.errors import ConfigError, NumericsError, ReplayEvalError
from replayeval.report.schema import KLReport
from replayeval.report.tasks_schema import TasksReport
from replayeval.store.provenance import provenance, utc_text
from replayeval.store.sweeps import ANSWERS, SweepCell, SweepManifest, SweepStore
from replayeval.store.units import Unit
from replayeval.sweep.executors import Event, Executor, make_executor
from replayeval.sweep.grid import Cell, KLCell, expand
from replayeval.sweep.jobs import Answer, Failure, Job, Measurer, PreparedCell, TaskJob
from replayeval.sweep.plan import Plan, load_plan
from replayeval.sweep.progress import Meter, Progress

MOST_REASONS = 20
"""Reasons that one message lists."""


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """What `run` returns.

    Attributes:
        path: Path or URL of the run's directory; `replayeval.sweep.collect.results` reads it.
        manifest: What the run is made of.
        reused: Units that were in the store before.
        measured: Units that this call measured.
        failures: Units that could not be finished: `cell`, `unit`, `kind`, `text`, `trace`.
    """

    path: str
    manifest: SweepManifest
    reused: int
    measured: int
    failures: tuple[Mapping[str, Any], ...]

    @property
    def complete(self) -> bool:
        """Whether every unit is there."""
        return self.manifest.finished is not None

    def results(self) -> list[KLReport | TasksReport]:
        """Return the records of all cells."""
        from replayeval.sweep.collect import results

        return results(self.path)

    def raise_failures(self) -> None:
        """Raise what went wrong, if anything did.

        Raises:
            ConfigError: Some cell cannot be measured at all.
            NumericsError: A self-check failed.
            ReplayEvalError: A unit failed otherwise.
        """
        if not self.failures:
            return
        kinds = {failure["kind"] for failure in self.failures}
        reasons = list(dict.fromkeys(f"{f['cell']}: {f['text']}" for f in self.failures))
        more = (
            [] if len(reasons) <= MOST_REASONS else [f"and {len(reasons) - MOST_REASONS} more (`replayeval runs show`)"]
        )
        listed = "\n  - ".join([*reasons[:MOST_REASONS], *more])
        text = f"{len(self.failures)} of {len(self.manifest.units)} units were not measured:\n  - {listed}"
        kept = f"\nEverything else is kept in {self.path}; go on with --resume."
        kind = ConfigError if kinds == {"input"} else NumericsError if "check" in kinds else ReplayEvalError
        raise kind(text + kept)


def run(
    plan: Plan | str | Path,
    out: str | Path,
    executor: Executor | str = "local",
    resume: bool = False,
    *,
    measurer: Measurer | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> SweepRun:
    """Measure what is missing of a plan.

    A unit that fails does not stop the others; units of a cell that cannot be measured at all are not tried further.

    Args:
        plan: The plan, its file, or the name of a shipped one.
        out: Store: a directory or a URL of fsspec. Runs in one store share their units.
        executor: `local`, `ray`, `ray:ADDRESS`, or an executor.
        resume: Go on with the run of this plan that the store holds.
        measurer: What pins, reads and measures; the real one where left out.
        progress: Called with every change.

    Raises:
        ConfigError: The plan cannot be measured.
        StoreError: The store cannot be used, or holds this run already and `resume` was not given.
    """
    chosen = make_executor(executor) if isinstance(executor, str) else executor
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    measurer = measurer or live_measurer()
    SweepStore.create(out)
    return execute(plan, measurer.prepare(expand(plan)), out, chosen, measurer, resume=resume, progress=progress)


def execute(
    plan: Plan,
    prepared: Sequence[PreparedCell],
    out: str | Path,
    executor: Executor,
    measurer: Measurer,
    *,
    resume: bool,
    progress: Callable[[Progress], None] | None,
) -> SweepRun:
    """Measure what is missing of cells that are prepared; see `run`."""
    store = SweepStore.create(out)
    manifest = plan_manifest(plan, prepared)
    with ExitStack() as stack:
        lock = store.lock_run(manifest.run)
        if lock is not None:
            stack.enter_context(lock)
        known = store.units.known()
        where = provenance(device="see the units") | {"executor": executor.name}
        manifest = store.start_run(manifest, provenance=where, resume=resume, known=known)
        jobs = [_with_answers(job, store) for job in missing_jobs(prepared, known)]
        reused = len(manifest.units) - len(jobs)
        meter = Meter(jobs, reused=reused, report=progress)
        cell_of = {job.key: number for number, cell in enumerate(prepared) for job in cell.jobs}
        failures = _measure(store, jobs, cell_of, measurer, executor, meter)
        finished = None if failures else manifest.finished or utc_text(datetime.now(UTC))
        manifest = replace(manifest, failures=tuple(failures), finished=finished)
        store.write_run(manifest)
    return SweepRun(
        path=store.run_path(manifest.run),
        manifest=manifest,
        reused=reused,
        measured=len(jobs) - len(failures),
        failures=tuple(failures),
    )


def plan_manifest(plan: Plan, prepared: Sequence[PreparedCell]) -> SweepManifest:
    """Return the manifest of a run that has not begun."""
    return SweepManifest(
        name=plan.name,
        plan=plan.model_dump(mode="json", by_alias=True),
        cells=tuple(
            SweepCell(
                kind="kl" if isinstance(p.cell, KLCell) else "tasks",
                label=p.cell.label,
                settings=_settings(p.cell, p.jobs[0]),
                units=tuple(job.key for job in p.jobs),
            )
            for p in prepared
        ),
    )


def missing_jobs(prepared: Sequence[PreparedCell], known: set[str]) -> list[Job]:
    """Return the units that are not in the store, each once, those of one model next to each other."""
    missing: dict[str, Job] = {}
    for cell in prepared:
        for job in cell.jobs:
            if job.key not in known:
                missing.setdefault(job.key, job)
    order: dict[str, int] = {}
    for job in missing.values():
        order.setdefault(job.cell.model.id, len(order))
    return sorted(missing.values(), key=lambda job: order[job.cell.model.id])


def _measure(
    store: SweepStore,
    jobs: list[Job],
    cell_of: Mapping[str, int],
    measurer: Measurer,
    executor: Executor,
    meter: Meter,
) -> list[dict[str, Any]]:
    hopeless: dict[int, Failure] = {}
    failures: list[dict[str, Any]] = []

    def skip(job: Job) -> bool:
        # Another process may have finished the unit since the store was listed.
        return cell_of[job.key] in hopeless or store.units.has(job.key)

    def advanced(event: Event) -> None:
        if event.kind == "retried":
            meter.retried(event.job, workers=event.workers, note=event.text)
        else:
            meter.advanced(event.job, event.tokens, workers=event.workers)

    for event in executor.run(jobs, measurer, skip=skip, advanced=advanced):
        kind, failure, cell = event.kind, event.failure, cell_of[event.job.key]
        if event.answer is not None:
            store.units.write(_unit(event.job, event.answer))
        elif kind == "skipped" and cell in hopeless:
            # Its traceback stands with the first unit of the cell.
            kind, failure = "failed", replace(hopeless[cell], trace="")
        note = ""
        if failure is not None:
            if failure.kind in ("input", "check"):
                hopeless.setdefault(cell, failure)
            failures.append({"cell": event.job.cell.label, "unit": event.job.key, **asdict(failure)})
            note = f"{event.job.cell.label}: {failure.text}"
        meter.ended(event.job, kind, workers=event.workers, note=note)
    return failures


def _with_answers(job: Job, store: SweepStore) -> Job:
    """A task may take days: its answers are kept one by one beside the store, so that a kill costs only one."""
    if isinstance(job, TaskJob) and store.folder.local is not None:
        return replace(job, answers=str(store.folder.local.absolute() / ANSWERS / job.key))
    return job


def _unit(job: Job, answer: Answer) -> Unit:
    return Unit(
        key=job.key,
        identity=job.identity,
        content_sha256=answer.content_sha256,
        result=answer.result,
        provenance=answer.provenance,
        table=answer.table,
    )


def _settings(cell: Cell, first: Job) -> dict[str, Any]:
    """What decides the record of the cell, as JSON values: what only regroups or places the work is left out."""
    values = {name: value for name, value in vars(cell).items() if name not in ("model", "chunk")}
    values["arms"] = list(cell.arms)
    if isinstance(cell, KLCell):
        values["lengths"] = list(cell.lengths)
    pinned = {"model": cell.model.id, "dtype": cell.model.dtype, "pin": asdict(first.pin)}
    return values | pinned | {"reference": first.identity["reference"]}


def live_measurer() -> Measurer:
    """Return the measurer that loads models and texts."""
    from replayeval.sweep.live import LiveMeasurer

    return LiveMeasurer()
