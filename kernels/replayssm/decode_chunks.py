"""Vectors over keys and tiles of states in chunks of 32 keys, as the decode kernels work on them.

Eight neighbouring threads share a row of a chunk, 16 bytes each, and hold their part of every chunk: a warp sums over
four rows with three exchanges, where rows spread over whole warps would need five each. Vectors come in the same chunks
and are loaded where they are needed, for a tensor that is reshaped would drag a whole tile into its layout.
"""

# pyright: reportUntypedFunctionDecorator=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnnecessaryComparison=false, reportPrivateImportUsage=false, reportMissingTypeStubs=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from replayssm.formats.triton_bits import decode


@triton.jit
def fetch(pointer, mask, MASKED: tl.constexpr):
    """Load, with a mask only where one is needed."""
    if MASKED:
        return tl.load(pointer, mask=mask, other=0)
    else:
        return tl.load(pointer)


@triton.jit
def chunk(pointer, step, NUMBER: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr):
    """Chunk `NUMBER` of a vector over keys."""
    WIDTH: tl.constexpr = 32 if BK >= 32 else BK
    place = NUMBER * WIDTH + tl.arange(0, WIDTH)
    return fetch(pointer + place * step, place < DK, BK != DK)


@triton.jit
def chunks(pointer, step, DK: tl.constexpr, BK: tl.constexpr):
    """All chunks of a vector over keys, as they are stored."""
    found = ()
    for c in tl.static_range(BK // (32 if BK >= 32 else BK)):
        found = found + (chunk(pointer, step, c, DK, BK),)
    return found


@triton.jit
def tile_chunk(
    pointer, rows, there, NUMBER: tl.constexpr, MASKED: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Chunk `NUMBER` of the rows of a tile; rows that are not there are zeros."""
    WIDTH: tl.constexpr = 32 if BK >= 32 else BK
    place = NUMBER * WIDTH + tl.arange(0, WIDTH)
    where = pointer + rows[:, None] * DK + place[None, :]
    return fetch(where, there[:, None] & (place < DK)[None, :], MASKED or BK != DK)


@triton.jit
def tile_chunks(pointer, rows, there, MASKED: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr):
    """All chunks of a tile."""
    found = ()
    for c in tl.static_range(BK // (32 if BK >= 32 else BK)):
        found = found + (tile_chunk(pointer, rows, there, c, MASKED, DK, BK),)
    return found


@triton.jit
def inner_product(left, left_step, right, right_step, DK: tl.constexpr, BK: tl.constexpr):
    """The product of two vectors in memory."""
    WIDTH: tl.constexpr = 32 if BK >= 32 else BK
    total = tl.zeros((WIDTH,), tl.float32)
    for c in tl.static_range(BK // WIDTH):
        one = chunk(left, left_step, c, DK, BK).to(tl.float32)
        total += one * chunk(right, right_step, c, DK, BK).to(tl.float32)
    return tl.sum(total, axis=0)


@triton.jit
def chunk_product(state, vector, BK: tl.constexpr):
    """`S x` for the rows of a tile in chunks."""
    total = state[0] * vector[0].to(tl.float32)[None, :]
    for c in tl.static_range(1, BK // (32 if BK >= 32 else BK)):
        total += state[c] * vector[c].to(tl.float32)[None, :]
    return tl.sum(total, axis=1)


@triton.jit
def written(state, write, key, BK: tl.constexpr):
    """A tile in chunks after one write per row along a key."""
    after = ()
    for c in tl.static_range(BK // (32 if BK >= 32 else BK)):
        after = after + (state[c] + write[:, None] * key[c].to(tl.float32)[None, :],)
    return after


@triton.jit
def multiplied(vector, factor, BK: tl.constexpr):
    """The elementwise product of two vectors in chunks."""
    found = ()
    for c in tl.static_range(BK // (32 if BK >= 32 else BK)):
        found = found + (vector[c].to(tl.float32) * factor[c].to(tl.float32),)
    return found


@triton.jit
def scaled_chunks(vector, factor, BK: tl.constexpr):
    """A vector in chunks times a number, float32."""
    found = ()
    for c in tl.static_range(BK // (32 if BK >= 32 else BK)):
        found = found + (vector[c].to(tl.float32) * factor,)
    return found


@triton.jit
def exponentials(vector, BK: tl.constexpr):
    """The exponentials of a vector in chunks."""
    found = ()
    for c in tl.static_range(BK // (32 if BK >= 32 else BK)):
        found = found + (tl.exp(vector[c].to(tl.float32)),)
    return found


@triton.jit
def decayed_chunks(state, gain, BK: tl.constexpr, CHANNELS: tl.constexpr):
    """A tile in chunks times one factor, or one per key."""
    after = ()
    for c in tl.static_range(BK // (32 if BK >= 32 else BK)):
        after = after + (state[c] * (gain[c][None, :] if CHANNELS else gain),)
    return after


@triton.jit
def to_chunks(values):
    """A tile `[BV, BK]` in chunks."""
    BV: tl.constexpr = values.shape[0]
    BK: tl.constexpr = values.shape[1]
    if BK <= 32:
        return (values,)
    else:
        low, high = tl.split(tl.permute(tl.reshape(values, (BV, 2, BK // 2)), (0, 2, 1)))
        return to_chunks(low) + to_chunks(high)


@triton.jit
def to_flat(state, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """`COUNT` chunks of a tile, from chunk `FIRST` on, side by side."""
    if COUNT == 1:
        return state[FIRST]
    else:
        low = to_flat(state, FIRST, COUNT // 2)
        high = to_flat(state, FIRST + COUNT // 2, COUNT // 2)
        return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (low.shape[0], 2 * low.shape[1]))


@triton.jit
def decoded(codes, ELEMENT: tl.constexpr, BK: tl.constexpr):
    """The float32 values of a tile in chunks."""
    found = ()
    for c in tl.static_range(BK // (32 if BK >= 32 else BK)):
        found = found + (decode(codes[c], ELEMENT),)
    return found
