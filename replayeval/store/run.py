"""Runs on disk: a manifest and one checked file per document, safe against a kill at any moment."""

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, cast

from replayeval.errors import StoreError
from replayeval.store._atomic import TEMPORARY_SUFFIX, write_atomically, write_text_atomically
from replayeval.store._lock import LOCK, lock_directory
from replayeval.store.identity import differences
from replayeval.store.manifest import MANIFEST, RunManifest, read_manifest
from replayeval.store.parquet import scores_from_parquet, scores_to_parquet
from replayeval.store.scores import DocumentScores

_UNITS = "documents"
_UNIT_NAME = re.compile(r"\d{6}\.parquet")
_CHECKSUM_SUFFIX = ".sha256"


class RunDirectory:
    """A run on disk.

    `manifest.json` says what is measured; `documents/000000.parquet` holds the scores of document 0 and
    `documents/000000.parquet.sha256` its digest, in the form that `sha256sum -c` reads. A document is in the run when
    both exist. A process that creates or resumes a run holds a lock on the directory until `close` or its end.
    """

    def __init__(self, path: Path, manifest: RunManifest, *, lock: IO[str] | None) -> None:
        """Use `create` or `open` instead."""
        self.path = path
        self.manifest = manifest
        self._lock = lock

    @classmethod
    def create(cls, path: str | Path, *, manifest: RunManifest, resume: bool = False) -> "RunDirectory":
        """Start a run in a new or empty directory, or go on with the one that lies there.

        Call it before any computation: it shows whether the directory can be written. Files that a killed process left
        half-written are removed.

        Args:
            path: Directory, created with its parents where missing.
            manifest: The run to start. On resumption its provenance is appended to the attempts.
            resume: Go on where an earlier process with the same identity stopped.

        Raises:
            StoreError: The directory cannot be written, is in use, holds foreign files, holds a run although `resume`
                was not given, or holds a run of another identity.
        """
        path = Path(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            _check_content(path, manifest, resume=resume)
            lock = lock_directory(path)
            try:
                # Again, because another process may have come and gone before the lock was taken.
                manifest = _check_content(path, manifest, resume=resume)
                (path / _UNITS).mkdir(exist_ok=True)
                _clean(path)
                run = cls(path, manifest, lock=lock)
                run._write_manifest()
            except BaseException:
                lock.close()
                raise
        except OSError as error:
            raise StoreError(
                f"cannot write the run directory {path}: {error.strerror or error}; "
                "choose a directory that exists or can be created, with space and permission to write"
            ) from error
        return run

    @classmethod
    def open(cls, path: str | Path) -> "RunDirectory":
        """Open a run for reading; nothing in the directory is changed.

        Raises:
            StoreError: There is no run at `path`, or its manifest is damaged.
        """
        path = Path(path)
        manifest = read_manifest(path)
        if manifest is None:
            what = "a directory without manifest.json" if path.is_dir() else "no directory"
            raise StoreError(f"expected a run directory at {path}, got {what}; give the --out of an earlier run")
        return cls(path, manifest, lock=None)

    def unit(self, doc_index: int) -> Path:
        """Return the path of a document's scores."""
        return self.path / _UNITS / f"{doc_index:06d}.parquet"

    def has(self, doc_index: int) -> bool:
        """Tell whether the document was written whole. Its content is checked when it is read."""
        unit = self.unit(doc_index)
        return unit.is_file() and _checksum_path(unit).is_file()

    def done(self) -> list[int]:
        """Return the indices of the documents that were written, in order."""
        if not (self.path / _UNITS).is_dir():
            return []
        names = (path.name for path in (self.path / _UNITS).iterdir())
        indices = sorted(int(name[:6]) for name in names if _UNIT_NAME.fullmatch(name))
        return [index for index in indices if self.has(index)]

    @property
    def is_complete(self) -> bool:
        """Whether every document of the run was written."""
        return self.done() == list(range(self.manifest.documents))

    def write(self, scores: DocumentScores) -> None:
        """Add the scores of one document; they are on disk when this returns.

        Raises:
            StoreError: The run was opened for reading, the document does not belong to the run or is there already, or
                the disk refuses.
        """
        self._check_writable()
        unit = self.unit(scores.doc_index)
        self._check_belongs(scores, unit)
        if self.has(scores.doc_index):
            raise StoreError(f"{unit} was written before; a finished document is never replaced")
        content = scores_to_parquet(scores, extra_metadata={"fingerprint": self.manifest.fingerprint})

        def write_table(temporary: Path) -> None:
            temporary.write_bytes(content)
            # The digest goes first: a unit without one cannot come to be, and one without a unit counts for nothing.
            digest = hashlib.sha256(content).hexdigest()
            write_text_atomically(_checksum_path(unit), f"{digest}  {unit.name}\n")

        try:
            write_atomically(unit, write_table)
        except OSError as error:
            raise StoreError(f"cannot write {unit}: {error.strerror or error}; make room, then --resume") from error

    def read(self, doc_index: int) -> DocumentScores:
        """Return the scores of one document, checked against its digest.

        Raises:
            StoreError: The unit is missing, truncated, damaged, or belongs to another run or document.
        """
        unit = self.unit(doc_index)
        remedy = f"delete it and {unit.name}{_CHECKSUM_SUFFIX}, then run again with --resume"
        if not self.has(doc_index):
            raise StoreError(f"document {doc_index} is not in {self.path}; finish the run with --resume")
        try:
            content = unit.read_bytes()
            recorded = _checksum_path(unit).read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"cannot read {unit}: {error}; {remedy}") from error
        digest = hashlib.sha256(content).hexdigest()
        if recorded != [digest, unit.name]:
            raise StoreError(
                f"{unit} is damaged: expected SHA-256 {' '.join(recorded) or 'in its checksum file, which is empty'}, "
                f"got {digest} over {len(content)} bytes; {remedy}"
            )
        try:
            scores, extra = scores_from_parquet(content)
        except StoreError as error:
            raise StoreError(f"{unit} is no file of this program: {error}; {remedy}") from error
        owner = extra.get("fingerprint")
        if owner != self.manifest.fingerprint:
            raise StoreError(
                f"{unit} belongs to another run: its fingerprint is {owner}, not {self.manifest.fingerprint}; {remedy}"
            )
        if scores.doc_index != doc_index:
            raise StoreError(f"{unit} holds document {scores.doc_index} instead of {doc_index}; {remedy}")
        self._check_belongs(scores, unit)
        return scores

    def read_all(self) -> list[DocumentScores]:
        """Return the scores of every document written so far, in order, each checked; see `is_complete`."""
        return [self.read(index) for index in self.done()]

    def finish(self, *, results: Mapping[str, Any] | None = None) -> None:
        """Mark the run as finished now and keep `results` in the manifest.

        Raises:
            StoreError: Documents are missing, or the run was opened for reading.
        """
        self._check_writable()
        missing = sorted(set(range(self.manifest.documents)) - set(self.done()))
        if missing:
            raise StoreError(f"{self.path} cannot be finished: documents {missing} are missing; run on with --resume")
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        self.manifest = replace(self.manifest, finished=finished, results=dict(results or {}))
        try:
            self._write_manifest()
        except OSError as error:
            raise StoreError(f"cannot write {self.path / MANIFEST}: {error.strerror or error}") from error

    def close(self) -> None:
        """Let other processes write to the directory."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "RunDirectory":
        """Return the run itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the run."""
        self.close()

    def _check_writable(self) -> None:
        if self._lock is None:
            raise StoreError(
                f"{self.path} is open for reading; RunDirectory.create(..., resume=True) opens it to write"
            )

    def _check_belongs(self, scores: DocumentScores, unit: Path) -> None:
        identity = self.manifest.identity
        documents, arms = cast(list[str], identity["documents"]), cast(list[str], identity["arms"])
        if scores.doc_index >= len(documents) or documents[scores.doc_index] != scores.doc_id:
            raise StoreError(
                f"{unit}: document {scores.doc_index} ({scores.doc_id}) is not one of this run's documents"
            )
        if list(scores.arms) != arms:
            raise StoreError(f"{unit}: expected the arms {arms}, got {list(scores.arms)}")

    def _write_manifest(self) -> None:
        text = json.dumps(self.manifest.to_json(), indent=2, ensure_ascii=False) + "\n"
        write_text_atomically(self.path / MANIFEST, text)


def _checksum_path(unit: Path) -> Path:
    return unit.with_name(unit.name + _CHECKSUM_SUFFIX)


def _check_content(path: Path, manifest: RunManifest, *, resume: bool) -> RunManifest:
    found = read_manifest(path)
    if found is None:
        _refuse_foreign_content(path)
        return manifest
    _refuse_other_run(path, found, manifest, resume=resume)
    return replace(found, attempts=(*found.attempts, *manifest.attempts))


def _refuse_foreign_content(path: Path) -> None:
    """Allow what a process killed before its manifest was in place leaves behind, and nothing else."""
    ours = {LOCK, _UNITS, MANIFEST + TEMPORARY_SUFFIX}
    foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in ours)
    if (path / _UNITS).is_dir():
        foreign += sorted(f"{_UNITS}/{entry.name}" for entry in (path / _UNITS).iterdir())
    if foreign:
        listed = ", ".join(foreign[:5]) + (" …" if len(foreign) > 5 else "")
        raise StoreError(
            f"expected a new, an empty or a run directory, but {path} holds {listed} and no {MANIFEST}; "
            "choose another directory"
        )


def _refuse_other_run(path: Path, found: RunManifest, wanted: RunManifest, *, resume: bool) -> None:
    changed = differences(found.identity, wanted.identity)
    if changed:
        listed = "\n  ".join(changed)
        raise StoreError(
            f"{path} holds a run of other arguments:\n  {listed}\n"
            "choose another directory, or give the arguments of the run that lies there"
        )
    if not resume:
        raise StoreError(f"{path} already holds this run; go on with it through --resume, or choose another directory")


def _clean(path: Path) -> None:
    units = path / _UNITS
    for entry in units.iterdir():
        if entry.name.endswith(TEMPORARY_SUFFIX):
            entry.unlink()
    for entry in list(units.iterdir()):
        unit = entry.name.removesuffix(_CHECKSUM_SUFFIX)
        if not _UNIT_NAME.fullmatch(unit):
            raise StoreError(f"{entry} is not a file of a run; move it elsewhere, then run again")
        if not (units / unit).is_file() or not _checksum_path(units / unit).is_file():
            entry.unlink()
    with suppress(FileNotFoundError):
        (path / (MANIFEST + TEMPORARY_SUFFIX)).unlink()
