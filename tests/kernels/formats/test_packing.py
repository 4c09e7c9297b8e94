"""Stored bytes: the contract table, their number, and that they load back to what a cast gives."""

import dataclasses

import pytest
import torch
from torch import Tensor

from replayssm.formats import (
    Format,
    PackedState,
    Rounding,
    pack,
    pack_with_feedback,
    store_and_load,
    store_and_load_with_feedback,
)
from tests.kernels.formats.cases import CASES, Case
from tests.kernels.formats.support import D_K, D_V, HEADS, mismatches, oracle_store, regimes, words_for
from tests.kernels.formats.test_cast import texts


def _inputs(case: Case) -> tuple[Tensor, Format, Tensor | None]:
    state = torch.tensor(case.state).view(1, 1, 1, -1)
    return state, Format.parse(case.text), None if case.words is None else torch.tensor([case.words])


def violations(case: Case, packed: PackedState, loaded: Tensor) -> list[str]:
    """Every way in which bytes and values differ from the contract."""
    found = [
        f"{name}: got {bytes(got.tolist()).hex()}, expected {expected}"
        for name, got, expected in (
            ("payload", packed.payload, case.payload),
            ("scales", packed.scales, case.scales),
            ("head_scales", packed.head_scales, case.head_scales),
        )
        if bytes(got.tolist()) != bytes.fromhex(expected)
    ]
    return found + mismatches(loaded.flatten(), torch.tensor(case.loaded))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contract(case: Case) -> None:
    state, fmt, bits = _inputs(case)
    assert violations(case, pack(state, fmt, bits=bits), store_and_load(state, fmt, bits=bits)) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_oracle_keeps_the_contract(case: Case) -> None:
    state, fmt, bits = _inputs(case)
    assert mismatches(oracle_store(state, fmt, bits).flatten(), torch.tensor(case.loaded)) == []


def test_contract_rejects_swapped_nibbles_and_scales() -> None:
    case = next(case for case in CASES if case.name == "nvfp4 two blocks")
    state, fmt, bits = _inputs(case)
    packed, loaded = pack(state, fmt, bits=bits), store_and_load(state, fmt, bits=bits)
    swapped = dataclasses.replace(packed, payload=packed.payload >> 4 | packed.payload << 4)
    assert violations(case, swapped, swapped.unpack()) != []
    reordered = dataclasses.replace(packed, scales=packed.scales.flip(0))
    assert violations(case, reordered, loaded) != []


@pytest.mark.parametrize("text", texts())
def test_bytes_load_back_to_what_a_cast_gives(text: str) -> None:
    fmt = Format.parse(text)
    states = torch.cat([*regimes().values()])
    bits = words_for(len(states)) if fmt.rounding is Rounding.STOCHASTIC else None
    packed = pack(states, fmt, bits=bits)
    assert mismatches(packed.unpack(), store_and_load(states, fmt, bits=bits)) == []
    bits_per_element = fmt.bits_per_element(heads=HEADS, d_v=D_V, d_k=D_K)
    assert packed.nbytes * 8 == bits_per_element * states.numel()
    assert packed.shape == states.shape


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fp32", 32), ("bf16", 16), ("fp16+sr", 16), ("fp8", 8 + 32 / 128), ("fp8[head]", 8 + 32 / 2**14),
        ("fp8[tensor]", 8 + 32 / 2**19), ("fp8[tile=32]", 8 + 32 / 2**12), ("fp8[block=64,scale=fp16]", 8 + 16 / 64),
        ("fp8[scale=none]", 8), ("int8", 8.25), ("int16", 16.25), ("int8[ef=int8]", 16.5),
        ("nvfp4", 4 + 8 / 16 + 32 / 2**14), ("mxfp8", 8.25), ("mxfp4+sr", 4.25), ("int8[ef=nvfp4]", 12.75 + 32 / 2**14),
    ],
)  # fmt: skip
def test_bits_per_element(text: str, expected: float) -> None:
    assert Format.parse(text).bits_per_element(heads=32, d_v=128, d_k=128) == expected


@pytest.mark.parametrize("text", ["fp8", "nvfp4", "mxfp4", "fp16", "int16"])
def test_no_rows(text: str) -> None:
    empty = torch.empty(0, HEADS, D_V, D_K)
    packed = pack(empty, Format.parse(text))
    assert packed.nbytes == 0 and packed.unpack().shape == empty.shape


@pytest.mark.parametrize(
    "text", ["int8[ef=int8]", "fp8[ef=fp8[tile=2]]+sr", "nvfp4[ef=mxfp4]", "bf16[ef=bf16]", "int8[ef=fp32]"]
)
def test_error_feedback_bytes(text: str) -> None:
    fmt = Format.parse(text)
    bits = words_for(1) if fmt.rounding is Rounding.STOCHASTIC else None
    residual = None
    for name in ("normal", "halfway", "wide", "not finite"):
        state = regimes()[name]
        loaded, lost = store_and_load_with_feedback(state, residual, fmt, bits=bits)
        packed, packed_lost = pack_with_feedback(state, residual, fmt, bits=bits)
        assert mismatches(packed.unpack(), loaded) == []
        assert mismatches(packed_lost.unpack(), lost) == []
        stored = packed.nbytes + packed_lost.nbytes
        assert stored * 8 == fmt.bits_per_element(heads=HEADS, d_v=D_V, d_k=D_K) * state.numel()
        residual = lost


def test_pack_refuses_error_feedback() -> None:
    with pytest.raises(ValueError, match="pack_with_feedback"):
        pack(regimes()["normal"], Format.parse("int8[ef=int8]"))
