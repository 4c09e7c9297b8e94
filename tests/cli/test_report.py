"""`replayeval report` and `replayeval nightly` from the command line."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from replayeval.cli import main
from tests.nightly.nights import FP8, Weather, measured
from tests.report.task_samples import two_tasks
from tests.report.test_gate import three_arms
from tests.store.samples import work

Captured = pytest.CaptureFixture[str]
PLAN = (
    "name: night\nmodels: builtin:gdn\ngrids:\n  - {kind: kl, arms: [shared:fp32, shared:fp8], docs: 4, lengths: 64}\n"
)


def test_a_report_of_records_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    (tmp_path / "kl.json").write_text(three_arms().to_json())
    (tmp_path / "tasks.json").write_text(two_tasks().to_json())
    work(str(tmp_path / "run"))
    words = [str(tmp_path / name) for name in ("kl.json", "tasks.json", "run")]
    assert main(["report", *words, "--out", str(tmp_path / "out"), "--title", "Mine"]) == 0
    output = capsys.readouterr()
    assert output.out.strip() == str(tmp_path / "out" / "index.html")
    assert "failed" in output.err
    html = (tmp_path / "out" / "index.html").read_text()
    assert "<title>Mine</title>" in html
    for text in ("org/model", "builtin:gdn", "KL ≤ 0.001", "accuracy drop ≤ 1 pp", "top-1 ≥ 99.5%"):
        assert text in html
    # The run has tokens, so its drift is in bins of a quarter octave.
    assert (tmp_path / "out" / "drift.csv").read_text().count("\n") > 4
    monkeypatch.setattr("replayeval.report.write.figures", lambda sources: iter(()))
    assert main(["report", words[0], "--out", str(tmp_path / "out"), "--max-kl", "0.5", "--at", "512"]) == 0
    assert "KL to 512 ≤ 0.5" in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "file"], "--out: expected a directory, got the file"),
        (["--out", "."], "holds kl.csv, which no report wrote there"),
        (["--max-kl", "-1"], "--max-kl: expected a number above 0"),
        (["--at", "3"], "no result at generation length 3"),
    ],
)
def test_bad_input_of_a_report(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kl.json").write_text(three_arms().to_json())
    Path("file").write_text("")
    Path("kl.csv").write_text("mine")
    assert main(["report", "kl.json", *words]) == 2
    assert Path("kl.csv").read_text() == "mine"
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


class Played:
    """A sweep that draws its nights instead of measuring them."""

    def __init__(self, weathers: Iterable[Weather]) -> None:
        self._weathers = iter(weathers)
        self.seen: list[tuple[str, Path]] = []

    def __call__(self, executor: str, progress: Any = None) -> Any:
        def run(plan: Any, out: Path, *, resume: bool) -> Any:
            self.seen.append((plan.name, out))
            return measured(next(self._weathers), seed=len(self.seen))

        return run


def test_nights_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    history = tmp_path / "history"
    played = Played([Weather()] * 2 + [Weather(diverged=(FP8,))] * 2)
    names = iter(f"2026-11-0{day}T02-00-00Z" for day in range(1, 9))
    monkeypatch.setattr("replayeval.nightly.night.sweep_runner", played)
    monkeypatch.setattr("replayeval.report.write.figures", lambda sources: iter(()))
    monkeypatch.setattr("replayeval.nightly.night.night_name", lambda moment: next(names))
    words = ["nightly", str(tmp_path / "plan.yaml"), "--history", str(history)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Nothing to compare with yet.\n12 series were not tested: too few earlier nights share" in out
    assert main(words) == 0
    assert "not tested" not in capsys.readouterr().out
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "regression  shared:fp8@L=16, KL to 64" in out
    assert "new regression" in out
    assert out.rstrip().endswith(str(history / "report" / "index.html"))
    assert [name for name, _ in played.seen] == ["night"] * 3
    assert json.loads((history / "nights" / "2026-11-03T02-00-00Z" / "night.json").read_text())["plan"] == "night"
    assert "## Changes" in (history / "report" / "report.md").read_text()
    monkeypatch.setattr("replayeval.nightly.record.night_name", lambda moment: "2026-11-03T02-00-01Z")
    assert main(["nightly", "--history", str(history), "--accept"]) == 0
    err = capsys.readouterr().err
    assert "accepted at their new level" in err
    assert "warning" not in err
    monkeypatch.setattr("replayeval.nightly.record.night_name", lambda moment: "2026-11-03T01-59-59Z")
    assert main(["nightly", "--history", str(history), "--accept"]) == 0
    err = capsys.readouterr().err
    assert "warning: night 2026-11-03T02-00-00Z is dated in the future" in err
    assert "2026-11-02" not in err
    assert main(words) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--history: expected the directory of the nights"),
        (["--history", "h"], "expected a plan, such as `nightly`"),
        (["plan.yaml", "--history", "h", "--alpha", "1"], "--alpha: expected a number above 0 and of at most 0.5"),
        (["plan.yaml", "--history", "h", "--tolerance", "-1"], "--tolerance: expected a number of at least 0"),
        (["plan.yaml", "--history", "h", "--accept"], "--accept runs nothing; expected no plan beside it"),
        (["--history", "h", "--accept"], "holds no finished night"),
        (["none.yaml", "--history", "h"], "expected a plan: a YAML file"),
        (["plan.yaml", "--history", "plan.yaml"], "--history: expected a directory, got the file"),
    ],
)
def test_bad_input_of_a_night(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text(PLAN)
    assert main(["nightly", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err
    assert not Path("h").exists()


@pytest.mark.slow
def test_two_real_nights_of_the_built_in_model_agree(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    words = ["nightly", str(tmp_path / "plan.yaml"), "--history", str(tmp_path / "history")]
    assert main(words) == 0
    capsys.readouterr()
    assert main(words) == 0
    assert "No change in 6 series." in capsys.readouterr().out
    run = next((tmp_path / "history" / "nights").glob("2*")) / "run"
    assert main(["report", str(run), "--out", str(tmp_path / "out")]) == 0
    assert main(["gate", str(run), "--max-kl", "1e-9", "--arm", "shared:fp32", "--min-docs", "4"]) == 0
