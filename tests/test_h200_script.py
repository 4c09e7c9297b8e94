"""The script that measures everything on a card: how its processes wait for each other, without a card."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"

PROCESS = """
import sys, time
from pathlib import Path
flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))
if sys.argv[1] == "broken":
    sys.exit("no such model")
Path(flags["--ready"]).touch()
while not Path(flags["--wait"]).exists():
    time.sleep(0.01)
if sys.argv[1] == "endless":
    time.sleep(600)
Path(flags["--out"]).write_text(str(time.time()))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import h200  # pyright: ignore[reportMissingImports]

    fake = tmp_path / "engine.py"
    fake.write_text(PROCESS)
    monkeypatch.setattr(h200, "ENGINE", fake)
    monkeypatch.setattr(h200, "require_cuda", lambda: None)
    return h200


def test_engines_are_warm_before_kernels_are_timed_and_run_one_by_one(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "MODELS", ("first", "broken", "second"))
    timed: list[float] = []

    def bench(*, before_timing: Any, keep: Any, **_: Any) -> Any:
        before_timing()
        timed.append(time.time())
        found = SimpleNamespace(to_json=lambda: {"schema": "some"})
        keep(found)
        return found

    monkeypatch.setattr(script, "bench_kernels", bench)
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["h200.py", "--out", str(out), "--seconds", "60"])
    script.main()
    ends = [float((out / f"engine-{name}.json").read_text()) for name in ("first", "second")]
    assert timed[0] < ends[0] < ends[1]
    assert '"schema": "some"' in (out / "kernels.json").read_text()
    said = capsys.readouterr().out
    assert "engine, first: done" in said and "engine, broken: exit 1, see its log" in said
    assert "no such model" in (out / "engine-broken.log").read_text()


def test_what_goes_wrong_with_kernels_is_kept_and_costs_nothing_else(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "MODELS", ("first",))

    def bench(*, keep: Any, **_: Any) -> Any:
        keep(SimpleNamespace(to_json=lambda: {"timings": [1]}))
        raise RuntimeError("no memory")

    monkeypatch.setattr(script, "bench_kernels", bench)
    monkeypatch.setattr(sys, "argv", ["h200.py", "--out", str(tmp_path), "--seconds", "60"])
    script.main()
    kept = (tmp_path / "kernels.json").read_text()
    assert '"failed": "RuntimeError: no memory"' in kept and '"timings"' in kept
    assert (tmp_path / "engine-first.json").exists()


def test_an_engine_that_does_not_end_is_cut_off(script: Any, tmp_path: Path) -> None:
    stage = script.EngineStage("endless", tmp_path, tmp_path, 60.0)
    try:
        script.wait_until_warm([stage], 30.0)
        assert stage.ready.exists() and not stage.failed
        assert "cut off" in stage.run(0.0)
    finally:
        stage.stop()
