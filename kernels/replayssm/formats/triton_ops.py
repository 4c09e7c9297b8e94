"""Storing tiles of a state in Triton and loading them back: scales, payloads, bytes.

The numbers are those of `replayssm.formats.store_and_load` and `pack`, bit for bit, for the same float32 state and
random words. Kernels that use these functions must be launched with `enable_fp_fusion=False`: a payload times its scale
is rounded to float32 before anything is added to it.
"""

# pyright: basic

import triton
import triton.language as tl

from replayssm.formats.triton_bits import (
    E2M1,
    E4M3,
    decode,
    decode_power_of_two,
    encode,
    encode_power_of_two,
    magnitude_bits,
)
from replayssm.formats.triton_payload import (
    SCALE_E4M3,
    SCALE_E8M0,
    SCALE_FP16,
    SCALE_NONE,
    group_scale,
    head_scale,
    in_units,
    over_keys,
    payload_of,
    unscaled_payload,
)


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
        payload = unscaled_payload(values, words, ELEMENT, STOCHASTIC)
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
        payload = payload_of(in_units(values, stored, of_head, SCALE), values, words, ELEMENT, STOCHASTIC)
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
    largest=None,
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
        largest: `group_largest` of the values, where it is known.

    Returns:
        float32 like `values`.
    """
    if SCALE == SCALE_NONE:
        loaded = unscaled_payload(values, words, ELEMENT, STOCHASTIC)
    else:
        if largest is None:
            largest = group_largest(magnitude_bits(values), TILE_ROWS, GROUP_KEYS)
        of_head = tl.full((1, 1), 1.0, tl.float32)
        if SCALE == SCALE_E4M3:
            if head_bits is None:
                head_bits = tl.max(tl.max(largest, axis=1), axis=0)
            of_head = of_head * head_scale(head_bits, DIVISOR)
        stored = group_scale(largest, of_head, DIVISOR, SCALE)
        effective = over_keys(stored * of_head, values.shape[1])
        payload = payload_of(in_units(values, stored, of_head, SCALE), values, words, ELEMENT, STOCHASTIC)
        loaded = payload * effective
    return loaded
