"""Element types: what one stored number of a state can be, as data.

Every limit used elsewhere (largest value, smallest exponent, overflow rule) comes from the few numbers declared here.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache


class ElementType(StrEnum):
    """The type of one stored payload."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    E2M1 = "e2m1"
    INT8 = "int8"
    INT16 = "int16"

    @property
    def spec(self) -> "ElementSpec":
        """The numbers that define this type."""
        return ELEMENT_SPECS[self]


class Overflow(StrEnum):
    """What a finite value beyond the largest one becomes."""

    INFINITE = "infinite"
    SATURATE = "saturate"


@dataclass(frozen=True, kw_only=True)
class ElementSpec:
    """Numbers that define an element type.

    A float type has the grid `k * 2**(max(e, min_exponent) - mantissa_bits)` for `|x|` in `[2**e, 2**(e+1))`;
    an integer type has the grid `k` and no negative zero.

    Attributes:
        bits: Stored width.
        is_integer: Two's complement integer rather than a float.
        exponent_bits: Width of the exponent field; 0 for integers.
        mantissa_bits: Width of the fraction field; 0 for integers.
        min_exponent: Exponent of the smallest normal value; 0 for integers.
        largest: Largest finite magnitude that is stored.
        overflow: What finite values beyond `largest` become.
        has_infinity: Whether an infinity can be stored.
        has_nan: Whether a NaN can be stored.
    """

    bits: int
    is_integer: bool = False
    exponent_bits: int = 0
    mantissa_bits: int = 0
    min_exponent: int = 0
    largest: float
    overflow: Overflow = Overflow.SATURATE
    has_infinity: bool = False
    has_nan: bool = False


ELEMENT_SPECS: dict[ElementType, ElementSpec] = {
    ElementType.FP32: ElementSpec(
        bits=32, exponent_bits=8, mantissa_bits=23, min_exponent=-126, largest=(2 - 2**-23) * 2.0**127,
        overflow=Overflow.INFINITE, has_infinity=True, has_nan=True,
    ),
    ElementType.BF16: ElementSpec(
        bits=16, exponent_bits=8, mantissa_bits=7, min_exponent=-126, largest=(2 - 2**-7) * 2.0**127,
        overflow=Overflow.INFINITE, has_infinity=True, has_nan=True,
    ),
    ElementType.FP16: ElementSpec(
        bits=16, exponent_bits=5, mantissa_bits=10, min_exponent=-14, largest=65504.0,
        overflow=Overflow.INFINITE, has_infinity=True, has_nan=True,
    ),
    ElementType.E4M3: ElementSpec(
        bits=8, exponent_bits=4, mantissa_bits=3, min_exponent=-6, largest=448.0, has_nan=True
    ),
    ElementType.E5M2: ElementSpec(
        bits=8, exponent_bits=5, mantissa_bits=2, min_exponent=-14, largest=57344.0, has_infinity=True, has_nan=True
    ),
    ElementType.E2M1: ElementSpec(bits=4, exponent_bits=2, mantissa_bits=1, min_exponent=0, largest=6.0),
    ElementType.INT8: ElementSpec(bits=8, is_integer=True, largest=127.0),
    ElementType.INT16: ElementSpec(bits=16, is_integer=True, largest=32767.0),
}  # fmt: skip


@cache
def decode_table(element: ElementType) -> tuple[float, ...]:
    """Value of every code of an element type of at most 8 bits.

    Args:
        element: The element type.

    Returns:
        One float per code, in code order; NaN and infinities where the code means that.

    Raises:
        ValueError: If the type is wider than 8 bits, where a table is not the way to decode.
    """
    spec = element.spec
    if spec.bits > 8:
        raise ValueError(
            f"a decode table exists for element types of at most 8 bits, got {element.value!r} with {spec.bits} bits; "
            "view its bytes as that type instead"
        )
    return tuple(_decode(code, spec) for code in range(1 << spec.bits))


def _decode(code: int, spec: ElementSpec) -> float:
    if spec.is_integer:
        half = 1 << (spec.bits - 1)
        return float(code - 2 * half if code >= half else code)
    sign = -1.0 if code >> (spec.bits - 1) else 1.0
    exponent = (code >> spec.mantissa_bits) & ((1 << spec.exponent_bits) - 1)
    fraction = code & ((1 << spec.mantissa_bits) - 1)
    if exponent == 0:
        magnitude = fraction * 2.0 ** (spec.min_exponent - spec.mantissa_bits)
    else:
        significand = (1 << spec.mantissa_bits) + fraction
        magnitude = significand * 2.0 ** (spec.min_exponent + exponent - 1 - spec.mantissa_bits)
    if magnitude > spec.largest:
        magnitude = float("inf") if spec.has_infinity and fraction == 0 else float("nan")
    return sign * magnitude
