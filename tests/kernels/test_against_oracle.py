"""`StateBank` and the reference walks against the float64 oracle, for every policy, window, format and cut of calls.

Everything runs in float64, so a disagreement is a wrong formula, a wrong rounding or a wrong random bit, and never
noise. The oracle stores through `replayssm.formats` (tested on its own) except where a test says otherwise.
"""

from collections.abc import Sequence
from itertools import cycle

import ml_dtypes
import numpy as np
import pytest
import torch

from replayssm.checkpoint import StoreEvent
from replayssm.gdn.reference import reference as gdn_reference
from replayssm.kda.reference import reference as kda_reference
from replayssm.mamba2.reference import reference as mamba2_reference
from replayssm.policy import Policy
from replayssm.records import Recurrence
from replayssm.replay import StateBank
from tests.kernels.against_oracle import (
    FORMATS,
    GROUPED,
    LAYER,
    MIXED_ARMS,
    NARROW,
    RECURRENCES,
    SEED,
    UNGROUPED,
    WINDOWS,
    ProjectStore,
    Shape,
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

REFERENCES = {
    Recurrence.MAMBA2: mamba2_reference,
    Recurrence.GDN: gdn_reference,
    Recurrence.KDA: kda_reference,
}


def grid(sharing: str) -> list[str]:
    """Every format and window of one sharing.

    For `separate` every pair of formats with the recurrences of the published grid, each pair at two of the windows,
    chosen so that every read format and every recurrence format meets all of them.
    """
    if sharing == "conventional":
        return [f"conventional:{fmt}" for fmt in FORMATS]
    if sharing == "shared":
        return [f"shared:{fmt}@L={window}" for fmt in FORMATS for window in WINDOWS]
    return [
        f"separate:{read}/{recurrence}@L={window}"
        for read in FORMATS
        for recurrence, windows in (("fp32", WINDOWS[::2]), ("fp16+sr", WINDOWS[1::2]))
        for window in (windows if FORMATS.index(read) % 2 else sorted(set(WINDOWS) - set(windows)))
    ]


def check(
    recurrence: Recurrence,
    arms: Sequence[str],
    shape: Shape,
    tokens: int,
    *,
    sequences: Sequence[int],
    chunk: int | None,
) -> None:
    """Run all arms in one bank, each row on the sequence that it names, and compare every row with the oracle."""
    policies = [Policy.parse(arm) for arm in arms]
    texts = {sequence: make_inputs(recurrence, shape, tokens, seed=sequence) for sequence in set(sequences)}
    bank = StateBank(policies, sequences=sequences, seed=SEED)
    actual = run_bank(bank, recurrence, to_torch([texts[sequence] for sequence in sequences]), chunk=chunk)
    truth = [
        expected(texts[sequence], policy, ProjectStore(policy=policy, sequence=sequence)).outputs
        for policy, sequence in zip(policies, sequences, strict=True)
    ]
    assert disagreements(arms, list(actual), truth) == {}


@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("shape", [GROUPED, NARROW, UNGROUPED])
def test_reference_is_the_recurrence(recurrence: Recurrence, shape: Shape) -> None:
    rows = [make_inputs(recurrence, shape, 67, seed=seed) for seed in range(2)]
    inputs = to_torch(rows)
    reference = REFERENCES[recurrence]
    outputs, state = reference(inputs, None)
    truth = [oracle.plain(row) for row in rows]
    assert disagreements("ab", [*outputs.numpy()], [trace.outputs for trace in truth]) == {}
    assert disagreements("ab", [*state.numpy()], [trace.working for trace in truth]) == {}
    # A walk that resumes from the state of its first part is the same walk.
    head, middle = reference(cut(inputs, 0, 29), None)
    before = middle.clone()
    tail, resumed = reference(cut(inputs, 29, 67), middle)
    assert torch.equal(middle, before)
    assert torch.equal(torch.cat([head, tail], dim=1), outputs)
    assert torch.equal(resumed, state)


@pytest.mark.parametrize("sharing", ["conventional", "shared", "separate"])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_every_format_and_window(recurrence: Recurrence, sharing: str) -> None:
    arms = grid(sharing)
    ids = cycle([0, 7, 2**31 - 1])
    check(recurrence, arms, GROUPED, 67, sequences=[next(ids) for _ in arms], chunk=50)


@pytest.mark.parametrize("shape", [NARROW, UNGROUPED])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_other_shapes(recurrence: Recurrence, shape: Shape) -> None:
    check(recurrence, MIXED_ARMS, shape, 67, sequences=[5] * len(MIXED_ARMS), chunk=None)


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_longest_window(recurrence: Recurrence) -> None:
    arms = ["shared:fp8@L=128", "shared:nvfp4+sr@L=127", "separate:nvfp4/fp16+sr@L=128", "shared:fp32@L=128"]
    check(recurrence, arms, NARROW, 261, sequences=[0, 1, 2, 3], chunk=100)


@pytest.mark.parametrize(("tokens", "chunk"), [(37, 1), (53, 7), (131, 43), (67, None)])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_cut_of_the_calls_does_not_matter(recurrence: Recurrence, tokens: int, chunk: int | None) -> None:
    ids = cycle([4, 9])
    check(recurrence, MIXED_ARMS, GROUPED, tokens, sequences=[next(ids) for _ in MIXED_ARMS], chunk=chunk)


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_stores_are_those_of_the_oracle(recurrence: Recurrence) -> None:
    """Not only what the outputs show: every token index, copy and stored state, and what is kept at the end."""
    events: dict[int, list[tuple[int, int]]] = {row: [] for row in range(len(MIXED_ARMS))}
    stored: dict[tuple[int, int], oracle.Array] = {}

    def observe(event: StoreEvent) -> None:
        assert event.layer == LAYER
        for row, copy, token, state in zip(event.rows, event.copies, event.tokens, event.states, strict=True):
            events[int(row)].append((int(token), int(copy)))
            stored[int(row), int(copy)] = state.clone().numpy()

    policies = [Policy.parse(arm) for arm in MIXED_ARMS]
    text = make_inputs(recurrence, GROUPED, 67)
    inputs = to_torch([text] * len(policies))
    bank = StateBank(policies, sequences=[2] * len(policies), seed=SEED, prompt=True, observer=observe)
    run_bank(bank, recurrence, cut(inputs, 0, 19))
    assert not any(events.values()), "a prompt is not stored before it ends"
    bank.hand_over()
    run_bank(bank, recurrence, cut(inputs, 19, 67), chunk=31)
    for row, policy in enumerate(policies):
        store = ProjectStore(policy=policy, sequence=2)
        trace = expected(text, policy, store, prompt_tokens=19)
        assert sorted(events[row]) == sorted(trace.stores), MIXED_ARMS[row]
        assert store.calls == list(trace.stores)
        for copy, state in enumerate(trace.copies):
            assert agrees(stored[row, copy], state), (MIXED_ARMS[row], copy)
    kept = bank.checkpoints[LAYER].states.numpy()
    for row, policy in enumerate(policies):
        assert np.array_equal(kept[row], stored[row, oracle.RECURRENCE_COPY]), policy


@pytest.mark.parametrize(("chunk", "garbage"), [(1, float("nan")), (7, float("nan")), (23, 1e3), (None, float("nan"))])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_leaves_the_state_untouched(side: str, garbage: float, chunk: int | None) -> None:
    recurrence, tokens = Recurrence.GDN, 43
    policies = [Policy.parse(arm) for arm in MIXED_ARMS]
    rng = np.random.default_rng(17)
    valid = np.ones((len(policies), tokens), dtype=np.bool_)
    for row in range(len(policies)):
        if side in ("left", "both"):
            valid[row, : rng.integers(0, 22)] = False
        if side in ("right", "both"):
            valid[row, tokens - rng.integers(0, 20) :] = False
    valid[0] = True
    valid[-1] = False
    texts = [make_inputs(recurrence, GROUPED, tokens, seed=row) for row in range(len(policies))]
    inputs = to_torch(texts)
    padding = torch.from_numpy(~valid)
    inputs = inputs.map(lambda x: x.masked_fill(padding.view(*padding.shape, *[1] * (x.dim() - 2)), garbage))
    bank = StateBank(policies, sequences=range(len(policies)), seed=SEED)
    actual = run_bank(bank, recurrence, inputs, chunk=chunk, valid=torch.from_numpy(valid))
    assert np.all(actual[~valid] == 0.0)
    rows = [row for row in range(len(policies)) if valid[row].any()]
    truth = [
        expected(texts[row].select(valid[row]), policies[row], ProjectStore(policy=policies[row], sequence=row)).outputs
        for row in rows
    ]
    assert disagreements([MIXED_ARMS[row] for row in rows], [actual[row][valid[row]] for row in rows], truth) == {}


@pytest.mark.parametrize("prompt_tokens", [1, 16, 37])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_hand_over_from_the_prompt(recurrence: Recurrence, prompt_tokens: int) -> None:
    tokens = prompt_tokens + 35
    policies = [Policy.parse(arm) for arm in MIXED_ARMS]
    text = make_inputs(recurrence, GROUPED, tokens)
    inputs = to_torch([text] * len(policies))
    bank = StateBank(policies, sequences=[2] * len(policies), seed=SEED, prompt=True)
    prompt = run_bank(bank, recurrence, cut(inputs, 0, prompt_tokens), chunk=20)
    bank.hand_over()
    decode = run_bank(bank, recurrence, cut(inputs, prompt_tokens, tokens), chunk=23)
    truth = [
        expected(text, policy, ProjectStore(policy=policy, sequence=2), prompt_tokens=prompt_tokens).outputs
        for policy in policies
    ]
    assert disagreements(MIXED_ARMS, [*np.concatenate([prompt, decode], axis=1)], truth) == {}


def test_hand_over_of_left_padded_prompts() -> None:
    recurrence, prompt_length, tokens = Recurrence.KDA, 30, 77
    policies = [Policy.parse(arm) for arm in MIXED_ARMS]
    starts = [(11 * row) % 29 for row in range(len(policies))]
    texts = [make_inputs(recurrence, GROUPED, tokens, seed=row) for row in range(len(policies))]
    valid = np.stack([np.arange(tokens) >= start for start in starts])
    inputs, mask = to_torch(texts), torch.from_numpy(valid)
    bank = StateBank(policies, sequences=range(len(policies)), seed=SEED, prompt=True)
    prompt = run_bank(bank, recurrence, cut(inputs, 0, prompt_length), valid=mask[:, :prompt_length], chunk=13)
    bank.hand_over()
    decode = run_bank(bank, recurrence, cut(inputs, prompt_length, tokens), chunk=9)
    actual = np.concatenate([prompt, decode], axis=1)
    truth = [
        expected(
            texts[row].select(valid[row]),
            policy,
            ProjectStore(policy=policy, sequence=row),
            prompt_tokens=prompt_length - starts[row],
        ).outputs
        for row, policy in enumerate(policies)
    ]
    got = [actual[row][valid[row]] for row in range(len(policies))]
    assert disagreements(MIXED_ARMS, got, truth) == {}


def test_hand_over_without_a_prompt() -> None:
    policies = [Policy.parse(arm) for arm in MIXED_ARMS]
    text = make_inputs(Recurrence.GDN, GROUPED, 40)
    bank = StateBank(policies, sequences=[0] * len(policies), seed=SEED, prompt=True)
    bank.hand_over()
    actual = run_bank(bank, Recurrence.GDN, to_torch([text] * len(policies)), chunk=11)
    truth = [expected(text, policy, ProjectStore(policy=policy)).outputs for policy in policies]
    assert disagreements(MIXED_ARMS, [*actual], truth) == {}


def test_layers_do_not_share_states_or_bits() -> None:
    policies = [Policy.parse(arm) for arm in MIXED_ARMS]
    layers = {0: (Recurrence.GDN, GROUPED), 1: (Recurrence.MAMBA2, NARROW), 7: (Recurrence.GDN, GROUPED)}
    texts = {layer: make_inputs(kind, shape, 50, seed=layer) for layer, (kind, shape) in layers.items()}
    inputs = {layer: to_torch([text] * len(policies)) for layer, text in texts.items()}
    bank = StateBank(policies, sequences=[1] * len(policies), seed=SEED, prompt=True)
    pieces: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
    for start, stop in [(0, 10), (10, 21), (21, 39), (39, 50)]:
        for layer, (kind, _) in layers.items():
            pieces[layer].append(bank.advance(layer, kind, cut(inputs[layer], start, stop)))
        if stop == 21:
            bank.hand_over()
    for layer in layers:
        truth = [
            expected(
                texts[layer], policy, ProjectStore(policy=policy, sequence=1, layer=layer), prompt_tokens=21
            ).outputs
            for policy in policies
        ]
        actual = torch.cat(pieces[layer], dim=1).numpy()
        assert disagreements(MIXED_ARMS, [*actual], truth) == {}, layer


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_decays_and_write_strengths_at_their_limits(recurrence: Recurrence) -> None:
    """Products of decays underflow, their inverses would overflow, and `beta` spans the whole range of a reflection."""
    tokens = 67
    text = make_inputs(recurrence, GROUPED, tokens)
    rng = np.random.default_rng(3)
    choices = np.array([0.0, 1e-9, 0.02, 30.0, 750.0])
    weights = [0.25, 0.25, 0.44, 0.03, 0.03]
    text.log_decay[...] = -rng.choice(choices, text.log_decay.shape, p=weights)
    if text.beta is not None:
        text.beta[...] = rng.choice(np.array([0.0, 0.5, 1.0, 1.9]), text.beta.shape)
    policies = [Policy.parse(arm) for arm in MIXED_ARMS]
    bank = StateBank(policies, sequences=[0] * len(policies), seed=SEED)
    actual = run_bank(bank, recurrence, to_torch([text] * len(policies)), chunk=50)
    truth = [expected(text, policy, ProjectStore(policy=policy)).outputs for policy in policies]
    assert disagreements(MIXED_ARMS, [*actual], truth) == {}


def independent_cast(state: oracle.Array, name: str) -> oracle.Array:
    """Round to nearest even through float32 and the casts of NumPy and ml_dtypes."""
    single = state.astype(np.float32)
    if name == "bf16":
        return single.astype(ml_dtypes.bfloat16).astype(np.float64)
    if name == "fp16":
        return single.astype(np.float16).astype(np.float64)
    if name != "fp8":
        raise ValueError(f"expected bf16, fp16 or fp8, got {name}")
    scale = np.max(np.abs(single), axis=-1, keepdims=True) / np.float32(448)
    scale[scale == 0] = 1
    payload = np.clip(single / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return (payload.astype(np.float32) * scale).astype(np.float64)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_formats_that_another_library_casts(recurrence: Recurrence, name: str) -> None:
    def one_copy(state: oracle.Array, *, token_index: int, copy: int) -> oracle.Array:
        del token_index, copy
        return independent_cast(state, name)

    def two_copies(state: oracle.Array, *, token_index: int, copy: int) -> oracle.Array:
        del token_index
        return independent_cast(state, name if copy == oracle.READ_COPY else "fp16")

    stores = {
        f"conventional:{name}": one_copy,
        f"shared:{name}@L=5": one_copy,
        f"shared:{name}@L=16": one_copy,
        f"separate:{name}/fp16@L=5": two_copies,
    }
    text = make_inputs(recurrence, GROUPED, 67)
    policies = [Policy.parse(arm) for arm in stores]
    bank = StateBank(policies, sequences=[0] * len(stores), seed=SEED)
    actual = run_bank(bank, recurrence, to_torch([text] * len(stores)))
    truth = [expected(text, policy, store).outputs for policy, store in zip(policies, stores.values(), strict=True)]
    assert disagreements([*stores], [*actual], truth) == {}


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_float32_stays_within_its_own_rounding(recurrence: Recurrence) -> None:
    """The product's dtype. 2**-24 per operation, d_k (32) products per sum, worst case aligned over a window of 16."""
    arms = ["conventional:fp32", "shared:fp32@L=1", "shared:fp32@L=16", "separate:fp32/fp32@L=16", "shared:fp32@L=128"]
    text = make_inputs(recurrence, GROUPED, 131)
    bank = StateBank([Policy.parse(arm) for arm in arms], sequences=[0] * len(arms), seed=SEED)
    inputs = to_torch([text] * len(arms), torch.float32)
    actual = run_bank(bank, recurrence, inputs)
    assert actual.dtype == np.float32
    truth = [oracle.plain(text).outputs] * len(arms)
    assert disagreements(arms, [*actual], truth, tolerance=32 * 16 * 2.0**-24) == {}
    assert relative_error(actual[0], truth[0]) > 2.0**-30, "float32 outputs cannot be this close to float64 ones"


@pytest.mark.parametrize("prompt_rejects", [False, True])
def test_rolled_back_tokens_never_happened(prompt_rejects: bool) -> None:
    """Speculation that was rejected: inside a window, and (`prompt_rejects`) right before the hand-over of a prompt."""
    arms = ["shared:nvfp4+sr@L=16", "separate:fp8/fp16+sr@L=16"]
    policies = [Policy.parse(arm) for arm in arms]
    text, rejected = (make_inputs(Recurrence.GDN, GROUPED, 60, seed=seed) for seed in (0, 1))
    inputs, other = (to_torch([sequence] * len(arms)) for sequence in (text, rejected))
    bank = StateBank(policies, sequences=[0] * len(arms), seed=SEED, prompt=True)
    pieces = [run_bank(bank, Recurrence.GDN, cut(inputs, 0, 21))]
    if prompt_rejects:
        run_bank(bank, Recurrence.GDN, cut(other, 0, 4))
        bank.roll_back(4)
    bank.hand_over()
    pieces.append(run_bank(bank, Recurrence.GDN, cut(inputs, 21, 40)))
    run_bank(bank, Recurrence.GDN, cut(other, 0, 7))
    bank.roll_back(7)
    pieces.append(run_bank(bank, Recurrence.GDN, cut(inputs, 40, 60)))
    truth = [expected(text, policy, ProjectStore(policy=policy), prompt_tokens=21).outputs for policy in policies]
    assert disagreements(arms, [*np.concatenate(pieces, axis=1)], truth) == {}


def test_layer_number_is_the_address_of_the_bits() -> None:
    """The layer under test is not 0, so a bank that ignored it would have failed everywhere above."""
    assert LAYER != 0
    policy = Policy.parse("conventional:nvfp4+sr")
    text = make_inputs(Recurrence.GDN, GROUPED, 9)
    truth = {layer: expected(text, policy, ProjectStore(policy=policy, layer=layer)).outputs for layer in (0, LAYER)}
    assert relative_error(truth[0], truth[LAYER]) > 1e-3
