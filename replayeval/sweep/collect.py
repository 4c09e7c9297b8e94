"""From the units of a run to the records of its cells. Never loads torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from replayeval.errors import StoreError
from replayeval.report import schema
from replayeval.report.from_summary import timing_report
from replayeval.report.result import KLResult
from replayeval.report.schema import KLReport
from replayeval.report.tasks_schema import TasksReport
from replayeval.stats import summarise_kl
from replayeval.store import DocumentScores
from replayeval.store.identity import fingerprint
from replayeval.store.parquet import scores_from_parquet
from replayeval.store.sweeps import SweepCell, SweepManifest, SweepStore, locate_run
from replayeval.store.units import Unit
from replayeval.tasks.shards import merge
from replayeval.tasks.tally import tally


@dataclass(frozen=True, kw_only=True, eq=False)
class CellResult:
    """One cell of a run.

    Attributes:
        cell: The cell, as the run's manifest keeps it.
        report: Its record.
        scores: Its numbers per token; empty for tasks.
        units: Its units, without their tables.
    """

    cell: SweepCell
    report: KLReport | TasksReport
    scores: tuple[DocumentScores, ...]
    units: tuple[Unit, ...]


def results(run_path: str | Path) -> list[KLReport | TasksReport]:
    """Return the records of all cells of a run, computed from its units.

    A cell that is not complete yields what it has, with a caution among its intervals; one without any unit is left
    out.

    Args:
        run_path: Directory or URL of a run, or of a store that holds one run.

    Raises:
        StoreError: There is no such run, or a unit is damaged; the message names the file.
    """
    return [cell.report for cell in cells(run_path)]


def cells(run_path: str | Path) -> Iterator[CellResult]:
    """Yield the cells of a run one by one, so that the numbers of only one are in memory.

    Raises:
        StoreError: As `results`.
    """
    store, manifest = locate_run(run_path)
    known = store.units.known()
    for cell in manifest.cells:
        keys = [key for key in cell.units if key in known]
        if keys:
            collect = _collect_kl if cell.kind == "kl" else _collect_tasks
            yield collect(store, manifest, cell, keys)


def _collect_kl(store: SweepStore, manifest: SweepManifest, cell: SweepCell, keys: Sequence[str]) -> CellResult:
    settings = cell.settings
    units: list[Unit] = []
    scores: list[DocumentScores] = []
    for key in keys:
        unit = store.units.read(key)
        scores.append(_scores(store, unit, settings))
        units.append(_without_table(unit))
    lengths, floor = cast(list[int], settings["lengths"]), cast(str | None, settings["floor_arm"])
    summary = summarise_kl(scores, lengths=lengths, floor_arm=floor, seed=settings["seed"])
    report = KLResult.build(
        scores=scores,
        summary=summary,
        model=settings["model"],
        reference=settings["reference"],
        window=settings["window"],
        bits_per_element=units[0].result["bits_per_element"],
        checks=_checks(units, scores, floor),
        timing=timing_report(scores, rows=1 + len(settings["arms"])),
        provenance=_provenance(manifest, cell, units)
        | {"data": settings["data"]}
        | {key: units[0].result.get(key) for key in ("states", "attention")},
    ).report
    if len(keys) < len(cell.units) and report.intervals is not None:
        note = f"the sweep is not finished: {len(keys)} of {len(cell.units)} documents"
        caution = _with_note(note, report.intervals.caution)
        report = report.model_copy(update={"intervals": report.intervals.model_copy(update={"caution": caution})})
    return CellResult(cell=cell, report=report, scores=tuple(scores), units=tuple(units))


def _collect_tasks(store: SweepStore, manifest: SweepManifest, cell: SweepCell, keys: Sequence[str]) -> CellResult:
    settings = cell.settings
    units = [store.units.read(key, table=False) for key in keys]
    # Paired statistics are no means over shards: they are made here, over all documents together.
    shards = [_shard(store, unit, settings) for unit in units]
    try:
        outline, answers, arms = merge(shards)
    except StoreError as error:
        raise StoreError(f"{cell.label} in {store.folder.show()}: {error}") from None
    report = tally(
        outline,
        answers,
        arms=arms,
        model=settings["model"],
        window=settings["window"],
        seed=settings["seed"],
        made=_provenance(manifest, cell, units),
    )
    if len(keys) < len(cell.units):
        note = f"the sweep is not finished: {len(keys)} of {len(cell.units)} shards of documents"
        intervals = report.intervals.model_copy(update={"caution": _with_note(note, report.intervals.caution)})
        tasks = tuple(t.model_copy(update={"caution": _with_note(note, t.caution)}) for t in report.tasks)
        report = report.model_copy(update={"intervals": intervals, "tasks": tasks})
    return CellResult(cell=cell, report=report, scores=(), units=tuple(units))


def _shard(store: SweepStore, unit: Unit, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The answers of a unit, once they are those that its identity promises."""
    where = f"unit {unit.key} of {store.folder.show()}"
    remedy = "measure it anew in another store"
    try:
        found: Mapping[str, Any] = unit.result["shard"]
        held = [[a["task"], a["doc_id"], a["prompt_sha256"]] for a in found["answers"]]
        arms = list(found["arms"])
    except (KeyError, TypeError) as error:
        raise StoreError(f"{where} holds no answers of a shard of tasks ({error!r} is missing); {remedy}") from None
    if held != unit.identity["documents"]:
        raise StoreError(f"{where} holds the answers to other documents than its identity names; {remedy}")
    expected = [settings["reference"], *settings["arms"]]
    if arms != expected:
        raise StoreError(f"{where}: expected the arms {expected}, got {arms}; {remedy}")
    return found


def _with_note(note: str, caution: str | None) -> str:
    return note if caution is None else f"{note}; {caution}"


def _scores(store: SweepStore, unit: Unit, settings: Mapping[str, Any]) -> DocumentScores:
    where = f"unit {unit.key} of {store.folder.show()}"
    if unit.table is None:
        raise StoreError(f"{where} holds no numbers; delete its JSON file, then sweep again with --resume")
    try:
        scores, extra = scores_from_parquet(unit.table)
    except StoreError as error:
        raise StoreError(f"{where} is no file of this program: {error}") from error
    document = unit.identity["document"]
    if extra.get("unit") != unit.key or (scores.doc_index, scores.doc_id) != (document["index"], document["id"]):
        raise StoreError(f"{where} holds the numbers of another unit; delete its files, then sweep with --resume")
    if list(scores.arms) != settings["arms"]:
        raise StoreError(f"{where}: expected the arms {settings['arms']}, got {list(scores.arms)}")
    return scores


def _checks(units: Sequence[Unit], scores: Sequence[DocumentScores], floor: str | None) -> list[schema.Check]:
    """The self-checks of all workers, the worst of each name; the floor over all documents together."""
    worst: dict[str, dict[str, Any]] = {}
    for unit in units:
        for check in cast(list[dict[str, Any]], unit.result["checks"]):
            if check["name"] not in worst or _severity(check) > _severity(worst[check["name"]]):
                worst[check["name"]] = check
    # The floor is the last check of a unit, and of one document; here it is that of the cell.
    if floor is not None and worst:
        last = list(worst)[-1]
        row = scores[0].arms.index(floor)
        mean = float(np.concatenate([s.kl_nats[row] for s in scores]).mean())
        worst[last] = worst[last] | {"value": mean}
    return [
        schema.Check(
            name=check["name"],
            passed=check["passed"],
            value=check["value"],
            limit=check["limit"],
            notes={} if check.get("reason") is None else {"passed": check["reason"]},
        )
        for check in worst.values()
    ]


def _severity(check: Mapping[str, Any]) -> tuple[int, float]:
    rank = {True: 0, None: 1, False: 2}[check["passed"]]
    return rank, -1.0 if check["value"] is None else float(check["value"])


def _provenance(manifest: SweepManifest, cell: SweepCell, units: Sequence[Unit]) -> dict[str, Any]:
    first, settings = units[0], cell.settings
    found: dict[str, Any] = {
        **first.provenance,
        "arguments": {"given": dict(settings), "defaulted": {}},
        "seed": settings["seed"],
        "model": first.result["model"],
        "fingerprint": fingerprint(cell.to_json()),
        "sweep": _origin(manifest, cell) | {"units": len(units)},
    }
    # Units may come from several machines, versions and nights; whoever reads the record should see that.
    for name in ("device", "host", "versions", "git", "attention"):
        different: list[Any] = []
        for unit in units:
            of_unit = unit.result.get(name, unit.provenance.get(name))
            if of_unit not in different:
                different.append(of_unit)
        if len(different) > 1:
            found["sweep"][f"{name}_of_units"] = different
    return found


def _origin(manifest: SweepManifest, cell: SweepCell) -> dict[str, Any]:
    return {"plan": manifest.name, "run": manifest.run, "cell": cell.label}


def _without_table(unit: Unit) -> Unit:
    return replace(unit, table=None)
