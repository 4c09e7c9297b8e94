"""`store_and_load` against exact arithmetic, bit for bit, and what it refuses."""

import dataclasses

import pytest
import torch
from torch import Tensor

from replayssm.formats import NAMED_FORMATS, Format, Rounding, ScaleType, store_and_load
from tests.kernels.formats.support import (
    D_K,
    D_V,
    ELEMENTS,
    HEADS,
    Store,
    deciding_words,
    mismatches,
    oracle_store,
    product_store,
    regimes,
    words_for,
)

GRANULARITIES = ("tensor", "head", "row", "tile=2", "block=8", "block=32")


# Regimes in which groups differ most from each other.
GROUPING_REGIMES = ("wide", "zeros", "finite patterns", "not finite")


def texts() -> list[str]:
    """Every named format under every granularity, scale type and rounding that it can have, and some divisors."""
    found: list[str] = []
    grouped: list[str] = []
    for name, entry in NAMED_FORMATS.items():
        found.append(name)
        if entry.format.is_scaled:
            grouped += [f"{name}[{g}]" for g in GRANULARITIES if not (g == "tensor" and entry.format.scale == "e4m3")]
    for name in ("fp8", "fp8_e5m2", "int8", "int16", "nvfp4"):
        found += [f"{name}[block=16,scale={s}]" for s in ScaleType if s is not ScaleType.NONE]
    found += ["fp8[scale=none]", "fp8_e5m2[scale=none]"]
    found += ["fp8[tile=2,max=240]", "fp8[max=500]", "fp8[max=439.04]", "int8[max=100,scale=fp16]", "nvfp4[max=4]"]
    found += ["mxfp8[max=240]", "mxfp4[max=4]", "fp8_e5m2[max=100000,scale=e4m3]"]
    both = [text + suffix for text in found for suffix in ("", "+sr") if text + suffix != "fp32+sr"]
    # Groups are formed before anything is rounded, so one rounding each is enough for them: they alternate.
    return [*both, *(text + ("+sr" if place % 2 else "") for place, text in enumerate(grouped))]


@pytest.mark.parametrize("text", texts())
def test_equals_exact_arithmetic(text: str) -> None:
    fmt = Format.parse(text)
    plain = text.removesuffix("+sr") in NAMED_FORMATS
    states = torch.cat([*regimes().values()] if plain else [regimes()[name] for name in GROUPING_REGIMES])
    bits = words_for(len(states)) if fmt.rounding is Rounding.STOCHASTIC else None
    assert mismatches(store_and_load(states, fmt, bits=bits), oracle_store(states, fmt, bits)) == []


STOCHASTIC = [f"{name}+sr" for name in NAMED_FORMATS if name != "fp32"] + ["fp8[scale=none]+sr", "int8[scale=fp16]+sr"]


@pytest.mark.parametrize("text", STOCHASTIC)
def test_equals_exact_arithmetic_for_deciding_words(text: str) -> None:
    fmt = Format.parse(text)
    states = torch.cat([regimes()[name] for name in ("wide", "halfway", "finite patterns")])
    bits = deciding_words(states, fmt)
    assert mismatches(store_and_load(states, fmt, bits=bits), oracle_store(states, fmt, bits)) == []


@pytest.mark.parametrize("text", ["fp8+sr", "fp16+sr", "bf16+sr", "int16+sr"])
@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_equals_exact_arithmetic_for_extreme_words(text: str, word: int) -> None:
    fmt = Format.parse(text)
    states = torch.cat([*regimes().values()])
    bits = torch.full((len(states), ELEMENTS), word)
    assert mismatches(store_and_load(states, fmt, bits=bits), oracle_store(states, fmt, bits)) == []


@pytest.mark.parametrize("text", ["fp32", "bf16", "fp16+sr", "fp8", "int8+sr", "nvfp4"])
def test_float64_is_rounded_to_float32_first_and_returned_as_float64(text: str) -> None:
    fmt = Format.parse(text)
    state = regimes()["wide"].to(torch.float64) * (1 + 2.0**-40)
    bits = words_for(1) if fmt.rounding is Rounding.STOCHASTIC else None
    loaded = store_and_load(state, fmt, bits=bits)
    assert loaded.dtype == torch.float64
    assert torch.equal(loaded, store_and_load(state.float(), fmt, bits=bits).double())


@pytest.mark.parametrize("text", ["bf16+sr", "fp16", "fp16+sr", "fp8", "fp8[tensor]+sr", "nvfp4+sr", "int16"])
def test_leading_axes_and_memory_layout_do_not_matter(text: str) -> None:
    fmt = Format.parse(text)
    states = torch.cat([*regimes().values()])[:6]
    bits = words_for(6) if fmt.rounding is Rounding.STOCHASTIC else None
    expected = store_and_load(states, fmt, bits=bits)
    nested = None if bits is None else bits.view(2, 3, -1)
    assert (
        mismatches(store_and_load(states.view(2, 3, HEADS, D_V, D_K), fmt, bits=nested).view_as(states), expected) == []
    )
    transposed = states.mT.contiguous().mT
    assert not transposed.is_contiguous()
    assert mismatches(store_and_load(transposed, fmt, bits=bits), expected) == []
    single = store_and_load(states[2], fmt, bits=None if bits is None else bits[2])
    assert mismatches(single, expected[2]) == []
    none = store_and_load(states[:0], fmt, bits=None if bits is None else bits[:0])
    assert none.shape == states[:0].shape


@pytest.mark.parametrize("text", ["fp32", "bf16", "fp16+sr", "fp8+sr", "nvfp4", "int8"])
def test_inputs_are_not_modified(text: str) -> None:
    fmt = Format.parse(text)
    state, bits = regimes()["wide"], words_for(1)
    kept_state, kept_bits = state.clone(), bits.clone()
    store_and_load(state, fmt, bits=bits if fmt.rounding is Rounding.STOCHASTIC else None)
    assert torch.equal(state, kept_state) and torch.equal(bits, kept_bits)


@pytest.mark.parametrize("name", NAMED_FORMATS)
def test_a_state_that_diverged_shows(name: str) -> None:
    fmt = NAMED_FORMATS[name].format
    variants = [fmt]
    if not fmt.is_identity:
        variants.append(dataclasses.replace(fmt, rounding=Rounding.STOCHASTIC))
    for spoiler in (float("inf"), float("-inf"), float("nan")):
        state = regimes()["normal"].clone()
        state[0, 1, 2, 3] = spoiler
        for variant in variants:
            bits = words_for(1) if variant.rounding is Rounding.STOCHASTIC else None
            loaded = store_and_load(state, variant, bits=bits)
            assert not loaded[0, 1, 2, 3].isfinite()
            assert loaded[0, 0].isfinite().all(), "another head is not affected"
            if variant.is_scaled:
                group = slice(0, fmt.group) if fmt.granularity == "block" else slice(None)
                assert loaded[0, 1, 2, group].isnan().all(), "the group loads back as NaN"


def test_half_precision_overflow_is_infinite() -> None:
    state = torch.tensor([65519.0, 65520.0, 1e30, -65520.0]).view(1, 1, 1, 4)
    loaded = store_and_load(state, Format.parse("fp16")).flatten().tolist()
    assert loaded == [65504.0, float("inf"), float("inf"), float("-inf")]


def test_zeros_load_back_as_zeros_and_keep_their_sign_in_floats() -> None:
    state = torch.zeros(1, HEADS, D_V, D_K)
    state[..., 1::2] = -0.0
    for name, entry in NAMED_FORMATS.items():
        loaded = store_and_load(state, entry.format)
        assert torch.equal(loaded, torch.zeros_like(state)), name
        signs = torch.zeros_like(state) if entry.format.spec.is_integer else state
        assert torch.equal(loaded.signbit(), signs.signbit()), name


@pytest.mark.parametrize("name", NAMED_FORMATS)
@pytest.mark.parametrize("magnitude", [1e-36, 1e-38, 1e-44, 1e38])
def test_extreme_blocks_stay_finite_and_nonzero_where_the_type_can(name: str, magnitude: float) -> None:
    state = torch.full((1, HEADS, D_V, D_K), magnitude)
    loaded = store_and_load(state, NAMED_FORMATS[name].format)
    assert loaded.isfinite().all() or (name, magnitude) == ("fp16", 1e38)
    if magnitude in (1e-36, 1e38) and name != "fp16":
        # A quarter is half the coarsest step of any of these types, relative to the value it is next to.
        assert ((loaded - state).abs() <= magnitude / 4).all()


def _refusals() -> dict[str, tuple[Tensor, str, Tensor | None, str]]:
    good = torch.zeros(1, HEADS, D_V, D_K)
    bits = torch.zeros(1, ELEMENTS, dtype=torch.int64)
    return {
        "missing bits": (good, "fp8+sr", None, "random_bits"),
        "superfluous bits": (good, "fp8", bits, "bits=None"),
        "short bits": (good, "fp8+sr", bits[:, 1:], "256"),
        "bits of another type": (good, "fp8+sr", bits.to(torch.int32), "int64"),
        "block": (good[..., :24], "nvfp4", None, "d_k=24"),
        "tile": (good, "fp8[tile=3]", None, "d_v=4"),
        "odd keys": (good[..., :31], "nvfp4[row]", None, "d_k=31"),
        "dtype": (good.to(torch.bfloat16), "fp8", None, "bfloat16"),
        "rank": (good[0, 0], "fp8", None, "[4, 32]"),
        "feedback": (good, "int8[ef=int8]", None, "store_and_load_with_feedback"),
    }


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("case", _refusals())
def test_refusals_say_what_to_do(case: str) -> None:
    state, text, bits, hint = _refusals()[case]
    with pytest.raises(ValueError, match="expected|need|keeps|takes|must") as caught:
        store_and_load(state, Format.parse(text), bits=bits)
    assert hint in str(caught.value)
    assert str(Format.parse(text)) in str(caught.value)


def _half_away(state: Tensor, fmt: Format, bits: Tensor | None) -> Tensor:
    """Planted fault: ties go away from zero."""
    nudged = state * (1 + 2.0**-22)
    return store_and_load(nudged, fmt, bits=bits)


def _strictly_above(state: Tensor, fmt: Format, bits: Tensor | None) -> Tensor:
    """Planted fault: up only if fraction + word exceeds one."""
    return store_and_load(state, fmt, bits=None if bits is None else (bits - 1).clamp(min=0))


def _fewer_bits(state: Tensor, fmt: Format, bits: Tensor | None) -> Tensor:
    """Planted fault: only the top 13 random bits are used."""
    return store_and_load(state, fmt, bits=None if bits is None else (bits >> 19) << 19)


def _hidden_overflow(state: Tensor, fmt: Format, bits: Tensor | None) -> Tensor:
    """Planted fault: what is not finite is quietly replaced."""
    return store_and_load(state, fmt, bits=bits).nan_to_num(0.0)


def _flushed(state: Tensor, fmt: Format, bits: Tensor | None) -> Tensor:
    """Planted fault: subnormal float32 values read as zeros."""
    return store_and_load(torch.where(state.abs() < 2.0**-126, 0.0, state), fmt, bits=bits)


def _neighbouring_scale(state: Tensor, fmt: Format, bits: Tensor | None) -> Tensor:
    """Planted fault: the groups are shifted by one row."""
    return store_and_load(state.roll(8, -1), fmt, bits=bits).roll(-8, -1)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (_half_away, "fp8[scale=none]"),
        (_half_away, "nvfp4"),
        (_strictly_above, "fp16+sr"),
        (_strictly_above, "nvfp4+sr"),
        (_strictly_above, "bf16+sr"),
        (_strictly_above, "int8+sr"),
        (_fewer_bits, "fp8+sr"),
        (_hidden_overflow, "int8"),
        (_hidden_overflow, "fp16"),
        (_flushed, "bf16"),
        (_flushed, "fp8"),
        (_neighbouring_scale, "nvfp4"),
    ],
)
def test_the_comparison_rejects_wrong_variants(fault: Store, text: str) -> None:
    fmt = Format.parse(text)
    states = torch.cat([regimes()[name] for name in ("wide", "halfway", "subnormal", "beyond", "not finite")])
    bits = deciding_words(states, fmt) if fmt.rounding is Rounding.STOCHASTIC else None
    expected = oracle_store(states, fmt, bits)
    assert mismatches(product_store(states, fmt, bits), expected) == []
    assert mismatches(fault(states, fmt, bits), expected) != []
