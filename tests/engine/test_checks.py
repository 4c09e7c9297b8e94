"""Each check of the apparatus on itself passes on healthy models and fails on a planted fault."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from replayeval.engine import checks
from replayeval.engine.checks import (
    FLOOR_LIMIT_NATS,
    check_every_layer_stores,
    check_floor,
    check_forcing_is_live,
    control_arm,
)
from replayeval.engine.forcing import Engine, Forcing, score_document
from replayeval.errors import NumericsError
from replayeval.models.head import OutputHead
from replayeval.store.scores import DocumentScores
from replayssm.lanes import Lanes
from replayssm.policy import Policy
from replayssm.replay import StateBank
from tests.engine.forced import document, policies
from tests.models import tiny

ARMS = policies(["shared:fp32", "shared:fp8+sr", "conventional:bf16", "separate:int8/fp32@L=5"])
SEVERAL = ("mamba2", "nemotron_h_moe", "zamba2", "falcon_h1", "qwen3_5_moe", "olmo_hybrid", "kimi_linear")


@pytest.mark.parametrize("name", SEVERAL)
def test_healthy_models_pass_every_check(name: str) -> None:
    head, doc = OutputHead(tiny.shared(name)), document(40)
    for prefill in (0, 11):
        forcing = Forcing(arms=ARMS, chunk_tokens=16, prefill_tokens=prefill)
        live = check_forcing_is_live(head, doc, forcing)
        assert live.passed and live.value is not None and live.limit is not None and live.value <= live.limit
        stores = check_every_layer_stores(head, doc, forcing)
        assert stores.passed and stores.value is not None and stores.limit is not None and stores.value >= stores.limit
        floor = check_floor([score_document(head, doc, forcing)], ARMS[0], dtype=torch.float32)
        assert floor.passed and floor.value is not None and 0 <= floor.value <= FLOOR_LIMIT_NATS[torch.float32]


def test_the_step_engine_passes_too() -> None:
    head, doc = OutputHead(tiny.shared("qwen3_5")), document(20)
    forcing = Forcing(arms=ARMS, engine=Engine.STEP)
    assert check_forcing_is_live(head, doc, forcing).passed
    assert check_every_layer_stores(head, doc, forcing).passed


def test_stores_are_counted_exactly() -> None:
    # 40 tokens: 5 windows of 8 for two shared arms, 40 for the conventional one, 8 of 5 tokens in both copies.
    check = check_every_layer_stores(OutputHead(tiny.shared("mamba2")), document(40), Forcing(arms=ARMS))
    assert check.limit == 5 + 5 + 40 + 2 * 8


def test_the_control_arm_is_the_lossless_one() -> None:
    assert control_arm(ARMS) == ARMS[0]
    assert control_arm(ARMS[1:]) is None
    both = policies(["separate:fp8/fp32", "separate:fp32/fp32"])
    assert control_arm(both) == both[1]


def scores(kl: list[float], *, diverged_at: int | None = None) -> DocumentScores:
    values = np.array([kl])
    bad = np.isnan(values)
    return DocumentScores(
        doc_index=0,
        doc_id="d",
        prefill_tokens=0,
        arms=(str(ARMS[0]),),
        kl_nats=values,
        nll_nats=np.where(bad, np.nan, 1.0),
        nll_reference_nats=np.ones(len(kl)),
        top1_agrees=~bad,
        diverged_at=(diverged_at,),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_floor_is_held_against_the_limit_of_the_dtype(dtype: torch.dtype) -> None:
    limit = FLOOR_LIMIT_NATS[dtype]
    check = check_floor([scores([0.0, limit]), scores([limit, 0.5 * limit])], ARMS[0], dtype=dtype)
    assert (check.passed, check.limit) == (True, limit)
    assert check.value == pytest.approx(2.5 * limit / 4)
    with pytest.raises(NumericsError, match=r"expected a mean KL of at most .* between shared:fp32@L=8"):
        check_floor([scores([0.0, 0.0]), scores([limit, 4 * limit])], ARMS[0], dtype=dtype)


def test_exactly_no_disagreement_is_reported_as_zero() -> None:
    assert check_floor([scores([0.0, 0.0])], ARMS[0], dtype=torch.float32).value == 0.0


def test_a_control_arm_that_diverged_fails() -> None:
    with pytest.raises(NumericsError, match="got nan"):
        check_floor([scores([0.0, float("nan")], diverged_at=2)], ARMS[0], dtype=torch.float32)


def test_without_a_control_arm_there_is_no_outcome_and_a_reason() -> None:
    check = check_floor([scores([0.0])], None, dtype=torch.float32)
    assert check.passed is None and check.value is None and check.reason == "no arm keeps its state in float32"


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5"])
def test_a_control_arm_that_loses_something_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    head, doc, forcing = OutputHead(tiny.shared(name)), document(40), Forcing(arms=ARMS[:1])
    of = Lanes.of
    bf16 = Policy.parse("shared:bf16@L=8").recurrence_format

    def lossy(policies: Any, **kwargs: Any) -> Lanes:
        lanes = of(policies, **kwargs)
        return replace(lanes, formats=(*lanes.formats[:-1], bf16))

    monkeypatch.setattr(Lanes, "of", lossy)
    with pytest.raises(NumericsError, match="algebraically equal"):
        check_floor([score_document(head, doc, forcing)], ARMS[0], dtype=torch.float32)


class _Spoiled(OutputHead):
    """Runs the model on other tokens than those that it is given, or mixes up their hidden states."""

    def __init__(self, *args: Any, tokens: Callable[[Tensor, int], Tensor], hidden: Callable[[Tensor], Tensor]) -> None:
        super().__init__(*args)
        self._tokens = tokens
        self._hidden = hidden

    def hidden(
        self,
        input_ids: Tensor,
        cache: Any = None,
        start_position: int = 0,
        attention_mask: Any = None,
        positions: Any = None,
    ) -> Tensor:
        ids = self._tokens(input_ids.clone(), start_position)
        return self._hidden(super().hidden(ids, cache, start_position, attention_mask, positions).clone())


def unchanged(x: Tensor, _: int = 0) -> Tensor:
    return x


def first_token_only(ids: Tensor, _: int) -> Tensor:
    ids[:] = 7
    return ids


def one_row_ignores_its_tokens(ids: Tensor, _: int) -> Tensor:
    ids[2] = 7
    return ids


def leaks_the_future(hidden: Tensor) -> Tensor:
    return hidden + 1e-3 * hidden.mean(1, keepdim=True)


def leaks_one_token(hidden: Tensor) -> Tensor:
    hidden[:, :-1] += 0.01 * hidden[:, 1:]
    return hidden


@pytest.mark.parametrize(
    ("tokens", "hidden", "words"),
    [
        (first_token_only, unchanged, "left all later outputs as they were under conventional:fp32, shared:fp32"),
        (one_row_ignores_its_tokens, unchanged, r"as they were under shared:fp8\+sr@L=8; these rows"),
        (unchanged, leaks_the_future, "changed outputs before it"),
        (unchanged, leaks_one_token, "changed outputs before it"),
    ],
)
def test_an_engine_that_ignores_tokens_or_sees_the_future_is_caught(
    tokens: Callable[[Tensor, int], Tensor], hidden: Callable[[Tensor], Tensor], words: str
) -> None:
    head = _Spoiled(tiny.shared("qwen3_5"), tokens=tokens, hidden=hidden)
    with pytest.raises(NumericsError, match=words):
        check_forcing_is_live(head, document(40), Forcing(arms=ARMS))


def test_a_state_that_forgets_its_tokens_is_no_reason_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    # Attention and convolutions still carry the corrupted token; only the last tokens' dependence is left untested.
    advance = StateBank.advance

    def backwards(self: StateBank, layer: int, recurrence: Any, inputs: Any, *, valid: Any = None) -> Tensor:
        return advance(self, layer, recurrence, inputs.map(lambda x: x.flip(1)), valid=valid).flip(1)

    monkeypatch.setattr(StateBank, "advance", backwards)
    with pytest.raises(NumericsError, match="changed outputs before it"):
        check_forcing_is_live(OutputHead(tiny.shared("mamba2")), document(40), Forcing(arms=ARMS))


def test_a_document_of_two_tokens_has_no_outcome_and_a_reason() -> None:
    check = check_forcing_is_live(OutputHead(tiny.shared("mamba2")), document(2), Forcing(arms=ARMS))
    assert check.passed is None and check.reason == "the first document is shorter than 3 tokens"


def test_an_arm_that_diverges_within_the_probe_is_left_out_and_the_reference_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, doc = OutputHead(tiny.shared("qwen3_5")), document(40)
    original = checks._hidden  # pyright: ignore[reportPrivateUsage]
    lost = {"row": 2}

    def diverging(*args: Any, **kwargs: Any) -> Tensor:
        hidden = original(*args, **kwargs)
        hidden[lost["row"], 12:] = torch.nan
        return hidden

    monkeypatch.setattr(checks, "_hidden", diverging)
    assert check_forcing_is_live(head, doc, Forcing(arms=ARMS)).passed
    lost["row"] = 0
    with pytest.raises(NumericsError, match="finite outputs of the float32 reference"):
        check_forcing_is_live(head, doc, Forcing(arms=ARMS))


def test_a_layer_without_stores_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = StateBank.advance

    def forgetful(self: StateBank, layer: int, recurrence: Any, inputs: Any, *, valid: Any = None) -> Tensor:
        outputs = advance(self, layer, recurrence, inputs, valid=valid)
        if layer == 2:
            self.checkpoints[layer].stores = 0
        return outputs

    monkeypatch.setattr(StateBank, "advance", forgetful)
    with pytest.raises(NumericsError, match=r"expected at least \d+ stores in 40 tokens .* fewer in model.layers.2"):
        check_every_layer_stores(OutputHead(tiny.shared("qwen3_5")), document(40), Forcing(arms=ARMS))


def test_windows_that_are_twice_too_long_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Lanes.of

    def sparse(policies: Any, **kwargs: Any) -> Lanes:
        lanes = of(policies, **kwargs)
        return replace(lanes, windows=2 * lanes.windows, first_windows=2 * lanes.windows)

    monkeypatch.setattr(Lanes, "of", sparse)
    with pytest.raises(NumericsError, match="expected at least 66 stores"):
        check_every_layer_stores(OutputHead(tiny.shared("qwen3_5")), document(40), Forcing(arms=ARMS))


def test_a_layer_that_bypasses_the_hook_is_caught() -> None:
    model = tiny.build("qwen3_5")
    mixer = model.model.layers[2].linear_attn
    # What an optimised kernel would do that does not call the module-level core.
    mixer.forward = lambda hidden_states, **_: torch.zeros_like(hidden_states)
    for check in (check_every_layer_stores, check_forcing_is_live):
        with pytest.raises(NumericsError, match=r"2 \(model.layers.2"):
            check(OutputHead(model), document(40), Forcing(arms=ARMS))
