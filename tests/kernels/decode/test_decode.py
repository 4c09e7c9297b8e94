"""Decode kernels in Triton's interpreter, against replaying the inputs of each window in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm.decode import DecodeToken, Launch, advance, decode_step, default_launch, prepare_step
from replayssm.decode_arguments import MATRIX
from replayssm.formats import pack
from replayssm.policy import Policy
from replayssm.records import Recurrence
from replayssm.slots import DecodeCursors, DecodeSlots, LayerShape, Mamba2Constants
from tests.kernels.decode.support import SLOTS, Case, Fault, layer, run, stored_bytes, token

pytest.importorskip("triton")

# One store after at most 4 tokens: 4 updates of 3 roundings each on an element, and the writes' own errors.
STATE_LIMIT = 1e-6

FLOAT_CASES = [
    Case(recurrence="mamba2", policy="shared:fp32@L=3"),
    Case(recurrence="mamba2", policy="conventional:fp32", d_k=12),
    Case(recurrence="mamba2", policy="separate:fp16/fp32@L=3", dtype=torch.bfloat16),
    Case(recurrence="gdn", policy="shared:fp32@L=4", launch=Launch(rows=2, warps=1)),
    Case(recurrence="gdn", policy="shared:fp32@L=2", strided=True, d_v=8, launch=Launch(rows=8, warps=1)),
    Case(recurrence="gdn", policy="conventional:fp32", normalise=False, d_k=12),
    Case(recurrence="gdn", policy="separate:nvfp4/fp32@L=3", dtype=torch.bfloat16),
    Case(recurrence="kda", policy="shared:fp32@L=3", d_k=12, strided=True),
    Case(recurrence="kda", policy="separate:fp8/fp32@L=3", key_heads=2),
    Case(recurrence="gdn", policy="shared:fp32@L=3", launch=Launch(rows=2, warps=1, tiles=2, eager=True)),
    Case(recurrence="mamba2", policy="shared:fp32@L=3", launch=Launch(rows=2, warps=1, tiles=3, eager=True)),
    Case(
        recurrence="gdn",
        policy="shared:fp32@L=3",
        launch=Launch(rows=4, warps=1, tiles=2, flush_rows=2, flush_warps=1, flush_tiles=3),
    ),
    Case(
        recurrence="mamba2",
        policy="separate:fp16/fp32@L=3",
        launch=Launch(rows=4, warps=1, tiles=2, flush_rows=2, flush_warps=1, flush_tiles=3),
    ),
    # Writes computed anew from a window of several records.
    Case(
        recurrence="gdn",
        policy="separate:nvfp4/fp32@L=5",
        heads=1,
        steps=((2, 1), (2, 1), (2, -1), (2, 0), (2, 0), (2, 1)),
        launch=Launch(rows=4, warps=1, tiles=2, stages=2, flush_rows=4, flush_warps=1, flush_tiles=2),
    ),
    Case(recurrence="gdn", policy="separate:fp8/fp32@L=4", heads=1, normalise=False, launch=Launch(rows=2, warps=1)),
]


@pytest.mark.parametrize("case", FLOAT_CASES, ids=lambda c: f"{c.recurrence}-{c.policy}")
def test_outputs_and_float32_states_within_their_bounds(case: Case) -> None:
    outcome = run(case)
    assert outcome.output_error <= 1
    assert outcome.state_error <= STATE_LIMIT


LOW = ["shared:fp8", "shared:nvfp4", "shared:mxfp8", "shared:mxfp4", "shared:int8", "shared:fp16", "shared:fp8_e5m2"]


@pytest.mark.parametrize("policy", LOW)
def test_outputs_read_through_low_precision_states(policy: str) -> None:
    # Before the first flush: afterwards a rounding may fall the other way.
    case = Case(recurrence="gdn", policy=f"{policy}@L=4", d_k=32, steps=((2, 1), (2, -1), (1, 2)))
    outcome = run(case)
    assert outcome.output_error <= 1


@pytest.mark.parametrize("recurrence", ["gdn", "mamba2"])
@pytest.mark.parametrize("read", ["fp8", "fp8_e5m2", "int8", "nvfp4", "mxfp8", "mxfp4"])
def test_codes_meet_bfloat16_vectors_as_matrices(recurrence: str, read: str) -> None:
    case = Case(
        recurrence=recurrence,
        policy=f"separate:{read}/fp32@L=3",
        dtype=torch.bfloat16,
        d_k=128 if read.endswith("fp4") else 72,
        d_v=20,
        steps=((2, 1), (2, -1), (1, 2)),
    )
    if read.startswith("mx") and case.d_k == 72:
        case = replace(case, d_k=96)
    slots, cursors, *_ = layer(case, torch.Generator().manual_seed(0))
    one = token(case, 0, torch.Generator().manual_seed(0))
    out = torch.empty_like(one.value)
    prepared = prepare_step(slots, cursors, one, torch.tensor([2, 1], dtype=torch.int32), out=out)
    assert prepared.arguments["FORM"] == MATRIX
    outcome = run(case)
    assert outcome.output_error <= 1
    assert outcome.state_error <= STATE_LIMIT


@pytest.mark.parametrize(
    ("recurrence", "policy"),
    [("gdn", "shared:fp32@L=3"), ("gdn", "separate:nvfp4/fp32@L=3"), ("mamba2", "separate:fp8/fp32@L=3")],
)
def test_queries_may_have_another_dtype_than_keys(recurrence: str, policy: str) -> None:
    """A layer that normalises its queries itself hands them over in float32, beside bfloat16 keys."""
    case = Case(
        recurrence=recurrence,
        policy=policy,
        dtype=torch.bfloat16,
        query_dtype=torch.float32,
        d_k=128,
        normalise=False,
        steps=((2, 1), (2, -1), (1, 2)),
    )
    outcome = run(case)
    assert outcome.output_error <= 1


EXACT = [
    ("mamba2", "shared:nvfp4+sr@L=3"),
    ("mamba2", "shared:bf16@L=2"),
    ("mamba2", "separate:mxfp4/fp16+sr@L=2"),
    ("gdn", "shared:fp8@L=3"),
    ("gdn", "shared:fp16+sr@L=2"),
    ("gdn", "separate:nvfp4/int8+sr@L=3"),
    ("gdn", "conventional:int8+sr"),
    ("gdn", "shared:fp8[tile=4]+sr@L=2"),
    ("kda", "shared:mxfp8+sr@L=3"),
    ("kda", "separate:fp8[head]/bf16+sr@L=2"),
]


@pytest.mark.parametrize(("recurrence", "policy"), EXACT)
def test_stored_bytes_are_those_of_pack(recurrence: str, policy: str) -> None:
    """Every update adds one number to an element, so the working state has one value and the bytes have to be equal."""
    d_v = 4 if "tile" in policy else 5
    case = Case(
        recurrence=recurrence, policy=policy, exact=True, heads=1, d_k=32, d_v=d_v, steps=((2, -1), (2, 0), (0, 2))
    )
    outcome = run(case, dtype=torch.float32)
    flushed = 0
    for slot in range(SLOTS):
        for number, copy in enumerate(outcome.slots.copies):
            ours, theirs = copy.packed(slot), outcome.reference.copies[slot][number]
            for name in ("scales", "head_scales"):
                assert torch.equal(getattr(ours, name), getattr(theirs, name)), (slot, number, name)
            # A zero may have either sign: what the records add up to is added to the state at once.
            assert torch.equal(ours.unpack(), theirs.unpack().view_as(ours.unpack())), (slot, number)
            flushed += outcome.cursors.tokens[slot] > 16 and slot == 2
    assert flushed, "nothing was stored"


@pytest.mark.parametrize("recurrence", ["mamba2", "gdn"])
def test_a_head_stored_tile_by_tile_has_the_scale_of_all_its_tiles(recurrence: str) -> None:
    launch = Launch(rows=4, warps=1, tiles=2, flush_rows=2, flush_warps=1, flush_tiles=3)
    case = Case(recurrence=recurrence, policy="separate:nvfp4/fp32@L=3", heads=1, d_k=32, launch=launch)
    outcome = run(case)
    slot = case.steps[0][0]
    main, read = outcome.slots.copies
    expected = pack(main.packed(slot).unpack()[None].view(1, *outcome.slots.shape.state), read.format)
    for name in ("payload", "scales", "head_scales"):
        got = getattr(read.packed(slot), name).flatten()
        assert torch.equal(got, getattr(expected, name).view(torch.uint8).flatten()), name
    assert not torch.equal(main.payload[slot], layer(case, torch.Generator().manual_seed(0))[0].copies[0].payload[slot])


def cut_writes(slots: DecodeSlots, _: DecodeCursors) -> None:
    slots.records["write"].copy_(slots.records["write"].to(torch.bfloat16))


def cut_keys(slots: DecodeSlots, _: DecodeCursors) -> None:
    slots.records["key"].copy_(slots.records["key"].to(torch.bfloat16))


def no_decay(slots: DecodeSlots, _: DecodeCursors) -> None:
    slots.records["log_decay"].zero_()


def no_norm(slots: DecodeSlots, _: DecodeCursors) -> None:
    slots.records["norm"].fill_(1.0)


def no_solution(slots: DecodeSlots, _: DecodeCursors) -> None:
    slots.records["solution"].copy_(torch.eye(slots.policy.window_tokens).expand_as(slots.records["solution"]))


def late_flush(_: DecodeSlots, cursors: DecodeCursors) -> None:
    cursors.records.sub_(1).clamp_min_(0)


def cut_state(slots: DecodeSlots, _: DecodeCursors) -> None:
    slots.copies[0].payload.copy_(slots.copies[0].payload.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("recurrence", "fault"),
    [
        ("gdn", cut_writes),
        ("gdn", cut_keys),
        ("gdn", no_decay),
        ("gdn", no_norm),
        ("gdn", no_solution),
        ("gdn", late_flush),
        ("mamba2", cut_keys),
        ("mamba2", no_decay),
        ("kda", no_decay),
        ("mamba2", cut_state),
    ],
)
def test_planted_faults_are_outside_the_bounds(recurrence: str, fault: Fault) -> None:
    policy = "separate:fp32/fp32@L=3" if fault is no_solution else "shared:fp32@L=3"
    outcome = run(Case(recurrence=recurrence, policy=policy, heads=1), fault=fault)
    assert outcome.output_error > 1 or outcome.state_error > STATE_LIMIT


def test_slots_that_are_not_named_keep_every_byte() -> None:
    case = Case(recurrence="gdn", policy="separate:nvfp4/fp16@L=2", d_k=32, steps=((2, -1), (2, -1)))
    before, _ = layer(case, torch.Generator().manual_seed(5))
    outcome = run(case)
    for slot in (0, 1, 3):
        for old, new in zip(stored_bytes(before, slot), stored_bytes(outcome.slots, slot), strict=True):
            assert torch.equal(old.nan_to_num(-7), new.nan_to_num(-7)) if old.is_floating_point() else old.equal(new)
    assert outcome.cursors.tokens.tolist() == [3, 14, 17, 92]
    assert outcome.cursors.records.tolist() == [0, 0, 0, 0]


def test_the_cut_of_the_work_changes_nothing() -> None:
    case = Case(recurrence="gdn", policy="shared:fp32@L=2", heads=1, steps=((2, 0), (2, 0)))
    whole = run(case)
    cut = run(replace(case, launch=Launch(rows=2, warps=1)))
    for a, b in zip(whole.outputs, cut.outputs, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(whole.slots.copies[0].payload, cut.slots.copies[0].payload)


def test_cursors_advance_and_wrap_where_a_slot_is_named() -> None:
    cursors = DecodeCursors(slots=4, device="cpu")
    cursors.records[:] = torch.tensor([2, 0, 1, 2], dtype=torch.int32)
    advance(cursors, torch.tensor([3, -1, 1, 2], dtype=torch.int32), window=3, rows_per_program=2)
    assert cursors.records.tolist() == [2, 1, 2, 0]
    assert cursors.tokens.tolist() == [0, 1, 1, 1]


def on_meta(case: Case, rows: int) -> tuple[DecodeSlots, DecodeCursors, DecodeToken, Tensor, Tensor]:
    shape = LayerShape(recurrence=Recurrence(case.recurrence), key_heads=1, heads=2, d_k=case.d_k, d_v=case.d_v)
    slots = DecodeSlots(shape, Policy.parse(case.policy), slots=SLOTS, input_dtype=torch.float32, device="meta")
    one = token(replace(case, steps=((0,) * rows,)), 0, torch.Generator().manual_seed(0))
    tensors: dict[str, Any] = {k: None if v is None else v.to("meta") for k, v in vars(one).items()}
    moved = DecodeToken(**tensors)
    index = torch.empty(rows, dtype=torch.int32, device="meta")
    return slots, DecodeCursors(slots=SLOTS, device="meta"), moved, index, torch.empty_like(moved.value)


def test_nothing_on_the_device_is_looked_at_before_the_launch() -> None:
    """Tensors without data can be prepared, so a captured graph depends on addresses and shapes alone."""
    case = Case(recurrence="kda", policy="separate:nvfp4/fp16+sr@L=4", d_k=32)
    slots, cursors, one, index, out = on_meta(case, 3)
    prepared = prepare_step(slots, cursors, one, index, out=out)
    assert prepared.grid == (3 * 2,)
    assert set(prepared.arguments) == set(prepared.kernel.arg_names)


@pytest.mark.usefixtures("unchecked_annotations")
def test_launches_and_inputs_that_do_not_fit_are_refused() -> None:
    case = Case(recurrence="gdn", policy="shared:nvfp4@L=4", d_k=32, d_v=40)
    slots, cursors, one, index, out = on_meta(case, 2)
    assert default_launch(slots, 2).flush_rows == 64
    for launch in (Launch(rows=16, warps=4), Launch(rows=64, warps=4, flush_rows=16)):
        with pytest.raises(ValueError, match="all 40 rows"):
            decode_step(slots, cursors, one, index, out=out, launch=launch)
    again, *_ = on_meta(replace(case, policy="separate:nvfp4/fp32@L=4"), 2)
    with pytest.raises(ValueError, match="all 40 rows, which share a scale, got 32"):
        launch = Launch(rows=32, warps=1, tiles=2, flush_rows=16, flush_tiles=2)
        decode_step(again, cursors, one, index, out=out, launch=launch)
    with pytest.raises(ValueError, match="all 40 rows in one tile, for they share a scale, got 2 tiles of 64 rows"):
        decode_step(slots, cursors, one, index, out=out, launch=Launch(rows=64, warps=4, tiles=2))
    with pytest.raises(ValueError, match="int32 slots of 2 rows"):
        decode_step(slots, cursors, one, index.long(), out=out)
    with pytest.raises(ValueError, match="`beta`"):
        decode_step(slots, cursors, replace(one, beta=None), index, out=out)
    with pytest.raises(ValueError, match="dtype of its records"):
        decode_step(slots, cursors, replace(one, key=one.key.half()), index, out=out)
    with pytest.raises(ValueError, match="power of two"):
        plain = on_meta(replace(case, policy="shared:fp32@L=4"), 2)[0]
        decode_step(plain, cursors, one, index, out=out, launch=Launch(rows=3, warps=1))
    with pytest.raises(ValueError, match="error-feedback"):
        on_meta(replace(case, policy="shared:int8[ef=int8]@L=4"), 2)
    with pytest.raises(ValueError, match="cursors of as many slots as the layer has, 4, got 3"):
        decode_step(slots, DecodeCursors(slots=3, device="meta"), one, index, out=out)
    with pytest.raises(ValueError, match=r"of shape \(2, 2, 40, 32\), got \(2, 2, 32, 40\)"):
        slots.admit(torch.tensor([0, 1]), torch.zeros(2, *slots.shape.state).mT, cursors)
    with pytest.raises(ValueError, match="float32, bfloat16 or float16, got torch.float64"):
        DecodeSlots(slots.shape, slots.policy, slots=SLOTS, input_dtype=torch.float64)
    with pytest.raises(ValueError, match="Mamba2Constants"):
        on_meta(Case(recurrence="mamba2", policy="shared:fp32@L=4"), 2)


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("rate", [torch.zeros(1), torch.zeros(2, dtype=torch.float64), torch.zeros(4)[::2]])
def test_constants_that_the_kernels_would_misread_are_refused(rate: Tensor) -> None:
    shape = LayerShape(recurrence=Recurrence.MAMBA2, key_heads=1, heads=2, d_k=16, d_v=16)
    constants = Mamba2Constants(decay_rate=rate, dt_bias=torch.zeros(2), skip=torch.zeros(2))
    with pytest.raises(ValueError, match="contiguous float32 `decay_rate` of 2 heads"):
        DecodeSlots(shape, Policy.parse("shared:fp32"), slots=SLOTS, constants=constants)


@pytest.mark.usefixtures("unchecked_annotations")
def test_shapes_that_no_layer_has_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the key heads"):
        LayerShape(recurrence=Recurrence.GDN, key_heads=2, heads=3, d_k=16, d_v=16)


def test_bytes_of_the_slots_are_counted() -> None:
    case = Case(recurrence="gdn", policy="separate:nvfp4/fp16@L=4", d_k=32, d_v=4)
    slots, *_ = on_meta(case, 2)
    states = 4 * 2 * 4 * 32
    policy_bytes = slots.policy.bits_per_element(heads=2, d_v=4, d_k=32) * states / 8
    records = 4 * (4 * (32 * 4 + 4) + 2 * 4 * (4 * 4 + 4 + 4 * 4 + 4 + 4 * 4))
    assert slots.nbytes == policy_bytes + records
