"""Units on a real Ray cluster on this machine, with workers killed in mid-run."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

from replayeval.errors import ConfigError
from replayeval.store.sweeps import locate_run
from replayeval.sweep.executors import make_executor
from replayeval.sweep.plan import parse_plan
from replayeval.sweep.progress import Progress
from replayeval.sweep.runner import SweepRun, run
from tests.sweep.synthetic import SyntheticMeasurer, numbers, plan

pytestmark = pytest.mark.filterwarnings("ignore")

BUILTIN = """
name: builtin
models: {models}
grids:
  - kind: kl
    data: builtin
    lengths: [32, 64]
    docs: {docs}
    chunk: 32
    arms: [shared:fp32, shared:fp8+sr, 'separate:nvfp4/fp16+sr']
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two cores; its workers find the tests where this process does."""
    ray = import_module("ray")
    with pytest.MonkeyPatch.context() as patch:
        root = Path(__file__).parents[2]
        patch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "kernels")]))
        patch.setenv("OMP_NUM_THREADS", "1")
        options = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False, "logging_level": "CRITICAL"}
        ray.init(address="local", **options)
        yield ray
        ray.shutdown()


def assert_same(first: SweepRun, second: SweepRun) -> None:
    """Bit by bit: the numbers of every unit, and the records."""
    (store_a, a), (store_b, b) = locate_run(first.path), locate_run(second.path)
    assert a.fingerprint == b.fingerprint and a.finished and b.finished
    for key in a.units:
        assert store_a.units.read(key).content_sha256 == store_b.units.read(key).content_sha256
    assert list(map(numbers, first.results())) == list(map(numbers, second.results()))
    assert [p for p in store_a.verify() + store_b.verify() if p.kind != "leftover"] == []


def workers() -> list[psutil.Process]:
    """Processes of actors of this test's cluster."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        # One that ends while it is looked at is none.
        with suppress(psutil.Error):
            if "UnitActor" in " ".join(process.cmdline()[:1]):
                found.append(process)
    return found


def test_a_killed_worker_costs_its_unit_one_more_attempt_and_nothing_else(cluster: Any, tmp_path: Path) -> None:
    log, marks, seen = tmp_path / "log", tmp_path / "marks", list[Progress]()
    marks.mkdir()
    measurer = SyntheticMeasurer(dies=str(marks), dies_at=(2,), log=str(log), delay_seconds=0.01)
    small = plan(models=1, windows=1)
    there = run(small, tmp_path / "ray", "ray", measurer=measurer, progress=seen.append)
    here = run(small, tmp_path / "local", measurer=SyntheticMeasurer())
    assert there.failures == ()
    assert_same(there, here)
    assert seen[-1].retries == len(list(marks.iterdir())) == 1
    assert any("a worker died at" in progress.note for progress in seen)
    assert (seen[-1].units, seen[-1].tokens_left) == (5, 0)
    # No unit was computed twice: each worker died before it had computed anything of the unit.
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len({key for key, _ in lines}) == len(lines) == 5
    assert str(os.getpid()) not in {process for _, process in lines}
    _, alive = psutil.wait_procs(workers(), timeout=20)
    assert alive == []


def test_a_cluster_that_is_too_small_is_refused(cluster: Any, tmp_path: Path) -> None:
    base = plan(models=1, windows=1)
    models = tuple(model.model_copy(update={"gpus": 2, "cpus": 1}) for model in base.models)
    with pytest.raises(ConfigError, match="expected a node with 2 GPUs and 1 CPU cores .* got 0 GPUs and 2 CPU cores"):
        run(base.model_copy(update={"models": models}), tmp_path, "ray", measurer=SyntheticMeasurer())


def test_an_executor_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs Ray.*replayeval\[ray\]"):
        make_executor("ray")
    with pytest.raises(ConfigError, match="expected the executor to be one of local, ray"):
        make_executor("slurm")


@pytest.mark.slow
def test_a_unit_that_kills_every_worker_is_given_up_and_the_others_are_not(cluster: Any, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    deadly = SyntheticMeasurer(dies=str(marks), dies_at=(1,), always_dies=True)
    small = plan(models=1, windows=1)
    done = run(small, tmp_path / "s", "ray", measurer=deadly)
    (failure,) = done.failures
    assert failure["kind"] == "lost" and "3 workers died at this unit" in failure["text"]
    assert done.measured == 4
    healed = run(small, tmp_path / "s", "ray", resume=True, measurer=SyntheticMeasurer())
    assert_same(healed, run(small, tmp_path / "t", measurer=SyntheticMeasurer()))


@pytest.mark.slow
def test_workers_that_cannot_be_made_end_the_sweep_with_the_reason(cluster: Any, tmp_path: Path) -> None:
    done = run(plan(models=1, windows=1), tmp_path, "ray", measurer=_NoWorkers())
    assert len(done.failures) == 5
    assert {f["kind"] for f in done.failures} == {"lost"} and "no library here" in done.failures[0]["text"]


class _NoWorkers(SyntheticMeasurer):
    def worker(self) -> Any:
        raise ImportError("no library here")


@pytest.mark.slow
def test_a_built_in_model_with_workers_killed_from_outside(cluster: Any, tmp_path: Path) -> None:
    import torch

    chosen = parse_plan(BUILTIN.format(models="[builtin:gdn, builtin:mamba2]", docs=4))
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        if progress.units in (1, 5) and len(killed) < 2 and (alive := workers()):
            killed.append(alive[0].pid)
            alive[0].kill()

    there = run(chosen, tmp_path / "ray", "ray", progress=kill)
    assert len(killed) == 2 and there.failures == ()
    torch.set_num_threads(1)
    assert_same(there, run(chosen, tmp_path / "local"))


@pytest.mark.slow
def test_a_node_that_dies_takes_its_workers_and_no_results(tmp_path: Path) -> None:
    """Two nodes of one core each; the one without the driver is taken away in mid-run."""
    ray = import_module("ray")
    if ray.is_initialized():
        ray.shutdown()
    made = import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    second = made.add_node(num_cpus=1)
    removed: list[int] = []

    def remove(progress: Progress) -> None:
        if progress.units >= 6 and not removed:
            removed.append(progress.workers)
            made.remove_node(second, allow_graceful=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", made.address)
        measurer = SyntheticMeasurer(delay_seconds=0.5)
        there = run(plan(), tmp_path / "ray", "ray", measurer=measurer, progress=remove)
    made.shutdown()
    assert removed == [2] and there.failures == ()
    assert_same(there, run(plan(), tmp_path / "local", measurer=replace(measurer, delay_seconds=0.0)))
