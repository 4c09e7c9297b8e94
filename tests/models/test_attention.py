"""Attention without a mask, against sums in float64 and against what transformers does by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask, sliding_window_causal_mask_function

from replayeval.models import attention
from replayeval.models.attention import NAME, attention_name, causal_attention, causal_attention_forward, causal_mask
from replayeval.models.head import OutputHead
from tests.models import tiny
from tests.models.agreement import LIMIT, PLANTED, gap

CUDA = torch.device("cuda")
EPS32 = 2.0**-23
SCALE = 0.3


def inputs(rows: int, heads: int, key_heads: int, time: int, past: int, *, d_v: int = 24) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(rows, heads, time, 16, generator=generator),
        torch.randn(rows, key_heads, past + time, 16, generator=generator),
        torch.randn(rows, key_heads, past + time, d_v, generator=generator),
    )


def exact(query: Tensor, key: Tensor, value: Tensor, *, ahead: int = 0) -> Tensor:
    """Sums in float64, one query head at a time; `ahead` shifts what a token may see."""
    groups, past = query.shape[1] // key.shape[1], key.shape[2] - query.shape[2]
    found: list[Tensor] = []
    for head in range(query.shape[1]):
        q, k, v = query[:, head].double(), key[:, head // groups].double(), value[:, head // groups].double()
        scores = torch.einsum("rtd,rsd->rts", q, k) * SCALE
        for t in range(query.shape[2]):
            scores[:, t, past + t + 1 + ahead :] = -torch.inf
        found.append(torch.einsum("rts,rsv->rtv", scores.softmax(-1), v))
    return torch.stack(found, dim=2)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize(("time", "past"), [(5, 0), (5, 7), (2, 31), (1, 6)])
def test_every_token_attends_to_its_past_and_itself(heads: int, key_heads: int, time: int, past: int) -> None:
    query, key, value = inputs(3, heads, key_heads, time, past)
    module: Any = torch.nn.Module()
    module.num_key_value_groups = heads // key_heads
    got, weights = causal_attention_forward(module, query, key, value, None, scaling=SCALE, dropout=0.0)
    expected = exact(query, key, value)
    # Scores are sums of 16 products, outputs of as many as there are tokens, each with a rounding or two.
    limit = 4 * (16 + time + past) * EPS32 * float(value.abs().max())
    assert weights is None
    assert float((got - expected).abs().max()) < limit
    if time > 1:
        # Aligned with the first key instead of the last, tokens see too little; one token ahead is too much.
        for ahead in {-past or 1, 1}:
            wrong = exact(query, key, value, ahead=ahead)
            assert float((wrong - expected).abs().max()) > 100 * limit


SLIDING = "lara_mini"
"""Attends to a sliding window, which needs a mask."""


@pytest.mark.parametrize("name", [n for n in tiny.NAMES if n != "mamba2"])
def test_models_give_the_hidden_states_that_they_give_with_a_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, ids = OutputHead(tiny.shared(name)), tiny.token_ids(2, 16)
    calls: list[int] = []

    def counted(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        calls.append(query.shape[2] if mask is None else 0)
        return causal_attention_forward(module, query, key, value, mask, **options)

    monkeypatch.setitem(attention.ALL_ATTENTION_FUNCTIONS._global_mapping, NAME, counted)

    def in_chunks() -> Tensor:
        cache, parts, start = head.new_cache(2), list[Tensor](), 0
        for length in (9, 6, 1):
            with torch.no_grad():
                parts.append(head.hidden(ids[:, start : start + length], cache, start))
            start += length
        return torch.cat(parts, dim=1)

    expected = in_chunks()
    assert not calls
    with causal_attention(head.config, CUDA):
        got = in_chunks()
    layers = len(calls) // 3
    assert layers > 0
    assert calls == [0 if name == SLIDING else time for time in (9, 6, 1) for _ in range(layers)]
    assert gap(got, expected) < LIMIT
    assert head.config._attn_implementation == "sdpa"
    if name == SLIDING:
        return
    # What a model attends to matters in it: else nothing above could fail.
    monkeypatch.setattr(attention, "causal_lower_right", attention_of_the_first_keys)
    with causal_attention(head.config, CUDA):
        assert gap(in_chunks(), expected) > PLANTED


def attention_of_the_first_keys(time: int, past_and_time: int) -> Tensor:
    return torch.ones(time, past_and_time, dtype=torch.bool).tril()


def test_only_a_plain_past_goes_without_a_mask() -> None:
    plain: dict[str, Any] = {"batch_size": 2, "q_length": 3, "kv_length": 8, "q_offset": 5}
    assert causal_mask(**plain) is None
    padded = torch.ones(2, 8, dtype=torch.bool)
    padded[1, :2] = False
    for other in (
        {"attention_mask": padded},
        {"mask_function": sliding_window_causal_mask_function(4)},
        {"kv_length": 9},
        {"q_offset": 6, "kv_offset": 1},
        {"q_offset": 0},
        {"mask_function": bidirectional_mask_function, "allow_is_bidirectional_skip": True},
    ):
        wanted: dict[str, Any] = {**plain, **other}
        got = causal_mask(**wanted)
        wanted |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        expected = sdpa_mask(**wanted)
        assert got is not None
        assert expected is not None
        assert torch.equal(got, expected)


def test_a_mask_is_obeyed() -> None:
    query, key, value = inputs(1, 4, 2, 3, 4)
    module: Any = torch.nn.Module()
    module.num_key_value_groups = 2
    mask = torch.zeros(1, 1, 3, 7, dtype=torch.bool)
    mask[..., 2] = True
    got, _ = causal_attention_forward(module, query, key, value, mask, scaling=SCALE)
    only = value[:, :, 2].repeat_interleave(2, dim=1)
    assert torch.allclose(got, only[:, None].expand_as(got), rtol=4 * EPS32, atol=0)


def test_what_is_not_causal_or_not_plain_goes_the_way_of_transformers() -> None:
    query, key, value = inputs(2, 4, 2, 3, 4)
    module: Any = torch.nn.Module()
    module.num_key_value_groups = 2
    got, _ = causal_attention_forward(module, query, key, value, None, scaling=SCALE, is_causal=False)
    expected, _ = sdpa_attention_forward(module, query, key, value, None, scaling=SCALE, is_causal=False)
    assert torch.equal(got, expected)
    module.is_causal = False
    got, _ = causal_attention_forward(module, query, key, value, None, scaling=SCALE)
    assert torch.equal(got, expected)
    with pytest.raises(ValueError, match="softcap"):
        causal_attention_forward(module, query, key, value, None, scaling=SCALE, softcap=5.0)


@pytest.mark.parametrize(("implementation", "device"), [("eager", "cuda"), ("sdpa", "cpu")])
def test_other_attention_and_other_devices_are_left_alone(implementation: str, device: str) -> None:
    config: Any = tiny.build("qwen3_5").config
    config._attn_implementation = implementation
    assert attention_name(config, torch.device(device)) == implementation
    with causal_attention(config, torch.device(device)):
        assert config._attn_implementation == implementation


def test_an_error_inside_puts_it_back() -> None:
    config: Any = tiny.build("qwen3_5").config
    with pytest.raises(KeyError), causal_attention(config, CUDA):
        assert config._attn_implementation == attention_name(config, CUDA) == NAME
        raise KeyError
    assert config._attn_implementation == "sdpa"
