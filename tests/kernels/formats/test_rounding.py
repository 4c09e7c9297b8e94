"""Rounding of bare payloads against other libraries over every code, and what stochastic rounding promises."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from replayssm.formats import ElementType, Format, decode_table, store_and_load
from replayssm.formats.rounding import round_stochastically, round_stochastically_to_bfloat16, round_to_nearest
from tests.kernels.formats.support import mismatches
from tests.oracles import formats as oracle

ML_DTYPES = {
    ElementType.E4M3: ml_dtypes.float8_e4m3fn,
    ElementType.E5M2: ml_dtypes.float8_e5m2,
    ElementType.E2M1: ml_dtypes.float4_e2m1fn,
}
GFLOAT = {
    ElementType.E4M3: gfloat.formats.format_info_ocp_e4m3,
    ElementType.E5M2: gfloat.formats.format_info_ocp_e5m2,
    ElementType.E2M1: gfloat.formats.format_info_ocp_e2m1,
    ElementType.INT8: gfloat.formats.format_info_ocp_int8,
}
TORCH = {ElementType.E4M3: torch.float8_e4m3fn, ElementType.E5M2: torch.float8_e5m2}
SMALL_FLOATS = tuple(ML_DTYPES)


def magnitudes(element: ElementType) -> list[float]:
    """Every finite magnitude of a type of at most 8 bits, ascending."""
    return sorted({abs(v) for v in decode_table(element) if math.isfinite(v) and abs(v) <= element.spec.largest})


def probes(grid: list[float]) -> Tensor:
    """Every grid point, every halfway point, the float32 neighbours of both, and values beyond the grid; both signs."""
    points = np.array(grid, dtype=np.float32)
    halfway = (points[1:] + points[:-1]) / np.float32(2)
    exact = np.concatenate([points, halfway])
    above, below = np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))
    beyond = np.array([points[-1] * 1.01, points[-1] * 1.5, points[-1] * 100, 3e38], dtype=np.float32)
    tiny = np.array([1e-45, 1e-40, 1e-38, 1e-30], dtype=np.float32)
    values = np.concatenate([exact, above, below[below >= 0], beyond, tiny])
    return torch.from_numpy(np.concatenate([values, -values]))


def rounded(values: Tensor, element: ElementType) -> Tensor:
    """The payload rule: limit to the largest value, then round."""
    limited = values.abs().clamp_(max=element.spec.largest)
    return round_to_nearest(limited, element.spec).copysign_(values)


@pytest.mark.parametrize("element", SMALL_FLOATS)
def test_decode_table_equals_ml_dtypes_and_gfloat(element: ElementType) -> None:
    codes = np.arange(1 << element.spec.bits, dtype=np.uint8)
    table = torch.tensor(decode_table(element))
    theirs = torch.from_numpy(codes.view(ML_DTYPES[element]).astype(np.float32))
    assert mismatches(table, theirs) == []
    info = GFLOAT[element]
    assert mismatches(table, torch.tensor([gfloat.decode_float(info, int(code)).fval for code in codes])) == []


@pytest.mark.parametrize("element", TORCH)
def test_decode_table_equals_torch(element: ElementType) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert mismatches(torch.tensor(decode_table(element)), codes.view(TORCH[element]).to(torch.float32)) == []


def test_decode_table_of_integers_is_twos_complement() -> None:
    table = decode_table(ElementType.INT8)
    assert table == tuple(float(np.uint8(code).view(np.int8)) for code in range(256))


def test_decode_table_refuses_wide_types() -> None:
    with pytest.raises(ValueError, match="at most 8 bits, got 'fp16'"):
        decode_table(ElementType.FP16)


@pytest.mark.parametrize("element", SMALL_FLOATS)
def test_nearest_equals_ml_dtypes(element: ElementType) -> None:
    values = probes(magnitudes(element))
    # ml_dtypes overflows to NaN or infinity in 8-bit types; saturation is compared with gfloat.
    inside = values[values.abs() <= element.spec.largest]
    theirs = torch.from_numpy(inside.numpy().astype(ML_DTYPES[element]).astype(np.float32))
    assert mismatches(rounded(inside, element), theirs) == []


@pytest.mark.parametrize("element", TORCH)
def test_nearest_equals_torch(element: ElementType) -> None:
    values = probes(magnitudes(element))
    inside = values[values.abs() <= element.spec.largest]
    assert mismatches(rounded(inside, element), inside.to(TORCH[element]).to(torch.float32)) == []


@pytest.mark.parametrize("element", SMALL_FLOATS)
def test_nearest_equals_saturating_gfloat(element: ElementType) -> None:
    values = probes(magnitudes(element))
    theirs = [gfloat.round_float(GFLOAT[element], value, sat=True) for value in values.tolist()]
    assert mismatches(rounded(values, element), torch.tensor(theirs)) == []


@pytest.mark.parametrize(("element", "largest"), [(ElementType.INT8, 127), (ElementType.INT16, 32767)])
def test_nearest_integers_equal_numpy(element: ElementType, largest: int) -> None:
    grid = [float(k) for k in range(0, largest + 1, max(1, largest // 2000))]
    values = torch.cat([probes(grid), torch.arange(largest) + 0.5])
    theirs = np.clip(np.rint(values.numpy()), -largest, largest)
    assert torch.equal(rounded(values, element), torch.from_numpy(theirs))


HALF_CODES = {
    "fp16": np.arange(0x7C00, dtype=np.uint16).view(np.float16),
    "bf16": np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("text", HALF_CODES)
def test_half_precision_equals_numpy_and_ml_dtypes_over_all_codes(text: str) -> None:
    codes = HALF_CODES[text]
    with np.errstate(over="ignore"):
        values = probes(codes.astype(np.float32).tolist())
        theirs = torch.from_numpy(values.numpy().astype(codes.dtype).astype(np.float32))
    loaded = store_and_load(values.view(1, 1, -1), Format.parse(text)).flatten()
    assert mismatches(loaded, theirs) == []


def _truncating(values: Tensor, element: ElementType) -> Tensor:
    return rounded(values * (1 - 2.0**-20), element)


def _ties_away(values: Tensor, element: ElementType) -> Tensor:
    return rounded(values * (1 + 2.0**-23), element)


def _flushing(values: Tensor, element: ElementType) -> Tensor:
    return rounded(torch.where(values.abs() < 2.0**element.spec.min_exponent, values * 0, values), element)


@pytest.mark.parametrize("element", SMALL_FLOATS)
@pytest.mark.parametrize("fault", [_truncating, _ties_away, _flushing])
def test_the_probes_reject_wrong_rounding(element: ElementType, fault: Callable[[Tensor, ElementType], Tensor]) -> None:
    values = probes(magnitudes(element))
    theirs = torch.tensor([gfloat.round_float(GFLOAT[element], value, sat=True) for value in values.tolist()])
    assert mismatches(fault(values, element), theirs) != []


def _midpoint_words(top_bits: int) -> Tensor:
    """Every value of the top bits, each in the middle of the words that share it."""
    return (torch.arange(1 << top_bits) << (32 - top_bits)) + (1 << (31 - top_bits))


@pytest.mark.parametrize("element", [ElementType.E2M1, ElementType.E4M3, ElementType.E5M2, ElementType.FP16])
def test_stochastic_rounding_is_unbiased_over_all_words(element: ElementType) -> None:
    """A value k/2**12 of the way up goes up for exactly k of the 2**12 settings of the top bits, subnormals too."""
    spec = element.spec
    words = _midpoint_words(12)
    starts = [0.0, 1.0, 1.5, 2.0**spec.min_exponent, 2.0 ** (spec.min_exponent - spec.mantissa_bits)]
    for start, k in itertools.product(starts, (0, 1, 5, 2048, 3000, 4095)):
        lo, hi, _ = oracle.neighbours(Fraction(start), oracle.ELEMENTS[element.value])
        x = lo + (hi - lo) * Fraction(k, 4096)
        assert Fraction(float(x)) == x
        values = torch.full(words.shape, float(x))
        assert values[0].item() == float(x)
        results = round_stochastically(values, spec, words)
        assert set(results.tolist()) <= {float(lo), float(hi)}
        assert int((results == float(hi)).sum()) == k
        assert sum(map(Fraction, results.tolist())) / len(words) == x


def test_stochastic_rounding_of_integers_and_bfloat16_is_unbiased_over_all_words() -> None:
    words = _midpoint_words(12)
    for k in (0, 1, 100, 2048, 4095):
        up = round_stochastically(torch.full(words.shape, 5 + k / 4096), ElementType.INT8.spec, words)
        assert int((up == 6).sum()) == k and int((up == 5).sum()) == 4096 - k
        for quantum in (2.0**-7, 2.0**-133):
            base = 1.0 if quantum > 1e-30 else 3 * quantum
            values = torch.full(words.shape, base + k / 4096 * quantum)
            results = round_stochastically_to_bfloat16(-values, words)
            assert int((results == -(base + quantum)).sum()) == k and int((results == -base).sum()) == 4096 - k


def test_the_enumeration_rejects_a_biased_rounding() -> None:
    words = _midpoint_words(12)
    biased = round_stochastically(torch.full(words.shape, 1 + 5 / 4096 / 8), ElementType.E4M3.spec, words | 1 << 31)
    assert int((biased > 1).sum()) != 5


@pytest.mark.parametrize("element", [*SMALL_FLOATS, ElementType.INT8])
@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 1])
def test_values_on_the_grid_never_move(element: ElementType, word: int) -> None:
    grid = torch.tensor(magnitudes(element))
    words = torch.full(grid.shape, word)
    assert torch.equal(round_stochastically(grid.clone(), element.spec, words), grid)
    assert torch.equal(round_to_nearest(grid.clone(), element.spec), grid)


@pytest.mark.parametrize("text", ["fp16+sr", "bf16+sr"])
def test_half_precision_values_never_move(text: str) -> None:
    dtype = torch.float16 if text == "fp16+sr" else torch.bfloat16
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).to(torch.float32).view(1, 1, -1)
    for word in (0, 2**32 - 1):
        bits = torch.full((values.numel(),), word)
        assert mismatches(store_and_load(values, Format.parse(text), bits=bits), values) == []


@pytest.mark.parametrize("element", [*SMALL_FLOATS, ElementType.INT8])
@pytest.mark.parametrize("word", [None, 0, 1 << 30, 2**32 - 1])
def test_rounding_is_monotone_and_idempotent(element: ElementType, word: int | None) -> None:
    values = probes(magnitudes(element)).abs().clamp(max=element.spec.largest).sort().values
    words = torch.full(values.shape, word or 0)

    def once(x: Tensor) -> Tensor:
        x = x.clone()
        return round_to_nearest(x, element.spec) if word is None else round_stochastically(x, element.spec, words)

    results = once(values)
    assert (results.diff() >= 0).all()
    assert torch.equal(once(results), results)
