"""The tolerance of the oracle comparisons rejects plausible wrong walks, and the properties that define the policies.

`faulty` is a third walk, with the mistakes that state kernels are known to make behind a switch. Without a mistake it
is the oracle; with one, `StateBank` must disagree with it by more than the tolerance, or the comparison would not see
the mistake in `StateBank` either.
"""

from enum import StrEnum

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm.checkpoint import WINDOW_FORMS
from replayssm.policy import CheckpointSharing, Policy
from replayssm.records import Recurrence
from replayssm.replay import StateBank
from replayssm.window import pick
from tests.kernels.against_oracle import (
    FORMATS,
    GROUPED,
    NARROW,
    RECURRENCES,
    RELATIVE_TOLERANCE,
    SEED,
    ProjectStore,
    agrees,
    cut,
    disagreements,
    expected,
    make_inputs,
    relative_error,
    run_bank,
    to_torch,
)
from tests.oracles import recurrence as oracle

SEQUENCE = 6
PROMPT = 21
TOKENS = 75


class Fault(StrEnum):
    NONE = "none"
    READ_AFTER_ROUND = "the storing token's output is taken from the state after it was rounded"
    READ_CHECKPOINT = "outputs inside a window read the checkpoint without the window's own tokens"
    FLUSH_OUTPUT_FROM_READ_COPY = "the storing token's output is taken from the low-precision copy"
    READ_COPY_FROM_ITSELF = "the read copy is stored from its own walk"
    READ_COPY_ROUNDED_TWICE = "the read copy is stored from the stored recurrence copy"
    RECURRENCE_FROM_READ_COPY = "the recurrence copy is stored from the walk of the read copy"
    ONE_WRITE_FOR_BOTH = "the replay on the recurrence copy uses the writes that were computed on the read copy"
    WINDOW_TOO_LONG = "the window is one token too long"
    WINDOW_TOO_SHORT = "the window is one token too short"
    WINDOW_FROM_SEQUENCE_START = "the windows are counted from the first token of the prompt"
    NO_HAND_OVER = "the state is not stored at the end of the prompt"
    WRONG_TOKEN = "the random bits of a store are those of the next token"
    WRONG_COPY = "the random bits of the two copies are swapped"
    WRONG_SEQUENCE = "the random bits are those of another sequence"
    WRONG_LAYER = "the random bits are those of another layer"
    WRONG_SEED = "only the low half of the seed reaches the random bits"
    INTERLEAVED_HEADS = "key heads serve interleaved value heads, not consecutive ones"
    DECAY_AFTER_WRITE = "the decay is applied after the write"


# Which arms a fault changes at all: the most forgiving ones, whose stores are finest.
ARMS_OF_FAULT = {
    Fault.READ_AFTER_ROUND: ["conventional:fp16", "shared:fp16@L=16", "separate:nvfp4/fp16@L=16"],
    Fault.READ_CHECKPOINT: ["shared:fp32@L=5", "separate:nvfp4/fp32@L=16"],
    Fault.FLUSH_OUTPUT_FROM_READ_COPY: ["separate:fp16/fp32@L=16", "separate:nvfp4/fp16+sr@L=16"],
    Fault.READ_COPY_FROM_ITSELF: ["separate:fp16/fp32@L=16", "separate:nvfp4/fp16+sr@L=5"],
    Fault.READ_COPY_ROUNDED_TWICE: ["separate:nvfp4/fp16+sr@L=16", "separate:bf16/fp16@L=5"],
    Fault.RECURRENCE_FROM_READ_COPY: ["separate:fp16/fp32@L=16", "separate:nvfp4/fp16+sr@L=5"],
    Fault.ONE_WRITE_FOR_BOTH: ["separate:fp16/fp32@L=16", "separate:nvfp4/fp16+sr@L=5"],
    Fault.WINDOW_TOO_LONG: ["shared:fp16@L=1", "shared:fp16@L=16", "separate:fp16/fp32@L=16"],
    Fault.WINDOW_TOO_SHORT: ["shared:fp16@L=5", "shared:fp16@L=16", "separate:fp16/fp32@L=16"],
    Fault.WINDOW_FROM_SEQUENCE_START: ["shared:fp16@L=16", "separate:fp16/fp32@L=16"],
    Fault.NO_HAND_OVER: ["conventional:fp16", "shared:fp16@L=16", "separate:fp16/fp32@L=16"],
    Fault.WRONG_TOKEN: ["conventional:fp16+sr", "shared:fp16+sr@L=16", "separate:fp16+sr/fp32@L=16"],
    Fault.WRONG_COPY: ["conventional:fp16+sr", "separate:fp16/fp16+sr@L=16", "separate:fp16+sr/fp32@L=16"],
    Fault.WRONG_SEQUENCE: ["conventional:fp16+sr", "shared:fp16+sr@L=16", "separate:fp16/fp16+sr@L=16"],
    Fault.WRONG_LAYER: ["conventional:fp16+sr", "shared:fp16+sr@L=16", "separate:fp16/fp16+sr@L=16"],
    Fault.WRONG_SEED: ["conventional:fp16+sr", "shared:fp16+sr@L=16", "separate:fp16/fp16+sr@L=16"],
    Fault.INTERLEAVED_HEADS: ["conventional:fp32", "shared:fp32@L=16"],
    Fault.DECAY_AFTER_WRITE: ["conventional:fp32", "shared:fp32@L=16"],
}


def advance(
    state: oracle.Array, inputs: oracle.Inputs, token: int, fault: Fault, writes: oracle.Array | None
) -> tuple[oracle.Array, oracle.Array]:
    """Fold one token of all heads into the state, with `writes` instead of the token's own where they are given."""
    heads = np.arange(inputs.heads)
    groups = inputs.heads // inputs.key.shape[1]
    key_heads = heads % inputs.key.shape[1] if fault is Fault.INTERLEAVED_HEADS else heads // groups
    key = inputs.key[token, key_heads]
    decay = np.exp(inputs.log_decay[token].reshape(inputs.heads, 1, -1))
    before = state if fault is Fault.DECAY_AFTER_WRITE else state * decay
    if writes is not None:
        own = writes
    elif inputs.beta is None:
        own = inputs.value[token]
    else:
        own = inputs.beta[token, :, None] * (inputs.value[token] - np.einsum("hvk,hk->hv", before, key))
    after = before + own[:, :, None] * key[:, None, :]
    return (after * decay if fault is Fault.DECAY_AFTER_WRITE else after), own


def faulty(inputs: oracle.Inputs, policy: Policy, fault: Fault, *, prompt_tokens: int) -> oracle.Array:
    """Walk one sequence under `policy` with one mistake and return the outputs."""
    store = ProjectStore(
        policy=policy,
        sequence=SEQUENCE + (fault is Fault.WRONG_SEQUENCE),
        seed=SEED % 2**32 if fault is Fault.WRONG_SEED else SEED,
        token_offset=int(fault is Fault.WRONG_TOKEN),
        layer_offset=int(fault is Fault.WRONG_LAYER),
        swap_copies=fault is Fault.WRONG_COPY,
    )
    separate = policy.sharing is CheckpointSharing.SEPARATE
    window = policy.window_tokens + (fault is Fault.WINDOW_TOO_LONG) - (fault is Fault.WINDOW_TOO_SHORT)
    main = low = checkpoint = inputs.zero_state()
    outputs = np.zeros(inputs.value.shape)
    filled = 0
    for token in range(inputs.tokens):
        low, writes = advance(low, inputs, token, fault, None)
        reuse = fault is Fault.ONE_WRITE_FOR_BOTH and token >= prompt_tokens
        main, _ = advance(main, inputs, token, fault, writes if reuse else None)
        prompt_ends = token == prompt_tokens - 1
        filled += token >= prompt_tokens or fault is Fault.WINDOW_FROM_SEQUENCE_START
        flush = filled == window and token >= prompt_tokens
        if filled == window:
            filled = 0
        if prompt_ends and fault is Fault.NO_HAND_OVER:
            prompt_ends = False
        source = low if separate and not flush and not prompt_ends else main
        if flush and fault is Fault.FLUSH_OUTPUT_FROM_READ_COPY:
            source = low
        if fault is Fault.READ_CHECKPOINT and not flush and token >= prompt_tokens:
            source = checkpoint
        if flush or prompt_ends:
            carried = low if flush and fault is Fault.RECURRENCE_FROM_READ_COPY else main
            stored = store(carried, token_index=token, copy=oracle.RECURRENCE_COPY)
            if separate:
                seen = stored if fault is Fault.READ_COPY_ROUNDED_TWICE else main
                seen = low if flush and fault is Fault.READ_COPY_FROM_ITSELF else seen
                low = store(seen, token_index=token, copy=oracle.READ_COPY)
            else:
                low = stored
            main = stored
            checkpoint = low
            if flush and fault is Fault.READ_AFTER_ROUND:
                source = main
        key_heads = np.arange(inputs.heads) // (inputs.heads // inputs.key.shape[1])
        if fault is Fault.INTERLEAVED_HEADS:
            key_heads = np.arange(inputs.heads) % inputs.key.shape[1]
        outputs[token] = np.einsum("hvk,hk->hv", source, inputs.query[token, key_heads])
    return outputs


def bank_outputs(
    recurrence: Recurrence, text: oracle.Inputs, policies: list[Policy], *, prompt_tokens: int
) -> oracle.Array:
    inputs = to_torch([text] * len(policies))
    bank = StateBank(policies, sequences=[SEQUENCE] * len(policies), seed=SEED, prompt=True)
    prompt = run_bank(bank, recurrence, cut(inputs, 0, prompt_tokens))
    bank.hand_over()
    decode = run_bank(bank, recurrence, cut(inputs, prompt_tokens, text.tokens), chunk=17)
    return np.concatenate([prompt, decode], axis=1)


def test_every_fault_has_arms() -> None:
    assert set(ARMS_OF_FAULT) == set(Fault) - {Fault.NONE}


@pytest.mark.parametrize("fault", list(ARMS_OF_FAULT), ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_a_planted_fault_is_rejected(recurrence: Recurrence, fault: Fault) -> None:
    policies = [Policy.parse(arm) for arm in ARMS_OF_FAULT[fault]]
    text = make_inputs(recurrence, GROUPED, TOKENS)
    actual = bank_outputs(recurrence, text, policies, prompt_tokens=PROMPT)
    for policy, outputs in zip(policies, actual, strict=True):
        truth = expected(text, policy, ProjectStore(policy=policy, sequence=SEQUENCE), prompt_tokens=PROMPT).outputs
        sound = faulty(text, policy, Fault.NONE, prompt_tokens=PROMPT)
        wrong = faulty(text, policy, fault, prompt_tokens=PROMPT)
        assert agrees(sound, truth), f"{policy}: the walk without a fault is not the oracle"
        assert agrees(outputs, truth), f"{policy}: {relative_error(outputs, truth):.3g}"
        if fault is Fault.ONE_WRITE_FOR_BOTH and recurrence is Recurrence.MAMBA2:
            assert agrees(wrong, truth), "the writes of Mamba-2 do not depend on the state"
        else:
            # Far beyond the tolerance, so that no choice near it would have let the fault pass.
            assert relative_error(wrong, outputs) > 1e3 * RELATIVE_TOLERANCE, f"{policy}: {fault} was not seen"


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_window_of_one_in_fp32_is_the_plain_recurrence(recurrence: Recurrence) -> None:
    """To a float64 state fp32 is a rounding: 2**-25 of an element per store, d_k (32) of them in each output."""
    arms = ["conventional:fp32", "shared:fp32@L=1", "separate:fp32/fp32@L=1", "separate:nvfp4/fp32@L=1"]
    text = make_inputs(recurrence, GROUPED, 67)
    bank = StateBank([Policy.parse(arm) for arm in arms], sequences=[0] * len(arms), seed=SEED)
    actual = run_bank(bank, recurrence, to_torch([text] * len(arms)))
    assert disagreements(arms, [*actual], [oracle.plain(text).outputs] * len(arms), tolerance=32 * 2.0**-25) == {}
    # The same four walks round the same states, so among themselves they agree to float64.
    assert disagreements(arms, [*actual], [actual[0]] * len(arms)) == {}


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), recurrence=st.sampled_from(RECURRENCES))
@settings(max_examples=20)
def test_any_split_into_windows_is_equivalent_when_nothing_is_rounded(sizes: list[int], recurrence: Recurrence) -> None:
    """The window forms alone, with the identity as the store: outputs and state are those of the plain recurrence."""
    text = make_inputs(recurrence, NARROW, sum(sizes))
    inputs = to_torch([text])
    state = torch.from_numpy(text.zero_state())[None]
    pieces: list[torch.Tensor] = []
    start = 0
    for size in sizes:
        # One step of one lane.
        window = pick(WINDOW_FORMS[recurrence].prepare(cut(inputs, start, start + size).map(lambda x: x[None])), 0)
        outputs, writes = window.outputs(state)
        pieces.append(outputs.movedim(-1, 1))
        state = window.fold(state, writes)
        start += size
    trace = oracle.plain(text)
    assert agrees(torch.cat(pieces, dim=1)[0].numpy(), trace.outputs)
    assert agrees(state[0].numpy(), trace.working)


@given(chunk=st.integers(1, 70), recurrence=st.sampled_from(RECURRENCES))
@settings(max_examples=10)
def test_a_prompt_is_the_plain_recurrence_under_every_policy(chunk: int, recurrence: Recurrence) -> None:
    arms = ["conventional:nvfp4+sr", "shared:fp8@L=16", "separate:int8/fp16+sr@L=5"]
    text = make_inputs(recurrence, NARROW, 67)
    bank = StateBank([Policy.parse(arm) for arm in arms], sequences=[0] * len(arms), seed=SEED, prompt=True)
    actual = run_bank(bank, recurrence, to_torch([text] * len(arms)), chunk=chunk)
    assert disagreements(arms, [*actual], [oracle.plain(text).outputs] * len(arms)) == {}


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_error_of_the_read_copy_never_reaches_the_recurrence_copy(recurrence: Recurrence) -> None:
    """The flush outputs show the recurrence copy: for every read format they are those of `shared` in its format."""
    window = 16
    text = make_inputs(recurrence, GROUPED, 131)
    for carried in ("fp32", "fp16"):
        arms = [f"shared:{carried}@L={window}", *(f"separate:{read}/{carried}@L={window}" for read in FORMATS)]
        bank = StateBank([Policy.parse(arm) for arm in arms], sequences=[SEQUENCE] * len(arms), seed=SEED)
        actual = run_bank(bank, recurrence, to_torch([text] * len(arms)), chunk=50)
        flushes = np.arange(window - 1, 131, window)
        at_flush = [outputs[flushes] for outputs in actual]
        assert disagreements(arms, at_flush, [at_flush[0]] * len(arms)) == {}
        inside = np.setdiff1d(np.arange(window, 131), flushes)
        for arm, outputs in zip(arms[1:], actual[1:], strict=True):
            if Policy.parse(arm).read_format != Policy.parse(arm).recurrence_format:
                assert relative_error(outputs[inside], actual[0][inside]) > 1e-8, f"{arm}: the read copy serves nothing"


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_future_tokens_do_not_reach_past_outputs(recurrence: Recurrence) -> None:
    arms = ["conventional:fp8", "shared:nvfp4+sr@L=16", "separate:int8/fp16+sr@L=16"]
    text, other = (make_inputs(recurrence, GROUPED, 60, seed=seed) for seed in (0, 1))
    changed = to_torch([text] * len(arms))
    for tensor, replacement in (
        (changed.query, other.query),
        (changed.key, other.key),
        (changed.value, other.value),
        (changed.log_decay, other.log_decay),
    ):
        tensor[:, 37:] = torch.from_numpy(replacement[37:])
    outputs = [
        run_bank(
            StateBank([Policy.parse(arm) for arm in arms], sequences=[0] * len(arms), seed=SEED), recurrence, inputs
        )
        for inputs in (to_torch([text] * len(arms)), changed)
    ]
    assert disagreements(arms, [*outputs[1][:, :37]], [*outputs[0][:, :37]]) == {}
    assert all(relative_error(outputs[1][row, 37:], outputs[0][row, 37:]) > 1e-3 for row in range(len(arms)))


def test_oracle_lists_its_stores() -> None:
    """Token indices and copies of the stores, by hand: a prompt of 3 tokens, windows of 4, two tokens left over."""
    text = make_inputs(Recurrence.GDN, GROUPED, 13)
    assert oracle.conventional(text, oracle.no_store, prompt_tokens=11).stores == ((10, 0), (11, 0), (12, 0))
    assert oracle.conventional(text.select(slice(0, 2)), oracle.no_store).stores == ((0, 0), (1, 0))
    assert oracle.shared(text, oracle.no_store, window_tokens=4).stores == ((3, 0), (7, 0), (11, 0))
    assert oracle.shared(text, oracle.no_store, window_tokens=4, prompt_tokens=3).stores == ((2, 0), (6, 0), (10, 0))
    walked = oracle.separate(text, oracle.no_store, window_tokens=4, prompt_tokens=3)
    assert walked.stores == ((2, 0), (2, 1), (6, 0), (6, 1), (10, 0), (10, 1))
    assert np.array_equal(walked.copies[0], walked.copies[1])
    assert np.array_equal(walked.copies[0], oracle.plain(text.select(slice(0, 11))).working)
    assert np.array_equal(walked.working, oracle.plain(text).working)
