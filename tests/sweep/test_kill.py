"""A sweep that is killed at random moments ends with exactly the results of one that was left alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from replayeval.store.sweeps import SweepStore, locate_run
from replayeval.sweep.collect import results
from replayeval.sweep.runner import run
from tests.sweep.synthetic import SyntheticMeasurer, numbers, plan

ROOT = Path(__file__).parents[2]

# The parent imports once and never computes; each child is born in a moment, works, and is killed.
KILLING = """
import os, random, signal, sys, time
import pandas  # pyarrow loads it on first use, which would cost every child a second
from replayeval.sweep.runner import run
from tests.sweep.synthetic import SyntheticMeasurer, plan

store, kills, docs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
generator, killed = random.Random(int(sys.argv[4])), 0

def work():
    run(plan(docs=docs), store, resume=True, measurer=SyntheticMeasurer(delay_seconds=0.005, log=store + ".log"))

while killed < kills:
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    time.sleep(generator.uniform(0.0, 0.25))
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        break  # it had finished before
    assert status == -signal.SIGKILL, status
    killed += 1
work()
print(killed)
"""


def killed_sweep(store: Path, *, kills: int, docs: int, seed: int) -> int:
    done = subprocess.run(
        [sys.executable, "-c", KILLING, str(store), str(kills), str(docs), str(seed)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def assert_as_undisturbed(store: Path, undisturbed: Path) -> None:
    assert list(map(numbers, results(store))) == list(map(numbers, results(undisturbed)))
    killed, alone = locate_run(store), locate_run(undisturbed)
    assert killed[1].finished is not None and killed[1].fingerprint == alone[1].fingerprint
    for key in alone[1].units:
        assert killed[0].units.read(key).table == alone[0].units.read(key).table
    assert [problem for problem in SweepStore.open(store).verify() if problem.kind != "leftover"] == []


@pytest.mark.parametrize(
    ("kills", "docs"), [(5, 60), pytest.param(50, 600, marks=pytest.mark.slow)], ids=["few", "fifty"]
)
def test_killed_at_random_moments(kills: int, docs: int, tmp_path: Path) -> None:
    run(plan(docs=docs), tmp_path / "alone", measurer=SyntheticMeasurer())
    killed = killed_sweep(tmp_path / "killed", kills=kills, docs=docs, seed=kills)
    # The units sleep for longer together than all children live, however fast the machine is.
    assert killed >= kills - 1
    assert_as_undisturbed(tmp_path / "killed", tmp_path / "alone")
    # A unit is computed twice only if it was killed between its computation and its commit.
    computed = [line.split()[0] for line in (tmp_path / "killed.log").read_text().splitlines()]
    assert len(set(computed)) == 4 * docs
    assert len(computed) <= 4 * docs + killed


def test_the_comparison_sees_a_unit_that_differs(tmp_path: Path) -> None:
    """The test above can fail: units of another plan are not taken for these."""
    run(plan(docs=4), tmp_path / "a", measurer=SyntheticMeasurer())
    run(plan(docs=4, tokens=50), tmp_path / "b", measurer=SyntheticMeasurer())
    with pytest.raises(AssertionError):
        assert_as_undisturbed(tmp_path / "b", tmp_path / "a")
