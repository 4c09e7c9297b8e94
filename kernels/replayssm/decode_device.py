"""What the decode kernels of all recurrences share: tiles of stored states, suffix sums of decays, cursors.

A tile holds `BV` value rows of one head, all keys of each. Of a 4-bit format the two codes of a byte stay in two tiles
of half the width, so that reading a state needs no exchange between threads; vectors that meet them are split likewise.
"""

# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnnecessaryComparison=false, reportPrivateImportUsage=false, reportMissingTypeStubs=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from replayssm.formats.triton_bits import E4M3, FP32, decode, decode_power_of_two, magnitude_bits, philox_bits
from replayssm.formats.triton_ops import SCALE_E4M3, SCALE_E8M0, SCALE_NONE, store_state


@triton.jit
def fetch(pointer, mask, MASKED: tl.constexpr):
    """Load, with a mask only where one is needed."""
    if MASKED:
        return tl.load(pointer, mask=mask, other=0)
    else:
        return tl.load(pointer)


@triton.jit
def product(low, high, vector_low, vector_high, PACKED: tl.constexpr):
    """`S x` for the rows of a tile."""
    if PACKED:
        return tl.sum(low * vector_low[None, :] + high * vector_high[None, :], axis=1)
    else:
        return tl.sum(low * vector_low[None, :], axis=1)


@triton.jit
def as_tile(vector, PACKED: tl.constexpr):
    """A vector over keys as a tile meets it: as it is, or (4-bit formats) its even and its odd elements."""
    if PACKED:
        low, high = tl.split(tl.reshape(vector, (vector.shape[0] // 2, 2)))
        return low, high
    else:
        return vector, vector


@triton.jit
def fetch_tile(
    payload_ptr, scale_ptr, rows, mask, MASKED: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
    GROUP_KEYS: tl.constexpr, SCALE: tl.constexpr, TILE_ROWS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The codes `[BV, keys or bytes]` and the stored scales `[BV, groups]` of a tile, as they lie in memory."""
    if PACKED:
        place = tl.arange(0, BK // 2)
        width: tl.constexpr = DK // 2
    else:
        place = tl.arange(0, BK)
        width: tl.constexpr = DK
    inside = mask[:, None] & (place < width)[None, :]
    codes = fetch(payload_ptr + rows[:, None] * width + place[None, :], inside, MASKED or BK != DK)
    if SCALE == SCALE_NONE:
        scales = codes
    else:
        group = tl.arange(0, BK // GROUP_KEYS)
        per_row: tl.constexpr = (DK + GROUP_KEYS - 1) // GROUP_KEYS
        there = mask[:, None] & (group < per_row)[None, :]
        where = scale_ptr + (rows // TILE_ROWS)[:, None] * per_row + group[None, :]
        scales = fetch(where, there, MASKED or BK != DK)
    return codes, scales


@triton.jit
def scaled(values, factor):
    """Values `[BV, keys]` times factors `[BV, groups]`, each of which serves consecutive keys."""
    BV: tl.constexpr = values.shape[0]
    WIDTH: tl.constexpr = values.shape[1]
    GROUPS: tl.constexpr = factor.shape[1]
    if GROUPS == 1:
        return values * factor
    else:
        grouped = tl.reshape(values, (BV, GROUPS, WIDTH // GROUPS)) * factor[:, :, None]
        return tl.reshape(grouped, (BV, WIDTH))


@triton.jit
def decode_tile(codes, scales, head_scale_ptr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, PACKED: tl.constexpr):
    """The float32 values of fetched codes; of a 4-bit format those of the low and of the high halves of the bytes."""
    if PACKED:
        low = decode(codes & 15, ELEMENT)
        high = decode(codes >> 4, ELEMENT)
    else:
        low = decode(codes, ELEMENT)
        high = low
    if SCALE != SCALE_NONE:
        if SCALE == SCALE_E8M0:
            factor = decode_power_of_two(scales)
        elif SCALE == SCALE_E4M3:
            factor = decode(scales, E4M3) * tl.load(head_scale_ptr)
        else:
            factor = scales.to(tl.float32)
        low = scaled(low, factor)
        if PACKED:
            high = scaled(high, factor)
        else:
            high = low
    return low, high


@triton.jit
def whole_tile(low, high, BV: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr):
    """The values of a tile in order, `[BV, BK]`."""
    if PACKED:
        return tl.reshape(tl.join(low, high), (BV, BK))
    else:
        return low


@triton.jit
def store_tile(
    values, philox, sequence, token, payload_ptr, scale_ptr, head_scale_ptr, divisor, head, rows, mask,
    COPY: tl.constexpr, MASKED: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, ELEMENT: tl.constexpr,
    SCALE: tl.constexpr, TILE_ROWS: tl.constexpr, GROUP_KEYS: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Store `[BV, BK]` values of one head in a format; `philox` points to the seed's halves and the layer."""
    BK: tl.constexpr = values.shape[1]
    place = tl.arange(0, BK)[None, :]
    if ELEMENT == FP32:
        where = payload_ptr + rows[:, None] * DK + place
        if MASKED or BK != DK:
            tl.store(where, values, mask=mask[:, None] & (place < DK))
        else:
            tl.store(where, values)
    else:
        kept = tl.where(mask[:, None] & (place < DK), values, 0.0)
        if STOCHASTIC:
            words = philox_bits(
                tl.load(philox).to(tl.uint32), tl.load(philox + 1).to(tl.uint32),
                (tl.load(philox + 2) + COPY * 16777216).to(tl.uint32), sequence.to(tl.uint32), token.to(tl.uint32),
                head * DV + rows, DK, BK,
            )  # fmt: skip
        else:
            words = tl.zeros(values.shape, tl.uint32)
        largest = tl.max(tl.max(magnitude_bits(kept), axis=1), axis=0)
        store_state(
            kept, words, payload_ptr, scale_ptr, head_scale_ptr, largest, divisor, rows, mask, DK, ELEMENT, SCALE,
            TILE_ROWS, GROUP_KEYS, STOCHASTIC,
        )  # fmt: skip


@triton.jit
def later_decays(pointer, now, count, LP: tl.constexpr):
    """For each record the sum of the log-decays after it, the present token's included, and the sum of all.

    Each is summed from its own terms, never a difference of two sums, which one strong decay would cost their digits.
    """
    record = tl.arange(0, LP)
    following = tl.load(pointer + record + 1, mask=record + 1 < count, other=0.0)
    own = tl.load(pointer + record, mask=record < count, other=0.0)
    return tl.cumsum(following, axis=0, reverse=True) + now, tl.sum(own, axis=0) + now


@triton.jit
def advance_cursors_kernel(slot_index, cursors, tokens, count, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Count the token that all layers have just read: one more record, or none after a flush."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_index + row, mask=row < count, other=-1).to(tl.int64)
    used = slot >= 0
    cursor = tl.load(cursors + slot, mask=used, other=0) + 1
    tl.store(cursors + slot, tl.where(cursor >= WINDOW, 0, cursor), mask=used)
    token = tl.load(tokens + slot, mask=used, other=0)
    tl.store(tokens + slot, token + 1, mask=used)
