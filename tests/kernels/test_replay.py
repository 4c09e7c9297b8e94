"""The state bank as its callers use it: what it refuses, forgets and reports, and what must not change its outputs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from replayssm.checkpoint import StoreEvent
from replayssm.formats import Format, Rounding, store_and_load_with_feedback
from replayssm.lanes import LOSSLESS_WINDOW, Lanes
from replayssm.policy import REFERENCE, Policy
from replayssm.records import Recurrence, TokenInputs
from replayssm.replay import StateBank
from tests.kernels.against_oracle import (
    GROUPED,
    LAYER,
    MIXED_ARMS,
    NARROW,
    RECURRENCES,
    SEED,
    ProjectStore,
    cut,
    disagreements,
    expected,
    make_inputs,
    relative_error,
    run_bank,
    to_torch,
)
from tests.oracles import recurrence as oracle

# A float32 sum of d_k = 32 products, folded over at most 100 tokens: 32 * 100 * 2**-24 = 2e-4 of the largest magnitude
# if every rounding went the same way. They do not: the root of that number of roundings leaves 3e-6.
FLOAT32 = 3e-6


def parse(texts: Sequence[str]) -> tuple[Policy, ...]:
    return tuple(Policy.parse(text) for text in texts)


def bank_of(texts: Sequence[str], **kwargs: Any) -> StateBank:
    return StateBank(parse(texts), **{"sequences": [0] * len(texts), "seed": SEED, **kwargs})


def tokens_of(
    recurrence: Recurrence, rows: int, time: int, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> TokenInputs:
    """The same tokens in every row."""
    return to_torch([make_inputs(recurrence, GROUPED, time, seed=seed)] * rows, dtype)


class Events:
    """Collects stores as `(layer, row, copy, token) -> state`."""

    def __init__(self) -> None:
        self.order: list[tuple[int, int, int, int]] = []
        self.states: dict[tuple[int, int, int, int], torch.Tensor] = {}

    def __call__(self, event: StoreEvent) -> None:
        assert len(event.rows) == len(event.copies) == len(event.tokens) == len(event.states)
        for lane, (row, copy, token) in enumerate(
            zip(event.rows.tolist(), event.copies.tolist(), event.tokens.tolist(), strict=True)
        ):
            self.order.append((event.layer, row, copy, token))
            self.states[self.order[-1]] = event.states[lane].clone()


# --- what is refused -------------------------------------------------------------------------------------------------


def test_policies_and_sequences_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="at least one, got 0 policies and 0 sequences"):
        StateBank([], sequences=[], seed=0)
    with pytest.raises(ValueError, match="got 2 policies and 1 sequences"):
        StateBank(parse(["shared:fp8", "shared:fp8"]), sequences=[0], seed=0)


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("name", ["query", "key", "value", "log_decay", "beta"])
def test_a_tensor_of_another_shape_or_dtype_is_named(recurrence: Recurrence, name: str) -> None:
    inputs = tokens_of(recurrence, 1, 4)
    tensor = getattr(inputs, name)
    if tensor is None:
        with pytest.raises(ValueError, match="expected no `beta`"):
            bank_of(["shared:fp8"]).advance(LAYER, recurrence, replace(inputs, beta=inputs.log_decay))
        return
    if name not in ("value", "key"):
        with pytest.raises(ValueError, match=f"{recurrence} inputs: expected `{name}` of shape .*, got .*"):
            bank_of(["shared:fp8"]).advance(LAYER, recurrence, replace(inputs, **{name: tensor[..., :-1]}))
    with pytest.raises(ValueError, match="expected `.*` (of shape|in float32 or float64)"):
        bank_of(["shared:fp8"]).advance(LAYER, recurrence, replace(inputs, **{name: tensor[:, :-1]}))
    with pytest.raises(ValueError, match="in float32 or float64"):
        bank_of(["shared:fp8"]).advance(LAYER, recurrence, replace(inputs, **{name: tensor.to(torch.bfloat16)}))
    with pytest.raises(ValueError, match="in float32 or float64"):
        bank_of(["shared:fp8"]).advance(LAYER, recurrence, inputs.map(lambda x: x.half()))


def test_a_recurrence_without_its_tensors_is_refused() -> None:
    gdn, kda = tokens_of(Recurrence.GDN, 1, 4), tokens_of(Recurrence.KDA, 1, 4)
    for recurrence, inputs, words in (
        (Recurrence.GDN, replace(gdn, beta=None), "expected `beta` of shape .*, got None"),
        (Recurrence.GDN, kda, "expected `log_decay`"),
        (Recurrence.KDA, gdn, "expected `log_decay`"),
        (Recurrence.MAMBA2, gdn, "no delta rule"),
    ):
        with pytest.raises(ValueError, match=words):
            bank_of(["shared:fp8"]).advance(LAYER, recurrence, inputs)


def test_key_heads_divide_the_value_heads() -> None:
    inputs = tokens_of(Recurrence.GDN, 1, 4)
    cut_heads = replace(
        inputs, value=inputs.value[:, :, :5], log_decay=inputs.log_decay[:, :, :5], beta=torch.ones(1, 4, 5).double()
    )
    with pytest.raises(ValueError, match="5 value heads are not a multiple of 3 key heads"):
        bank_of(["shared:fp8"]).advance(LAYER, Recurrence.GDN, cut_heads)


def test_rows_padding_and_earlier_tokens_have_to_fit() -> None:
    bank = bank_of(["shared:fp8", "shared:fp8"])
    with pytest.raises(ValueError, match=f"layer {LAYER}: expected tokens of 2 rows, got 3"):
        bank.advance(LAYER, Recurrence.GDN, tokens_of(Recurrence.GDN, 3, 4))
    inputs = tokens_of(Recurrence.GDN, 2, 4)
    with pytest.raises(ValueError, match=r"expected `valid` of shape \(2, 4\), got \(2, 3\)"):
        bank.advance(LAYER, Recurrence.GDN, inputs, valid=torch.ones(2, 3, dtype=torch.bool))
    bank.advance(LAYER, Recurrence.GDN, inputs)
    with pytest.raises(ValueError, match="expected gdn tokens for states of shape .*, got mamba2 tokens"):
        bank.advance(LAYER, Recurrence.MAMBA2, tokens_of(Recurrence.MAMBA2, 2, 4))
    narrow = to_torch([make_inputs(Recurrence.GDN, NARROW, 4)] * 2)
    with pytest.raises(ValueError, match=r"expected gdn tokens for states of shape \(6, 8, 32\), got .* \(6, 5, 16\)"):
        bank.advance(LAYER, Recurrence.GDN, narrow)


def test_a_layer_keeps_its_dtype() -> None:
    bank = bank_of(["shared:fp8"])
    bank.advance(LAYER, Recurrence.GDN, tokens_of(Recurrence.GDN, 1, 4))
    with pytest.raises(ValueError, match=f"layer {LAYER}: expected torch.float64 tokens, got torch.float32"):
        bank.advance(LAYER, Recurrence.GDN, tokens_of(Recurrence.GDN, 1, 4, dtype=torch.float32))


def test_only_a_prompt_is_handed_over_and_only_once() -> None:
    with pytest.raises(ValueError, match="handed over already"):
        bank_of(["shared:fp8"]).hand_over()
    bank = bank_of(["shared:fp8"], prompt=True)
    bank.hand_over()
    with pytest.raises(ValueError, match="handed over already"):
        bank.hand_over()


def test_a_format_that_does_not_fit_the_state_is_refused_at_its_store() -> None:
    with pytest.raises(ValueError, match="blocks of 12 keys"):
        bank_of(["shared:nvfp4[block=12]@L=1"]).advance(LAYER, Recurrence.GDN, tokens_of(Recurrence.GDN, 1, 4))


# --- roll back -------------------------------------------------------------------------------------------------------

BUFFERED = ("shared:nvfp4@L=16", "separate:nvfp4+sr/fp16+sr@L=32", "shared:fp32@L=128", "shared:int8[ef=int8]@L=9")


@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize(("before", "wrong"), [(0, 5), (3, 4), (20, 6), (40, 2)])
def test_tokens_that_were_rolled_back_were_never_fed(recurrence: Recurrence, before: int, wrong: int) -> None:
    rows = len(BUFFERED)
    right = tokens_of(recurrence, rows, before + 40)
    rejected = tokens_of(recurrence, rows, wrong, seed=9)
    bank, clean = bank_of(BUFFERED), bank_of(BUFFERED)
    for some in (bank, clean):
        some.advance(LAYER, recurrence, cut(right, 0, before))
        some.advance(LAYER + 1, recurrence, cut(right, 0, before))
    for layer in (LAYER, LAYER + 1):
        bank.advance(layer, recurrence, rejected)
    bank.roll_back(wrong)
    for layer in (LAYER, LAYER + 1):
        outputs, wanted = (
            run_bank(b, recurrence, cut(right, before, before + 40), chunk=11, layer=layer) for b in (bank, clean)
        )
        assert relative_error(outputs, wanted) <= 1e-12
        states = (b.checkpoints[layer].states.numpy() for b in (bank, clean))
        assert relative_error(*states) <= 1e-12


def test_without_rolling_back_the_rejected_tokens_are_seen() -> None:
    right, rejected = tokens_of(Recurrence.GDN, 4, 40), tokens_of(Recurrence.GDN, 4, 3, seed=9)
    bank, clean = bank_of(BUFFERED), bank_of(BUFFERED)
    bank.advance(LAYER, Recurrence.GDN, rejected)
    assert relative_error(run_bank(bank, Recurrence.GDN, right), run_bank(clean, Recurrence.GDN, right)) > 1e-3


def test_a_part_of_what_is_buffered_may_be_rolled_back_row_by_row() -> None:
    right, rejected = tokens_of(Recurrence.GDN, 4, 40), tokens_of(Recurrence.GDN, 4, 6, seed=9)
    bank, clean = bank_of(BUFFERED), bank_of(BUFFERED)
    kept = [6, 4, 0, 1]
    bank.advance(LAYER, Recurrence.GDN, rejected)
    bank.roll_back([6 - k for k in kept])
    valid = torch.arange(6)[None, :] < torch.tensor(kept)[:, None]
    clean.advance(LAYER, Recurrence.GDN, rejected, valid=valid)
    assert bank.checkpoints[LAYER].cursors.records.tolist() == kept
    assert relative_error(run_bank(bank, Recurrence.GDN, right), run_bank(clean, Recurrence.GDN, right)) <= 1e-12


def test_a_prompt_may_be_rolled_back_before_the_hand_over() -> None:
    right, rejected = tokens_of(Recurrence.GDN, 4, 40), tokens_of(Recurrence.GDN, 4, 5, seed=9)
    bank, clean = (bank_of(BUFFERED, prompt=True) for _ in range(2))
    for some in (bank, clean):
        some.advance(LAYER, Recurrence.GDN, cut(right, 0, 7))
    bank.advance(LAYER, Recurrence.GDN, rejected)
    bank.roll_back(5)
    outputs: list[oracle.Array] = []
    for some in (bank, clean):
        some.hand_over()
        outputs.append(run_bank(some, Recurrence.GDN, cut(right, 7, 40)))
    assert relative_error(*outputs) <= 1e-12


@pytest.mark.parametrize("count", [-1, 3, 100])
def test_what_was_stored_is_not_rolled_back_and_nothing_changes(count: int) -> None:
    inputs = tokens_of(Recurrence.GDN, 2, 40)
    bank, clean = bank_of(["shared:nvfp4@L=16", "shared:nvfp4@L=8"]), bank_of(["shared:nvfp4@L=16", "shared:nvfp4@L=8"])
    for some in (bank, clean):
        some.advance(LAYER, Recurrence.GDN, cut(inputs, 0, 10))
        some.advance(LAYER + 1, Recurrence.GDN, cut(inputs, 0, 3))
    with pytest.raises(ValueError, match=f"can roll back 0 to .*since the last store.*got {count}"):
        bank.roll_back(count)
    for layer in (LAYER, LAYER + 1):
        outputs, wanted = (run_bank(b, Recurrence.GDN, cut(inputs, 10, 40), layer=layer) for b in (bank, clean))
        assert np.array_equal(outputs, wanted)


def test_a_conventional_row_stores_every_token_and_gives_none_back() -> None:
    bank = bank_of(["shared:fp8", "conventional:bf16"])
    bank.advance(LAYER, Recurrence.GDN, tokens_of(Recurrence.GDN, 2, 5))
    bank.roll_back(0)
    with pytest.raises(ValueError, match="row 1: can roll back 0 to 0 tokens"):
        bank.roll_back(1)


# --- observer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunk", "prompt"), [(1, 0), (7, 0), (50, 0), (7, 6), (50, 70)])
def test_the_observer_sees_every_store_once_with_what_loads_back(chunk: int, prompt: int) -> None:
    time = prompt + 50
    inputs = make_inputs(Recurrence.GDN, GROUPED, time)
    events = Events()
    bank = bank_of(MIXED_ARMS, prompt=prompt > 0, observer=events)
    repeated = to_torch([inputs] * len(MIXED_ARMS))
    if prompt:
        run_bank(bank, Recurrence.GDN, cut(repeated, 0, prompt))
        assert events.order == []
        bank.hand_over()
    run_bank(bank, Recurrence.GDN, cut(repeated, prompt, time), chunk=chunk)
    assert len(events.order) == len(events.states) == bank.checkpoints[LAYER].stores
    for row, policy in enumerate(parse(MIXED_ARMS)):
        truth = expected(inputs, policy, ProjectStore(policy=policy), prompt_tokens=prompt)
        assert sorted((t, c) for layer, r, c, t in events.order if r == row) == sorted(truth.stores), MIXED_ARMS[row]
        for copy, state in enumerate(truth.copies if truth.stores else ()):
            last = max(t for layer, r, c, t in events.order if (r, c) == (row, copy))
            stored = events.states[LAYER, row, copy, last]
            assert relative_error(stored.numpy(), state) <= 1e-12, (MIXED_ARMS[row], copy)


def test_watching_changes_nothing() -> None:
    inputs = tokens_of(Recurrence.KDA, len(MIXED_ARMS), 30)
    plain = run_bank(bank_of(MIXED_ARMS), Recurrence.KDA, inputs, chunk=7)
    watched = run_bank(bank_of(MIXED_ARMS, observer=Events()), Recurrence.KDA, inputs, chunk=7)
    assert np.array_equal(plain, watched)


# --- the float32 reference in windows --------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_walking_the_reference_in_windows_changes_rounding_noise_only(recurrence: Recurrence) -> None:
    texts = ("conventional:fp32", "shared:nvfp4@L=16", "shared:fp32@L=16")
    inputs = tokens_of(recurrence, 3, 100, dtype=torch.float32)
    merged = run_bank(bank_of(texts), recurrence, inputs)
    single = run_bank(bank_of(texts, merge_lossless=False), recurrence, inputs)
    assert relative_error(merged[0], single[0]) <= FLOAT32
    assert np.array_equal(merged[1:], single[1:])
    # An independent evaluation: it agrees with neither of the others bit by bit, so a floor of zero means something.
    assert not np.array_equal(merged[0], single[0])
    assert not np.array_equal(merged[0], merged[2])
    exact = expected(make_inputs(recurrence, GROUPED, 100), REFERENCE, oracle.no_store).outputs
    for row in (merged[0], single[0], merged[2]):
        assert relative_error(row, exact) <= FLOAT32
    assert relative_error(merged[1], exact) > 100 * FLOAT32


@pytest.mark.parametrize(
    ("others", "window", "first"),
    [([16, 8], 16, 8), ([5], 5, 2), ([1], 4, 2), ([], LOSSLESS_WINDOW, LOSSLESS_WINDOW // 2), ([128], 128, 64)],
)
def test_windows_of_the_reference_are_shifted_against_those_of_the_arms(
    others: list[int], window: int, first: int
) -> None:
    policies = (REFERENCE, *parse([f"shared:fp8@L={w}" for w in others]))
    lanes = Lanes.of(policies, dtype=torch.float32, merge_lossless=True)
    assert (lanes.windows.tolist(), lanes.first_windows.tolist()) == ([window, *others], [first, *others])


def test_rows_that_lose_something_are_never_merged() -> None:
    policies = parse(["conventional:bf16", "conventional:fp32", "shared:fp8@L=16"])
    for dtype, merge, windows in (
        (torch.float32, True, [1, 16, 16]),
        (torch.float32, False, [1, 1, 16]),
        (torch.float64, True, [1, 1, 16]),  # a float64 state loses something in float32
    ):
        assert Lanes.of(policies, dtype=dtype, merge_lossless=merge).windows.tolist() == windows


# --- formats ---------------------------------------------------------------------------------------------------------


class FeedbackStore:
    """The oracle's store with error feedback: it remembers what was lost."""

    def __init__(self, policy: Policy) -> None:
        self.lost: dict[int, torch.Tensor] = {}
        self._plain = ProjectStore(policy=policy)
        self._policy = policy

    def __call__(self, state: oracle.Array, *, token_index: int, copy: int) -> oracle.Array:
        fmt = self._policy.copies[copy]
        if fmt.error_feedback is None:
            return self._plain(state, token_index=token_index, copy=copy)
        loaded, self.lost[copy] = store_and_load_with_feedback(torch.from_numpy(state)[None], self.lost.get(copy), fmt)
        return loaded[0].numpy()


FEEDBACK = (
    "shared:int8[ef=int8]@L=5",
    "conventional:int8[ef=int8]",
    "shared:int8@L=5",
    "separate:int8[ef=int8]/fp16@L=8",
    "shared:fp8[ef=fp8]@L=16",
    "shared:nvfp4+sr@L=3",
)


@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("chunk", [1, 4, 60])
def test_error_feedback_is_carried_from_store_to_store(recurrence: Recurrence, chunk: int) -> None:
    inputs = make_inputs(recurrence, GROUPED, 60)
    policies = parse(FEEDBACK)
    outputs = run_bank(bank_of(FEEDBACK), recurrence, to_torch([inputs] * len(FEEDBACK)), chunk=chunk)
    truth = [expected(inputs, policy, FeedbackStore(policy)).outputs for policy in policies]
    assert disagreements(FEEDBACK, list(outputs), truth) == {}
    # A walk that forgets what was lost is told from one that does not.
    forgetful = [replace(p, read_format=f, recurrence_format=f) for p, f in [(policies[0], Format.parse("int8"))]]
    assert relative_error(truth[0], expected(inputs, forgetful[0], FeedbackStore(forgetful[0])).outputs) > 1e-4


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_error_feedback_with_rows_that_pause(recurrence: Recurrence) -> None:
    time = 40
    inputs = make_inputs(recurrence, GROUPED, time)
    rng = np.random.default_rng(5)
    valid = rng.random((len(FEEDBACK), time)) < np.linspace(0.3, 1.0, len(FEEDBACK))[:, None]
    valid[:, 8:16] &= np.arange(len(FEEDBACK))[:, None] % 2 == 0  # in this call half of the rows rest entirely
    outputs = run_bank(
        bank_of(FEEDBACK),
        recurrence,
        to_torch([inputs] * len(FEEDBACK)),
        chunk=8,
        valid=torch.from_numpy(valid),
    )
    actual, truth = [], []
    for row, policy in enumerate(parse(FEEDBACK)):
        assert not outputs[row][~valid[row]].any()
        actual.append(outputs[row][valid[row]])
        truth.append(expected(inputs.select(valid[row]), policy, FeedbackStore(policy)).outputs)
    assert disagreements(FEEDBACK, actual, truth) == {}


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_formats_beyond_the_published_grid(recurrence: Recurrence) -> None:
    texts = (
        "shared:int16@L=5",
        "shared:int16+sr@L=5",
        "separate:mxfp4/int16+sr@L=7",
        "conventional:fp8_e5m2+sr",
        "shared:mxfp8@L=4",
        "shared:fp8[tile=4,max=240]+sr@L=6",
        "shared:int8[head,scale=fp16]@L=6",
    )
    inputs = make_inputs(recurrence, GROUPED, 30)
    outputs = run_bank(bank_of(texts), recurrence, to_torch([inputs] * len(texts)), chunk=13)
    truth = [expected(inputs, p, ProjectStore(policy=p)).outputs for p in parse(texts)]
    assert disagreements(texts, list(outputs), truth) == {}


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_a_float64_bank_rounds_what_it_stores_in_float32(recurrence: Recurrence) -> None:
    texts = ("shared:fp32@L=5", "conventional:fp32")
    inputs = make_inputs(recurrence, GROUPED, 30)
    events = Events()
    outputs = run_bank(bank_of(texts, observer=events), recurrence, to_torch([inputs] * 2))
    for state in events.states.values():
        assert state.dtype == torch.float64
        assert torch.equal(state, state.float().double())
    exact = oracle.plain(inputs).outputs
    for row in outputs:
        assert 1e-10 < relative_error(row, exact) <= FLOAT32


# --- what must not change a row --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_rows_with_different_windows_do_not_see_each_other(recurrence: Recurrence) -> None:
    windows = (1, 2, 3, 5, 13, 16, 34, 64, 127, 128)
    texts = [f"shared:nvfp4+sr@L={w}" for w in windows] + [f"separate:int8/fp16+sr@L={w}" for w in windows[::3]]
    rows = [make_inputs(recurrence, NARROW, 140, seed=r) for r in range(len(texts))]
    sequences = [7 * r for r in range(len(texts))]
    together = run_bank(bank_of(texts, sequences=sequences), recurrence, to_torch(rows), chunk=47)
    truth = [
        expected(inputs, p, ProjectStore(policy=p, sequence=s)).outputs
        for inputs, p, s in zip(rows, parse(texts), sequences, strict=True)
    ]
    assert disagreements(texts, list(together), truth) == {}


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_tensors_that_are_not_contiguous(recurrence: Recurrence) -> None:
    inputs = tokens_of(recurrence, len(MIXED_ARMS), 20, dtype=torch.float32)

    def scattered(x: torch.Tensor) -> torch.Tensor:
        # As slices of a fused projection come: another order of axes, and gaps.
        wide = torch.cat([x, x], dim=-1).transpose(0, 1).contiguous().transpose(0, 1)
        return wide[..., : x.shape[-1]]

    strided = inputs.map(scattered)
    assert not strided.key.is_contiguous()
    copies = strided.map(torch.clone)
    plain = run_bank(bank_of(MIXED_ARMS), recurrence, inputs, chunk=6)
    assert np.array_equal(run_bank(bank_of(MIXED_ARMS), recurrence, strided, chunk=6), plain)
    for name in ("query", "key", "value", "log_decay"):
        assert torch.equal(getattr(strided, name), getattr(copies, name)), f"{name} was written to"


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_inputs_are_not_kept_by_reference(recurrence: Recurrence) -> None:
    inputs = tokens_of(recurrence, 4, 40)
    clean = run_bank(bank_of(BUFFERED), recurrence, inputs, chunk=10)
    bank = bank_of(BUFFERED)
    pieces: list[torch.Tensor] = []
    for start in range(0, 40, 10):
        part = cut(inputs, start, start + 10).map(torch.clone)
        pieces.append(bank.advance(LAYER, recurrence, part).clone())
        part.map(lambda x: x.fill_(99.0))
    assert np.array_equal(torch.cat(pieces, dim=1).numpy(), clean)


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_no_tokens_change_nothing(recurrence: Recurrence) -> None:
    inputs = tokens_of(recurrence, 4, 30)
    bank = bank_of(BUFFERED)
    none = cut(inputs, 0, 0)
    assert bank.advance(LAYER, recurrence, none).shape == (4, 0, GROUPED.heads, GROUPED.d_v)
    first = run_bank(bank, recurrence, cut(inputs, 0, 13))
    assert bank.advance(LAYER, recurrence, none).shape[1] == 0
    padding = bank.advance(LAYER, recurrence, cut(inputs, 20, 25), valid=torch.zeros(4, 5, dtype=torch.bool))
    assert not padding.any()
    second = run_bank(bank, recurrence, cut(inputs, 13, 30))
    plain = run_bank(bank_of(BUFFERED), recurrence, inputs)
    assert relative_error(np.concatenate([first, second], axis=1), plain) <= 1e-12


def test_layers_and_banks_do_not_share_anything() -> None:
    inputs = tokens_of(Recurrence.GDN, 1, 30)
    texts = ["shared:fp8+sr@L=5"]
    bank = bank_of(texts)
    first = run_bank(bank, Recurrence.GDN, inputs, layer=1)
    other = run_bank(bank, Recurrence.GDN, inputs, layer=2)
    assert not np.array_equal(first, other)  # other random bits
    assert np.array_equal(other, run_bank(bank_of(texts), Recurrence.GDN, inputs, layer=2))
    assert not np.array_equal(other, run_bank(bank_of(texts, seed=1), Recurrence.GDN, inputs, layer=2))
    assert Policy.parse(texts[0]).recurrence_format.rounding is Rounding.STOCHASTIC
    assert sorted(bank.checkpoints) == [1, 2]
    assert bank.rows == 1


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_a_row_that_is_not_finite_leaves_the_others_alone(recurrence: Recurrence) -> None:
    inputs = tokens_of(recurrence, len(MIXED_ARMS), 40)
    clean = run_bank(bank_of(MIXED_ARMS), recurrence, inputs, chunk=9)
    inputs.value[4, 11] = torch.nan
    spoiled = run_bank(bank_of(MIXED_ARMS), recurrence, inputs, chunk=9)
    others = [row for row in range(len(MIXED_ARMS)) if row != 4]
    assert np.array_equal(spoiled[others], clean[others])
    assert np.isnan(spoiled[4, 11:]).all()
