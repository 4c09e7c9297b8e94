"""Rounding of float32 values to the grid of an element type, to nearest or stochastically.

Float grids are reached with additions and exact powers of two only, so the results are those of exact arithmetic on
every device that keeps IEEE float32 (subnormals included).
"""

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from replayssm.formats.elements import ElementSpec

MAGNITUDE_MASK = 0x7FFFFFFF
EXPONENT_MASK = 0x7F800000
_EXPONENT_SHIFT = 23
_BIAS = 127
# Adding and subtracting 1.5 * 2**23 quanta leaves a float32 rounded to nearest even in units of one quantum.
_SHIFTER = 1.5 * 2.0**23


def float32_bits(values: Float[Tensor, "*shape"]) -> Int32[Tensor, "*shape"]:
    """The bit patterns of float32 values, sharing memory."""
    return values.view(torch.int32)


def magnitudes_of(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Absolute values, with the sign of NaN removed too."""
    return (float32_bits(values) & MAGNITUDE_MASK).view(torch.float32)


def round_to_nearest(magnitudes: Float[Tensor, "*shape"], spec: ElementSpec) -> Float[Tensor, "*shape"]:
    """Round magnitudes to the grid of a type, ties to even, in place.

    The grid continues beyond the largest value; what happens there is the caller's rule.

    Args:
        magnitudes: Non-negative float32 values; below 2**22 for integers. Overwritten.
        spec: The element type, at most 16 bits wide.

    Returns:
        `magnitudes`; NaN and infinities become NaN in float types.
    """
    if spec.is_integer:
        return magnitudes.add_(_SHIFTER).sub_(_SHIFTER)
    shifter = _clamped_exponents(magnitudes, spec).mul_(_SHIFTER * 2.0**-spec.mantissa_bits)
    return magnitudes.add_(shifter).sub_(shifter)


def round_stochastically(
    magnitudes: Float[Tensor, "*shape"], spec: ElementSpec, bits: Int64[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Round magnitudes up or down to the grid of a type, as random words decide, exactly.

    Between grid neighbours `lo <= x < hi` the result is `hi` if `(x - lo)/(hi - lo) + word/2**32 >= 1`, else `lo`.
    The grid continues beyond the largest value.

    Args:
        magnitudes: Non-negative float32 values; below 2**22 for integers. Overwritten.
        spec: The element type, at most 16 bits wide.
        bits: One word in `[0, 2**32)` per value.

    Returns:
        The rounded values; unspecified where a magnitude is not finite.
    """
    # Words are multiples of 2**-32 of a quantum, so what lies below that in x / quantum never decides: it is cut off.
    if spec.is_integer:
        quanta = magnitudes.mul_(2.0**32).to(torch.int64).add_(bits)
        return quanta.bitwise_right_shift_(32).to(torch.float32)
    exponents = _clamped_exponents(magnitudes, spec)
    quanta = magnitudes.div_(exponents).mul_(2.0 ** (32 + spec.mantissa_bits)).to(torch.int64).add_(bits)
    return quanta.bitwise_right_shift_(32).to(torch.float32).mul_(exponents).mul_(2.0**-spec.mantissa_bits)


def _clamped_exponents(magnitudes: Tensor, spec: ElementSpec) -> Tensor:
    """`2**max(floor(log2(x)), min_exponent)` of each magnitude; infinity where it is not finite."""
    exponents = float32_bits(magnitudes) & EXPONENT_MASK
    smallest = (spec.min_exponent + _BIAS) << _EXPONENT_SHIFT
    return exponents.clamp_(min=smallest).view(torch.float32)


def round_stochastically_to_bfloat16(
    values: Float[Tensor, "*shape"], bits: Int64[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Round float32 values stochastically to bfloat16.

    A bfloat16 is the upper half of a float32, subnormals included, so adding a random lower half and cutting it off is
    the rule of `round_stochastically`, and a carry out of the largest finite value is an infinity.

    Args:
        values: float32 values. Not modified.
        bits: One word in `[0, 2**32)` per value.

    Returns:
        The rounded values; NaN stays NaN.
    """
    patterns = float32_bits(values)
    lower = (bits >> 16).to(torch.int32)
    # NaN payloads are cut so that the addition cannot carry out of them.
    rounded = (patterns & MAGNITUDE_MASK).clamp_(max=EXPONENT_MASK | 0x7F0000).add_(lower).bitwise_and_(-0x10000)
    return rounded.bitwise_or_(patterns & ~MAGNITUDE_MASK).view(torch.float32)
