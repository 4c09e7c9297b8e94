"""A store of sweeps: shared units, and one directory per run that says which of them it is made of."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, cast

from replayeval.errors import ConfigError, StoreError
from replayeval.store.files import Folder, is_temporary
from replayeval.store.identity import fingerprint
from replayeval.store.manifest import MANIFEST
from replayeval.store.manifest import SCHEMA as KL_RUN_SCHEMA
from replayeval.store.units import UNITS, Problem, UnitStore

STORE_SCHEMA = "replayeval.store/1"
RUN_SCHEMA = "replayeval.sweep/1"
STORE = "store.json"
RUNS = "runs"
ANSWERS = "answers"
"""Where units of tasks keep single answers while they are worked on; the tasks check those files themselves."""

_RUN_MANIFEST = re.compile(rf"{RUNS}/([^/]+)/{re.escape(MANIFEST)}")
_KEYS = {
    "schema",
    "name",
    "plan",
    "fingerprint",
    "cells",
    "attempts",
    "finished",
    "failures",
    "checksum",
}


@dataclass(frozen=True, kw_only=True)
class SweepCell:
    """A cell of a run, as its manifest keeps it.

    Attributes:
        kind: "kl" or "tasks".
        label: What tables call it.
        settings: Everything about it, as JSON values.
        units: Keys of its units, in order.
    """

    kind: str
    label: str
    settings: Mapping[str, Any]
    units: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {"kind": self.kind, "label": self.label, "settings": dict(self.settings), "units": list(self.units)}


@dataclass(frozen=True, kw_only=True)
class SweepManifest:
    """What a run of a sweep is made of.

    Attributes:
        name: Name of its plan.
        plan: The plan, as JSON values.
        cells: Its cells.
        attempts: Provenance of each process that worked on it, the first one first.
        finished: UTC time at which the last unit was there, or None.
        failures: Units that could not be finished in the last attempt: `cell`, `unit`, `kind`, `text`, `trace`.
    """

    name: str
    plan: Mapping[str, Any]
    cells: tuple[SweepCell, ...]
    attempts: tuple[Mapping[str, Any], ...] = ()
    finished: str | None = None
    failures: tuple[Mapping[str, Any], ...] = ()
    fingerprint: str = field(init=False, default="")

    def __post_init__(self) -> None:
        """Take the fingerprint: over the cells, which decide the numbers, and the name."""
        values = {"name": self.name, "cells": [cell.to_json() for cell in self.cells]}
        object.__setattr__(self, "fingerprint", fingerprint(values))

    @property
    def run(self) -> str:
        """Name of the run's directory."""
        return f"{self.name}-{self.fingerprint[:10]}"

    @property
    def units(self) -> tuple[str, ...]:
        """Keys of all units, each once, in the order of the cells."""
        return tuple(dict.fromkeys(key for cell in self.cells for key in cell.units))

    def to_json(self) -> dict[str, Any]:
        """Return the content of the manifest."""
        values: dict[str, Any] = {
            "schema": RUN_SCHEMA,
            "name": self.name,
            "plan": dict(self.plan),
            "fingerprint": self.fingerprint,
            "cells": [cell.to_json() for cell in self.cells],
            "attempts": [dict(attempt) for attempt in self.attempts],
            "finished": self.finished,
            "failures": [dict(failure) for failure in self.failures],
        }
        return values | {"checksum": fingerprint(values)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], *, where: str) -> "SweepManifest":
        """Return the manifest that `to_json` wrote.

        Raises:
            StoreError: It is of another schema, or damaged.
        """
        schema = values.get("schema")
        if schema == KL_RUN_SCHEMA:
            raise StoreError(f"{where}: expected a run of a sweep, got one of `replayeval kl`")
        if schema != RUN_SCHEMA:
            raise StoreError(f"{where}: expected schema {RUN_SCHEMA}, got {schema!r}; use the version that wrote it")
        body = {name: value for name, value in values.items() if name != "checksum"}
        try:
            sound = set(values) == _KEYS and fingerprint(body) == values["checksum"]
        except ConfigError:
            sound = False
        if not sound:
            raise StoreError(f"{where} is damaged: its content does not fit its checksum; start the sweep again")
        cells = tuple(
            SweepCell(kind=c["kind"], label=c["label"], settings=c["settings"], units=tuple(c["units"]))
            for c in cast(list[dict[str, Any]], values["cells"])
        )
        return cls(
            name=values["name"],
            plan=values["plan"],
            cells=cells,
            attempts=tuple(values["attempts"]),
            finished=values["finished"],
            failures=tuple(values["failures"]),
        )


class SweepStore:
    """A folder of units and of the runs that are made of them: `store.json`, `units/`, `runs/NAME/manifest.json`."""

    def __init__(self, folder: Folder) -> None:
        """Use `open` or `create` instead."""
        self.folder = folder
        self.units = UnitStore(folder)

    @classmethod
    def create(cls, path: str | Path) -> "SweepStore":
        """Open a store, or make one of a new or empty folder.

        Raises:
            StoreError: The folder holds something else, a store of another version, or cannot be written.
        """
        folder = Folder(path)
        if not folder.exists(STORE):
            foreign = [name for name in folder.top() if not is_temporary(name)]
            if foreign:
                listed = ", ".join(foreign[:5]) + (" …" if len(foreign) > 5 else "")
                raise StoreError(
                    f"expected a new, an empty or a store directory, but {folder.show()} holds {listed} and no "
                    f"{STORE}; choose another directory"
                )
            folder.write_json(STORE, {"schema": STORE_SCHEMA})
        return cls.open(path)

    @classmethod
    def open(cls, path: str | Path) -> "SweepStore":
        """Open a store; nothing is written.

        Raises:
            StoreError: There is none, or one of another version.
        """
        folder = Folder(path)
        try:
            schema = folder.read_json(STORE).get("schema")
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(
                f"expected a store of sweeps at {folder.show()}, got a folder without {STORE}, or none; "
                "give the --out of an earlier sweep"
            ) from None
        if schema != STORE_SCHEMA:
            raise StoreError(
                f"{folder.show(STORE)}: expected schema {STORE_SCHEMA}, got {schema!r}; use the version that wrote it"
            )
        return cls(folder)

    def runs(self) -> list[str]:
        """Return the names of the runs, in order."""
        return [match[1] for name in self.folder.names(RUNS) if (match := _RUN_MANIFEST.fullmatch(name))]

    def run_path(self, run: str) -> str:
        """Return the path or URL of a run's directory."""
        return self.folder.show(f"{RUNS}/{run}")

    def read_run(self, run: str) -> SweepManifest:
        """Return the manifest of a run.

        Raises:
            StoreError: There is no such run, or its manifest is damaged or that of another run.
        """
        name = f"{RUNS}/{run}/{MANIFEST}"
        try:
            values = self.folder.read_json(name)
        except FileNotFoundError:
            known = ", ".join(self.runs()) or "none"
            raise StoreError(f"there is no run {run} in {self.folder.show()}; there are: {known}") from None
        manifest = SweepManifest.from_json(values, where=self.folder.show(name))
        if manifest.run != run:
            raise StoreError(
                f"{self.folder.show(name)} is the manifest of run {manifest.run}, not of {run}: it was renamed or "
                "copied here; put it back, or start the sweep again"
            )
        return manifest

    def find_run(self, run: str) -> SweepManifest | None:
        """Return the manifest of a run, or None where there is none."""
        return self.read_run(run) if self.folder.exists(f"{RUNS}/{run}/{MANIFEST}") else None

    def write_run(self, manifest: SweepManifest) -> None:
        """Replace the manifest of a run in one step."""
        self.folder.write_json(f"{RUNS}/{manifest.run}/{MANIFEST}", manifest.to_json())

    def lock_run(self, run: str) -> IO[str] | None:
        """Keep other processes from working on a run; see `Folder.lock`."""
        return self.folder.lock(f"{RUNS}/{run}")

    def start_run(
        self, manifest: SweepManifest, *, provenance: Mapping[str, Any], resume: bool, known: Sequence[str] | set[str]
    ) -> SweepManifest:
        """Begin a run, or go on with it. Call it with the lock held.

        Raises:
            StoreError: The run is there already and `resume` was not given.
        """
        found = self.find_run(manifest.run)
        if found is not None and not resume:
            done = len(set(found.units) & set(known))
            raise StoreError(
                f"{self.run_path(manifest.run)} already holds this sweep, {done} of {len(found.units)} units done; "
                "go on with it through --resume, or choose another --out to measure it anew"
            )
        attempts = (*(found.attempts if found else ()), dict(provenance))
        started = replace(manifest, attempts=attempts)
        self.write_run(started)
        return started

    def verify(self, run: str | None = None) -> list[Problem]:
        """Check every file of the store, or the units of one run alone."""
        if run is not None:
            manifest, known = self.read_run(run), self.units.known()
            # A run that is not finished may lack units; a finished one has lost them.
            return self.units.verify(keys=[key for key in manifest.units if key in known or manifest.finished])
        problems = self.units.verify()
        for name in self.folder.names():
            if (
                name == STORE
                or name.startswith((f"{UNITS}/", f"{ANSWERS}/"))
                or re.fullmatch(rf"{RUNS}/[^/]+/\.lock", name)
            ):
                continue
            match = _RUN_MANIFEST.fullmatch(name)
            if match is None:
                kind = "leftover" if is_temporary(name) else "foreign"
                text = "a process was killed while it wrote this" if kind == "leftover" else "no file of this program"
                problems.append(Problem(file=self.folder.show(name), kind=kind, text=text))
                continue
            try:
                self.read_run(match[1])
            except StoreError as error:
                problems.append(Problem(file=self.folder.show(name), kind="damaged", text=str(error)))
        return problems


def locate(path: str | Path) -> tuple[SweepStore, str | None]:
    """Return the store and the run that a path means: the directory of a run, or that of a store.

    Returns:
        The store, and the name of the run; None for a store as a whole.

    Raises:
        StoreError: The path is neither.
    """
    text = str(path).rstrip("/")
    if Folder(text).exists(MANIFEST) and not Folder(text).exists(STORE):
        parent, _, run = text.rpartition("/")
        if parent.rpartition("/")[2] == RUNS or parent == RUNS:
            return SweepStore.open(parent.removesuffix(RUNS).rstrip("/") or "."), run
        SweepManifest.from_json(Folder(text).read_json(MANIFEST), where=f"{text}/{MANIFEST}")
        raise StoreError(f"expected {text} to lie in the folder {RUNS} of a store; it was moved away from its units")
    return SweepStore.open(path), None


def locate_run(path: str | Path) -> tuple[SweepStore, SweepManifest]:
    """Return the store and the manifest of the one run that a path means.

    Raises:
        StoreError: The path is no run, nor a store with a single run.
    """
    store, run = locate(path)
    if run is None:
        runs = store.runs()
        if len(runs) != 1:
            listed = ", ".join(store.run_path(name) for name in runs) or "none"
            raise StoreError(f"expected one run in {store.folder.show()}, got {len(runs)}: {listed}; give one of them")
        run = runs[0]
    return store, store.read_run(run)
