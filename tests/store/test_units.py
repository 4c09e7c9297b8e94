"""Units under the digest of what they are: written whole, never replaced, and every damage named."""

import hashlib
import json
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replayeval.errors import StoreError
from replayeval.store.files import Folder
from replayeval.store.identity import fingerprint
from replayeval.store.parquet import numbers_sha256, scores_from_parquet, scores_to_parquet
from replayeval.store.units import Unit, UnitStore
from tests.store.samples import sample_scores
from tests.store.test_scores import assert_same


def unit(number: int = 0, **changes: Any) -> Unit:
    identity = {"kind": "kl", "number": number}
    scores = sample_scores(number)
    made = Unit(
        key=fingerprint(identity),
        identity=identity,
        content_sha256=numbers_sha256(scores),
        result={"checks": []},
        provenance={"device": "cpu"},
        table=scores_to_parquet(scores, extra_metadata={"unit": "x"}),
    )
    return replace(made, **changes)


def files(store: UnitStore, key: str) -> tuple[Path, Path]:
    assert store.folder.local is not None
    manifest = store.folder.local / "units" / key[:2] / f"{key}.json"
    (table,) = manifest.parent.glob(f"{key}-*.parquet")
    return manifest, table


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> UnitStore:
    where = tmp_path if request.param == "local" else f"memory://{uuid.uuid4().hex}/store"
    return UnitStore(Folder(where))


def test_what_is_written_is_read(store: UnitStore) -> None:
    for number in range(3):
        assert store.write(unit(number))
    assert store.known() == {unit(number).key for number in range(3)}
    found = store.read(unit(1).key)
    assert found == replace(unit(1), written=found.written)
    assert found.table is not None
    scores, extra = scores_from_parquet(found.table)
    assert_same(scores, sample_scores(1))
    assert extra == {"unit": "x"}
    assert store.read(unit(1).key, table=False).table is None
    assert store.verify() == []


def test_a_finished_unit_is_never_replaced(store: UnitStore) -> None:
    assert store.write(unit())
    assert not store.write(unit(content_sha256="0" * 64, table=b"another"))
    assert store.read(unit().key).content_sha256 == unit().content_sha256


def test_a_key_that_is_not_the_digest_is_refused(store: UnitStore) -> None:
    with pytest.raises(StoreError, match="digest of its identity"):
        store.write(unit(key="0" * 64))
    assert store.known() == set()


def test_a_missing_unit_is_named(store: UnitStore) -> None:
    with pytest.raises(StoreError, match=r"is not in .*--resume"):
        store.read("0" * 64)


def edited(manifest: Path, **changes: Any) -> None:
    """Change fields and make the checksum fit again, as only a forger would."""
    values = json.loads(manifest.read_text()) | changes
    body = {name: value for name, value in values.items() if name != "checksum"}
    manifest.write_text(json.dumps(values | {"checksum": fingerprint(body)}))


DAMAGES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "cut off manifest": (lambda m, t: m.write_bytes(m.read_bytes()[:80]), "damaged"),
    "empty manifest": (lambda m, t: m.write_bytes(b""), "damaged"),
    "no object": (lambda m, t: m.write_text("[]"), "expected a JSON object"),
    "NaN": (lambda m, t: m.write_text(m.read_text().replace('"checks": []', '"checks": NaN')), "damaged"),
    "one digit": (lambda m, t: m.write_text(m.read_text().replace('"device": "cpu"', '"device": "cpv"')), "checksum"),
    "surplus key": (lambda m, t: edited(m, more=1), "unknown keys"),
    "another schema": (lambda m, t: edited(m, schema="replayeval.unit/9"), "another version"),
    "another identity": (lambda m, t: edited(m, identity={"kind": "kl"}), "identity does not fit"),
    "cut off table": (lambda m, t: t.write_bytes(t.read_bytes()[:100]), "damaged: expected SHA-256"),
    "one bit": (lambda m, t: t.write_bytes(bytes([t.read_bytes()[0] ^ 1]) + t.read_bytes()[1:]), "expected SHA-256"),
    "no table": (lambda m, t: t.unlink(), "is missing"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damage_is_found_and_the_file_named(damage: str, tmp_path: Path) -> None:
    store = UnitStore(Folder(tmp_path))
    store.write(unit(0))
    store.write(unit(1))
    key = unit(0).key
    manifest, table = files(store, key)
    act, text = DAMAGES[damage]
    act(manifest, table)
    with pytest.raises(StoreError, match=text) as caught:
        store.read(key)
    assert key in str(caught.value)
    (problem,) = store.verify()
    assert problem.kind == "damaged" and key in problem.file
    assert store.read(unit(1).key).key == unit(1).key


def test_a_unit_under_the_name_of_another_is_found(tmp_path: Path) -> None:
    store = UnitStore(Folder(tmp_path))
    store.write(unit(0))
    store.write(unit(1))
    manifest, _ = files(store, unit(0).key)
    other, _ = files(store, unit(1).key)
    other.write_bytes(manifest.read_bytes())
    with pytest.raises(StoreError, match="renamed or copied"):
        store.read(unit(1).key)


def test_foreign_files_and_leftovers_are_told_apart(tmp_path: Path) -> None:
    store = UnitStore(Folder(tmp_path))
    store.write(unit(0))
    folder = tmp_path / "units" / unit(0).key[:2]
    (folder / "notes.txt").write_text("mine")
    (folder / f"{unit(0).key}.json.0011.tmp").write_text("half")
    (folder / f"{unit(1).key}-{'0' * 16}.parquet").write_text("a table whose manifest never came")
    assert {(Path(p.file).name[-8:], p.kind) for p in store.verify()} == {
        ("otes.txt", "foreign"),
        ("0011.tmp", "leftover"),
        (".parquet", "leftover"),
    }


def test_two_processes_that_finish_the_same_unit_leave_one_of_them(tmp_path: Path) -> None:
    """Both wrote their tables before either wrote its manifest: the tables differ, in what they cost."""
    store = UnitStore(Folder(tmp_path))
    first = unit(0)
    slower = scores_to_parquet(sample_scores(0, counters={"seconds": 9.0}), extra_metadata={"unit": "x"})
    digest = hashlib.sha256(slower).hexdigest()
    store.folder.write(f"units/{first.key[:2]}/{first.key}-{digest[:16]}.parquet", slower)
    store.write(first)
    assert store.read(first.key).table == first.table
    assert [problem.kind for problem in store.verify()] == ["leftover"]


def test_the_digest_of_numbers_knows_numbers_from_costs() -> None:
    scores = sample_scores(0)
    assert numbers_sha256(scores) == numbers_sha256(sample_scores(0, counters={"seconds": 2.0}))
    changed = scores.kl_nats.copy()
    changed[0, 3] = changed[0, 3] * (1 + 2**-52) + 5e-324
    assert numbers_sha256(scores) != numbers_sha256(sample_scores(0, kl_nats=changed))
    agrees = scores.top1_agrees.copy()
    agrees[0, 0] = not agrees[0, 0]
    assert numbers_sha256(scores) != numbers_sha256(sample_scores(0, top1_agrees=agrees))


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    folder = Folder(tmp_path)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StoreError, match=r"No space left.*make room"):
        folder.write("units/aa/x.json", b"content")
    assert folder.names() == []


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(StoreError, match="nosuch"):
        Folder("nosuch://bucket/x")


def test_elsewhere_files_are_moved_into_place(tmp_path: Path) -> None:
    """A file system that is neither this machine's nor an object store."""
    folder = Folder(f"dir::file://{tmp_path}")
    assert folder.local is None
    folder.write("units/aa/x.json", b"1")
    folder.write("units/aa/x.json", b"2")
    assert folder.read("units/aa/x.json") == b"2"
    assert folder.names() == ["units/aa/x.json"] and folder.top() == ["units"]
