"""Rows that move between banks while their sequences decode: they must go on as if they had never been moved."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from replayssm.backend import Backend, Execution
from replayssm.policy import Policy
from replayssm.records import Recurrence
from replayssm.replay import StateBank
from replayssm.schedule import Cursors
from tests.kernels.against_oracle import (
    GROUPED,
    LAYER,
    SEED,
    ProjectStore,
    Shape,
    cut,
    disagreements,
    expected,
    make_inputs,
    run_bank,
    to_torch,
)
from tests.kernels.triton.test_window_triton import exact_inputs, on_device
from tests.oracles import recurrence as oracle

POLICIES = (
    "conventional:fp32",
    "conventional:bf16",
    "shared:fp8+sr@L=5",
    "separate:nvfp4/fp16+sr@L=4",
    "separate:nvfp4/fp32@L=4",
)
PROMPTS = (3, 7)
MOVES = (2, 9)
"""Tokens that each bank decodes before its rows are moved; windows of 4 and 5 are then half full."""
TOKENS = 40


def sequences() -> list[tuple[int, str, int]]:
    """Bank, policy and sequence number of each row."""
    return [(bank, text, 10 * bank + i) for bank in (0, 1) for i, text in enumerate(POLICIES)]


def moved(recurrence: Recurrence, order: Sequence[int]) -> tuple[list[oracle.Array], list[oracle.Array]]:
    """What the rows say after they were joined in `order`, and what the oracle says of each sequence alone."""
    rows = sequences()
    inputs = [make_inputs(recurrence, GROUPED, TOKENS, seed=sequence) for _, _, sequence in rows]
    banks: list[StateBank] = []
    for bank in (0, 1):
        members = [i for i, row in enumerate(rows) if row[0] == bank]
        built = StateBank(
            [Policy.parse(rows[i][1]) for i in members],
            sequences=[rows[i][2] for i in members],
            seed=SEED,
            prompt=True,
        )
        tokens = to_torch([inputs[i] for i in members])
        run_bank(built, recurrence, cut(tokens, 0, PROMPTS[bank]))
        built.hand_over()
        run_bank(built, recurrence, cut(tokens, PROMPTS[bank], PROMPTS[bank] + MOVES[bank]), chunk=1)
        banks.append(built)
    chosen = [[i - len(POLICIES) * bank for i in order if rows[i][0] == bank] for bank in (0, 1)]
    order = [i for bank in (0, 1) for i in order if rows[i][0] == bank]
    joined = StateBank.join(banks, chosen)
    starts = [PROMPTS[rows[i][0]] + MOVES[rows[i][0]] for i in order]
    length = TOKENS - max(starts)
    rest = [cut(to_torch([inputs[i]]), start, start + length) for i, start in zip(order, starts, strict=True)]
    together = run_bank(joined, recurrence, stacked(rest), chunk=3)
    truth: list[oracle.Array] = []
    for i, start in zip(order, starts, strict=True):
        bank, text, sequence = rows[i]
        policy = Policy.parse(text)
        store = ProjectStore(policy=policy, sequence=sequence)
        outputs = expected(inputs[i], policy, store, prompt_tokens=PROMPTS[bank]).outputs
        truth.append(outputs[start : start + length])
    return list(together), truth


def stacked(parts: Sequence[Any]) -> Any:
    names = ("query", "key", "value", "log_decay", "beta")
    joined = {n: [getattr(p, n) for p in parts] for n in names}
    return type(parts[0])(**{n: None if v[0] is None else torch.cat(v) for n, v in joined.items()})


@pytest.mark.parametrize(
    ("recurrence", "order"),
    [
        (Recurrence.MAMBA2, range(10)),
        (Recurrence.GDN, range(10)),
        (Recurrence.GDN, (9, 3, 0, 3, 7)),
        (Recurrence.KDA, (9, 3, 0, 3, 7)),
        (Recurrence.GDN, (2,)),
    ],
    ids=["all of mamba2", "all of gdn", "some of gdn, one twice", "some of kda, one twice", "one of gdn"],
)
def test_a_row_that_moved_goes_on_as_if_it_had_not(recurrence: Recurrence, order: Sequence[int]) -> None:
    actual, truth = moved(recurrence, order)
    assert len(actual) == len(order)
    assert not disagreements([str(i) for i in range(len(truth))], actual, truth)


@pytest.mark.parametrize("lost", ["seen", "remaining", "records"])
def test_a_cursor_that_gets_lost_on_the_way_is_noticed(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = Cursors.of

    def forgetful(parts: Sequence[Cursors], rows: Sequence[Sequence[int]]) -> Cursors:
        found = of(parts, rows)
        values = {name: getattr(found, name) for name in ("records", "remaining", "seen")}
        values[lost] = np.maximum(values[lost] - 1, 0 if lost != "remaining" else 1)
        return Cursors(**values)

    monkeypatch.setattr(Cursors, "of", forgetful)
    actual, truth = moved(Recurrence.GDN, range(10))
    assert disagreements([str(i) for i in range(10)], actual, truth)


def test_what_cannot_be_joined_is_refused() -> None:
    policy = Policy.parse("shared:fp32")
    reading = StateBank([policy], sequences=[0], seed=0, prompt=True)
    with pytest.raises(ValueError, match="still reading its prompt"):
        StateBank.join([reading])
    other = [StateBank([policy], sequences=[0], seed=seed) for seed in (0, 1)]
    with pytest.raises(ValueError, match="one seed"):
        StateBank.join(other)
    kernels = [StateBank([policy], sequences=[0], seed=0, execution=Execution.parse(e)) for e in ("torch", "triton")]
    with pytest.raises(ValueError, match="one way to walk"):
        StateBank.join(kernels)
    inputs = to_torch([make_inputs(Recurrence.GDN, GROUPED, 2)])
    used = StateBank([policy], sequences=[0], seed=0)
    used.advance(LAYER, Recurrence.GDN, inputs)
    with pytest.raises(ValueError, match="same layers"):
        StateBank.join([used, other[0]])
    with pytest.raises(ValueError, match="at least one"):
        StateBank.join([used], [[]])


def test_what_error_feedback_has_lost_moves_too() -> None:
    policies = [Policy.parse("shared:int8[ef=int8]@L=3"), Policy.parse("conventional:bf16")]
    tokens = to_torch([make_inputs(Recurrence.MAMBA2, GROUPED, 20, seed=s) for s in (0, 1)])
    whole = StateBank(policies, sequences=[0, 1], seed=SEED)
    truth = run_bank(whole, Recurrence.MAMBA2, tokens)
    bank = StateBank(policies, sequences=[0, 1], seed=SEED)
    run_bank(bank, Recurrence.MAMBA2, cut(tokens, 0, 8))
    part = StateBank.join([bank], [[1, 0]])
    got = run_bank(part, Recurrence.MAMBA2, stacked([cut(tokens, 8, 20)]).map(lambda x: x.flip(0)))
    assert not disagreements(["bf16", "int8"], list(got), [truth[1, 8:], truth[0, 8:]])


def test_joined_rows_go_on_under_the_kernels_with_random_bits_of_their_own_sequences() -> None:
    shape = Shape(heads=1, key_heads=1, d_v=4, d_k=16)
    inputs = exact_inputs(Recurrence.MAMBA2, shape, 2, 14)
    policy = Policy.parse("separate:fp8+sr/fp16+sr@L=3")

    def outputs(execution: Execution) -> torch.Tensor:
        put = on_device if execution.backend is Backend.TRITON else (lambda x: x)
        banks: list[StateBank] = []
        for row, (sequence, count) in enumerate(((8, 4), (5, 5))):
            own = cut(inputs, 0, count).map(lambda x, row=row: x[row : row + 1])
            bank = StateBank([policy], sequences=[sequence], seed=1, execution=execution, prompt=True)
            bank.advance(LAYER, Recurrence.MAMBA2, put(own))
            bank.hand_over()
            banks.append(bank)
        joined = StateBank.join(banks[::-1], [[0], [0]])
        rest = [cut(inputs, 5, 14).map(lambda x: x[1:]), cut(inputs, 4, 13).map(lambda x: x[:1])]
        return joined.advance(LAYER, Recurrence.MAMBA2, put(stacked(rest))).cpu()

    # Every sum of these inputs is exact, so a bit of difference is a wrong state, cursor or random word.
    assert torch.equal(outputs(Execution.parse("triton")), outputs(Execution()))
