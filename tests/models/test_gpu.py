"""What differs on a GPU: half-precision projections, placement on several devices, kernels that may be installed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from replayeval.models.attention import causal_attention_forward
from replayeval.models.head import OutputHead, check_head
from replayeval.models.hook import hooked
from replayeval.models.loading import load_model
from replayssm.policy import Policy
from replayssm.replay import StateBank
from tests.models import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EPS32 = 2.0**-23


def bank(rows: int) -> StateBank:
    return StateBank([Policy.parse("conventional:fp32")] * rows, sequences=list(range(rows)), seed=0)


def logits(model: Any, device: torch.device, cuts: list[int]) -> torch.Tensor:
    head, ids, parts, start = OutputHead(model), tiny.token_ids(2, sum(cuts)).to(device), list[torch.Tensor](), 0
    with hooked(model, bank(2)) as report:
        cache = head.new_cache(2)
        for length in cuts:
            parts.append(head.logits(head.hidden(ids[:, start : start + length], cache, start)))
            start += length
        report.verify()
    return torch.cat(parts, dim=1).cpu()


@pytest.mark.parametrize("name", tiny.NAMES)
def test_the_gpu_reproduces_the_cpu(name: str, tmp_path: Path) -> None:
    directory = str(tiny.save(name, tmp_path / "model"))
    on_cpu = load_model(directory, device="cpu")
    on_gpu = load_model(directory, device="cuda:0")
    check_head(OutputHead(on_gpu.model))
    expected = logits(on_cpu.model, on_cpu.device, [9, 1, 1])
    got = logits(on_gpu.model, on_gpu.device, [9, 1, 1])
    # As on the CPU: about 170 units of float32 rounding through a few layers, doubled for two sides that round.
    assert float((got - expected).abs().max() / expected.abs().max()) < 4e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_accumulated_in_float32(dtype: torch.dtype) -> None:
    model: Any = tiny.build("granitemoehybrid", dtype=dtype)
    head = OutputHead(model.to("cuda"))
    hidden = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    with torch.no_grad():
        got = head.logits(hidden)
        exact = hidden.double() @ head.projection.weight.double().t() / 1.7
    assert got.dtype == torch.float32
    assert float((got - exact).abs().max()) < 32 * EPS32 * float(exact.abs().max())
    check_head(head)


@pytest.mark.parametrize("name", ["mamba2", "nemotron_h_moe", "qwen3_5_wrapper", "kimi_linear"])
def test_half_precision_models_run(name: str, tmp_path: Path) -> None:
    loaded = load_model(str(tiny.save(name, tmp_path / "model")), device="cuda:0", dtype="bfloat16")
    check_head(OutputHead(loaded.model))
    assert bool(torch.isfinite(logits(loaded.model, loaded.device, [9, 1, 1])).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(16, 4, 256), (40, 8, 128), (6, 6, 40)])
def test_attention_without_a_mask(dtype: torch.dtype, heads: int, key_heads: int, width: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(3, of, tokens, width, generator=generator, device="cuda").to(dtype)
        for of, tokens in ((heads, 65), (key_heads, 300), (key_heads, 300))
    )
    module: Any = torch.nn.Module()
    module.num_key_value_groups = heads // key_heads
    got, _ = causal_attention_forward(module, query, key, value, None, scaling=width**-0.5)
    k, v = (x.double().repeat_interleave(heads // key_heads, dim=1) for x in (key, value))
    scores = query.double() @ k.transpose(-1, -2) * width**-0.5
    seen = torch.ones(65, 300, dtype=torch.bool, device="cuda").tril(300 - 65)
    expected = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)
    # Weights are rounded to the dtype before they meet values, and outputs once more; weights sum to one.
    limit = (2 * torch.finfo(dtype).eps + 4 * (width + 300) * EPS32) * float(value.abs().max())
    assert float((got.double() - expected).abs().max()) < limit
    one_ahead = torch.ones(65, 300, dtype=torch.bool, device="cuda").tril(300 - 65 + 1)
    wrong = (scores.masked_fill(~one_ahead, -torch.inf).softmax(-1) @ v).transpose(1, 2)
    assert float((wrong - expected).abs().max()) > limit


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5"])
def test_a_model_that_is_spread_over_devices(name: str, tmp_path: Path) -> None:
    directory = str(tiny.save(name, tmp_path / "model"))
    loaded = load_model(directory)
    check_head(OutputHead(loaded.model))
    expected = logits(load_model(directory, device="cpu").model, torch.device("cpu"), [9, 1, 1])
    got = logits(loaded.model, loaded.device, [9, 1, 1])
    assert float((got - expected).abs().max() / expected.abs().max()) < 4e-5
