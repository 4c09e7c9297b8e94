"""The run directory: what it accepts, what it refuses, what it says."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from replayeval.errors import StoreError
from replayeval.store import RunDirectory
from tests.store.samples import DOCUMENTS, sample_identity, sample_manifest, sample_scores, work
from tests.store.test_scores import assert_same


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A complete run."""
    work(str(tmp_path / "run"))
    return tmp_path / "run"


def test_what_was_written_is_read(finished: Path) -> None:
    run = RunDirectory.open(finished)
    assert run.is_complete and run.manifest.finished is not None
    for index, scores in enumerate(run.read_all()):
        assert_same(scores, sample_scores(index))


def test_checksum_files_suit_sha256sum(finished: Path) -> None:
    names = sorted(path.name for path in (finished / "documents").glob("*.sha256"))
    assert len(names) == DOCUMENTS
    subprocess.run(["sha256sum", "-c", *names], cwd=finished / "documents", check=True, capture_output=True)


def test_manifest_is_readable_json(finished: Path) -> None:
    values = json.loads((finished / "manifest.json").read_text())
    assert values["schema"] == "replayeval.run/1"
    assert values["fingerprint"] == sample_identity().fingerprint
    assert values["identity"]["lengths"] == [25, 50]
    assert values["attempts"] == [{"device": "cpu"}]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"seed": 8}, "seed: 7 in the directory, 8 now"),
        ({"lengths": (25,)}, r"lengths: \[25, 50\] in the directory, \[25\] now"),
        ({"extra": {"numerics": "2"}}, 'extra.numerics: "1" in the directory, "2" now'),
        ({"extra": {}}, 'extra.numerics: "1" in the directory, absent now'),
        ({"weights_sha256": "00"}, 'weights_sha256: null in the directory, "00" now'),
        ({"documents": ("document-0", "document-1", "x")}, r"documents: .*\"document-2\"\] in the directory, .* now"),
    ],
)
@pytest.mark.parametrize("resume", [False, True])
def test_other_arguments_are_refused_and_shown(
    finished: Path, changes: dict[str, Any], line: str, resume: bool
) -> None:
    with pytest.raises(StoreError, match=rf"(?s)holds a run of other arguments:\n  {line}\n"):
        RunDirectory.create(finished, manifest=sample_manifest(**changes), resume=resume)


def test_many_documents_are_counted_instead_of_listed(tmp_path: Path) -> None:
    names = [f"{index:064d}" for index in range(9)]
    RunDirectory.create(tmp_path / "run", manifest=sample_manifest(documents=tuple(names))).close()
    changed = sample_manifest(documents=(*names[:4], "x" * 64), seed=8)
    with pytest.raises(
        StoreError, match="documents: 9 in the directory, 5 now, of which 4 are the same\\n  seed: 7 in"
    ):
        RunDirectory.create(tmp_path / "run", manifest=changed)


def test_every_field_of_the_identity_changes_the_fingerprint() -> None:
    changes: dict[str, Any] = {
        "kind": "x", "model": "x", "revision": None, "weights_sha256": "x", "reference": "x", "arms": ("x",),
        "data": "x", "documents": ("x",), "lengths": (1,), "prefill_tokens": 0, "seed": 0, "engine": "step",
        "dtype": "float32", "window_tokens": 1, "extra": {},
    }  # fmt: skip
    assert set(changes) == set(sample_identity().to_json())
    prints = {sample_identity(**{name: value}).fingerprint for name, value in changes.items()}
    assert len(prints | {sample_identity().fingerprint}) == len(changes) + 1


def test_existing_run_needs_resume(finished: Path) -> None:
    with pytest.raises(StoreError, match="--resume"):
        RunDirectory.create(finished, manifest=sample_manifest())
    with RunDirectory.create(finished, manifest=sample_manifest(), resume=True) as run:
        assert run.done() == list(range(DOCUMENTS))
        assert len(run.manifest.attempts) == 2


def test_foreign_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    for resume in (False, True):
        with pytest.raises(StoreError, match=r"thesis.tex and no manifest.json"):
            RunDirectory.create(tmp_path, manifest=sample_manifest(), resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_foreign_file_among_the_documents_is_refused(finished: Path) -> None:
    (finished / "documents" / "notes.txt").write_text("x")
    with pytest.raises(StoreError, match=r"notes.txt is not a file of a run"):
        RunDirectory.create(finished, manifest=sample_manifest(), resume=True)
    assert (finished / "documents" / "notes.txt").exists()


@pytest.mark.parametrize("inside", ["file/run", "file"])
def test_unwritable_path_is_refused(tmp_path: Path, inside: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot write the run directory"):
        RunDirectory.create(tmp_path / inside, manifest=sample_manifest())


def test_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunDirectory.create(tmp_path / "run", manifest=sample_manifest()) as run:

        def refuse(_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("replayeval.store._atomic.os.fsync", refuse)
        with pytest.raises(StoreError, match="000000.parquet: No space left on device"):
            run.write(sample_scores(0))
        assert not run.has(0)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", manifest=sample_manifest()):
        with pytest.raises(StoreError, match="being written by another process"):
            RunDirectory.create(tmp_path / "run", manifest=sample_manifest(), resume=True)
        assert RunDirectory.open(tmp_path / "run").done() == []
    RunDirectory.create(tmp_path / "run", manifest=sample_manifest(), resume=True).close()


def test_missing_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="got no directory"):
        RunDirectory.open(tmp_path / "absent")
    with pytest.raises(StoreError, match=r"without manifest.json"):
        RunDirectory.open(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"replayeval.run/1"', '"replayeval.run/9"', "expected schema replayeval.run/1, got 'replayeval.run/9'"),
        ('"seed": 7', '"seed": 8', "fingerprint does not fit"),
        ('"finished"', '"ended"', r"missing keys \['finished'\], unknown keys \['ended'\]"),
        ("{", "[", "damaged"),
    ],
)
def test_edited_manifest_is_refused(finished: Path, old: str, new: str, words: str) -> None:
    manifest = finished / "manifest.json"
    manifest.write_text(manifest.read_text().replace(old, new, 1))
    with pytest.raises(StoreError, match=words):
        RunDirectory.open(finished)


def _truncate(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flip(content: bytes) -> bytes:
    middle = len(content) // 3
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", [_truncate, _flip, lambda _: b"", lambda content: content + b"x"])
def test_damaged_unit_is_named(finished: Path, damage: Any) -> None:
    unit = finished / "documents" / "000001.parquet"
    unit.write_bytes(damage(unit.read_bytes()))
    run = RunDirectory.open(finished)
    with pytest.raises(StoreError, match=r"000001.parquet is damaged.*--resume"):
        run.read_all()
    assert_same(run.read(0), sample_scores(0))


def test_following_the_advice_repairs_the_run(finished: Path) -> None:
    unit = finished / "documents" / "000001.parquet"
    unit.write_bytes(b"")
    unit.unlink()
    work(str(finished))
    assert_same(RunDirectory.open(finished).read(1), sample_scores(1))


def test_unit_of_another_run_is_refused(finished: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with RunDirectory.create(other, manifest=sample_manifest(seed=8)) as run:
        run.write(sample_scores(0))
    for suffix in ("", ".sha256"):
        shutil.copy(other / "documents" / f"000000.parquet{suffix}", finished / "documents")
    with pytest.raises(StoreError, match=r"000000.parquet belongs to another run"):
        RunDirectory.open(finished).read(0)


def test_unit_under_another_name_is_refused(finished: Path) -> None:
    first, second = (finished / "documents" / f"00000{index}.parquet" for index in (0, 1))
    shutil.copy(second, first)
    digest = second.with_name(second.name + ".sha256").read_text()
    first.with_name(first.name + ".sha256").write_text(digest.replace(second.name, first.name))
    with pytest.raises(StoreError, match="holds document 1 instead of 0"):
        RunDirectory.open(finished).read(0)


def test_only_documents_of_the_run_are_written_once(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", manifest=sample_manifest()) as run:
        run.write(sample_scores(0))
        with pytest.raises(StoreError, match="written before"):
            run.write(sample_scores(0))
        with pytest.raises(StoreError, match="not one of this run's documents"):
            run.write(sample_scores(1, doc_id="other"))
        with pytest.raises(StoreError, match="not one of this run's documents"):
            run.write(sample_scores(DOCUMENTS))
        with pytest.raises(StoreError, match=r"documents \[1, 2\] are missing"):
            run.finish()
    with pytest.raises(StoreError, match="open for reading"):
        run.write(sample_scores(1))
