"""`replayeval runs`: list, show, check and compare what lies on disk."""

from typing import Annotated, Any

import typer

from replayeval.cli.session import say
from replayeval.errors import StoreError

app = typer.Typer(
    name="runs",
    help="List, show, check and compare runs of sweeps and of `kl --out`.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Path_ = Annotated[str, typer.Argument(metavar="RUN", help="Directory or URL of a run, or of a store.")]


@app.command("ls")
def ls(
    path: Annotated[str, typer.Argument(metavar="DIR", help="A store, or a folder of runs of `kl --out`.")] = "sweeps",
) -> None:
    """List the runs in a store, or the runs of `kl --out` in a folder."""
    from rich.text import Text

    from replayeval.store.files import Folder
    from replayeval.store.sweeps import STORE, SweepStore

    table = _table("run", "plan", "cells", "units", "finished", "attempts")
    if Folder(path).exists(STORE):
        store = SweepStore.open(path)
        known = store.units.known()
        for name in store.runs():
            try:
                manifest = store.read_run(name)
            except StoreError as error:
                table.add_row(name, Text(str(error), overflow="fold"), "", "", "", "")
                continue
            units = manifest.units
            done = f"{sum(key in known for key in units):,}/{len(units):,}"
            finished = manifest.finished or ("failed" if manifest.failures else "no")
            table.add_row(
                name, Text(manifest.name), str(len(manifest.cells)), done, finished, str(len(manifest.attempts))
            )
    else:
        for name, run in _kl_runs(path):
            done = f"{len(run.done())}/{run.manifest.documents}"
            identity = run.manifest.identity
            table.add_row(
                Text(name), Text(f"kl of {identity['model']}"), "1", done, run.manifest.finished or "no",
                str(len(run.manifest.attempts)),
            )  # fmt: skip
    _print(table)


@app.command("show")
def show(path: Path_) -> None:
    """Show what a run is made of, where its numbers come from, and its results."""
    from replayeval.cli.sweep import print_results
    from replayeval.store.sweeps import locate_run

    if _is_kl(path):
        _show_kl(path)
        return
    store, manifest = locate_run(path)
    known = store.units.known()
    table = _table("cell", "units", "done")
    for cell in manifest.cells:
        done = sum(key in known for key in cell.units)
        table.add_row(_text(cell.label), f"{len(cell.units):,}", f"{done:,}")
    _line(f"run       {store.run_path(manifest.run)}")
    _line(f"plan      {manifest.name}: {manifest.plan.get('title', '')}")
    _line(f"finished  {manifest.finished or 'no'}")
    for attempt in manifest.attempts:
        _line(f"attempt   {_origin(attempt)}")
    for failure in manifest.failures:
        _line(f"failed    {failure['cell']}: {failure['text']}")
    _print(table)
    print_results(store.run_path(manifest.run), console=_console())


@app.command("verify")
def verify(path: Path_) -> None:
    """Read every file and check it against its digest; damaged, missing and foreign files are named. Exits 1 if any."""
    from replayeval.store.sweeps import locate

    if _is_kl(path):
        problems = _verify_kl(path)
        for problem in problems:
            _line(problem)
        if problems:
            raise typer.Exit(1)
        say("no damaged file")
        return
    store, run = locate(path)
    found = store.verify(run)
    for problem in found:
        _line(f"{problem.kind:8}  {problem.file}\n          {problem.text}")
    bad = [problem for problem in found if problem.kind != "leftover"]
    say(f"{len(bad)} bad files, {len(found) - len(bad)} harmless leftovers")
    if bad:
        raise typer.Exit(1)


@app.command("diff")
def diff(first: Path_, second: Path_) -> None:
    """Compare two runs cell by cell and unit by unit, bit by bit. Exits 1 where numbers differ."""
    from replayeval.store.sweeps import locate_run
    from replayeval.sweep.difference import run_difference

    difference = run_difference(locate_run(first), locate_run(second))
    for line in difference.lines:
        _line(line)
    if difference.differs:
        raise typer.Exit(1)


def _is_kl(path: str) -> bool:
    from replayeval.store.files import Folder
    from replayeval.store.manifest import MANIFEST, SCHEMA

    try:
        return Folder(path).read_json(MANIFEST).get("schema") == SCHEMA
    except (FileNotFoundError, NotADirectoryError):
        return False


def _kl_runs(path: str) -> list[tuple[str, Any]]:
    from pathlib import Path

    from replayeval.store import RunDirectory

    folder = Path(path)
    if not folder.is_dir():
        raise StoreError(f"expected a store or a folder of runs at {path}, got no folder; give the --out of a sweep")
    found = [entry.name for entry in sorted(folder.iterdir()) if _is_kl(str(entry))]
    if not found:
        raise StoreError(f"expected runs in {path}, found none; give the --out of a sweep, or the folder of `kl --out`")
    return [(name, RunDirectory.open(folder / name)) for name in found]


def _show_kl(path: str) -> None:
    from pathlib import Path

    from replayeval.report.from_run import kl_source
    from replayeval.report.schema import KLReport
    from replayeval.report.table import KLTable
    from replayeval.store import RunDirectory

    run = RunDirectory.open(path)
    _line(f"run       {path}")
    _line(f"documents {len(run.done())} of {run.manifest.documents}")
    _line(f"finished  {run.manifest.finished or 'no'}")
    for attempt in run.manifest.attempts:
        _line(f"attempt   {_origin(attempt)}")
    report = kl_source(Path(path)).report
    if isinstance(report, KLReport):
        _console().print(KLTable(report))


def _verify_kl(path: str) -> list[str]:
    from replayeval.store import RunDirectory

    run = RunDirectory.open(path)
    problems: list[str] = []
    for index in run.done():
        try:
            run.read(index)
        except StoreError as error:
            problems.append(f"damaged   {error}")
    return problems


def _origin(attempt: Any) -> str:
    git: dict[str, Any] = attempt.get("git") or {}
    commit = f", commit {git['commit'][:10]}{' with changes' if git.get('dirty') else ''}" if git else ""
    executor = f", executor {attempt['executor']}" if "executor" in attempt else ""
    return f"{attempt.get('started')}, replayeval {attempt.get('versions', {}).get('replayeval')}{commit}{executor}"


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("run", "plan", "cell", "finished") else "right")
    return table


def _text(value: str) -> Any:
    from rich.text import Text

    return Text(value)


def _print(table: Any) -> None:
    _console().print(table)


def _line(text: str) -> None:
    from replayeval.report.text import printable

    print("\n".join(printable(line) for line in text.splitlines()))


def _console() -> Any:
    from rich.console import Console

    from replayeval.report.table import TABLE_WIDTH

    console = Console()
    return console if console.is_terminal else Console(width=max(TABLE_WIDTH, 110))
