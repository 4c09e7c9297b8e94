"""`replayeval sweep` and `replayeval runs` from the command line."""

import json
import re
from pathlib import Path

import pytest

from replayeval.cli import main
from replayeval.cli.sweep import progress_line
from replayeval.store import RunDirectory
from replayeval.sweep.progress import Progress
from tests.store.samples import work
from tests.sweep.synthetic import FAILURES, SyntheticMeasurer

Captured = pytest.CaptureFixture[str]

PLAN = """
name: mine
title: A test
published: table11
models: [{id: org/nano, published_as: Nemotron-3-Nano-4B, active_parameters: 4.0e+9}]
grids:
  - kind: kl
    data: books
    lengths: [512, 1K]
    docs: 3
    arms: [shared:fp32, shared:fp8, shared:fp8+sr]
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    use(monkeypatch, SyntheticMeasurer())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text(PLAN)
    return "plan.yaml"


def use(monkeypatch: pytest.MonkeyPatch, measurer: SyntheticMeasurer) -> None:
    monkeypatch.setattr("replayeval.sweep.runner.live_measurer", lambda: measurer)


def test_a_dry_run_shows_the_grid_and_writes_nothing(plan: str, capsys: Captured, tmp_path: Path) -> None:
    assert main(["sweep", plan, "--dry-run"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "mine: A test" in out and "3 units in 1 cells; 0 done; 3,072 tokens to read" in out
    # 2 operations x 4e9 parameters x 3 x 1024 tokens x 4 rows.
    assert "0.0983 PFLOP" in out and "time unknown" in out
    assert "org/nano, books to 1K, L=16, fp8" in out
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_sweep_is_run_resumed_listed_shown_and_verified(plan: str, capsys: Captured) -> None:
    assert main(["sweep", plan]) == 0
    first = capsys.readouterr()
    assert "3 units measured, 0 reused; the run is in sweeps/runs/mine-" in first.err
    table = " ".join(first.out.split())
    assert "shared:fp8+sr" in table and "Published and measured" in table
    # N=1K: published 0.59; the synthetic scores put the ratio near 2.
    row = next(line for line in first.out.splitlines() if re.search(r"1K\s+0\.59", line))
    assert re.search(r"0\.59\s+(1\.9|2\.\d*)\d*\s+\[1\.\d+, 2\.\d+\]\s+\+1\.\d+ \*", row), row
    assert re.search(r"8K\s+1\.3\s+not measured", first.out)

    assert main(["sweep", plan]) == 2
    refused = capsys.readouterr()
    assert "already holds this sweep, 3 of 3 units done" in refused.err and "Traceback" not in refused.err
    assert main(["sweep", plan, "--resume"]) == 0
    again = capsys.readouterr()
    assert "0 units measured, 3 reused" in again.err and again.out == first.out

    assert main(["sweep", plan, "--dry-run"]) == 0
    assert "3 done; 0 tokens to read" in " ".join(capsys.readouterr().out.split())
    assert main(["runs", "ls"]) == 0
    assert re.search(r"mine-\w{10}\s+mine\s+1\s+3/3\s+20\d\d-.*\s2", capsys.readouterr().out)
    assert main(["runs", "show", "sweeps"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("attempt   20") == 2 and "executor local" in shown and "shared:fp8+sr" in shown
    assert main(["runs", "verify", "sweeps"]) == 0
    assert "0 bad files" in capsys.readouterr().err
    assert main(["runs", "diff", "sweeps", "sweeps"]) == 0
    assert "3 units equal bit by bit, 0 differ" in capsys.readouterr().out


def test_damage_exits_1_and_names_the_file(plan: str, capsys: Captured, tmp_path: Path) -> None:
    assert main(["sweep", plan]) == 0
    bad = next(tmp_path.glob("sweeps/units/*/*.parquet"))
    bad.write_bytes(b"")
    capsys.readouterr()
    assert main(["runs", "verify", "sweeps"]) == 1
    output = capsys.readouterr()
    assert bad.name in output.out and "damaged" in output.out and "1 bad files" in output.err
    assert main(["sweep", plan, "--resume"]) == 2
    assert bad.name in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "code"), [("input", 2), ("check", 1), ("error", 1)])
def test_failed_units_decide_the_exit_code(
    kind: str, code: int, plan: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, SyntheticMeasurer(fails=FAILURES[kind]))
    assert main(["sweep", plan]) == code
    output = capsys.readouterr()
    assert "of 3 units were not measured" in output.err and str(FAILURES[kind]) in output.err
    assert "Traceback" not in output.err and "shared:fp8" in output.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep"], "or one of fig13,"),
        (["sweep", "nigthly"], "did you mean nightly?"),
        (["sweep", "plan.yaml", "--executor", "slurm"], "expected the executor to be one of local, ray"),
        (["sweep", "plan.yaml", "--out", ""], "--out: expected a directory or a URL"),
        (["sweep", "plan.yaml", "--out", "."], "holds plan.yaml and no store.json"),
        (["sweep", "plan.yaml", "--out", "nosuch://x"], "cannot open nosuch://x"),
        (["sweep", "bad.yaml"], "expected published tables out of"),
        (["runs", "ls", "nowhere"], "got no folder"),
        (["runs", "ls", "."], "expected runs in ., found none"),
        (["runs", "show", "nowhere"], "expected a store of sweeps at nowhere"),
        (["runs", "verify", "plan.yaml"], "expected a store of sweeps at plan.yaml"),
        (["runs", "diff", "nowhere", "nowhere"], "expected a store of sweeps at nowhere"),
    ],
)
def test_bad_input_is_one_message(words: list[str], message: str, plan: str, capsys: Captured) -> None:
    Path("bad.yaml").write_text(PLAN.replace("table11", "table99"))
    if "--out" in words and words[-1] == ".":
        Path("bad.yaml").unlink()
    assert main(words) == 2
    output = capsys.readouterr()
    assert message in output.err and output.err.startswith("replayeval: error:") and "Traceback" not in output.err


def test_runs_of_kl_are_listed_shown_and_verified_too(tmp_path: Path, capsys: Captured) -> None:
    work(str(tmp_path / "a"))
    assert main(["runs", "ls", str(tmp_path)]) == 0
    assert re.search(r"a\s+kl of org/model\s+1\s+3/3", capsys.readouterr().out)
    assert main(["runs", "show", str(tmp_path / "a")]) == 0
    assert "documents 3 of 3" in capsys.readouterr().out
    assert main(["runs", "verify", str(tmp_path / "a")]) == 0
    unit = RunDirectory.open(tmp_path / "a").unit(1)
    unit.write_bytes(unit.read_bytes()[:50])
    assert main(["runs", "verify", str(tmp_path / "a")]) == 1
    assert unit.name in capsys.readouterr().out


def test_the_line_of_progress() -> None:
    moment = Progress(
        units=30,
        units_total=40,
        reused=10,
        failed=1,
        tokens=6000,
        seconds=60.0,
        eta_seconds=240.0,
        workers=4,
        retries=2,
    )
    assert progress_line(moment) == "30/40 units, 100 tokens/s, 4 min left, 4 workers, 2 retries, 1 failed"
    assert json.dumps(moment.tokens_per_s) == "100.0"
