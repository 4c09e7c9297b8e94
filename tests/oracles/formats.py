"""Storing a state and loading it back, one number at a time, in exact rational arithmetic.

Slow and independent: it knows IEEE rounding as a rule about fractions and nothing about bit patterns or tensors. A
float here is a Python float that holds a float32 value; every float32 operation is an exact fraction rounded once.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache


@dataclass(frozen=True, kw_only=True)
class Element:
    """Precision (fraction bits), exponent of the smallest normal, largest value, and whether overflow is infinite."""

    fraction_bits: int
    smallest_exponent: int
    largest: Fraction
    infinite: bool = False
    integer: bool = False


FLOAT32 = Element(fraction_bits=23, smallest_exponent=-126, largest=Fraction(2**24 - 1) * 2**104, infinite=True)
ELEMENTS = {
    "fp32": FLOAT32,
    "bf16": Element(fraction_bits=7, smallest_exponent=-126, largest=Fraction(255 * 2**120), infinite=True),
    "fp16": Element(fraction_bits=10, smallest_exponent=-14, largest=Fraction(65504), infinite=True),
    "e4m3": Element(fraction_bits=3, smallest_exponent=-6, largest=Fraction(448)),
    "e5m2": Element(fraction_bits=2, smallest_exponent=-14, largest=Fraction(57344)),
    "e2m1": Element(fraction_bits=1, smallest_exponent=0, largest=Fraction(6)),
    "int8": Element(fraction_bits=0, smallest_exponent=0, largest=Fraction(127), integer=True),
    "int16": Element(fraction_bits=0, smallest_exponent=0, largest=Fraction(32767), integer=True),
}


@dataclass(frozen=True, kw_only=True)
class OracleFormat:
    """What the oracle needs to know of a format; the words are those of the text grammar."""

    element: str
    granularity: str = "none"
    group: int = 0
    scale: str = "none"
    divisor: float = 0.0
    stochastic: bool = False


@cache
def power(exponent: int) -> Fraction:
    """Two to a power of any sign."""
    return Fraction(2) ** exponent


def single(x: float) -> Fraction:
    """A positive parameter as the float32 that arithmetic sees."""
    return Fraction(float32(Fraction(x)))


def floor_log2(x: Fraction) -> int:
    """The exponent of a positive number."""
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if power(exponent) <= x else exponent - 1


def neighbours(x: Fraction, element: Element) -> tuple[Fraction, Fraction, int]:
    """The grid points `lo <= x < hi` of a type whose exponents never end, and how many quanta `lo` is."""
    if element.integer:
        quantum = Fraction(1)
    else:
        exponent = max(floor_log2(x), element.smallest_exponent) if x else element.smallest_exponent
        quantum = power(exponent - element.fraction_bits)
    steps = math.floor(x / quantum)
    return steps * quantum, (steps + 1) * quantum, steps


def round_magnitude(x: Fraction, element: Element, word: int | None = None) -> Fraction | None:
    """Round a magnitude to nearest even, or stochastically with a word; None means infinity."""
    lo, hi, steps = neighbours(x, element)
    if word is None:
        up = x - lo > hi - x or (x - lo == hi - x and steps % 2 == 1)
    else:
        up = (x - lo) / (hi - lo) + Fraction(word, 2**32) >= 1
    rounded = hi if up else lo
    if rounded > element.largest:
        return None if element.infinite else element.largest
    return rounded


def float32(x: Fraction) -> float:
    """A non-negative fraction as float32."""
    rounded = round_magnitude(x, FLOAT32)
    return math.inf if rounded is None else float(rounded)


def float32_of(x: float) -> float:
    """A float64 as float32."""
    if math.isfinite(x):
        return math.copysign(float32(abs(Fraction(x))), x)
    return x


def scale_value(largest: Fraction, fmt: OracleFormat) -> Fraction:
    """The scale of a group whose largest magnitude is this, for every type but `e4m3`."""
    if fmt.scale == "e8m0":
        if largest < power(-126):
            return power(-126)
        return max(power(floor_log2(largest) - floor_log2(Fraction(fmt.divisor))), power(-126))
    quotient = Fraction(float32(largest / single(fmt.divisor)))
    if fmt.scale == "fp32":
        return max(quotient, power(-126))
    assert fmt.scale == "fp16"
    rounded = round_magnitude(min(max(quotient, power(-24)), Fraction(65504)), ELEMENTS["fp16"])
    assert rounded is not None
    return rounded


def head_scale(largest: Fraction, fmt: OracleFormat) -> Fraction:
    """The float32 scale of a head."""
    return max(Fraction(float32(largest / Fraction(float32(single(fmt.divisor) * 448)))), power(-117))


def group_scale(largest: Fraction, of_head: Fraction, fmt: OracleFormat) -> Fraction:
    """The e4m3 scale of a group under the scale of its head."""
    ratio = Fraction(float32(largest / Fraction(float32(of_head * single(fmt.divisor)))))
    rounded = round_magnitude(min(max(ratio, power(-9)), Fraction(448)), ELEMENTS["e4m3"])
    assert rounded is not None
    return rounded


def group_size(fmt: OracleFormat, heads: int, d_v: int, d_k: int) -> int:
    """Consecutive elements that share a scale."""
    return {
        "none": 1,
        "tensor": heads * d_v * d_k,
        "head": d_v * d_k,
        "row": d_k,
        "tile": fmt.group * d_k,
        "block": fmt.group,
    }[fmt.granularity]


def effective_scales(values: list[float], fmt: OracleFormat, heads: int, d_v: int, d_k: int) -> list[Fraction | None]:
    """The scale of each element; None where the group (or, with head scales, the head) is not finite."""
    size, head_size = group_size(fmt, heads, d_v, d_k), d_v * d_k
    scales: list[Fraction | None] = []
    for start in range(0, len(values), size):
        group = values[start : start + size]
        if fmt.scale == "e4m3":
            head_start = start // head_size * head_size
            head = values[head_start : head_start + head_size]
            if not all(map(math.isfinite, head)):
                scales += [None] * size
                continue
            of_head = head_scale(max(abs(Fraction(v)) for v in head), fmt)
            of_group = group_scale(max(abs(Fraction(v)) for v in group), of_head, fmt)
            scales += [Fraction(float32(of_head * of_group))] * size
        elif all(map(math.isfinite, group)):
            scales += [scale_value(max(abs(Fraction(v)) for v in group), fmt)] * size
        else:
            scales += [None] * size
    return scales


def store_one(value: float, fmt: OracleFormat, scale: Fraction | None, word: int | None) -> float:
    """Store one float32 and load it back."""
    element = ELEMENTS[fmt.element]
    if fmt.scale != "none":
        if scale is None:
            return math.nan
        quotient = float32(abs(Fraction(value)) / scale)
        payload = round_magnitude(min(Fraction(quotient), element.largest), element, word)
        assert payload is not None
        magnitude = float32(payload * scale)
        return magnitude if element.integer and payload == 0 else math.copysign(magnitude, value)
    if math.isnan(value) or (math.isinf(value) and not element.infinite):
        return math.nan
    if math.isinf(value):
        return value
    rounded = round_magnitude(abs(Fraction(value)), element, word)
    return math.copysign(math.inf if rounded is None else float(rounded), value)


def store_and_load(
    values: list[float], fmt: OracleFormat, *, heads: int, d_v: int, d_k: int, words: list[int] | None = None
) -> list[float]:
    """Store one state, given as a flat list in C order, and load it back."""
    values = [float32_of(value) for value in values]
    assert len(values) == heads * d_v * d_k and (words is not None) == fmt.stochastic
    scales: list[Fraction | None]
    scales = [None] * len(values) if fmt.scale == "none" else effective_scales(values, fmt, heads, d_v, d_k)
    chosen: list[int | None] = [None] * len(values) if words is None else [*words]
    return [store_one(v, fmt, s, w) for v, s, w in zip(values, scales, chosen, strict=True)]


def threshold_words(values: list[float], fmt: OracleFormat, *, heads: int, d_v: int, d_k: int) -> list[int]:
    """The smallest word that rounds each element up, `2**32 - 1` where none does."""
    values = [float32_of(value) for value in values]
    element = ELEMENTS[fmt.element]
    scales: list[Fraction | None] = [Fraction(1)] * len(values)
    if fmt.scale != "none":
        scales = effective_scales(values, fmt, heads, d_v, d_k)
    words: list[int] = []
    for value, scale in zip(values, scales, strict=True):
        word = 2**32 - 1
        if scale is not None and math.isfinite(value):
            x = Fraction(float32(abs(Fraction(value)) / scale))
            lo, hi, _ = neighbours(x, element)
            word = min(word, math.ceil((1 - (x - lo) / (hi - lo)) * 2**32))
        words.append(word)
    return words


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 on one counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(c0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(c2 * 0xCD9E8D57, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3
