"""The files in docs/examples, executed over several nights with a sweep that draws its numbers."""

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
SHIM = """#!{python}
import sys
sys.path.insert(0, {root!r})
import pathlib
from tests.nightly.nights import FP8, Weather, measured
import replayeval.cli, replayeval.nightly.night as night, replayeval.report.write as write

counter = pathlib.Path("counter")
def sweep_runner(executor, progress=None):
    def run(plan, out, *, resume):
        number = int(counter.read_text()) if counter.exists() else 0
        counter.write_text(str(number + 1))
        out.mkdir(parents=True, exist_ok=True)
        return measured(Weather(diverged=(FP8,) if number == 2 else ()), seed=number)
    return run

night.sweep_runner = sweep_runner
night.night_name = lambda moment: f"2026-11-0{{1 + int(counter.read_text()) if counter.exists() else 1}}T02-17-00Z"
write.figures = lambda sources: iter(())
sys.exit(replayeval.cli.main())
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    program = tmp_path / "bin" / "replayeval"
    program.parent.mkdir()
    program.write_text(SHIM.format(python=sys.executable, root=str(ROOT)))
    program.chmod(0o755)
    return tmp_path


def shell(command: str, place: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a runner of GitHub Actions does."""
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", command],
        cwd=place,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def workflow() -> dict[str, Any]:
    return cast(dict[str, Any], yaml.safe_load((EXAMPLES / "nightly-workflow.yml").read_text())["jobs"]["nightly"])


def test_the_workflow_passes_two_nights_and_fails_the_third_which_diverges(place: Path) -> None:
    job = workflow()
    (measure,) = [step["run"] for step in job["steps"] if "replayeval nightly" in step.get("run", "")]
    codes = [shell(measure, place, **job["env"]).returncode for _ in range(3)]
    assert codes == [0, 0, 1]
    # What later steps publish and keep is where they look for it.
    for step in job["steps"]:
        for pattern in step.get("with", {}).get("path", "").split():
            if pattern not in ("gate.xml", "badge.json"):
                assert list(place.glob(pattern)), pattern


def test_the_gate_of_the_workflow_takes_the_options_that_it_is_given(place: Path) -> None:
    (command,) = [step["run"] for step in workflow()["steps"] if "replayeval gate" in step.get("run", "")]
    (place / "nights" / "nights" / "2026-11-01T02-17-00Z" / "run").mkdir(parents=True)
    done = shell(command, place, HISTORY="nights")
    # The run is empty here: everything but the run is accepted.
    assert done.returncode == 2
    assert "2026-11-01T02-17-00Z/run' is no run" in done.stderr


def test_the_systemd_unit_and_the_line_of_cron_run_a_night(place: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    unit.read_string((EXAMPLES / "replayeval-nightly.service").read_text())
    command = unit["Service"]["ExecStart"].replace("/var/lib/replayeval", str(place / "lib"))
    done = shell(command, place)
    assert done.returncode == 0, done.stderr
    assert (place / "lib" / "nightly" / "report" / "index.html").is_file()
    text = (ROOT / "docs" / "nightly.md").read_text()
    (line,) = re.findall(r"^17 2 \* \* \* +(.*?) \|\|", text, re.MULTILINE)
    assert line == unit["Service"]["ExecStart"]
