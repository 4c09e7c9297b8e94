"""What the decode kernels of all recurrences share: tiles of stored states, suffix sums of decays, cursors.

A tile holds `BV` value rows of one head, all keys of each. Scaled float codes of 8 or 4 bits are read as words of 4 or
8 codes (`WORDS`): three integer instructions turn a code into a float32 that is off by a power of two, half of which a
vector that meets it makes up for, and a factor on the sum the rest. Where that does not fit (`PACKED` without `WORDS`),
the two codes of a byte stay in two tiles of half the width. Neither needs an exchange between threads.
"""

# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnnecessaryComparison=false, reportPrivateImportUsage=false, reportMissingTypeStubs=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from replayssm.formats.triton_bits import (
    E2M1,
    E4M3,
    FP32,
    decode,
    decode_power_of_two,
    magnitude_bits,
    philox_bits,
)
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
    GROUP_KEYS: tl.constexpr, SCALE: tl.constexpr, TILE_ROWS: tl.constexpr, PACKED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The codes `[BV, keys or bytes]` and the stored scales `[BV, groups]` of a tile, as they lie in memory."""
    if WORDS:
        place = tl.arange(0, BK // (8 if PACKED else 4))
        width: tl.constexpr = DK // (8 if PACKED else 4)
    elif PACKED:
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
def stored_factor(scales, head_scale_ptr, SCALE: tl.constexpr):
    """What the payloads of each group are multiplied with, from fetched scales."""
    if SCALE == SCALE_E8M0:
        return decode_power_of_two(scales)
    elif SCALE == SCALE_E4M3:
        return decode(scales, E4M3) * tl.load(head_scale_ptr)
    else:
        return scales.to(tl.float32)


@triton.jit
def word_code(words, NUMBER: tl.constexpr, ELEMENT: tl.constexpr):
    """Code `NUMBER` of each word as a float32 `2**-126` (e2m1), `2**-120` (e4m3) or `2**-112` (e5m2) times its value.

    The sign is drawn out by an arithmetic shift that leaves exponent and fraction in their place; small codes become
    float32 subnormals, which products keep exactly once a factor brings them back.
    """
    if ELEMENT == E2M1:
        bits = ((words << (28 - 4 * NUMBER)) >> 6) & -2118123520
    elif ELEMENT == E4M3:
        bits = ((words << (24 - 8 * NUMBER)) >> 4) & -2014314496
    else:
        bits = ((words << (24 - 8 * NUMBER)) >> 3) & -1881145344
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def word_product(words, factor, vector, ELEMENT: tl.constexpr):
    """`S x` for the rows of a tile of words."""
    BK: tl.constexpr = vector.shape[0]
    if ELEMENT == E2M1:
        lifted = tl.reshape(vector * 9223372036854775808.0, (BK // 8, 2, 2, 2))
        even, odd = tl.split(lifted)
        e0, e1 = tl.split(even)
        o0, o1 = tl.split(odd)
        v0, v4 = tl.split(e0)
        v2, v6 = tl.split(e1)
        v1, v5 = tl.split(o0)
        v3, v7 = tl.split(o1)
        total = word_code(words, 0, ELEMENT) * v0[None, :]
        total += word_code(words, 1, ELEMENT) * v1[None, :]
        total += word_code(words, 2, ELEMENT) * v2[None, :]
        total += word_code(words, 3, ELEMENT) * v3[None, :]
        total += word_code(words, 4, ELEMENT) * v4[None, :]
        total += word_code(words, 5, ELEMENT) * v5[None, :]
        total += word_code(words, 6, ELEMENT) * v6[None, :]
        total += word_code(words, 7, ELEMENT) * v7[None, :]
        return tl.sum(scaled(total * 9223372036854775808.0, factor), axis=1)
    else:
        lift: tl.constexpr = 1152921504606846976.0 if ELEMENT == E4M3 else 72057594037927936.0  # pyright: ignore
        even, odd = tl.split(tl.reshape(vector * lift, (BK // 4, 2, 2)))
        v0, v2 = tl.split(even)
        v1, v3 = tl.split(odd)
        total = word_code(words, 0, ELEMENT) * v0[None, :]
        total += word_code(words, 1, ELEMENT) * v1[None, :]
        total += word_code(words, 2, ELEMENT) * v2[None, :]
        total += word_code(words, 3, ELEMENT) * v3[None, :]
        return tl.sum(scaled(total * lift, factor), axis=1)


@triton.jit
def read_tile(
    codes, scales, head_scale_ptr, vector, ELEMENT: tl.constexpr, SCALE: tl.constexpr, PACKED: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """`S x` for the rows of a fetched tile."""
    if WORDS:
        return word_product(codes, stored_factor(scales, head_scale_ptr, SCALE), vector, ELEMENT)
    else:
        low, high = decode_tile(codes, scales, head_scale_ptr, ELEMENT, SCALE, PACKED)
        vector_low, vector_high = as_tile(vector, PACKED)
        return product(low, high, vector_low, vector_high, PACKED)


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
        factor = stored_factor(scales, head_scale_ptr, SCALE)
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
