"""Units of work on disk, each under the digest of what decides its numbers, so that none is ever computed twice."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

from replayeval.errors import ConfigError, StoreError
from replayeval.store.files import Folder, is_temporary
from replayeval.store.identity import fingerprint
from replayeval.store.provenance import utc_text

UNIT_SCHEMA = "replayeval.unit/1"
UNITS = "units"
_MANIFEST_NAME = re.compile(r"units/([0-9a-f]{2})/(([0-9a-f]{64})\.json)")
_DATA_NAME = re.compile(r"units/([0-9a-f]{2})/([0-9a-f]{64})-([0-9a-f]{16})\.parquet")
_KEYS = {"schema", "key", "identity", "data", "content_sha256", "result", "provenance", "written", "checksum"}


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One finished unit.

    Attributes:
        key: Digest of `identity`.
        identity: Everything that changes the numbers, as JSON values.
        content_sha256: Digest over the numbers alone, without what they cost: equal on two machines that agree bit by
            bit.
        result: What the unit found that is not in its table: checks, bits per element, or a whole record.
        provenance: Versions, device, commit, arguments.
        written: UTC time.
        table: Content of its Parquet file, or None where the unit has none.
    """

    key: str
    identity: Mapping[str, Any]
    content_sha256: str
    result: Mapping[str, Any]
    provenance: Mapping[str, Any]
    written: str = field(default_factory=lambda: utc_text(datetime.now(UTC)))
    table: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A file that is not as it should be.

    Attributes:
        file: Where it is.
        kind: "damaged", "foreign" (no file of this program), "missing" (named by another file), or "leftover" (of a
            process that was killed; harmless).
        text: What is wrong.
    """

    file: str
    kind: str
    text: str


class UnitStore:
    """The units below a folder: `units/ab/KEY.json` and, beside it, the Parquet file that it names.

    A unit exists when its JSON file does, which is written last. The name of the Parquet file holds the start of its
    digest, so that two processes that finish the same unit at once leave one or the other, never a mixture.
    """

    def __init__(self, folder: Folder) -> None:
        """Look at a folder; nothing is written."""
        self.folder = folder

    def has(self, key: str) -> bool:
        """Tell whether the unit was finished. Its content is checked when it is read."""
        return self.folder.exists(_manifest_name(key))

    def known(self) -> set[str]:
        """Return the keys of all finished units."""
        return {match[3] for name in self.folder.names(UNITS) if (match := _MANIFEST_NAME.fullmatch(name))}

    def write(self, unit: Unit) -> bool:
        """Add a unit; it is on disk when this returns.

        Returns:
            False when another process had finished it before: what is there is never replaced.

        Raises:
            StoreError: The file system refuses, or the key is not that of the identity.
        """
        if fingerprint(unit.identity) != unit.key:
            raise StoreError(f"unit {unit.key}: expected the digest of its identity as key, got another")
        if self.has(unit.key):
            return False
        data: dict[str, Any] | None = None
        if unit.table is not None:
            digest = hashlib.sha256(unit.table).hexdigest()
            data = {"file": _data_name(unit.key, digest), "bytes": len(unit.table), "sha256": digest}
            self.folder.write(data["file"], unit.table)
        values: dict[str, Any] = {
            "schema": UNIT_SCHEMA,
            "key": unit.key,
            "identity": dict(unit.identity),
            "data": data,
            "content_sha256": unit.content_sha256,
            "result": dict(unit.result),
            "provenance": dict(unit.provenance),
            "written": unit.written,
        }
        self.folder.write_json(_manifest_name(unit.key), values | {"checksum": fingerprint(values)})
        return True

    def read(self, key: str, *, table: bool = True) -> Unit:
        """Return a unit, checked against its digests.

        Args:
            key: Which one.
            table: Read its Parquet file too.

        Raises:
            StoreError: It is missing, damaged, or not what its name says; the message names the file.
        """
        name = _manifest_name(key)
        remedy = f"delete {self.folder.show(name)}, then sweep again with --resume"
        try:
            values = self.folder.read_json(name)
        except FileNotFoundError:
            raise StoreError(f"unit {key} is not in {self.folder.show()}; finish the sweep with --resume") from None
        except StoreError as error:
            raise StoreError(f"{error}; {remedy}") from None
        wrong = _offence(values, key)
        if wrong is not None:
            raise StoreError(f"{self.folder.show(name)} {wrong}; {remedy}")
        content: bytes | None = None
        if table and values["data"] is not None:
            content = self._content(values["data"], remedy=remedy)
        return Unit(
            key=key,
            identity=values["identity"],
            content_sha256=values["content_sha256"],
            result=values["result"],
            provenance=values["provenance"],
            written=values["written"],
            table=content,
        )

    def verify(self, *, keys: Iterable[str] | None = None) -> list[Problem]:
        """Read every unit and look at every file.

        Args:
            keys: Only these units; foreign files and leftovers are then not looked for.
        """
        problems: list[Problem] = []
        names = self.folder.names(UNITS) if keys is None else []
        used: set[str] = set()
        wanted = sorted(self._keys_of(names) if keys is None else keys)
        for key in wanted:
            name = _manifest_name(key)
            try:
                self.read(key)
                values = self.folder.read_json(name)
            except (StoreError, FileNotFoundError) as error:
                kind = "damaged" if self.has(key) else "missing"
                problems.append(Problem(file=self.folder.show(name), kind=kind, text=str(error)))
                # What a damaged manifest would name cannot be known; its data are no leftovers yet.
                used.update(n for n in names if key in n)
                continue
            used.add(name)
            if values["data"] is not None:
                used.add(values["data"]["file"])
        for name in names:
            if name in used:
                continue
            ours = is_temporary(name) or _DATA_NAME.fullmatch(name) is not None
            kind = "leftover" if ours else "foreign"
            text = "a process was killed while it wrote this" if ours else "no file of this program"
            problems.append(Problem(file=self.folder.show(name), kind=kind, text=text))
        return problems

    def _keys_of(self, names: Iterable[str]) -> set[str]:
        return {match[3] for name in names if (match := _MANIFEST_NAME.fullmatch(name))}

    def _content(self, data: Mapping[str, Any], *, remedy: str) -> bytes:
        file = self.folder.show(data["file"])
        try:
            content = self.folder.read(data["file"])
        except FileNotFoundError:
            raise StoreError(f"{file} is missing; {remedy}") from None
        digest = hashlib.sha256(content).hexdigest()
        if digest != data["sha256"]:
            raise StoreError(
                f"{file} is damaged: expected SHA-256 {data['sha256']} over {data['bytes']} bytes, "
                f"got {digest} over {len(content)}; {remedy}"
            )
        return content


def _manifest_name(key: str) -> str:
    return f"{UNITS}/{key[:2]}/{key}.json"


def _data_name(key: str, digest: str) -> str:
    return f"{UNITS}/{key[:2]}/{key}-{digest[:16]}.parquet"


def _offence(values: Mapping[str, Any], key: str) -> str | None:
    """What is wrong with the content of a unit's JSON file."""
    schema = values.get("schema")
    if schema != UNIT_SCHEMA:
        return f"is of schema {schema!r}, expected {UNIT_SCHEMA}, so another version wrote it"
    if set(values) != _KEYS:
        return f"is damaged: missing keys {sorted(_KEYS - set(values))}, unknown keys {sorted(set(values) - _KEYS)}"
    body = {name: value for name, value in values.items() if name != "checksum"}
    try:
        checksum = fingerprint(body)
    except ConfigError as error:
        return f"is damaged: {error}"
    if checksum != values["checksum"]:
        return "is damaged: its content does not fit its checksum"
    identity: object = values["identity"]
    if not isinstance(identity, dict) or fingerprint(cast(dict[str, Any], identity)) != values["key"]:
        return "is damaged: its identity does not fit its key"
    if values["key"] != key:
        return f"holds the unit {values['key']}, so it was renamed or copied here"
    return None
