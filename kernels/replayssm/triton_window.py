"""Device functions that the window kernels of all recurrences share.

A launch walks *pieces*: runs of at most BLOCK_T tokens of one replay window. Inside a window nothing is rounded, so a
window longer than BLOCK_T is the same computation as its pieces one after another with the working state between them;
the store comes after its last piece. Tiles: a state is `[BLOCK_V, BLOCK_K]`, tokens of a piece are `[BLOCK_T, …]`,
outputs and writes are `[BLOCK_V, BLOCK_T]`, as the products with a state leave them.

Tables (see `replayssm.triton_tables`): `rows_ptr` int32 `[rows, ROW_FIELDS]`, `pieces_ptr` int32
`[rows, pieces, PIECE_FIELDS]`, `tokens_ptr` int32 `[rows, pieces, BLOCK_T]` with the flat index of each token or −1.
A row: its recurrence lane, its read lane or −1, the formats of both, sequence, low and high half of the seed, pieces.
A piece: tokens in it, flags (STORES, WRITES), index of its last token in the sequence, slot of its read copy or −1.

What a piece does to a state is prepared beforehand, for all pieces at once, as *operands* (see `put_operand`): with

    outputs = own + state @ readsᵀ    writes = values − state @ recallsᵀ    state ← state * decay + writes @ keys

only two products depend on the state before, so a walk is a chain of those.
`replayssm.{mamba2,gdn,kda}.window_triton` derive the operands.

Only the copy that carries a recurrence is walked in order. A separate read copy is a function of the working state at
the last store, so the walk leaves that state in `copies`, one per window, and a second launch stores and reads them all
at once (`windows_ptr` int32 `[windows, WINDOW_FIELDS]`: row, first piece, pieces or 0, slot of the copy that the window
reads, whether the copy has to be stored first, index of the last token in it, lane that it stays in or −1, unused).
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false

import triton
import triton.language as tl

from replayssm.formats.triton_bits import magnitude_bits, philox_bits
from replayssm.formats.triton_ops import group_largest, store_and_load_tile
from replayssm.formats.triton_payload import SCALE_E4M3, SCALE_NONE

ROW_FIELDS = tl.constexpr(8)
PIECE_FIELDS = tl.constexpr(4)
WINDOW_FIELDS = tl.constexpr(8)
STORES = tl.constexpr(1)
WRITES = tl.constexpr(2)
IEEE = tl.constexpr(0)
TF32 = tl.constexpr(1)
BF16_PRODUCTS = tl.constexpr(2)
BF16_INTERPRETED = tl.constexpr(3)
BF16X6 = tl.constexpr(4)
BF16X6_INTERPRETED = tl.constexpr(5)


@triton.jit
def product(a, b, PRODUCTS: tl.constexpr):
    """`a @ b` with float32 accumulation, operands as PRODUCTS says."""
    return add_product(tl.zeros((a.shape[0], b.shape[1]), dtype=tl.float32), a, b, PRODUCTS)


@triton.jit
def add_product(start, a, b, PRODUCTS: tl.constexpr):
    """`start + a @ b`; what a state becomes this way stays where the product leaves it, and costs no registers more."""
    if PRODUCTS == BF16_PRODUCTS:
        result = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc=start)
    elif PRODUCTS == BF16_INTERPRETED:
        result = tl.dot(_to_bfloat16(a), _to_bfloat16(b), acc=start, input_precision="ieee")
    elif PRODUCTS == TF32:
        result = tl.dot(a, b, acc=start, input_precision="tf32")
    elif PRODUCTS == BF16X6 or PRODUCTS == BF16X6_INTERPRETED:
        a0, a1, a2 = in_parts(a, PRODUCTS)
        b0, b1, b2 = in_parts(b, PRODUCTS)
        result = start + product_of_parts(a0, a1, a2, b0, b1, b2)
    else:
        result = tl.dot(a, b, acc=start, input_precision="ieee")
    return result


@triton.jit
def in_parts(x, PRODUCTS: tl.constexpr):
    """Three bfloat16 numbers whose sum is `x`; what is not finite becomes NaN."""
    if PRODUCTS == BF16X6:
        # As one piece of assembly, or the compiler moves some of the conversions to another layout and others not.
        first, second, third = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 low, high;
                .reg .f32 a, b;
                cvt.rn.bf16x2.f32 $0, $4, $3;
                shl.b32 low, $0, 16;
                and.b32 high, $0, 0xffff0000;
                sub.rn.f32 a, $3, low;
                sub.rn.f32 b, $4, high;
                cvt.rn.bf16x2.f32 $1, b, a;
                shl.b32 low, $1, 16;
                and.b32 high, $1, 0xffff0000;
                sub.rn.f32 a, a, low;
                sub.rn.f32 b, b, high;
                cvt.rn.bf16x2.f32 $2, b, a;
            }
            """,
            "=&r,=&r,=&r,r,r",
            [x],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        first = _to_bfloat16(x)
        rest = x - first
        second = _to_bfloat16(rest)
        third = _to_bfloat16(rest - second)
    return first, second, third


@triton.jit
def product_of_parts(a0, a1, a2, b0, b1, b2):
    """The product of two sums of three parts, smallest terms first; what is left out is below 2**-24 of a product."""
    total = tl.dot(a2, b0, input_precision="ieee")
    total = tl.dot(a1, b1, acc=total, input_precision="ieee")
    total = tl.dot(a0, b2, acc=total, input_precision="ieee")
    total = tl.dot(a1, b0, acc=total, input_precision="ieee")
    total = tl.dot(a0, b1, acc=total, input_precision="ieee")
    return tl.dot(a0, b0, acc=total, input_precision="ieee")


@triton.jit
def read_state(state, vectors, PRODUCTS: tl.constexpr):
    """`state @ vectorsᵀ` for vectors `[BLOCK_T, BLOCK_K]`.

    A float32 product keeps the operands of its whole reduction in registers, several times what the state takes. So
    tiles of few rows are multiplied 32 keys at a time by different warps; with many rows that costs more than it saves.
    """
    BLOCK_V: tl.constexpr = state.shape[0]
    BLOCK_T: tl.constexpr = vectors.shape[0]
    PARTS: tl.constexpr = state.shape[1] // 32
    if PRODUCTS == IEEE and PARTS > 1 and BLOCK_V <= 32:
        rows = tl.permute(tl.reshape(state, (BLOCK_V, PARTS, 32)), (1, 0, 2))
        columns = tl.permute(tl.reshape(vectors, (BLOCK_T, PARTS, 32)), (1, 2, 0))
        result = tl.sum(tl.dot(rows, columns, input_precision="ieee"), axis=0)
    else:
        result = product(state, tl.trans(vectors), PRODUCTS)
    return result


@triton.jit
def _to_bfloat16(x):
    """Operands rounded to bfloat16 but kept as float32, for the interpreter, whose bfloat16 products are wrong."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def put_operand(ptr, place, first, x, PRODUCTS: tl.constexpr, ROWS: tl.constexpr):
    """Leave the vectors `x` `[BLOCK_T, BLOCK_K]` of one piece and head as the products take them.

    Operands are a contiguous `[places, parts, ROWS, BLOCK_K]`, in bfloat16 where the products are; the vectors of a
    piece are the rows from `first`.
    """
    BLOCK_T: tl.constexpr = x.shape[0]
    BLOCK_K: tl.constexpr = x.shape[1]
    SIZE: tl.constexpr = ROWS * BLOCK_K
    PARTS: tl.constexpr = 3 if PRODUCTS == BF16X6 or PRODUCTS == BF16X6_INTERPRETED else 1
    inner = (first + tl.arange(0, BLOCK_T))[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    where = ptr + place.to(tl.int64) * (PARTS * SIZE) + inner
    if PARTS == 3:
        x0, x1, x2 = in_parts(x, PRODUCTS)
        tl.store(where, x0)
        tl.store(where + SIZE, x1)
        tl.store(where + 2 * SIZE, x2)
    elif PRODUCTS == BF16_PRODUCTS:
        tl.store(where, x.to(tl.bfloat16))
    elif PRODUCTS == BF16_INTERPRETED:
        tl.store(where, _to_bfloat16(x))
    else:
        tl.store(where, x)


@triton.jit
def operand(ptr, place, part, PRODUCTS: tl.constexpr, ROWS: tl.constexpr, USED: tl.constexpr, BLOCK_K: tl.constexpr):
    """The first USED of the ROWS vectors of an operand, `[USED, BLOCK_K]`."""
    PARTS: tl.constexpr = 3 if PRODUCTS == BF16X6 or PRODUCTS == BF16X6_INTERPRETED else 1
    inner = tl.arange(0, USED)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    return tl.load(ptr + (place.to(tl.int64) * PARTS + part) * (ROWS * BLOCK_K) + inner)


@triton.jit
def read_operand(state, ptr, place, PRODUCTS: tl.constexpr, ROWS: tl.constexpr, USED: tl.constexpr):
    """`state @ vectorsᵀ` for vectors of an operand."""
    BLOCK_K: tl.constexpr = state.shape[1]
    x0 = operand(ptr, place, 0, PRODUCTS, ROWS, USED, BLOCK_K)
    if PRODUCTS == BF16X6 or PRODUCTS == BF16X6_INTERPRETED:
        x1 = operand(ptr, place, 1, PRODUCTS, ROWS, USED, BLOCK_K)
        x2 = operand(ptr, place, 2, PRODUCTS, ROWS, USED, BLOCK_K)
        s0, s1, s2 = in_parts(state, PRODUCTS)
        result = product_of_parts(s0, s1, s2, tl.trans(x0), tl.trans(x1), tl.trans(x2))
    else:
        result = read_state(state, x0, PRODUCTS)
    return result


@triton.jit
def add_operand(start, writes, ptr, place, PRODUCTS: tl.constexpr):
    """`start + writes @ vectors` for the vectors of an operand, one per token."""
    BLOCK_T: tl.constexpr = writes.shape[1]
    BLOCK_K: tl.constexpr = start.shape[1]
    x0 = operand(ptr, place, 0, PRODUCTS, BLOCK_T, BLOCK_T, BLOCK_K)
    if PRODUCTS == BF16X6 or PRODUCTS == BF16X6_INTERPRETED:
        x1 = operand(ptr, place, 1, PRODUCTS, BLOCK_T, BLOCK_T, BLOCK_K)
        x2 = operand(ptr, place, 2, PRODUCTS, BLOCK_T, BLOCK_T, BLOCK_K)
        w0, w1, w2 = in_parts(writes, PRODUCTS)
        result = start + product_of_parts(w0, w1, w2, x0, x1, x2)
    else:
        result = add_product(start, writes, x0, PRODUCTS)
    return result


@triton.jit
def put_values(ptr, place, values, own, v, d_v):
    """Leave values and own outputs `[BLOCK_V, BLOCK_T]` of one piece and head in a `[places, 2, d_v, BLOCK_T]`."""
    BLOCK_T: tl.constexpr = values.shape[1]
    inner = v[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    where = ptr + place.to(tl.int64) * 2 * d_v * BLOCK_T + inner
    tl.store(where, values, mask=(v < d_v)[:, None])
    tl.store(where + d_v * BLOCK_T, own, mask=(v < d_v)[:, None])


@triton.jit
def decay_between(later, earlier):
    """`exp(later − earlier)` of cumulated float64 log-decays, in float32."""
    return tl.exp((later - earlier).to(tl.float32))


@triton.jit
def piece_and_head(program, heads):
    """The piece (int64) and head of a program; heads of a piece are neighbours, as they are in memory."""
    return (program // heads).to(tl.int64), program % heads


@triton.jit
def load_tokens(ptr, tokens, width, columns, mask):
    """Rows `tokens` of a contiguous `[tokens, width]` array, zero for neutral tokens (−1) and beyond `mask`."""
    where = tokens.to(tl.int64)[:, None] * width + columns[None, :]
    return tl.load(ptr + where, mask=(tokens >= 0)[:, None] & mask[None, :], other=0.0)


@triton.jit
def load_vector(ptr, tokens, width, column):
    """Column `column` of the rows `tokens` of a contiguous `[tokens, width]` array, zero for neutral tokens."""
    return tl.load(ptr + tokens.to(tl.int64) * width + column, mask=tokens >= 0, other=0.0)


@triton.jit
def state_offsets(lane, head, heads, d_v, v, keys, D_K: tl.constexpr):
    """Where a tile of one head of one lane is, in a contiguous `[lanes, heads, d_v, d_k]`."""
    return (lane.to(tl.int64) * heads + head) * d_v * D_K + v[:, None] * D_K + keys[None, :]


@triton.jit
def solve_unit_lower(strict, BLOCK_T: tl.constexpr):
    """The inverse of `I + strict`, row by row, for a strictly lower triangular `[BLOCK_T, BLOCK_T]`.

    Forward substitution: a product of powers would be faster, but loses digits where keys repeat.
    """
    index = tl.arange(0, BLOCK_T)
    inverse = (index[:, None] == index[None, :]).to(tl.float32)
    for i in range(1, BLOCK_T):
        row = tl.sum(tl.where(index[:, None] == i, strict, 0.0), axis=0)
        known = tl.sum(row[:, None] * inverse, axis=0)
        inverse = tl.where(index[:, None] == i, inverse - known[None, :], inverse)
    return inverse


@triton.jit
def publish_largest(own, ptr, part):
    """Leave the largest magnitude (as bits) that a program has found to the others of its head, at `ptr[part]`."""
    tl.store(ptr + part, own + 1)


@triton.jit
def largest_of_head(ptr, PARTS: tl.constexpr):
    """Largest of the magnitudes (as bits) that the programs of one head leave with `publish_largest`; waits for them.

    All of them run once the first does, or start next: see `replayssm.triton_pieces.place_in_grid`.

    Args:
        ptr: int32 `[PARTS]`, zero before the first of them starts; used once.
        PARTS: How many programs there are.

    Returns:
        int32 scalar.
    """
    largest = tl.full((), 0, tl.int32)
    for i in tl.static_range(PARTS):
        found = tl.load(ptr + i, volatile=True)
        while found == 0:
            found = tl.load(ptr + i, volatile=True)
        largest = tl.maximum(largest, found - 1)
    return largest


@triton.jit
def store_lane(
    working,
    which,
    row_ptr,
    layer,
    token,
    copy: tl.constexpr,
    head_rows,
    D_K: tl.constexpr,
    FORMATS: tl.constexpr,
    exchange_ptr=None,
    part=0,
    PARTS: tl.constexpr = 1,
):
    """Store a working state in the format that its row names and load it back.

    Args:
        working: float32 `[BLOCK_V, BLOCK_K]`.
        which: Index in FORMATS, or −1 for a copy that keeps the working state as it is.
        row_ptr: The row's entry of the table of rows.
        layer: Index of the layer.
        token: Index of the last token folded into the state, uint32.
        copy: Which copy the random bits are for.
        head_rows: `head * d_v + row` of each row of the tile.
        D_K: Keys per row.
        FORMATS: Tuple of `(ELEMENT, SCALE, TILE_ROWS, GROUP_KEYS, DIVISOR, STOCHASTIC)`.
        exchange_ptr: Where the programs of a head exchange what `largest_of_head` takes, if PARTS is not 1.
        part: Which of those programs this is.
        PARTS: Programs that share a head whose scale depends on all of it.
    """
    BLOCK_V: tl.constexpr = working.shape[0]
    BLOCK_K: tl.constexpr = working.shape[1]
    loaded = working
    for i in tl.static_range(len(FORMATS)):
        if which == i:
            SHARED: tl.constexpr = PARTS > 1 and FORMATS[i][1] == SCALE_E4M3
            largest = None
            if FORMATS[i][1] != SCALE_NONE:
                largest = group_largest(magnitude_bits(working), FORMATS[i][2], FORMATS[i][3])
            if SHARED:
                publish_largest(tl.max(tl.max(largest, axis=1), axis=0), exchange_ptr, part)
            # Random words are drawn while the others find theirs.
            words = tl.zeros((BLOCK_V, BLOCK_K), dtype=tl.uint32)
            if FORMATS[i][5]:
                words = philox_bits(
                    tl.load(row_ptr + 5).to(tl.uint32),
                    tl.load(row_ptr + 6).to(tl.uint32),
                    (layer + (copy << 24)).to(tl.uint32),
                    tl.load(row_ptr + 4).to(tl.uint32),
                    token,
                    head_rows,
                    D_K,
                    BLOCK_K,
                )
            head_bits = None
            if SHARED:
                head_bits = largest_of_head(exchange_ptr, PARTS)
            loaded = store_and_load_tile(
                working,
                words,
                FORMATS[i][0],
                FORMATS[i][1],
                FORMATS[i][2],
                FORMATS[i][3],
                FORMATS[i][4],
                FORMATS[i][5],
                head_bits,
                largest,
            )
    return loaded


@triton.jit
def store_piece(
    carried,
    piece_ptr,
    row_ptr,
    states_ptr,
    copies_ptr,
    layer,
    head,
    heads,
    d_v,
    v,
    inside,
    D_K: tl.constexpr,
    FORMATS: tl.constexpr,
    exchange_ptr=None,
    part=0,
    PARTS: tl.constexpr = 1,
):
    """Store the carried copy of a row at the end of a window and return what it loads back as."""
    flags = tl.load(piece_ptr + 1)
    token = tl.load(piece_ptr + 2).to(tl.uint32)
    slot = tl.load(piece_ptr + 3)
    keys = tl.arange(0, carried.shape[1])
    if slot >= 0:
        tl.store(copies_ptr + state_offsets(slot, head, heads, d_v, v, keys, D_K), carried, mask=inside)
    carried = store_lane(
        carried,
        tl.load(row_ptr + 2),
        row_ptr,
        layer,
        token,
        0,
        head * d_v + v,
        D_K,
        FORMATS,
        exchange_ptr,
        part,
        PARTS,
    )
    if (flags & WRITES) != 0:
        at = state_offsets(tl.load(row_ptr), head, heads, d_v, v, keys, D_K)
        tl.store(states_ptr + at, carried, mask=inside)
    return carried


@triton.jit
def store_outputs(outputs_ptr, outputs, tokens, keep, head, heads, d_v, v):
    """Write outputs `[BLOCK_V, BLOCK_T]` of the tokens that `keep` names into a contiguous `[tokens, heads, d_v]`."""
    out = tokens.to(tl.int64)[None, :] * (heads * d_v) + (head * d_v + v)[:, None]
    tl.store(outputs_ptr + out, outputs, mask=(v < d_v)[:, None] & keep[None, :])
