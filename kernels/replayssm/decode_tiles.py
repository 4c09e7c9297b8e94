"""Tiles of stored states in the decode kernels: `BV` value rows of one head, all keys of each.

A tile is read in one of three ways:

- WIDE: in chunks, see `replayssm.decode_chunks`.
- MATRIX: scaled codes of 8 or 4 bits, in words of 4 or 8, meet bfloat16 vectors on the tensor cores. A float code times
  the scale of its block has at most 6 significant bits, an integer at most 7, so it is a bfloat16 and every product is
  exact.
- FLAT: everything else, as `[BV, BK]`; words are turned into float32 by integer instructions that leave each code off
  by a power of two, which the vector makes up for.
"""

# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnnecessaryComparison=false, reportPrivateImportUsage=false, reportMissingTypeStubs=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from replayssm.decode_chunks import chunk_product, decoded, fetch, tile_chunks, to_chunks, to_flat
from replayssm.decode_words import scaled, stored_factor, word_product
from replayssm.formats.triton_bits import FP32, decode, magnitude_bits, philox_bits
from replayssm.formats.triton_ops import load_state, store_state
from replayssm.formats.triton_payload import SCALE_NONE

WIDE = tl.constexpr(0)
FLAT = tl.constexpr(1)
MATRIX = tl.constexpr(2)


@triton.jit
def load_tile(
    payload_ptr, scale_ptr, head_scale_ptr, rows, mask, MASKED: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, TILE_ROWS: tl.constexpr, GROUP_KEYS: tl.constexpr,
):  # fmt: skip
    """The float32 values of a stored tile, in chunks."""
    if SCALE == SCALE_NONE:
        return decoded(tile_chunks(payload_ptr, rows, mask, MASKED, DK, BK), ELEMENT, BK)
    else:
        return to_chunks(
            load_state(
                payload_ptr, scale_ptr, head_scale_ptr, rows, mask, DK, BK, ELEMENT, SCALE, TILE_ROWS, GROUP_KEYS
            )
        )


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
    FORM: tl.constexpr,
):  # fmt: skip
    """The codes (`[BV, keys or bytes or words]`, or chunks) and the stored scales `[BV, groups]` of a tile."""
    if FORM == WIDE:
        codes = tile_chunks(payload_ptr, rows, mask, MASKED, DK, BK)
    else:
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
def read_tile(
    codes, scales, head_scale_ptr, vector, BK: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr,
    PACKED: tl.constexpr, WORDS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """`S x` for the rows of a fetched tile; `x` in chunks for a WIDE one."""
    if FORM == WIDE:
        found = chunk_product(decoded(codes, ELEMENT, BK), vector, BK)
        if SCALE != SCALE_NONE:
            found = found * tl.sum(stored_factor(scales, head_scale_ptr, SCALE), axis=1)
        return found
    elif WORDS:
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
def largest_of_tile(state, there, DK: tl.constexpr, BK: tl.constexpr):
    """Bits of the largest magnitude of a tile in chunks."""
    WIDTH: tl.constexpr = 32 if BK >= 32 else BK
    largest = 0
    for c in tl.static_range(BK // WIDTH):
        inside = there[:, None] & (c * WIDTH + tl.arange(0, WIDTH) < DK)[None, :]
        bits = tl.where(inside, magnitude_bits(state[c]), 0)
        largest = tl.maximum(largest, tl.max(tl.max(bits, axis=1), axis=0))
    return largest


@triton.jit
def store_tile(
    state, philox, sequence, token, payload_ptr, scale_ptr, head_scale_ptr, divisor, head, rows, mask,
    COPY: tl.constexpr, MASKED: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, TILE_ROWS: tl.constexpr, GROUP_KEYS: tl.constexpr,
    STOCHASTIC: tl.constexpr, head_bits=None,
):  # fmt: skip
    """Store the chunks of a tile of one head in a format; `philox` points to the seed's halves and the layer.

    `head_bits` are those of the largest magnitude of the head, of a tile that is only a part of it.
    """
    WIDTH: tl.constexpr = 32 if BK >= 32 else BK
    if ELEMENT == FP32:
        for c in tl.static_range(BK // WIDTH):
            place = c * WIDTH + tl.arange(0, WIDTH)
            where = payload_ptr + rows[:, None] * DK + place[None, :]
            if MASKED or BK != DK:
                tl.store(where, state[c], mask=mask[:, None] & (place < DK)[None, :])
            else:
                tl.store(where, state[c])
    else:
        values = to_flat(state, 0, BK // WIDTH)
        place = tl.arange(0, BK)[None, :]
        kept = tl.where(mask[:, None] & (place < DK), values, 0.0)
        if STOCHASTIC:
            words = philox_bits(
                tl.load(philox).to(tl.uint32), tl.load(philox + 1).to(tl.uint32),
                (tl.load(philox + 2) + COPY * 16777216).to(tl.uint32), sequence.to(tl.uint32), token.to(tl.uint32),
                head * DV + rows, DK, BK,
            )  # fmt: skip
        else:
            words = tl.zeros(values.shape, tl.uint32)
        if head_bits is None:
            head_bits = tl.max(tl.max(magnitude_bits(kept), axis=1), axis=0)
        store_state(
            kept, words, payload_ptr, scale_ptr, head_scale_ptr, head_bits, divisor, rows, mask, DK, ELEMENT, SCALE,
            TILE_ROWS, GROUP_KEYS, STOCHASTIC,
        )  # fmt: skip


@triton.jit
def store_copies(
    state, philox, sequence, token, payload_ptr, scale_ptr, head_scale_ptr, divisor, read_payload_ptr, read_scale_ptr,
    read_head_scale_ptr, read_divisor, head, rows, mask, largest, SEPARATE: tl.constexpr, AGAIN: tl.constexpr,
    MASKED: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, ELEMENT: tl.constexpr,
    SCALE: tl.constexpr, TILE_ROWS: tl.constexpr, GROUP_KEYS: tl.constexpr, STOCHASTIC: tl.constexpr,
    READ_ELEMENT: tl.constexpr, READ_SCALE: tl.constexpr, READ_TILE_ROWS: tl.constexpr, READ_GROUP_KEYS: tl.constexpr,
    READ_STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Store a tile in both copies, or leave the read copy to `store_again`: returns the bits of the largest so far."""
    if AGAIN:
        largest = tl.maximum(largest, largest_of_tile(state, mask, DK, BK))
    elif SEPARATE:
        store_tile(
            state, philox, sequence, token, read_payload_ptr, read_scale_ptr, read_head_scale_ptr, read_divisor, head,
            rows, mask, 1, MASKED, DV, DK, BK, READ_ELEMENT, READ_SCALE, READ_TILE_ROWS, READ_GROUP_KEYS,
            READ_STOCHASTIC,
        )  # fmt: skip
    store_tile(
        state, philox, sequence, token, payload_ptr, scale_ptr, head_scale_ptr, divisor, head, rows, mask, 0, MASKED,
        DV, DK, BK, ELEMENT, SCALE, TILE_ROWS, GROUP_KEYS, STOCHASTIC,
    )  # fmt: skip
    return largest


@triton.jit
def store_again(
    states_at, philox, sequence, token, payload_ptr, scale_ptr, head_scale_ptr, divisor, head, first_row, largest,
    BV: tl.constexpr, TILES: tl.constexpr, MASKED: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, TILE_ROWS: tl.constexpr, GROUP_KEYS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Store the read copy of a head from the float32 copy that this program has just stored, tile by tile.

    Its scale, from the bits `largest`, was not known before all of the head was.
    """
    tl.debug_barrier()
    for t in tl.range(0, TILES, num_stages=1):
        rows = first_row + t * BV + tl.arange(0, BV)
        there = rows < DV
        state = tile_chunks(states_at, rows, there, MASKED, DK, BK)
        store_tile(
            state, philox, sequence, token, payload_ptr, scale_ptr, head_scale_ptr, divisor, head, rows, there, 1,
            MASKED, DV, DK, BK, ELEMENT, SCALE, TILE_ROWS, GROUP_KEYS, STOCHASTIC, largest,
        )  # fmt: skip
