"""The window kernels against the float64 oracle and, where every sum is exact, bit for bit against the PyTorch path.

Without a GPU the kernels run in Triton's interpreter; on one, the same tests run compiled.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from replayssm.backend import Execution
from replayssm.checkpoint import StoreEvent
from replayssm.policy import Policy
from replayssm.records import Recurrence, TokenInputs
from replayssm.replay import StateBank
from replayssm.schedule import Slab
from replayssm.triton_tables import piece_tables
from replayssm.triton_walk import TritonWalk
from tests.kernels.against_oracle import (
    LAYER,
    RECURRENCES,
    SEED,
    Shape,
    cut,
    expected,
    make_inputs,
    relative_error,
    run_bank,
    to_torch,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRITON = Execution.parse("triton")
SMALL = Shape(heads=2, key_heads=1, d_v=20, d_k=40)
EPS32 = 2.0**-24


def bound(shape: Shape, tokens: int, *, unit: float = EPS32) -> float:
    """How far float32 outputs may be from exact ones, relative to the largest output.

    An output is a product over `d_k` with a state that has been through `tokens` sums and decays, each of which errs by
    at most one unit of what it adds up; the delta rule solves with a well-conditioned unit triangle, which at most
    doubles that. Errors of sums of `n` terms grow as the root of `n` where they are independent; 4 standard deviations
    of that are allowed.
    """
    return 2 * 4 * unit * float(np.sqrt(shape.d_k + 3 * tokens))


def bank_of(
    arms: Sequence[str], *, sequences: Sequence[int] | None = None, execution: Execution = TRITON, **kwargs: object
) -> StateBank:
    ids = [0] * len(arms) if sequences is None else sequences
    return StateBank([Policy.parse(arm) for arm in arms], sequences=ids, seed=SEED, execution=execution, **kwargs)  # pyright: ignore[reportArgumentType]


def on_device(inputs: TokenInputs) -> TokenInputs:
    return inputs.map(lambda x: x.to(DEVICE))


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels do not write, they read as NaN and leave as NaN."""
    walk = TritonWalk.walk

    def poisoned(self: TritonWalk, *args: Any, slabs: Sequence[Slab], outputs: torch.Tensor, **kwargs: Any) -> None:
        for slab in slabs:
            used = torch.as_tensor(slab.index[slab.index >= 0], device=outputs.device)
            outputs[used] = torch.nan
        walk(self, *args, slabs=slabs, outputs=outputs, **kwargs)
        assert bool(torch.isfinite(outputs).all())

    def unset(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, torch.nan, device=device, dtype=dtype)

    monkeypatch.setattr(TritonWalk, "walk", poisoned)
    monkeypatch.setattr("replayssm.triton_walk._unset", unset)


def run(bank: StateBank, recurrence: Recurrence, inputs: TokenInputs, **kwargs: object) -> np.ndarray:
    """Outputs of all tokens."""
    return run_bank(bank, recurrence, on_device(inputs), **kwargs)  # pyright: ignore[reportArgumentType]


def exact_inputs(recurrence: Recurrence, shape: Shape, rows: int, tokens: int, *, seed: int = 0) -> TokenInputs:
    """Tokens for which every sum has at most one term that is not zero, so any order of operations gives one result.

    Keys and queries are unit vectors, and no key comes twice within `d_k` tokens, nothing decays, and writes are full.
    """
    rng = np.random.default_rng(seed)
    order = np.stack([rng.permutation(shape.d_k) for _ in range(shape.key_heads)], axis=1)
    key = np.eye(shape.d_k)[order[np.arange(tokens) % shape.d_k]]
    query = np.eye(shape.d_k)[rng.integers(0, shape.d_k, (tokens, shape.key_heads))]
    value = rng.standard_normal((tokens, shape.heads, shape.d_v))

    def stack(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.repeat(x[None], rows, axis=0)).to(torch.float32)

    decay_shape = (tokens, shape.heads, shape.d_k) if recurrence is Recurrence.KDA else (tokens, shape.heads)
    return TokenInputs(
        query=stack(query),
        key=stack(key),
        value=stack(value),
        log_decay=stack(np.zeros(decay_shape)),
        beta=None if recurrence is Recurrence.MAMBA2 else stack(np.ones((tokens, shape.heads))),
    )


FLOAT32_ARMS = ("shared:fp32@L=16", "separate:fp32/fp32@L=21")


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_float32_states_follow_the_recurrence(recurrence: Recurrence) -> None:
    """Windows of one piece, ragged last windows, windows of several pieces, decays that empty the state."""
    tokens = 25
    text = make_inputs(recurrence, SMALL, tokens)
    strong = text.log_decay.copy()
    strong[7] = -200.0
    text = replace(text, log_decay=strong)
    inputs = to_torch([text] * 2, torch.float32)
    outputs = run(bank_of(FLOAT32_ARMS), recurrence, inputs)
    exact = to_torch([text] * 2, torch.float32).map(lambda x: x.double())
    truth = expected(
        replace(
            text,
            **{
                name: getattr(exact, name)[0].numpy()
                for name in ("query", "key", "value", "log_decay", "beta")
                if getattr(exact, name) is not None
            },
        ),
        Policy.parse("shared:fp32@L=16"),
        lambda state, **_: state.copy(),
    ).outputs
    for row in range(2):
        assert relative_error(outputs[row], truth) < bound(SMALL, tokens)
    # Planted: a decay that is off by 2**-18 of itself, as a careless exponential would make it, is beyond the bound.
    off = run(bank_of(FLOAT32_ARMS[:1]), recurrence, replace(cut(inputs, 0, tokens), **_first_row_off(inputs)))
    assert relative_error(off[0], truth) > bound(SMALL, tokens)


def _first_row_off(inputs: TokenInputs) -> dict[str, torch.Tensor | None]:
    first = {
        name: None if getattr(inputs, name) is None else getattr(inputs, name)[:1]
        for name in ("query", "key", "value", "beta")
    }
    return {**first, "log_decay": inputs.log_decay[:1] + 2.0**-15}


EXACT_ARMS = (
    "conventional:fp8+sr",
    "shared:nvfp4@L=8",
    "shared:fp8+sr@L=5",
    "separate:nvfp4+sr/fp16+sr@L=8",
    "separate:mxfp8/bf16@L=20",
)
EXACT_SEQUENCES = (0, 3, 2**32 - 1, 3, 0)


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_stores_and_outputs_are_those_of_pytorch(recurrence: Recurrence) -> None:
    """Formats, random words, copies, windows and cuts of the calls, all in one bank, bit for bit."""
    shape = Shape(heads=2, key_heads=1, d_v=5, d_k=64)
    inputs = exact_inputs(recurrence, shape, len(EXACT_ARMS), 23)
    # Inputs of any strides.
    inputs = inputs.map(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    assert not inputs.value.is_contiguous()
    by_torch = bank_of(EXACT_ARMS, sequences=EXACT_SEQUENCES, execution=Execution())
    by_triton = bank_of(EXACT_ARMS, sequences=EXACT_SEQUENCES)
    want = run_bank(by_torch, recurrence, inputs, chunk=18)
    got = run(by_triton, recurrence, inputs, chunk=18)
    assert np.array_equal(got, want)
    states = by_triton.checkpoints[LAYER].states.cpu()
    assert torch.equal(states, by_torch.checkpoints[LAYER].states)
    assert by_triton.checkpoints[LAYER].stores == by_torch.checkpoints[LAYER].stores
    # Planted: a read that sees the state after its store, another seed, another window, a shared copy.
    assert not np.array_equal(got, run_bank(bank_of(EXACT_ARMS, execution=Execution()), recurrence, inputs, chunk=18))
    for row, wrong in ((1, "shared:nvfp4@L=7"), (2, "shared:fp8@L=5"), (3, "shared:fp16+sr@L=8")):
        one = inputs.map(lambda x: x[:1])
        other = run_bank(bank_of([wrong], sequences=[EXACT_SEQUENCES[row]], execution=Execution()), recurrence, one)
        assert not np.array_equal(got[row], other[0]), wrong


def test_padding_prompts_and_roll_back_are_those_of_pytorch() -> None:
    shape = Shape(heads=2, key_heads=2, d_v=5, d_k=32)
    arms = ["shared:fp8@L=8", "separate:nvfp4/fp32@L=4"]
    inputs = exact_inputs(Recurrence.GDN, shape, 2, 24)
    valid = torch.ones(2, 24, dtype=torch.bool)
    valid[0, :3] = False
    valid[1, 7] = False

    def outputs(execution: Execution) -> list[torch.Tensor]:
        bank = bank_of(arms, execution=execution, prompt=True)
        put = on_device if execution == TRITON else lambda x: x
        first = bank.advance(LAYER, Recurrence.GDN, put(cut(inputs, 0, 9)), valid=valid[:, :9])
        bank.hand_over()
        second = bank.advance(LAYER, Recurrence.GDN, put(cut(inputs, 9, 15)), valid=valid[:, 9:15])
        bank.roll_back([2, 1])
        third = bank.advance(LAYER, Recurrence.GDN, put(cut(inputs, 15, 24)))
        return [x.cpu() for x in (first, second, third, bank.checkpoints[LAYER].states)]

    for got, want in zip(outputs(TRITON), outputs(Execution()), strict=True):
        assert torch.equal(got, want)


def test_results_do_not_depend_on_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of every kind, walked window by window, have the bits of rows walked at once; more than one slab is made."""
    arms = ("conventional:fp32", "shared:nvfp4+sr@L=16", "separate:nvfp4/fp16+sr@L=16", "conventional:fp16+sr")
    shape = Shape(heads=2, key_heads=1, d_v=5, d_k=64)
    inputs = to_torch([make_inputs(Recurrence.GDN, shape, 41)] * len(arms), torch.float32)
    found: list[tuple[np.ndarray, torch.Tensor]] = []
    for elements in (1 << 28, 1):
        monkeypatch.setattr("replayssm.replay._KERNEL_SLAB_ELEMENTS", elements)
        bank = bank_of(arms)
        found.append((run(bank, Recurrence.GDN, inputs), bank.checkpoints[LAYER].states))
        made = [len(plan.slabs) for plan in bank._plans.values()]  # pyright: ignore[reportPrivateUsage]
        assert (max(made) > 3) == (elements == 1)
    assert np.array_equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_an_observer_sees_every_store() -> None:
    shape = Shape(heads=2, key_heads=1, d_v=5, d_k=32)
    arms = ["shared:fp8+sr@L=5", "separate:nvfp4/fp16@L=8"]
    inputs = exact_inputs(Recurrence.MAMBA2, shape, 2, 16)

    def events(execution: Execution) -> list[tuple[int, int, int, bytes]]:
        seen: list[tuple[int, int, int, bytes]] = []

        def observe(event: StoreEvent) -> None:
            assert event.layer == LAYER
            for row, copy, token, state in zip(event.rows, event.copies, event.tokens, event.states, strict=True):
                seen.append((int(row), int(copy), int(token), state.cpu().numpy().tobytes()))

        bank = bank_of(arms, execution=execution, observer=observe)
        run_bank(bank, Recurrence.MAMBA2, on_device(inputs) if execution == TRITON else inputs)
        assert len(seen) == bank.checkpoints[LAYER].stores
        return sorted(seen)

    assert events(TRITON) == events(Execution())


@pytest.mark.parametrize("products", ["bf16", "tf32"])
def test_coarser_products_are_coarser(products: str) -> None:
    tokens = 16
    text = make_inputs(Recurrence.GDN, SMALL, tokens)
    inputs = to_torch([text], torch.float32)
    truth = expected(text, Policy.parse("shared:fp32@L=16"), lambda state, **_: state.copy()).outputs
    outputs = run(
        bank_of(["shared:fp32@L=16"], execution=Execution.parse(f"triton:{products}")), Recurrence.GDN, inputs
    )
    error = relative_error(outputs[0], truth)
    assert error < bound(SMALL, tokens, unit=2.0**-8 if products == "bf16" else 2.0**-11)
    if products == "bf16" or DEVICE.type == "cuda":
        # Otherwise the products were not what was asked for.
        assert error > bound(SMALL, tokens)


def test_pieces_of_windows() -> None:
    """Each token once and in order, a store after the last piece of each complete window, one write per row."""
    bank = bank_of(["shared:fp8@L=40", "shared:fp8@L=7"], execution=Execution())
    inputs = exact_inputs(Recurrence.MAMBA2, SMALL, 2, 90)
    run_bank(bank, Recurrence.MAMBA2, cut(inputs, 0, 3))
    slabs = bank._plan(bank.checkpoints[LAYER], cut(inputs, 3, 90), None).slabs  # pyright: ignore[reportPrivateUsage]
    flat: dict[int, list[int]] = {0: [], 1: []}
    stores: dict[int, list[int]] = {0: [], 1: []}
    for slab in slabs:
        pieces, tokens, counts, windows = piece_tables(slab, np.arange(len(slab.rows)), np.array([-1, 5])[slab.rows])
        assert (windows[:, 0] == np.flatnonzero(slab.rows == 1)).all() and (windows[:, 2] == 1).all()
        assert windows[:, 3].tolist() == list(range(5, 5 + len(windows)))
        for place, row in enumerate(slab.rows.tolist()):
            used = pieces[place, : counts[place]]
            assert (used[:, 0] > 0).all() and (pieces[place, counts[place] :, :2] == 0).all()
            assert ((tokens[place] >= 0).sum(axis=1) == pieces[place, :, 0]).all()
            flat[row] += [t for t in tokens[place].ravel().tolist() if t >= 0]
            stores[row] += used[used[:, 1] > 0, 2].tolist()
            assert (used[:, 1] == 3).sum() == min(1, (used[:, 1] > 0).sum())
    assert flat == {row: list(range(90 * row, 90 * row + 90)) for row in (0, 1)}
    assert stores == {0: [39, 79], 1: list(range(6, 90, 7))}


def test_the_backend_is_explicit() -> None:
    assert str(Execution.parse("triton:tf32")) == "triton:tf32" and str(Execution()) == "torch"
    for text in ("cuda", "triton:fp8", "torch:tf32", "triton:"):
        with pytest.raises(ValueError, match="backend"):
            Execution.parse(text)
    inputs = exact_inputs(Recurrence.GDN, SMALL, 1, 2)
    with pytest.raises(ValueError, match="takes float32 tokens"):
        run(bank_of(["shared:fp8"]), Recurrence.GDN, inputs.map(lambda x: x.double()))
    with pytest.raises(ValueError, match=r"policy shared:int8\[ef=int8\]@L=16: .*use backend torch"):
        run(bank_of(["shared:int8[ef=int8]"]), Recurrence.GDN, inputs)


def test_without_a_gpu_or_the_interpreter_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replayssm.launch.is_interpreted", lambda: False)
    with pytest.raises(ValueError, match="layer 3: Triton kernels need a CUDA device, got cpu; use backend torch"):
        run_bank(bank_of(["shared:fp8"]), Recurrence.GDN, exact_inputs(Recurrence.GDN, SMALL, 1, 2))
