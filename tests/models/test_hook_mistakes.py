"""Mistakes that are planted in the hook or its inputs must show in the logits, far beyond what rounding may do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from replayeval.models import inputs as inputs_module
from replayeval.models.hook import ssm_layers
from tests.models import tiny
from tests.models.agreement import LIMIT, PLANTED, TOKENS, gap, in_chunks, own_logits
from tests.models.driver import TokenByToken

Spoil = Callable[[str, dict[str, Tensor | None]], dict[str, Tensor | None]]


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5", "kimi_linear"])
def test_padding_that_is_taken_for_tokens_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny.shared(name), tiny.token_ids(1, TOKENS)
    padded = torch.cat([torch.full((1, 5), 7), ids], dim=1)
    mask = torch.ones_like(padded)
    mask[0, :5] = 0
    # What transformers does by itself with single tokens.
    monkeypatch.setattr("replayeval.models.masks.MaskTracker.valid", lambda *args, **kwargs: None)
    got = in_chunks(model, padded, [1] * (TOKENS + 5), TokenByToken(), mask)
    assert gap(got[:, 5:], own_logits(model, ids)) > PLANTED


def keys_interleaved(recurrence: str, given: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Value head h reads key head h % key_heads instead of h // group."""
    key, query, value = given["key"], given["query"], given["value"]
    assert key is not None and query is not None and value is not None
    heads, key_heads = value.shape[2], key.shape[2]
    index = torch.arange(heads) % key_heads
    return {**given, "key": key[:, :, index], "query": query[:, :, index]}


def query_unscaled(recurrence: str, given: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    query = given["query"]
    assert query is not None
    return {**given, "query": query * query.shape[-1] ** 0.5}


def decay_of_the_next_head(recurrence: str, given: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    log_decay = given["log_decay"]
    assert log_decay is not None
    return {**given, "log_decay": log_decay.roll(1, dims=2)}


def no_decay(recurrence: str, given: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    log_decay = given["log_decay"]
    assert log_decay is not None
    return {**given, "log_decay": torch.zeros_like(log_decay)}


GROUPED = [n for n in tiny.NAMES if n not in ("kimi_linear", "bailing_hybrid")]  # KDA has as many key as value heads


@pytest.mark.parametrize("name", tiny.NAMES)
@pytest.mark.parametrize("spoil", [decay_of_the_next_head, no_decay])
def test_a_wrong_decay_is_rejected(name: str, spoil: Spoil) -> None:
    model, ids = tiny.shared(name), tiny.token_ids(2, TOKENS)
    assert gap(in_chunks(model, ids, [TOKENS], TokenByToken(spoil)), own_logits(model, ids)) > PLANTED


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "olmo_hybrid", "lara_mini", "kimi_linear", "bailing_hybrid"])
def test_a_query_that_is_not_scaled_is_rejected(name: str) -> None:
    # The norm behind the core hides most of a factor, but not what its epsilon lets through.
    model, ids = tiny.shared(name), tiny.token_ids(2, TOKENS)
    assert gap(in_chunks(model, ids, [TOKENS], TokenByToken(query_unscaled)), own_logits(model, ids)) > PLANTED


@pytest.mark.parametrize("name", GROUPED)
def test_a_wrong_grouping_of_key_heads_is_rejected(name: str) -> None:
    model, ids = tiny.shared(name), tiny.token_ids(2, TOKENS)
    assert gap(in_chunks(model, ids, [TOKENS], TokenByToken(keys_interleaved)), own_logits(model, ids)) > PLANTED


@pytest.mark.parametrize("name", ["mamba2", "bamba", "nemotron_h", "granitemoehybrid", "falcon_h1", "zamba2"])
def test_a_dropped_clamp_of_the_time_step_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny.build(name), tiny.token_ids(2, TOKENS)
    for layer in ssm_layers(model):  # bring time steps below the range, as trained models have them
        model.get_submodule(layer.name).get_parameter("dt_bias").data.sub_(5.0)
    expected = own_logits(model, ids)
    assert gap(in_chunks(model, ids, [1] * TOKENS, TokenByToken()), expected) < LIMIT
    original = inputs_module.time_steps

    def unclamped(dt: Tensor, **kwargs: Any) -> Tensor:
        return original(dt, **{**kwargs, "limit": (0.0, float("inf"))})

    monkeypatch.setattr(inputs_module, "time_steps", unclamped)
    assert gap(in_chunks(model, ids, [TOKENS], TokenByToken()), expected) > PLANTED


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
def test_a_dropped_skip_connection_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny.shared(name), tiny.token_ids(2, TOKENS)
    original = inputs_module.mamba2_finish
    monkeypatch.setattr("replayeval.models.hook.mamba2_finish", lambda y, x, d, z: original(y, x, None, z))
    assert gap(in_chunks(model, ids, [TOKENS], TokenByToken()), own_logits(model, ids)) > PLANTED


def test_a_dropped_gate_of_the_one_token_core_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny.shared("falcon_h1"), tiny.token_ids(2, TOKENS)
    original = inputs_module.mamba2_finish
    monkeypatch.setattr("replayeval.models.hook.mamba2_finish", lambda y, x, d, z: original(y, x, d, None))
    assert gap(in_chunks(model, ids, [1] * TOKENS, TokenByToken()), own_logits(model, ids)) > PLANTED
