"""Layers, tokens and runs for the tests of the decode kernels: tiny, because the interpreter is slow."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replayssm.decode import DecodeToken, Launch, advance, decode_step
from replayssm.decode_reference import ReferenceDecoder, token_inputs
from replayssm.policy import Policy
from replayssm.records import Recurrence
from replayssm.slots import DecodeCursors, DecodeSlots, LayerShape, Mamba2Constants

EPS = 2.0**-23
SLOTS = 4

Fault = Callable[[DecodeSlots, DecodeCursors], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is run; `slots` of each step, −1 for padding."""

    recurrence: str
    policy: str
    heads: int = 2
    key_heads: int = 1
    d_k: int = 16
    d_v: int = 5
    dtype: torch.dtype = torch.float32
    query_dtype: torch.dtype | None = None
    steps: tuple[tuple[int, ...], ...] = ((2, -1), (0, 2), (-1, 2), (2, 0), (0, 2), (2, 0))
    launch: Launch | None = None
    normalise: bool = True
    exact: bool = False
    strided: bool = False


def layer(case: Case, generator: torch.Generator) -> tuple[DecodeSlots, DecodeCursors]:
    """Slots whose records are poisoned and whose states are random."""
    shape = LayerShape(
        recurrence=Recurrence(case.recurrence),
        key_heads=case.key_heads,
        heads=case.heads,
        d_k=case.d_k,
        d_v=case.d_v,
    )
    constants = None
    if shape.recurrence is Recurrence.MAMBA2:
        rate = torch.zeros(case.heads) if case.exact else -torch.rand(case.heads, generator=generator) * 2
        constants = Mamba2Constants(
            decay_rate=rate,
            dt_bias=torch.randn(case.heads, generator=generator),
            skip=torch.zeros(case.heads) if case.exact else torch.randn(case.heads, generator=generator),
            dt_limit=(1.0, 1.0) if case.exact else (0.001, 3.0),
        )
    slots = DecodeSlots(
        shape,
        Policy.parse(case.policy),
        slots=SLOTS,
        input_dtype=case.dtype,
        normalise=case.normalise and not case.exact,
        constants=constants,
        seed=2**40 + 7,
        layer=3,
    )
    for record in slots.records.values():
        record.fill_(torch.nan)
    cursors = DecodeCursors(slots=SLOTS, device="cpu")
    cursors.tokens += torch.tensor([3, 14, 15, 92])
    slots.admit(torch.arange(SLOTS), torch.randn(SLOTS, *shape.state, generator=generator), cursors)
    return slots, cursors


def token(case: Case, step: int, generator: torch.Generator) -> DecodeToken:
    """One random token per row; with `exact`, one whose update of a state is a single rounded sum."""
    rows = len(case.steps[step])
    channels = (case.d_k,) if case.recurrence == "kda" else ()

    def draw(*size: int) -> Tensor:
        if not case.strided:
            return torch.randn(*size, generator=generator)
        # The last axis every other element, the first two swapped in memory.
        wide = torch.full((size[1], size[0], *size[2:-1], 2 * size[-1]), torch.nan)
        wide[..., ::2] = torch.randn(size[1], size[0], *size[2:], generator=generator)
        return wide[..., ::2].transpose(0, 1)

    vectors = {
        "query": draw(rows, case.key_heads, case.d_k),
        "key": draw(rows, case.key_heads, case.d_k),
        "value": draw(rows, case.heads, case.d_v),
    }
    if case.exact:
        vectors["key"] = torch.zeros(rows, case.key_heads, case.d_k)
        vectors["key"][..., step % case.d_k] = 1.0
        vectors["value"] = vectors["value"].mul(4).round()
    dtypes = {"query": case.query_dtype or case.dtype}
    vectors = {k: v.to(dtypes.get(k, case.dtype)) for k, v in vectors.items()}
    if case.recurrence == "mamba2":
        return DecodeToken(**vectors, dt=torch.randn(rows, case.heads, generator=generator))
    decay = -torch.rand(rows, case.heads, *channels, generator=generator) * 2
    beta = torch.rand(rows, case.heads, generator=generator)
    return DecodeToken(
        **vectors,
        log_decay=torch.zeros_like(decay) if case.exact else decay,
        beta=torch.ones_like(beta) if case.exact else beta,
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run gave.

    Attributes:
        slots: As the kernels left them.
        cursors: Likewise.
        reference: The oracle, which has read the same tokens.
        output_error: Largest error of an output, over its bound.
        state_error: Largest error of a stored element, over the largest element of its state.
        outputs: Of each step, NaN where nothing was written.
    """

    slots: DecodeSlots
    cursors: DecodeCursors
    reference: ReferenceDecoder
    output_error: float
    state_error: float
    outputs: list[Tensor]


def run(case: Case, *, fault: Fault | None = None, dtype: torch.dtype = torch.float64) -> Outcome:
    """Run the kernels and the oracle side by side; `fault` tampers with the slots after each step.

    An output is a sum of `d_k` products with a stored row and, per record, of one product with a score that is itself a
    sum of `d_k` products. It errs by at most the number of terms times eps times the sum of their magnitudes; the
    writes of a delta rule err likewise and enter once more.
    """
    generator = torch.Generator().manual_seed(5)
    slots, cursors = layer(case, generator)
    reference = ReferenceDecoder(slots, dtype=dtype, tokens=cursors.tokens.tolist())
    window = slots.policy.window_tokens
    written = torch.zeros(SLOTS)
    worst = 0.0
    outputs: list[Tensor] = []
    for step, index in enumerate(case.steps):
        one = token(case, step, generator)
        out = torch.full((len(index), case.d_v, case.heads), torch.nan).transpose(1, 2)
        chosen = torch.tensor(index, dtype=torch.int32)
        decode_step(slots, cursors, one, chosen, out=out, launch=case.launch)
        advance(cursors, chosen, window=window)
        inputs, _ = token_inputs(slots, one, torch.float64)
        norms = inputs.query[:, 0].norm(dim=-1).amax(-1) * inputs.key[:, 0].norm(dim=-1).amax(-1).clamp_min(1)
        sizes = [max(float(s.abs().amax()) for s in reference._states[i]) for i in index]
        wanted = reference.step(one, list(index))
        for row, slot in enumerate(index):
            if slot < 0:
                assert bool(out[row].isnan().all()), "a padded row was written"
                continue
            value = float(inputs.value[row].abs().max())
            written[slot] = max(float(written[slot]), value + case.d_k**0.5 * sizes[row])
            magnitude = case.d_k**0.5 * sizes[row] * float(norms[row]) + window * float(written[slot] * norms[row])
            bound = EPS * (2 * case.d_k + 4 * window + 16) * magnitude
            error = float((out[row] - wanted[row]).abs().max())
            worst = max(worst, error / bound if error == error else torch.inf)
        outputs.append(out)
        if fault is not None:
            fault(slots, cursors)
    states = [slots.copies[0].packed(s).unpack() for s in range(SLOTS)]
    errors = [float((x - reference.state(s)).abs().max() / x.abs().max()) for s, x in enumerate(states)]
    return Outcome(
        slots=slots,
        cursors=cursors,
        reference=reference,
        output_error=worst,
        state_error=max(torch.inf if e != e else e for e in errors),
        outputs=outputs,
    )


def stored_bytes(slots: DecodeSlots, slot: int) -> list[Any]:
    """Everything that one slot holds."""
    kept = [x[slot].clone() for c in slots.copies for x in (c.payload, c.scales, c.head_scales)]
    return [*kept, *(r[slot].clone() for r in slots.records.values() if r.numel())]
