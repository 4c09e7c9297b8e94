"""A run killed at any moment is resumed to the same numbers."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from replayeval.errors import StoreError
from replayeval.store import RunDirectory
from tests.store.samples import DOCUMENTS, sample_scores, work
from tests.store.test_scores import assert_same

ROOT = Path(__file__).parents[2]

# Each call that reaches the disk is a place where the process may die: before it, and half-way into a file. The parent
# never computes, so that its children are born without threads.
KILLING = """
import os, pathlib, shutil, signal, sys
import pandas  # pyarrow loads it on first use, which would cost every child a second
from tests.store import samples

left = None

def count():
    global left
    if left is not None:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

def counted(function):
    def call(*args, **kwargs):
        count()
        return function(*args, **kwargs)
    return call

def tearing_fsync(descriptor, fsync=os.fsync):
    path = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    if left == 0 and path.is_file():
        os.truncate(path, path.stat().st_size // 2)
    count()
    fsync(descriptor)

os.fsync = tearing_fsync
for name in ("replace", "mkdir", "unlink"):
    setattr(pathlib.Path, name, counted(getattr(pathlib.Path, name)))

def in_child(path, steps):
    global left
    child = os.fork()
    if child == 0:
        left = steps
        samples.work(str(path))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

base, step = pathlib.Path(sys.argv[1]), 0
while True:
    path = base / f"{step:02d}"
    first = in_child(path, step)
    if path.exists():
        shutil.copytree(path, base / f"{step:02d}-killed")
    if first == 0:
        break
    second = in_child(path, 7 * step % 25)
    if path.exists():
        shutil.copytree(path, base / f"{step:02d}-killed-again")
    last = in_child(path, None)
    assert first == -9 and second in (0, -9) and last == 0, (step, first, second, last)
    step += 1
print(step)
"""


def run_python(*arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def assert_sound(path: Path) -> None:
    """Whatever is there is whole and right."""
    if (path / "manifest.json").exists():
        run = RunDirectory.open(path)
        for index in run.done():
            assert_same(run.read(index), sample_scores(index))


def assert_complete(path: Path) -> None:
    run = RunDirectory.open(path)
    assert run.is_complete and run.manifest.finished
    assert not [file for file in path.rglob("*.tmp")]
    assert_sound(path)


def test_killed_at_every_step(tmp_path: Path) -> None:
    process = run_python("-c", KILLING, str(tmp_path))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err.decode()
    steps = int(out)
    # Per document: write and rename of the unit and of its digest, each forced to disk with its directory.
    assert steps >= 6 * DOCUMENTS
    for path in tmp_path.iterdir():
        if "killed" in path.name:
            assert_sound(path)
        else:
            assert_complete(path)
    unfinished = [path for path in tmp_path.glob("*-killed") if not (path / "documents" / "000002.parquet").exists()]
    assert len(unfinished) >= 4 * DOCUMENTS


def test_killed_at_random_moments(tmp_path: Path) -> None:
    path, generator = tmp_path / "run", random.Random(0)
    for _ in range(4):
        process = run_python("-m", "tests.store.samples", str(path))
        try:
            process.communicate(timeout=generator.uniform(0.4, 2.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        assert_sound(path)
    process = run_python("-m", "tests.store.samples", str(path))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err.decode()
    assert_complete(path)


def test_a_writer_that_is_not_atomic_is_caught(tmp_path: Path) -> None:
    """The tests above can fail: a unit written in place and cut off is found unsound."""
    work(str(tmp_path / "run"))
    unit = tmp_path / "run" / "documents" / f"{DOCUMENTS - 1:06d}.parquet"
    unit.write_bytes(unit.read_bytes()[:100])
    with pytest.raises(StoreError, match="damaged"):
        assert_sound(tmp_path / "run")
