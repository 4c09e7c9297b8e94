"""The manifest of a run: what is measured, with what, and when."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from replayeval.errors import StoreError
from replayeval.store.identity import RunIdentity, fingerprint

SCHEMA = "replayeval.run/1"
MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class RunManifest:
    """What a run says about itself.

    Attributes:
        identity: Everything that changes the numbers, as JSON values (`RunIdentity.to_json`).
        documents: Number of documents that make the run complete.
        attempts: Provenance, arguments included, of each process that worked on the run, the first one first.
        finished: UTC time at which the last document was written, or None.
        results: Whatever the finished run wants to keep beside its per-token numbers, such as its checks.
    """

    identity: Mapping[str, Any]
    documents: int
    attempts: tuple[Mapping[str, Any], ...] = ()
    finished: str | None = None
    results: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def start(cls, identity: RunIdentity, *, provenance: Mapping[str, Any]) -> "RunManifest":
        """Return the manifest of a run that begins now."""
        return cls(
            identity=identity.to_json(),
            documents=len(identity.documents),
            attempts=(dict(provenance),),
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the identity, in hexadecimal."""
        return fingerprint(self.identity)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `manifest.json`."""
        return {
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            "identity": dict(self.identity),
            "documents": self.documents,
            "attempts": [dict(attempt) for attempt in self.attempts],
            "finished": self.finished,
            "results": dict(self.results),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], *, where: Path) -> "RunManifest":
        """Return the manifest that `to_json` wrote.

        Raises:
            StoreError: Another schema, missing or surplus keys, or a fingerprint that does not fit the identity.
        """
        if values.get("schema") != SCHEMA:
            raise StoreError(
                f"{where}: expected schema {SCHEMA}, got {values.get('schema')!r}; "
                "use another directory, or the version of replayeval that wrote this one"
            )
        wanted = {"schema", "fingerprint", "identity", "documents", "attempts", "finished", "results"}
        if set(values) != wanted:
            missing, surplus = sorted(wanted - set(values)), sorted(set(values) - wanted)
            raise StoreError(f"{where}: missing keys {missing}, unknown keys {surplus}; measure anew elsewhere")
        offences = [f"{key}: expected {name}, got {type(values[key]).__name__}" for key, name in _misfits(values)]
        if offences:
            raise StoreError(f"{where} is damaged ({'; '.join(offences)}); measure anew elsewhere")
        manifest = cls(
            identity=values["identity"],
            documents=values["documents"],
            attempts=tuple(values["attempts"]),
            finished=values["finished"],
            results=values["results"],
        )
        if manifest.fingerprint != values["fingerprint"]:
            raise StoreError(f"{where}: the fingerprint does not fit the identity, so one of them was edited")
        return manifest


def _misfits(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys whose value is of another kind than `to_json` writes, with what it should be."""
    attempts: Any = values["attempts"]
    listed = isinstance(attempts, list) and all(isinstance(x, dict) for x in cast(list[object], attempts))
    documents, finished = values["documents"], values["finished"]
    counted = isinstance(documents, int) and not isinstance(documents, bool) and documents >= 0
    fits = {
        ("identity", "an object"): isinstance(values["identity"], dict),
        ("documents", "a count"): counted,
        ("attempts", "a list of objects"): listed,
        ("finished", "a text or null"): finished is None or isinstance(finished, str),
        ("results", "an object"): isinstance(values["results"], dict),
    }
    return [key for key, good in fits.items() if not good]


def read_manifest(path: Path) -> RunManifest | None:
    """Return the manifest of the run directory at `path`, or None where there is none.

    Raises:
        StoreError: The file cannot be read or is no manifest of this version.
    """
    file = path / MANIFEST
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise StoreError(f"{file} is damaged: {error}; use another directory") from error
    if not isinstance(values, dict):
        raise StoreError(f"{file}: expected a JSON object, got {type(values).__name__}; use another directory")
    return RunManifest.from_json(cast(dict[str, Any], values), where=file)
