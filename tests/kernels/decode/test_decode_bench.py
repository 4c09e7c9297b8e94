"""What the benchmark of the decode kernels times, and of which layers its tables can tell."""

import importlib.util
from pathlib import Path

import pytest
import torch

from replayeval.engine import bench_kernels, kernel_cases
from replayeval.engine.kernel_cases import SHAPES, LayerSets
from replayssm.policy import Policy
from replayssm.records import Recurrence
from replayssm.slots import LayerShape

pytest.importorskip("triton")


class Still:
    """A clock that runs nothing."""

    def seconds(self, run: object) -> float:
        return 1e-6


@pytest.mark.parametrize(("window", "found"), [(2, 0), (3, 1), (4, 2), (16, 8)])
def test_a_reading_step_is_one_that_does_not_flush(window: int, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = LayerShape(recurrence=Recurrence.GDN, key_heads=1, heads=1, d_k=16, d_v=4)
    monkeypatch.setitem(SHAPES, "tiny", shape)
    monkeypatch.setattr(kernel_cases, "CACHE_BYTES", 1000)
    steps: list[int] = []
    place = LayerSets.step_seconds

    def noted(self: LayerSets, clock: Still, launch: None, cursors: list[int]) -> float:
        steps.extend(cursors)
        return place(self, clock, launch, cursors)

    monkeypatch.setattr(LayerSets, "step_seconds", noted)
    speeds = {"read": 4e12, "read_modify_write": 4e12}
    case = bench_kernels._Case(
        name="tiny", batch=1, clock=Still(), generator=torch.Generator().manual_seed(0), speeds=speeds
    )
    timing = case.time(Policy.parse(f"shared:fp32@L={window}"))
    assert steps == [found, window - 1]
    assert timing.read_floor_us < timing.flush_floor_us


def test_tables_know_every_layer_that_can_be_timed() -> None:
    path = Path(__file__).parents[3] / "benchmarks" / "kernel_tables.py"
    spec = importlib.util.spec_from_file_location("kernel_tables", path)
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert list(tables.LAYERS) == list(SHAPES)
