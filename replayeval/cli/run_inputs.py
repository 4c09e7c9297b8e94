"""From the RUN arguments of `report` and `gate` to records: JSON files, run directories and sweep runs."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

import typer

from replayeval.cli import values
from replayeval.errors import ConfigError

if TYPE_CHECKING:
    from replayeval.report.cells import Source
    from replayeval.report.published import Comparison

MOST_DRIFTS = 50
"""Cells of a sweep whose drift is computed from their tokens; the octaves of the others are in their records."""

Runs: TypeAlias = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...", help="Records (`--json` files), run directories (`--out`) or sweep runs.", show_default=False
    ),
]


def load_sources(paths: Sequence[Path]) -> "list[Source]":
    """Return the records that some paths hold, in order.

    Raises:
        ConfigError: A path is neither a record nor a run; all such paths are tried in order and the first is named.
        StoreError: A run directory is damaged or empty.
    """
    found: list[Source] = []
    for path in paths:
        found += _from_directory(path) if path.is_dir() else [_from_file(path)]
    counts = Counter(source.where for source in found)
    repeated = {where for where, count in counts.items() if count > 1}
    if repeated:
        raise ConfigError(f"expected each run once, got {values.shown(sorted(repeated)[0])} more than once.")
    return found


def load_published(paths: Sequence[Path], sources: "Sequence[Source]") -> "list[Comparison]":
    """Return the published numbers that the plans of sweeps name, beside what was measured for them.

    Raises:
        ConfigError: A plan names a table that does not exist.
        StoreError: A sweep is damaged.
    """
    from replayeval.report.published import compare
    from replayeval.store.sweeps import RUN_SCHEMA, STORE, locate_run

    found: list[Comparison] = []
    for path in paths:
        if not path.is_dir() or (_schema(path) != RUN_SCHEMA and not (path / STORE).is_file()):
            continue
        plan = locate_run(path)[1].plan
        tables = cast(list[str], plan.get("published") or [])
        entries = cast(list[dict[str, Any]], plan.get("models") or [])
        names = {entry["id"]: entry["published_as"] for entry in entries if entry.get("published_as")}
        if tables:
            found += compare([source.report for source in sources], tables, models=names)
    return list(dict.fromkeys(found))


def _from_file(path: Path) -> "Source":
    from replayeval.report.cells import Source
    from replayeval.report.schema import KL_SCHEMA, KLReport
    from replayeval.report.tasks_schema import TASKS_SCHEMA, TasksReport

    kinds: dict[str, type[KLReport] | type[TasksReport]] = {KL_SCHEMA: KLReport, TASKS_SCHEMA: TasksReport}
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{values.shown(path)} does not exist. Give a record or a run directory.") from None
    except OSError as error:
        raise ConfigError(f"cannot read {values.shown(path)}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{values.shown(path)} is not UTF-8 text. Expected a record in JSON.") from None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{values.shown(path)} is not JSON: {error}. Expected one of {', '.join(kinds)}.") from None
    schema: Any = cast(dict[str, Any], content).get("schema") if isinstance(content, dict) else None
    if not isinstance(schema, str) or schema not in kinds:
        raise ConfigError(
            f"{values.shown(path)}: expected a record of schema {' or '.join(kinds)}, "
            f"got {'none' if schema is None else values.shown(schema)}. Write one with `--json`."
        )
    return Source(report=kinds[schema].from_json(text, where=str(path)), where=str(path))


def _from_directory(path: Path) -> "list[Source]":
    from replayeval.report.from_run import kl_source
    from replayeval.store.manifest import MANIFEST, SCHEMA
    from replayeval.store.sweeps import RUN_SCHEMA, STORE

    schema = _schema(path)
    if schema == SCHEMA:
        return [kl_source(path)]
    if schema == RUN_SCHEMA or (path / STORE).is_file():
        return _from_sweep(path)
    raise ConfigError(
        f"{values.shown(path)} is no run: expected a directory of `kl --out` or `sweep`, with a {MANIFEST} inside. "
        "Give one of these, or a record written by `--json`."
    )


def _schema(path: Path) -> object:
    """Schema of the manifest in a directory, or None; what is wrong with the manifest is said by who reads it."""
    from replayeval.store.manifest import MANIFEST

    try:
        content: object = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return cast(dict[str, object], content).get("schema") if isinstance(content, dict) else None


def _from_sweep(path: Path) -> "list[Source]":
    from replayeval.report.cells import Source
    from replayeval.report.drift import drift_by_arm
    from replayeval.report.text import printable
    from replayeval.sweep.collect import cells

    found: list[Source] = []
    for result in cells(path):
        settings = result.cell.settings
        drift = None
        if result.scores and len(found) < MOST_DRIFTS:
            drift = drift_by_arm(result.scores, longest=settings["lengths"][-1], seed=settings["seed"])
        where = printable(f"{path}: {result.cell.label}")
        if any(source.where == where for source in found):
            where = f"{where} ({len(found) + 1})"
        found.append(Source(report=result.report, where=where, drift=drift))
    if not found:
        raise ConfigError(f"{values.shown(path)} holds no finished unit yet; go on with the sweep through --resume.")
    return found
