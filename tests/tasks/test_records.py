"""Answers on disk: whole or not there, whatever happens, and never mixed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from replayeval.errors import StoreError
from replayeval.tasks.records import AnswerFolder, AnswerLog, AnswerRecord, SampleRecord, read_answers

IDENTITY = {"task": "t", "arm": "a", "lengths": (1, 2)}


def record(doc_id: int, text: str = "täxt \ud800 \n") -> AnswerRecord:
    sample = SampleRecord(
        output=text,
        output_tokens=(1, 2),
        length=2,
        truncated=False,
        loglikelihoods=((-1.5, True), (float("-inf"), False)),
        extracted="B",
        unextracted=None,
        score=0.5,
        metric="m",
        seed=7,
    )
    return AnswerRecord(doc_id=doc_id, prompt_sha256="0" * 64, samples=(sample, sample), seconds=0.25)


def written(path: Path, count: int) -> bytes:
    log = AnswerLog(path, IDENTITY)
    for doc_id in range(count):
        log.write(record(doc_id))
    log.close()
    return path.read_bytes()


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", 3)
    again = AnswerLog(tmp_path / "a.jsonl", IDENTITY)
    assert again.records == {i: record(i) for i in range(3)}
    with pytest.raises(StoreError, match="never replaced"):
        again.write(record(1))
    again.close()


def test_a_file_cut_off_anywhere_loses_the_cut_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    content = written(path, 2)
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    near = {end + offset for end in (0, *ends) for offset in (-2, -1, 0, 1, 2)}
    for length in sorted({*range(0, len(content), 41), *near} & {*range(len(content) + 1)}):
        path.write_bytes(content[:length])
        log = AnswerLog(path, IDENTITY)
        whole = sum(end <= length for end in ends)
        assert len(log.records) == max(0, whole - 1), length
        for doc_id in range(len(log.records), 2):
            log.write(record(doc_id))
        log.close()
        assert path.read_bytes() == content, length


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    content = written(path, 2)
    for place in (3, 40, len(content) // 2, len(content) - 10):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(StoreError, match=r"damaged in line \d"):
            AnswerLog(path, IDENTITY)


def test_answers_of_another_identity_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", 1)
    with pytest.raises(StoreError, match=r'arm: "a" in the directory, "b" now'):
        AnswerLog(tmp_path / "a.jsonl", IDENTITY | {"arm": "b"})


def test_another_version_is_refused(tmp_path: Path) -> None:
    import hashlib

    body = json.dumps({"schema": "replayeval.answers/9", "identity": {}})
    line = f"{hashlib.sha256(body.encode()).hexdigest()[:16]} {body}\n"
    (tmp_path / "a.jsonl").write_text(line, encoding="utf-8")
    with pytest.raises(StoreError, match="replayeval.answers/9"):
        AnswerLog(tmp_path / "a.jsonl", IDENTITY)


def test_a_folder_is_not_shared_by_two_writers(tmp_path: Path) -> None:
    with AnswerFolder(tmp_path, resume=False):
        program = (
            "from pathlib import Path\nfrom replayeval.errors import StoreError\n"
            "from replayeval.tasks.records import AnswerFolder\n"
            f"try:\n    AnswerFolder(Path({str(tmp_path)!r}), resume=True)\n"
            "except StoreError as error:\n    print(error)"
        )
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert "written by another process" in run.stdout


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match=r"thesis\.tex"):
        AnswerFolder(tmp_path, resume=True)


def test_an_unwritable_place_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot use"):
        AnswerFolder(tmp_path / "file" / "out", resume=False)


def test_names_of_arms_and_tasks_become_distinct_files(tmp_path: Path) -> None:
    names = ["separate:nvfp4/fp16+sr@L=16", "separate:nvfp4_fp16+sr@L=16", "../../etc", "a" * 300, "a" * 301]
    with AnswerFolder(tmp_path, resume=False) as folder:
        for name in names:
            folder.log("t/../x", name, {"arm": name}).write(record(0))
    assert sorted(identity["arm"] for identity, _ in read_answers(tmp_path)) == sorted(names)
    files = list((tmp_path / "answers").rglob("*.jsonl"))
    assert len(files) == len(names)
    assert {file.parent.parent for file in files} == {tmp_path / "answers"}


def test_a_kill_at_any_moment_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    program = (
        "import sys\nsys.path.insert(0, sys.argv[2])\nfrom pathlib import Path\n"
        "from tests.tasks.test_records import IDENTITY, record\nfrom replayeval.tasks.records import AnswerLog\n"
        "log = AnswerLog(Path(sys.argv[1]), IDENTITY)\nprint('ready', flush=True)\n"
        "for doc_id in range(10**9):\n    log.write(record(doc_id))"
    )
    path = tmp_path / "a.jsonl"
    root = str(Path(__file__).parents[2])
    with subprocess.Popen([sys.executable, "-c", program, str(path), root], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while not path.exists() or path.stat().st_size < 20_000:
            assert process.poll() is None
        process.kill()
    log = AnswerLog(path, IDENTITY)
    assert len(log.records) > 5
    assert all(log.records[i] == record(i) for i in range(len(log.records)))
    log.write(record(len(log.records)))
    log.close()
