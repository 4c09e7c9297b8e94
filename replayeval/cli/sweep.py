"""`replayeval sweep`: run a plan of many measurements, unit by unit."""

import sys
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from replayeval.cli import values
from replayeval.cli.session import Session, say
from replayeval.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from rich.console import Console

    from replayeval.store.sweeps import SweepManifest
    from replayeval.sweep.estimate import CellEstimate
    from replayeval.sweep.jobs import Measurer, PreparedCell
    from replayeval.sweep.plan import Plan

DEFAULT_OUT = "sweeps"

EXAMPLES = """\b
Examples:
  replayeval sweep smoke                      a shipped plan, by its name
  replayeval sweep table11 --dry-run          the grid, its cost and what is already done
  replayeval sweep plan.yaml --out s3://bucket/sweeps --executor ray --resume
"""


def run(
    context: typer.Context,
    plan: Annotated[
        str | None,
        typer.Argument(metavar="PLAN", help="A YAML file, or the name of a shipped plan.", show_default=False),
    ] = None,
    executor: Annotated[
        str,
        typer.Option(metavar="local|ray|ray:ADDRESS", help="Where units run; ray uses RAY_ADDRESS or a new cluster."),
    ] = "local",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is missing of this plan in --out.")] = False,
    out: Annotated[
        str, typer.Option(metavar="DIR|URL", help="Store of the results; plans in one store share their units.")
    ] = DEFAULT_OUT,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the grid and its cost, and stop.")] = False,
) -> None:
    """Measure every cell of a plan; what the store already holds is not measured again."""
    if plan is None:
        from replayeval.sweep.plan import shipped_plans

        raise ConfigError(f"expected a plan: a YAML file, or one of {', '.join(shipped_plans())}, got none")
    if not out.strip():
        raise ConfigError("--out: expected a directory or a URL, got an empty text")

    from replayeval.sweep.executors import make_executor
    from replayeval.sweep.grid import expand
    from replayeval.sweep.plan import load_plan
    from replayeval.sweep.runner import execute, live_measurer

    chosen = make_executor(executor)
    loaded = load_plan(plan)
    cells = expand(loaded)
    _check_published(loaded)
    measurer = live_measurer()
    prepared = _prepare(loaded, cells, measurer, out, dry_run=dry_run)
    if dry_run:
        return
    try:
        with SweepProgress() as progress:
            done = execute(loaded, prepared, out, chosen, measurer, resume=resume, progress=progress)
    except KeyboardInterrupt:
        session = cast(Session, context.obj)
        say(f"interrupted; every finished unit is kept. Go on with:\n  {session.resume_command()}")
        raise typer.Exit(130) from None
    say(f"{done.measured} units measured, {done.reused} reused; the run is in {done.path}")
    failed = print_results(done.path, console=_console())
    done.raise_failures()
    if failed:
        raise typer.Exit(1)


def print_results(path: str, *, console: "Console") -> bool:
    """Print the records of a run, and published numbers beside them where its plan names some.

    Returns:
        Whether a self-check of some cell failed.
    """
    from replayeval.report.published import compare
    from replayeval.report.schema import KLReport
    from replayeval.report.table import KLTable
    from replayeval.report.tasks_table import TasksTable
    from replayeval.store.sweeps import locate_run
    from replayeval.sweep.collect import cells
    from replayeval.sweep.tables import published_table

    _, manifest = locate_run(path)
    reports: list[Any] = []
    for cell in cells(path):
        console.print(cell.cell.label, markup=False, highlight=False, style="bold")
        report = cell.report
        console.print(KLTable(report) if isinstance(report, KLReport) else TasksTable(report))
        reports.append(report)
    tables = cast(list[str], manifest.plan.get("published", []))
    if tables and reports:
        found = compare(reports, tables, models=_published_names(manifest))
        if found:
            console.print(published_table(found))
    failed = [f"{r.model}: {c.name}" for r in reports for c in r.checks if c.passed is False]
    for line in failed:
        say(f"check failed: {line}")
    return bool(failed)


class SweepProgress:
    """A live bar on a terminal; elsewhere one line about every half minute, and one for every failure and retry."""

    def __init__(self) -> None:
        """Draw nothing yet."""
        from rich.console import Console

        self._console = Console(file=sys.stderr, stderr=True)
        self._bar: Any = None
        self._task: Any = None
        self._last_line = 0.0
        self._note = ""

    def __enter__(self) -> "SweepProgress":
        """Show the bar, still without a length."""
        if self._console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[detail]}"))
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("loading", total=None, detail="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: Any) -> None:
        """Show one moment of the sweep."""
        from replayeval.cli.progress import QUIET_INTERVAL_SECONDS

        detail = progress_line(progress)
        if progress.note and progress.note != self._note:
            self._note = progress.note
            self._console.print(f"replayeval: {values.shown(progress.note)[1:-1]}", markup=False, highlight=False)
        if self._bar is not None:
            done = progress.units + progress.failed
            self._bar.update(
                self._task, description="sweeping", total=progress.units_total, completed=done, detail=detail
            )
        elif progress.seconds - self._last_line >= QUIET_INTERVAL_SECONDS:
            self._last_line = progress.seconds
            self._console.print(f"replayeval: {detail}", markup=False, highlight=False, soft_wrap=True)


def progress_line(progress: Any) -> str:
    """Return units, rate, time left, workers and what went wrong, in one line."""
    from replayeval.sweep.tables import duration

    parts = [f"{progress.units:,}/{progress.units_total:,} units"]
    if progress.tokens_per_s is not None:
        parts.append(f"{progress.tokens_per_s:,.0f} tokens/s")
    if progress.eta_seconds is not None:
        parts.append(f"{duration(progress.eta_seconds)} left")
    if progress.workers > 1:
        parts.append(f"{progress.workers} workers")
    for name in ("retries", "failed"):
        if getattr(progress, name):
            parts.append(f"{getattr(progress, name)} {name}")
    return ", ".join(parts)


def _prepare(
    plan: "Plan", cells: "list[Any]", measurer: "Measurer", out: str, *, dry_run: bool
) -> "list[PreparedCell]":
    """Pin models and texts, and show the grid; it is shown, without what is done, even when that fails."""
    from replayeval.store.files import Folder
    from replayeval.store.sweeps import STORE, SweepStore
    from replayeval.sweep.estimate import estimate, estimate_cells, measured_rates
    from replayeval.sweep.tables import grid_table

    def show(estimates: "list[CellEstimate]") -> None:
        console.print(grid_table(plan, estimates))

    console = _console(stderr=not dry_run)
    # A store that cannot be used is found before models and texts are fetched.
    if dry_run:
        store = SweepStore.open(out) if Folder(out).exists(STORE) else None
    else:
        store = SweepStore.create(out)
    try:
        prepared = measurer.prepare(cells)
    except (ConfigError, StoreError):
        show(estimate_cells(cells))
        raise
    known = store.units.known() if store is not None else set[str]()
    rates = measured_rates(store.units, known) if store is not None else {}
    show(estimate(prepared, known, rates))
    return prepared


def _check_published(plan: "Plan") -> None:
    from replayeval.report.published import published_numbers

    published_numbers(plan.published)


def _published_names(manifest: "SweepManifest") -> dict[str, str]:
    models = cast(list[dict[str, Any]], manifest.plan.get("models", []))
    return {model["id"]: model["published_as"] for model in models if model.get("published_as")}


def _console(*, stderr: bool = False) -> "Console":
    from rich.console import Console

    from replayeval.report.table import TABLE_WIDTH

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=max(TABLE_WIDTH, 110))
