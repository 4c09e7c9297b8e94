"""Storing tiles of a state in Triton and loading them back: scales, payloads, bytes.

The numbers are those of `replayssm.formats.store_and_load` and `pack`, bit for bit, for the same float32 state and
random words. Kernels that use these functions must be launched with `enable_fp_fusion=False`: a payload times its scale
is rounded to float32 before anything is added to it.
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
    decode,
    decode_power_of_two,
    encode,
    encode_power_of_two,
    magnitude_bits,
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
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
_SMALLEST_HEAD_SCALE = tl.constexpr(2.0**-117)


@triton.jit
def head_scale(head_bits, divisor):
    """The float32 scale of a head, from the bits of its largest magnitude; NaN where that is not finite."""
    largest = head_bits.to(tl.float32, bitcast=True)
    quotient = tl.div_rn(largest, tl.zeros_like(largest) + divisor * 448.0)
    return tl.where(head_bits >= _INFINITY, float("nan"), tl.maximum(quotient, _SMALLEST_HEAD_SCALE))


@triton.jit
def group_scale(largest_bits, of_head, divisor, SCALE):
    """The stored scale of each group.

    Args:
        largest_bits: Bit pattern of the largest magnitude of each group, int32.
        of_head: Scale of the head, for SCALE_E4M3; any float32 otherwise.
        divisor: Divisor of the format; for SCALE_E8M0, whose divisor only shifts the exponent, the power of two that
            multiplies it (see `TritonFormat.divisor`).
        SCALE: Type of the stored scale, a scalar (constexpr or not).

    Returns:
        float32 values that the stored type represents exactly; NaN where a magnitude is not finite.
    """
    # What is not finite is set aside, so that no conversion sees it.
    lost = (largest_bits >= _INFINITY) | (of_head != of_head)
    largest_bits = tl.where(lost, 0, largest_bits)
    largest = largest_bits.to(tl.float32, bitcast=True)
    if SCALE == SCALE_E8M0:
        exponent = (largest_bits & _INFINITY).to(tl.float32, bitcast=True)
        scale = tl.maximum(exponent * divisor, _SMALLEST_SCALE)
    else:
        over = tl.zeros_like(largest) + divisor
        if SCALE == SCALE_E4M3:
            over = tl.where(lost, 1.0, of_head * over)
        scale = tl.div_rn(largest, over)
        if SCALE == SCALE_FP32:
            scale = tl.maximum(scale, _SMALLEST_SCALE)
        elif SCALE == SCALE_FP16:
            scale = tl.minimum(tl.maximum(scale, 2.0**-24), 65504.0)
            scale = round_to_grid(scale, tl.zeros_like(largest_bits).to(tl.uint32), -14, 127, 10, False)
        else:
            scale = tl.minimum(tl.maximum(scale, 2.0**-9), 448.0)
            scale = round_to_grid(scale, tl.zeros_like(largest_bits).to(tl.uint32), -6, 127, 3, False)
    return tl.where(lost, float("nan"), scale)


@triton.jit
def in_units(magnitudes, scale):
    """The correctly rounded quotient, where it is at least `2**-34`; elsewhere one that is small too.

    The elements of a group share the reciprocal, and two corrections of a product with a correctly rounded reciprocal
    give a correctly rounded quotient, as long as no remainder underflows.

    Source: Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", theorem 7.
    """
    if _INTERPRETED:
        # Its fused operations are not.
        quotient = tl.div_rn(magnitudes, scale)
    else:
        lift = tl.where(scale < 2.0**-60, 18446744073709551616.0, 1.0)
        over = scale * lift
        magnitudes = magnitudes * lift
        inverse = tl.div_rn(tl.full(over.shape, 1.0, tl.float32), over)
        quotient = magnitudes * inverse
        quotient = tl.fma(tl.fma(-over, quotient, magnitudes), inverse, quotient)
        quotient = tl.fma(tl.fma(-over, quotient, magnitudes), inverse, quotient)
    return quotient


@triton.jit
def round_payload(
    values, scale, words, smallest, largest_exponent, mantissa_bits, largest, infinite, stochastic, SCALED: tl.constexpr
):
    """The payload of each value, in units of its scale.

    Args:
        values: float32.
        scale: Effective scale, broadcast against `values`; 1 where there is none, NaN in groups that are not finite.
        words: uint32 like `values`; ignored unless `stochastic`.
        smallest: Exponent of the smallest normal value of the type; 0 for integers.
        largest_exponent: 0 for integers, 127 for floats.
        mantissa_bits: Width of the fraction.
        largest: Largest finite value of the type.
        infinite: Whether larger values become infinite (fp16) rather than `largest`.
        stochastic: Whether the words decide.
        SCALED: Whether there is a scale at all; a division by 1 would cost as much as any other.

    Returns:
        float32 values of the type, NaN where a value or its scale is NaN (or infinite without a scale that says so).
    """
    bits = magnitude_bits(values)
    # What is not finite is set aside, so that no conversion sees it.
    lost = (bits > _INFINITY) | ((bits == _INFINITY) & (infinite == 0))
    if SCALED:
        lost = lost | (scale != scale)
    quotient = tl.where(lost, 0, bits).to(tl.float32, bitcast=True)
    if SCALED:
        quotient = in_units(quotient, tl.where(scale != scale, 1.0, scale))
    # Beyond the grid point 65536, which is infinite in fp16, any number will do.
    quotient = tl.minimum(quotient, tl.where(infinite, 131072.0, largest))
    rounded = round_to_grid(quotient, words, smallest, largest_exponent, mantissa_bits, stochastic)
    rounded = tl.where(rounded > largest, float("inf"), rounded)
    signed = with_sign(rounded, values.to(tl.int32, bitcast=True))
    # Integers have no negative zero.
    signed = tl.where((largest_exponent == 0) & (rounded == 0.0), 0.0, signed)
    return tl.where(lost, float("nan"), signed)


@triton.jit
def store_payload(values, scale, words, ELEMENT: tl.constexpr, STOCHASTIC: tl.constexpr, SCALED: tl.constexpr):
    """`round_payload` for a type that is known at compile time."""
    if ELEMENT == FP32:
        payload = values
    elif ELEMENT == BF16:
        payload = round_to_bfloat16(values, words, STOCHASTIC)
    elif ELEMENT == FP16:
        payload = round_payload(values, scale, words, -14, 127, 10, 65504.0, True, STOCHASTIC, SCALED)
    elif ELEMENT == E4M3:
        payload = round_payload(values, scale, words, -6, 127, 3, 448.0, False, STOCHASTIC, SCALED)
    elif ELEMENT == E5M2:
        payload = round_payload(values, scale, words, -14, 127, 2, 57344.0, False, STOCHASTIC, SCALED)
    elif ELEMENT == E2M1:
        payload = round_payload(values, scale, words, 0, 127, 1, 6.0, False, STOCHASTIC, SCALED)
    elif ELEMENT == INT8:
        payload = round_payload(values, scale, words, 0, 0, 0, 127.0, False, STOCHASTIC, SCALED)
    else:
        payload = round_payload(values, scale, words, 0, 0, 0, 32767.0, False, STOCHASTIC, SCALED)
    return payload


@triton.jit
def group_largest(bits, TILE_ROWS: tl.constexpr, GROUP_KEYS: tl.constexpr):
    """Bits of the largest magnitude of each group of a tile.

    Args:
        bits: int32 magnitude bits `[BLOCK_V, BLOCK_K]`, zero beyond the state.
        TILE_ROWS: Rows that share a scale, a power of two that divides BLOCK_V.
        GROUP_KEYS: Keys that share a scale, a power of two that divides BLOCK_K.

    Returns:
        int32 `[BLOCK_V, BLOCK_K // GROUP_KEYS]`, repeated for the rows of a group.
    """
    BLOCK_V: tl.constexpr = bits.shape[0]
    GROUPS: tl.constexpr = bits.shape[1] // GROUP_KEYS
    if GROUPS == 1:
        largest = tl.max(bits, axis=1)[:, None]
    else:
        largest = tl.max(tl.reshape(bits, (BLOCK_V, GROUPS, GROUP_KEYS)), axis=2)
    if TILE_ROWS > 1:
        tiles = tl.max(tl.reshape(largest, (BLOCK_V // TILE_ROWS, TILE_ROWS, GROUPS)), axis=1)
        tiles = tl.broadcast_to(tiles[:, None, :], (BLOCK_V // TILE_ROWS, TILE_ROWS, GROUPS))
        largest = tl.reshape(tiles, (BLOCK_V, GROUPS))
    return largest


@triton.jit
def over_keys(scales, BLOCK_K: tl.constexpr):
    """Scales `[BLOCK_V, groups]`, repeated for the keys of each group: `[BLOCK_V, BLOCK_K]`."""
    BLOCK_V: tl.constexpr = scales.shape[0]
    GROUPS: tl.constexpr = scales.shape[1]
    wide = tl.broadcast_to(scales[:, :, None], (BLOCK_V, GROUPS, BLOCK_K // GROUPS))
    return tl.reshape(wide, (BLOCK_V, BLOCK_K))


@triton.jit
def store_state(
    values,
    words,
    payload_ptr,
    scale_ptr,
    head_scale_ptr,
    head_bits,
    divisor,
    rows,
    mask,
    D_K: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    GROUP_KEYS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Store a tile of one head in the layout of `pack` and return what loads back.

    Args:
        values: float32 `[BLOCK_V, BLOCK_K]`; must be zero beyond the state.
        words: uint32 like `values`, for STOCHASTIC only.
        payload_ptr: The head's payload, in the dtype that `encode` returns (4-bit codes: bytes of two).
        scale_ptr: The head's scales: float32, float16 (as fp16 scales), or uint8; unused without scales.
        head_scale_ptr: The head's float32 scale, for SCALE_E4M3 only.
        head_bits: Bits of the largest magnitude of the whole head, an int32 scalar, for SCALE_E4M3 only; a tile that
            is the whole head has `tl.max(tl.max(magnitude_bits(values), 1), 0)`.
        divisor: See `group_scale`.
        rows: Value row of each row of the tile, int32 `[BLOCK_V]`; tiles begin at multiples of TILE_ROWS.
        mask: Which rows exist.
        D_K: Keys per row.
        ELEMENT: Element type.
        SCALE: Scale type.
        TILE_ROWS: Rows that share a scale (all of BLOCK_V for a scale per head).
        GROUP_KEYS: Keys that share a scale; BLOCK_K for a scale per row or tile.
        STOCHASTIC: Whether the words decide the payload.

    Returns:
        float32 like `values`.
    """
    BLOCK_V: tl.constexpr = values.shape[0]
    BLOCK_K: tl.constexpr = values.shape[1]
    keys = tl.arange(0, BLOCK_K)
    inside = mask[:, None] & (keys < D_K)[None, :]
    if SCALE == SCALE_NONE:
        payload = store_payload(values, tl.full((1, 1), 1.0, tl.float32), words, ELEMENT, STOCHASTIC, False)
        loaded = payload
    else:
        largest = group_largest(magnitude_bits(values), TILE_ROWS, GROUP_KEYS)
        of_head = tl.full((1, 1), 1.0, tl.float32)
        if SCALE == SCALE_E4M3:
            scalar = head_scale(head_bits, divisor)
            tl.store(head_scale_ptr, scalar)
            of_head = of_head * scalar
        stored = group_scale(largest, of_head, divisor, SCALE)
        effective = over_keys(stored * of_head, BLOCK_K)
        payload = store_payload(values, effective, words, ELEMENT, STOCHASTIC, True)
        loaded = payload * effective
        GROUPS: tl.constexpr = BLOCK_K // GROUP_KEYS
        groups_of_row: tl.constexpr = (D_K + GROUP_KEYS - 1) // GROUP_KEYS
        group = tl.arange(0, GROUPS)
        first = mask & (rows % TILE_ROWS == 0)
        where = scale_ptr + (rows // TILE_ROWS)[:, None] * groups_of_row + group[None, :]
        there = first[:, None] & (group < groups_of_row)[None, :]
        if SCALE == SCALE_E8M0:
            tl.store(where, encode_power_of_two(stored), mask=there)
        elif SCALE == SCALE_E4M3:
            tl.store(where, encode(stored, E4M3), mask=there)
        elif SCALE == SCALE_FP16:
            tl.store(where, stored.to(tl.float16), mask=there)
        else:
            tl.store(where, stored, mask=there)
    codes = encode(payload, ELEMENT)
    if ELEMENT == E2M1:
        low, high = tl.split(tl.reshape(codes, (BLOCK_V, BLOCK_K // 2, 2)))
        pair = tl.arange(0, BLOCK_K // 2)
        where = payload_ptr + rows[:, None] * (D_K // 2) + pair[None, :]
        tl.store(where, low | (high << 4), mask=mask[:, None] & (pair < D_K // 2)[None, :])
    else:
        tl.store(payload_ptr + rows[:, None] * D_K + keys[None, :], codes, mask=inside)
    return tl.where(inside, loaded, 0.0)


@triton.jit
def load_state(
    payload_ptr,
    scale_ptr,
    head_scale_ptr,
    rows,
    mask,
    D_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    GROUP_KEYS: tl.constexpr,
):
    """Load a tile of one head from the layout of `pack`; the arguments are those of `store_state`.

    Returns:
        float32 `[BLOCK_V, BLOCK_K]`, zero beyond the state.
    """
    keys = tl.arange(0, BLOCK_K)
    inside = mask[:, None] & (keys < D_K)[None, :]
    if ELEMENT == E2M1:
        pair = tl.arange(0, BLOCK_K // 2)
        where = payload_ptr + rows[:, None] * (D_K // 2) + pair[None, :]
        both = tl.load(where, mask=mask[:, None] & (pair < D_K // 2)[None, :], other=0)
        codes = tl.reshape(tl.join(both & 15, both >> 4), (rows.shape[0], BLOCK_K))
    else:
        codes = tl.load(payload_ptr + rows[:, None] * D_K + keys[None, :], mask=inside, other=0)
    values = decode(codes, ELEMENT)
    if SCALE != SCALE_NONE:
        GROUPS: tl.constexpr = BLOCK_K // GROUP_KEYS
        groups_of_row: tl.constexpr = (D_K + GROUP_KEYS - 1) // GROUP_KEYS
        group = tl.arange(0, GROUPS)
        where = scale_ptr + (rows // TILE_ROWS)[:, None] * groups_of_row + group[None, :]
        codes = tl.load(where, mask=mask[:, None] & (group < groups_of_row)[None, :], other=0)
        if SCALE == SCALE_E8M0:
            scales = decode_power_of_two(codes)
        elif SCALE == SCALE_E4M3:
            scales = decode(codes, E4M3) * tl.load(head_scale_ptr)
        else:
            scales = codes.to(tl.float32)
        values = values * over_keys(scales, BLOCK_K)
    return tl.where(inside, values, 0.0)


@triton.jit
def store_and_load_tile(
    values,
    words,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    GROUP_KEYS: tl.constexpr,
    DIVISOR: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    head_bits=None,
):
    """What a tile loads back as after a store, without the detour over bytes.

    Args:
        values: float32 `[BLOCK_V, BLOCK_K]`, zero beyond the state; the whole head where its scale needs that.
        words: uint32 like `values`, for STOCHASTIC only.
        ELEMENT: Element type.
        SCALE: Scale type.
        TILE_ROWS: Rows that share a scale.
        GROUP_KEYS: Keys that share a scale.
        DIVISOR: See `group_scale`.
        STOCHASTIC: Whether the words decide the payload.
        head_bits: As in `store_state`; that of the tile, which must then be the whole head, where it is None.

    Returns:
        float32 like `values`.
    """
    if SCALE == SCALE_NONE:
        loaded = store_payload(values, tl.full((1, 1), 1.0, tl.float32), words, ELEMENT, STOCHASTIC, False)
    else:
        largest = group_largest(magnitude_bits(values), TILE_ROWS, GROUP_KEYS)
        of_head = tl.full((1, 1), 1.0, tl.float32)
        if SCALE == SCALE_E4M3:
            if head_bits is None:
                head_bits = tl.max(tl.max(largest, axis=1), axis=0)
            of_head = of_head * head_scale(head_bits, DIVISOR)
        stored = group_scale(largest, of_head, DIVISOR, SCALE)
        effective = over_keys(stored * of_head, values.shape[1])
        loaded = store_payload(values, effective, words, ELEMENT, STOCHASTIC, True) * effective
    return loaded
