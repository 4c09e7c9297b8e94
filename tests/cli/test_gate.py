"""`replayeval gate` from the command line: files and run directories, exit codes, and input that cannot be used."""

import json
import shutil
from pathlib import Path

import pytest

from replayeval.cli import main
from tests.report.test_gate import BAD, GOOD, three_arms
from tests.store.samples import work

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def record(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(three_arms().to_json())
    return path


def test_exit_codes_and_output(record: Path, capsys: Captured) -> None:
    assert main(["gate", str(record), "--max-kl", "1e-3", "--at", "1K"]) == 1
    out = capsys.readouterr().out
    assert "1 passed, 1 failed, 1 undecided" in out
    assert main(["gate", str(record), "--max-kl", "1e-3", "--arm", GOOD]) == 0


def test_files_for_ci(record: Path, tmp_path: Path, capsys: Captured) -> None:
    junit, badge, verdict = tmp_path / "gate.xml", tmp_path / "badge.json", tmp_path / "gate.json"
    words = ["gate", str(record), "--max-kl", "1e-3", "--junit", str(junit), "--badge", str(badge)]
    assert main([*words, "--json", str(verdict)]) == 1
    assert junit.read_text().startswith("<?xml")
    assert json.loads(badge.read_text())["schemaVersion"] == 1
    assert {arm["policy"]: arm["outcome"] for arm in json.loads(verdict.read_text())["arms"]}[BAD] == "fail"
    capsys.readouterr()
    main([*words, "--json", "-"])
    assert json.loads(capsys.readouterr().out)["schema"] == "replayeval.gate/1"


def test_a_run_directory_is_judged_from_its_tokens(tmp_path: Path, capsys: Captured) -> None:
    work(str(tmp_path / "run"))
    # Random KL between 0 and 1 in three documents; the second arm diverged at 21.
    assert main(["gate", str(tmp_path / "run"), "--max-kl", "10", "--min-docs", "3", "--at", "25"]) == 1
    out = capsys.readouterr().out
    assert "PASS       shared:fp8[tile=32,max=3.5]@L=16" in out
    assert "diverged at generation length 21" in out
    assert main(["gate", str(tmp_path / "run"), "--max-kl", "1e-3", "--arm", "shared:fp8[tile=32,max=3.5]"]) == 1
    assert "needs about 1 more document" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected a limit"),
        (["--at", "8K"], "expected a limit"),
        (["--max-kl", "small"], "--max-kl: expected a number above 0, got 'small'"),
        (["--max-kl", "nan"], "--max-kl: expected a number above 0"),
        (["--min-top1", "99.5"], "--min-top1: expected a number above 0 and of at most 1, got '99.5'"),
        (["--max-drop", "-1"], "--max-drop: expected a number of at least 0"),
        (["--max-kl", "1", "--at", "8K"], "no result at generation length 8K"),
        (["--max-kl", "1", "--arm", "shared:fp5"], "no record holds the policy shared:fp5"),
        (["--max-kl", "1", "--min-docs", "0"], "--min-docs: expected a whole number from 1"),
        (["--max-kl", "1", "--junit", "no/such/folder/x.xml"], "--junit: the folder"),
    ],
)
def test_bad_options(words: list[str], said: str, record: Path, capsys: Captured) -> None:
    assert main(["gate", str(record), *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--junit", "run.json"], "--junit: 'run.json' is what is judged, and would be overwritten"),
        (["--badge", "./x/../run.json"], "--badge: 'x/../run.json' is what is judged"),
        (["--json", "link.json"], "--json: 'link.json' is what is judged"),
        (["--json", "hard.json"], "--json: 'hard.json' is what is judged"),
        (["--junit", "run/manifest.json"], "--junit: 'run/manifest.json' is part of what is judged"),
        (["--junit", "a.xml", "--json", "./a.xml"], "--junit and --json: expected two files, got 'a.xml' for both"),
        (["--junit", "a", "--badge", "x/../a"], "--junit and --badge: expected two files"),
    ],
)
def test_no_output_replaces_an_input_or_another_output(
    words: list[str], said: str, record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x").mkdir()
    Path("link.json").symlink_to(record)
    Path("hard.json").hardlink_to(record)
    work("run")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["gate", "run.json", "run", "--max-kl", "1", *words]) == 2
    assert said in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_bad_runs(record: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.json").write_text("no json")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "other.json").write_text('{"schema": "something/1"}')
    (tmp_path / "cut.json").write_text('{"schema": "replayeval.kl/1"}')
    work(str(tmp_path / "damaged"))
    unit = tmp_path / "damaged" / "documents" / "000001.parquet"
    unit.write_bytes(unit.read_bytes()[:-1])
    work(str(tmp_path / "bare"))
    shutil.rmtree(tmp_path / "bare" / "documents")
    said = {
        "missing.json": "does not exist",
        "empty": "is no run",
        "text.json": "is not JSON",
        "list.json": "got none",
        "other.json": "got 'something/1'",
        "cut.json": "does not fit replayeval.kl/1",
        "damaged": "is damaged: expected SHA-256",
        "bare": "holds no document yet",
    }
    for name, message in said.items():
        assert main(["gate", str(tmp_path / name), "--max-kl", "1"]) == 2, name
        err = capsys.readouterr().err
        assert message in err, name
        assert "Traceback" not in err
    assert main(["gate", str(record), str(record), "--max-kl", "1"]) == 2
    assert "more than once" in capsys.readouterr().err
