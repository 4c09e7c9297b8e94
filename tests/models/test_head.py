"""The output head against each model's own logits, and the check that refuses a model it does not fit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from replayeval.errors import ConfigError, NumericsError
from replayeval.models import attention
from replayeval.models.head import VOCAB_BLOCK, OutputHead, check_head
from tests.models import tiny

EPS32 = 2.0**-23


@pytest.mark.parametrize("name", tiny.NAMES)
def test_logits_are_those_of_the_model(name: str) -> None:
    model, ids = tiny.shared(name), tiny.token_ids(2, 9)
    head = OutputHead(model)
    with torch.no_grad():
        own: Tensor = model(input_ids=ids, use_cache=False).logits  # pyright: ignore[reportCallIssue]
        got = head.logits(head.hidden(ids))
    assert got.dtype == torch.float32
    assert got.shape == (2, 9, tiny.VOCABULARY)
    assert float((got - own).abs().max()) <= 4 * EPS32 * float(own.abs().max())
    assert check_head(head) <= 4 * EPS32


@pytest.mark.parametrize("name", tiny.NAMES)
def test_chunks_with_a_cache_give_the_hidden_states_of_one_pass(name: str) -> None:
    """Without a hook here, so that names of arguments and positions are checked by themselves."""
    head, ids = OutputHead(tiny.shared(name)), tiny.token_ids(2, 12)
    with torch.no_grad():
        whole = head.hidden(ids)
        cache = head.new_cache(2)
        parts = [head.hidden(ids[:, start : start + 4], cache, start) for start in (0, 4, 8)]
        misplaced = head.hidden(ids[:, 8:], _cache_of(head, ids[:, :8]), 9)
    assert float((torch.cat(parts, dim=1) - whole).norm() / whole.norm()) < 1e-4
    if name not in ("mamba2", "nemotron_h", "nemotron_h_moe", "olmo_hybrid", "kimi_linear"):
        # A position that is off by one shows wherever the model has rotary attention.
        assert float((misplaced - whole[:, 8:]).norm() / whole.norm()) > 1e-3


def _cache_of(head: OutputHead, ids: Tensor) -> Any:
    cache = head.new_cache(ids.shape[0])
    head.hidden(ids, cache)
    return cache


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_accumulated_in_float32(dtype: torch.dtype) -> None:
    model = tiny.build("granitemoehybrid", dtype=dtype)
    head, ids = OutputHead(model), tiny.token_ids(1, 8)
    with torch.no_grad():
        hidden = head.hidden(ids)
        got = head.logits(hidden)
        own: Tensor = model(input_ids=ids, use_cache=False).logits  # pyright: ignore[reportCallIssue]
        exact = hidden.double() @ head.projection.weight.double().t() / 1.7
    scale = float(exact.abs().max())
    # 32 products in float32; a logit that was rounded to half precision on the way is off by far more.
    assert float((got - exact).abs().max()) < 32 * EPS32 * scale
    assert float((own.double() - exact).abs().max()) > 100 * EPS32 * scale
    assert check_head(head) < 2 * torch.finfo(dtype).eps


def test_the_vocabulary_is_projected_in_blocks_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    assert VOCAB_BLOCK > tiny.VOCABULARY
    head = OutputHead(tiny.build("qwen3_5", dtype=torch.bfloat16))
    hidden = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = head.logits(hidden).detach()
    monkeypatch.setattr("replayeval.models.head.VOCAB_BLOCK", 64)
    assert float((head.logits(hidden) - whole).detach().abs().max()) < 32 * EPS32 * float(whole.abs().max())


def test_a_bias_and_a_soft_cap_are_applied() -> None:
    head = OutputHead(tiny.build("bamba"))
    hidden = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = head.logits(hidden)
        head.projection.bias = torch.nn.Parameter(torch.linspace(-1, 1, tiny.VOCABULARY))
        biased = head.logits(hidden)
        head.cap = 3.0
        capped = head.logits(hidden)
    assert torch.allclose(biased, plain + head.projection.bias, atol=1e-6)
    assert torch.allclose(capped, 3.0 * torch.tanh(biased / 3.0), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("granitemoehybrid", "divisor", 1.0), ("falcon_h1", "multiplier", 1.0), ("bamba", "cap", 30.0)],
)
def test_the_check_refuses_logits_that_are_processed_otherwise(name: str, field: str, value: float) -> None:
    head = OutputHead(tiny.build(name))
    check_head(head)
    setattr(head, field, value)
    with pytest.raises(NumericsError, match="logits of .* reproduced"):
        check_head(head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_refuses_a_small_scale_error_in_its_dtype(dtype: torch.dtype) -> None:
    head = OutputHead(tiny.build("qwen3_next", dtype=dtype))
    check_head(head)
    head.multiplier = 1.0 + 4 * torch.finfo(dtype).eps + 1e-4
    with pytest.raises(NumericsError, match="logits"):
        check_head(head)


def test_the_check_refuses_hidden_states_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    head = OutputHead(tiny.build("qwen3_next"))
    original = head.hidden
    monkeypatch.setattr(head, "hidden", lambda ids, *past: original(ids.flip(1), *past))
    with pytest.raises(NumericsError, match="wired"):
        check_head(head)


def test_the_check_refuses_attention_that_is_aligned_with_the_first_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention that the engine uses on a card, here on a CPU."""
    head = OutputHead(tiny.build("qwen3_next"))
    monkeypatch.setattr(attention, "attention_name", lambda *_: attention.NAME)
    check_head(head)
    monkeypatch.setattr(attention, "causal_lower_right", lambda *size: torch.ones(*size, dtype=torch.bool).tril())
    with pytest.raises(NumericsError, match="wired"):
        check_head(head)


def test_the_check_refuses_weights_that_are_not_finite() -> None:
    model = tiny.build("mamba2")
    model.get_parameter("lm_head.weight").data[5, 3] = float("nan")
    with pytest.raises(NumericsError, match="finite"):
        check_head(OutputHead(model))


def test_the_check_leaves_the_model_as_it_was() -> None:
    model = tiny.build("zamba2")
    model.train()
    check_head(OutputHead(model))
    assert all(m.training and not m._forward_hooks for m in model.modules())


def test_bad_calls_are_refused() -> None:
    head, ids = OutputHead(tiny.shared("mamba2")), tiny.token_ids(1, 4)
    with pytest.raises(ValueError, match="at least 1 row"):
        head.new_cache(0)
    with pytest.raises(ValueError, match="expected a cache"):
        head.hidden(ids, None, 3)
    model = tiny.build("mamba2")
    model.set_output_embeddings(torch.nn.Identity())
    with pytest.raises(ConfigError, match="plain output projection"):
        OutputHead(model)
