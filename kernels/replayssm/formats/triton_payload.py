"""Scales and payloads of the elements of a state in Triton, without the layout in which they are stored.

Divisions, roundings and signs are those of `replayssm.formats`, bit for bit; kernels that use these functions must be
launched with `enable_fp_fusion=False`.
"""

# pyright: basic

import triton
import triton.language as tl
from triton import knobs

from replayssm.formats.triton_bits import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    FP16,
    FP32,
    INT8,
    round_to_bfloat16,
    round_to_grid,
    with_sign,
)

SCALE_NONE = tl.constexpr(0)
SCALE_FP32 = tl.constexpr(1)
SCALE_FP16 = tl.constexpr(2)
SCALE_E4M3 = tl.constexpr(3)
SCALE_E8M0 = tl.constexpr(4)

_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
_INFINITY = tl.constexpr(0x7F800000)
# Below this a scale and its values are multiplied by a power of two, so that remainders do not underflow.
_LIFTED = tl.constexpr(2.0**-24)
_LIFT = tl.constexpr(2.0**100)
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
_SMALLEST_HEAD_SCALE = tl.constexpr(2.0**-117)


@triton.jit
def reciprocal(x):
    """The reciprocal of positive normal values below 2**126: correctly rounded, or close enough for `quotients`.

    Two steps of Newton's at once, from an estimate within one unit of the last place; made odd, it cannot stay at a
    power of two beside which the reciprocal is.
    """
    estimate = tl.inline_asm_elementwise(
        "{ .reg .b32 e; rcp.approx.ftz.f32 e, $1; or.b32 $0, e, 1; }",
        "=r,r",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
    rest = tl.fma(x * -1.0, estimate, tl.full(x.shape, 1.0, tl.float32))
    return tl.fma(tl.fma(rest, rest, rest), estimate, estimate)


@triton.jit
def quotients(values, over, inverse):
    """`values / over`, correctly rounded where no remainder underflows, for `inverse` the `reciprocal` of `over`.

    A correction of the product with the reciprocal is enough: of all pairs of float32 significands, only those whose
    quotient is within 2**-23 units of a tie could be rounded wrongly, and none is (see `test_quotients.py`).

    Source: Brisebarre, Muller and Raina, "Accelerating correctly rounded floating-point division when the divisor is
    known in advance", section 3.
    """
    quotient = values * inverse
    return tl.fma(tl.fma(over * -1.0, quotient, values), inverse, quotient)


@triton.jit
def head_scale(head_bits, divisor):
    """The float32 scale of a head, from the bits of its largest magnitude; NaN where that is not finite."""
    largest = head_bits.to(tl.float32, bitcast=True)
    over = tl.zeros_like(largest) + divisor * 448.0
    if _INTERPRETED:
        quotient = tl.div_rn(largest, over)
    else:
        lift = tl.where(largest < 1.0, _LIFT, 1.0)
        quotient = quotients(largest * lift, over, reciprocal(over)) * tl.where(largest < 1.0, 1.0 / _LIFT, 1.0)
    return tl.where(head_bits >= _INFINITY, float("nan"), tl.maximum(quotient, _SMALLEST_HEAD_SCALE))


@triton.jit
def scale_in_head(largest, of_head, divisor):
    """The E4M3 scale of each group, from its largest magnitude and the scale of the head; NaN where that is."""
    over = of_head * divisor
    if _INTERPRETED:
        scale = tl.div_rn(largest, tl.zeros_like(largest) + over)
    else:
        lift = tl.where(over < _LIFTED, _LIFT, 1.0)
        over *= lift
        scale = quotients(largest * lift, over, reciprocal(over))
    scale = tl.minimum(tl.maximum(scale, 2.0**-9), 448.0)
    # Limits are not NaN.
    return round_to_grid(scale, scale, -6, 3, False, False) + (of_head - of_head)


@triton.jit
def group_scale(largest_bits, of_head, divisor, SCALE: tl.constexpr):
    """The stored scale of each group.

    Args:
        largest_bits: Bit pattern of the largest magnitude of each group, int32.
        of_head: Scale of the head, for SCALE_E4M3; any float32 otherwise.
        divisor: Divisor of the format; for SCALE_E8M0, whose divisor only shifts the exponent, the power of two that
            multiplies it (see `TritonFormat.divisor`).
        SCALE: Type of the stored scale.

    Returns:
        float32 values that the stored type represents exactly; NaN where a magnitude is not finite.
    """
    if SCALE == SCALE_E4M3:
        scale = scale_in_head(largest_bits.to(tl.float32, bitcast=True), of_head, divisor)
    else:
        # What is not finite is set aside, so that no conversion sees it.
        lost = largest_bits >= _INFINITY
        largest_bits = tl.where(lost, 0, largest_bits)
        largest = largest_bits.to(tl.float32, bitcast=True)
        if SCALE == SCALE_E8M0:
            exponent = (largest_bits & _INFINITY).to(tl.float32, bitcast=True)
            scale = tl.maximum(exponent * divisor, _SMALLEST_SCALE)
        else:
            scale = tl.div_rn(largest, tl.zeros_like(largest) + divisor)
            if SCALE == SCALE_FP32:
                scale = tl.maximum(scale, _SMALLEST_SCALE)
            else:
                scale = tl.minimum(tl.maximum(scale, 2.0**-24), 65504.0)
                scale = round_to_grid(scale, scale, -14, 10, False, False)
        scale = tl.where(lost, float("nan"), scale)
    return scale


@triton.jit
def over_keys(scales, BLOCK_K: tl.constexpr):
    """Scales `[BLOCK_V, groups]`, repeated for the keys of each group: `[BLOCK_V, BLOCK_K]`."""
    BLOCK_V: tl.constexpr = scales.shape[0]
    GROUPS: tl.constexpr = scales.shape[1]
    wide = tl.broadcast_to(scales[:, :, None], (BLOCK_V, GROUPS, BLOCK_K // GROUPS))
    return tl.reshape(wide, (BLOCK_V, BLOCK_K))


@triton.jit
def in_units(values, stored, of_head, SCALE: tl.constexpr):
    """The correctly rounded quotients by the scales of groups, where they are at least `2**-57`; else small as well.

    No grid has a finer `2**-32` of a gap, so nothing below decides.

    Args:
        values: float32 `[BLOCK_V, BLOCK_K]`.
        stored: Scales of groups, `[BLOCK_V, groups]`.
        of_head: What multiplies them.
        SCALE: Scale type.
    """
    BLOCK_K: tl.constexpr = values.shape[1]
    if _INTERPRETED:
        # Its fused operations are not.
        quotient = tl.div_rn(values, over_keys(stored * of_head, BLOCK_K))
    else:
        if SCALE == SCALE_E4M3:
            # No scale is below 2**-9 times that of the head.
            lift = tl.where(of_head < _LIFTED * 512.0, _LIFT, 1.0)
            over = stored * (of_head * lift)
        else:
            lift = tl.where(stored < _LIFTED, _LIFT, 1.0)
            over = stored * lift
            lift = over_keys(lift, BLOCK_K)
        quotient = quotients(values * lift, over_keys(over, BLOCK_K), over_keys(reciprocal(over), BLOCK_K))
    return quotient


@triton.jit
def round_payload(
    quotients,
    values,
    words,
    SMALLEST: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    INFINITE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """The payload of each quotient of a value and its scale.

    Args:
        quotients: float32, the values themselves where there is no scale.
        values: float32, whose signs the payloads get: a corrected quotient of a negative zero is a positive one.
        words: uint32 like `values`; ignored unless STOCHASTIC.
        SMALLEST: Exponent of the smallest normal value of the type; 0 for integers.
        MANTISSA_BITS: Width of the fraction.
        LARGEST: Largest finite value of the type.
        INTEGER: Whether it is an integer type, which has no negative zero.
        INFINITE: Whether larger values become infinite (fp16) rather than LARGEST.
        STOCHASTIC: Whether the words decide.

    Returns:
        float32 values of the type, NaN where a quotient is NaN.
    """
    # Beyond the grid point 65536, which is infinite in fp16, any number will do.
    magnitudes = tl.minimum(tl.abs(quotients), 131072.0 if INFINITE else LARGEST, propagate_nan=tl.PropagateNan.ALL)
    rounded = round_to_grid(magnitudes, words, SMALLEST, MANTISSA_BITS, INTEGER, STOCHASTIC)
    if INFINITE:
        rounded = tl.where(rounded > LARGEST, float("inf"), rounded)
    signed = with_sign(rounded, values.to(tl.int32, bitcast=True))
    if INTEGER:
        signed += 0.0
    return signed


@triton.jit
def payload_of(quotients, values, words, ELEMENT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """`round_payload` for a type that is known at compile time."""
    if ELEMENT == FP32:
        payload = quotients
    elif ELEMENT == BF16:
        payload = round_to_bfloat16(quotients, words, STOCHASTIC)
    elif ELEMENT == FP16:
        payload = round_payload(quotients, values, words, -14, 10, 65504.0, False, True, STOCHASTIC)
    elif ELEMENT == E4M3:
        payload = round_payload(quotients, values, words, -6, 3, 448.0, False, False, STOCHASTIC)
    elif ELEMENT == E5M2:
        payload = round_payload(quotients, values, words, -14, 2, 57344.0, False, False, STOCHASTIC)
    elif ELEMENT == E2M1:
        payload = round_payload(quotients, values, words, 0, 1, 6.0, False, False, STOCHASTIC)
    elif ELEMENT == INT8:
        payload = round_payload(quotients, values, words, 0, 0, 127.0, True, False, STOCHASTIC)
    else:
        payload = round_payload(quotients, values, words, 0, 0, 32767.0, True, False, STOCHASTIC)
    return payload


@triton.jit
def unscaled_payload(values, words, ELEMENT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The payload of values without a scale, NaN where a value is NaN (or infinite, in types that have no infinity)."""
    payload = payload_of(values, values, words, ELEMENT, STOCHASTIC)
    if ELEMENT != FP32 and ELEMENT != BF16 and ELEMENT != FP16:
        payload = tl.where(tl.abs(values) == float("inf"), float("nan"), payload)
    return payload
