"""Statistics and store never load torch, so that reading a run takes no second."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "datasets")


def loaded_by(statement: str) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after a statement."""
    code = f"import sys\n{statement}\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("package", ["replayeval.stats", "replayeval.store", "replayeval.data"])
def test_nothing_heavy_is_loaded(package: str) -> None:
    assert loaded_by(f"import {package}") == set()


def test_statistics_take_numpy_and_scipy_alone() -> None:
    assert "pyarrow" not in subprocess.run(
        [sys.executable, "-c", "import sys, replayeval.stats; print(*sys.modules)"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip


def test_the_test_can_fail() -> None:
    assert loaded_by("import replayeval.stats, torch") == {"torch"}
