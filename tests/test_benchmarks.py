"""The benchmark scripts, as far as they go without a card."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from replayeval.engine.kernel_cases import SHAPES
from replayeval.models.head import OutputHead
from replayeval.models.hook import ssm_layers
from tests.models import tiny

FOLDER = Path(__file__).parents[1] / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "shape", "layers", "billions"),
    [("qwen3.5-4b", "Qwen3.5-4B", 24, 4.21), ("nemotron-3-nano-4b", "Nemotron-3-Nano-4B", 21, 3.97)],
)
def test_configurations_have_the_layers_of_the_paper(name: str, shape: str, layers: int, billions: float) -> None:
    model = script("engine_speed").build(name, torch.device("meta"))
    found = ssm_layers(model)
    assert len(found) == layers
    for layer in found:
        assert (layer.heads, layer.d_v, layer.d_k) == SHAPES[shape].state
        assert layer.key_heads == SHAPES[shape].key_heads
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)


def test_prefill_and_the_size_of_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = script("engine_speed")
    head = OutputHead(tiny.shared("qwen3_5"))
    ten = speed.cache_bytes(head, 10)
    monkeypatch.setattr(speed, "ROWS", 1)
    assert ten == 30 * speed.cache_bytes(head, 2) > 0
    speed.plain_prefill(head, np.arange(9) % head.vocabulary, 4)


def test_relative_differences_leave_out_arms_that_equal_the_reference() -> None:
    speed = script("engine_speed")
    found = speed.relative_kl(np.array([1e-9, 1.5, 3.0]), np.array([0.0, 2.0, 3.0]), ("a", "b", "c"))
    assert found == {"mean_kl_difference_relative": 0.25, "mean_kl_nats_of_arms_equal_under_pytorch": {"a": 1e-9}}
    none = speed.relative_kl(np.zeros(2), np.zeros(2), ("a", "b"))
    assert none["mean_kl_difference_relative"] is None and "every arm equals the reference" in none["reason"]
    assert none["mean_kl_nats_of_arms_equal_under_pytorch"] == {"a": 0.0, "b": 0.0}
    assert np.isnan(speed.relative_kl(np.array([np.nan]), np.ones(1), ("a",))["mean_kl_difference_relative"])


@pytest.mark.parametrize("words", [("h200.py",), ("engine_speed.py", "qwen3.5-4b")])
def test_without_a_card_the_scripts_say_so(words: tuple[str, ...], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    words = (sys.executable, str(FOLDER / words[0]), *words[1:], "--out", str(tmp_path / "out"))
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "expected a CUDA device" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["streams", "steps"])
def test_without_a_card_no_limits_are_measured(what: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    pytest.importorskip("triton")
    words = [sys.executable, str(FOLDER / "decode_limits.py"), what]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr == "expected a CUDA device, found none\n"


def test_the_document_of_the_window_kernels_says_what_was_measured() -> None:
    words = [sys.executable, str(FOLDER / "engine_tables.py"), "--check"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_reads_of_a_decode_kernel_compile_for_hopper_without_spilling() -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    words = [sys.executable, str(FOLDER / "compile_for_hopper.py"), "--quick"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"reads alone: Compiled\(registers=\d+, spilled=0,", done.stdout)
