"""The walk of the pieces of all rows, and the reads of separate copies, from operands: for every recurrence."""

# pyright: basic, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from replayssm.triton_window import (
    PIECE_FIELDS,
    ROW_FIELDS,
    STORES,
    WINDOW_FIELDS,
    add_operand,
    read_operand,
    state_offsets,
    store_lane,
    store_outputs,
    store_piece,
)

MAMBA2 = tl.constexpr(0)
GDN = tl.constexpr(1)
KDA = tl.constexpr(2)


@triton.jit
def own_values(values_ptr, place, which, v, d_v, BLOCK_T: tl.constexpr):
    """Values or own outputs of a piece, `[BLOCK_V, BLOCK_T]`, from a contiguous `[places, 2, d_v, BLOCK_T]`."""
    where = (place.to(tl.int64) * 2 + which) * d_v * BLOCK_T + v[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    return tl.load(values_ptr + where, mask=(v < d_v)[:, None], other=0.0)


@triton.jit
def read_piece(
    state,
    reads_ptr,
    values_ptr,
    vectors_ptr,
    index,
    head,
    heads,
    key_heads,
    v,
    d_v,
    BLOCK_T: tl.constexpr,
    PRODUCTS: tl.constexpr,
    RULE: tl.constexpr,
):
    """Outputs `[BLOCK_V, BLOCK_T]` of one piece, without what it writes."""
    place = index * heads + head
    if RULE == MAMBA2:
        shared = index * key_heads + head // (heads // key_heads)
        inherited = read_operand(state, reads_ptr, shared, PRODUCTS, BLOCK_T, BLOCK_T)
        inherited = inherited * tl.load(vectors_ptr + place * 3 * BLOCK_T + tl.arange(0, BLOCK_T))[None, :]
    else:
        inherited = read_operand(state, reads_ptr, place, PRODUCTS, 2 * BLOCK_T, BLOCK_T)
    return inherited + own_values(values_ptr, place, 1, v, d_v, BLOCK_T)


@triton.jit
def advance(
    state,
    reads_ptr,
    keys_ptr,
    values_ptr,
    vectors_ptr,
    index,
    head,
    heads,
    key_heads,
    v,
    d_v,
    BLOCK_T: tl.constexpr,
    PRODUCTS: tl.constexpr,
    RULE: tl.constexpr,
):
    """Outputs `[BLOCK_V, BLOCK_T]` of one piece read through `state`, and the state after it."""
    BLOCK_V: tl.constexpr = state.shape[0]
    BLOCK_K: tl.constexpr = state.shape[1]
    t = tl.arange(0, BLOCK_T)
    place = index * heads + head
    shared = index * key_heads + head // (heads // key_heads)
    if RULE == MAMBA2:
        outputs = read_piece(
            state, reads_ptr, values_ptr, vectors_ptr, index, head, heads, key_heads, v, d_v, BLOCK_T, PRODUCTS, RULE
        )
        writes = own_values(values_ptr, place, 0, v, d_v, BLOCK_T)
    else:
        both = read_operand(state, reads_ptr, place, PRODUCTS, 2 * BLOCK_T, 2 * BLOCK_T)
        inherited, recalled = tl.split(tl.permute(tl.reshape(both, (BLOCK_V, 2, BLOCK_T)), (0, 2, 1)))
        outputs = inherited + own_values(values_ptr, place, 1, v, d_v, BLOCK_T)
        writes = own_values(values_ptr, place, 0, v, d_v, BLOCK_T) - recalled
    if RULE == KDA:
        decay = tl.load(vectors_ptr + place * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        state = add_operand(state * decay, writes, keys_ptr, place, PRODUCTS)
    else:
        vectors = vectors_ptr + place * 3 * BLOCK_T
        writes = writes * tl.load(vectors + BLOCK_T + t)[None, :]
        state = add_operand(state * tl.load(vectors + 2 * BLOCK_T), writes, keys_ptr, shared, PRODUCTS)
    return outputs, state


@triton.jit
def place_in_grid(part, head, row, started_ptr, heads, PARTS: tl.constexpr):
    """The part of a head, head and row that a program takes.

    Programs of one head that wait for each other take their places in the order in which they start. So at most one
    head of a launch waits for a program that does not run yet, and that is the next to start: every other head gets to
    its end and makes room.

    Args:
        part: The program's own place in the grid, its place if PARTS is 1.
        head: Likewise.
        row: Likewise.
        started_ptr: int32, zero before; used if PARTS is not 1.
        heads: Heads of a row.
        PARTS: Programs per head that wait for each other; 1 for tiles that do not.
    """
    if PARTS > 1:
        started = tl.atomic_add(started_ptr, 1)
        part = started % PARTS
        head = started // PARTS % heads
        row = started // (PARTS * heads)
    return part, head, row


@triton.jit(do_not_specialize=["layer", "longest"])
def walk_kernel(
    reads_ptr,
    keys_ptr,
    values_ptr,
    vectors_ptr,
    states_ptr,
    copies_ptr,
    exchange_ptr,
    outputs_ptr,
    rows_ptr,
    pieces_ptr,
    tokens_ptr,
    layer,
    heads,
    key_heads,
    d_v,
    longest,
    D_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FORMATS: tl.constexpr,
    PRODUCTS: tl.constexpr,
    RULE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Walk the pieces of one row, one head and BLOCK_V value rows; see `replayssm.triton_window` for the tables.

    With PARTS above 1, so many programs share a head whose scales depend on all of it; `exchange_ptr` is int32, zero:
    one number for `place_in_grid`, then `[rows, longest, heads, PARTS]`.
    """
    part, head, row = place_in_grid(tl.program_id(0), tl.program_id(1), tl.program_id(2), exchange_ptr, heads, PARTS)
    v = part * BLOCK_V + tl.arange(0, BLOCK_V)
    keys = tl.arange(0, BLOCK_K)
    inside = (v < d_v)[:, None] & (keys < D_K)[None, :]
    row_ptr = rows_ptr + row * ROW_FIELDS
    at = state_offsets(tl.load(row_ptr), head, heads, d_v, v, keys, D_K)
    carried = tl.load(states_ptr + at, mask=inside, other=0.0)
    for piece in range(tl.load(row_ptr + 7)):
        index = row.to(tl.int64) * longest + piece
        tokens = tl.load(tokens_ptr + index * BLOCK_T + tl.arange(0, BLOCK_T))
        outputs, carried = advance(
            carried,
            reads_ptr,
            keys_ptr,
            values_ptr,
            vectors_ptr,
            index,
            head,
            heads,
            key_heads,
            v,
            d_v,
            BLOCK_T,
            PRODUCTS,
            RULE,
        )
        store_outputs(outputs_ptr, outputs, tokens, tokens >= 0, head, heads, d_v, v)
        piece_ptr = pieces_ptr + index * PIECE_FIELDS
        if (tl.load(piece_ptr + 1) & STORES) != 0:
            carried = store_piece(
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
                D_K,
                FORMATS,
                exchange_ptr + 1 + (index * heads + head) * PARTS,
                part,
                PARTS,
            )


@triton.jit(do_not_specialize=["layer", "longest"])
def serve_kernel(
    reads_ptr,
    keys_ptr,
    values_ptr,
    vectors_ptr,
    states_ptr,
    copies_ptr,
    outputs_ptr,
    rows_ptr,
    windows_ptr,
    pieces_ptr,
    tokens_ptr,
    layer,
    heads,
    key_heads,
    d_v,
    longest,
    D_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FORMATS: tl.constexpr,
    PRODUCTS: tl.constexpr,
    RULE: tl.constexpr,
    SEVERAL: tl.constexpr,
):
    """Store a read copy and read a window through it, but for a token that flushes; one head, BLOCK_V rows.

    Without SEVERAL no window is more than one piece; a kernel that advances no state needs fewer registers.
    """
    window, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    window_ptr = windows_ptr + window * WINDOW_FIELDS
    v = part * BLOCK_V + tl.arange(0, BLOCK_V)
    t = tl.arange(0, BLOCK_T)
    keys = tl.arange(0, BLOCK_K)
    inside = (v < d_v)[:, None] & (keys < D_K)[None, :]
    row = tl.load(window_ptr)
    row_ptr = rows_ptr + row * ROW_FIELDS
    at = state_offsets(tl.load(window_ptr + 3), head, heads, d_v, v, keys, D_K)
    served = tl.load(copies_ptr + at, mask=inside, other=0.0)
    if tl.load(window_ptr + 4) != 0:
        token = tl.load(window_ptr + 5).to(tl.uint32)
        served = store_lane(
            served,
            tl.load(row_ptr + 3),
            row_ptr,
            layer,
            token,
            1,
            head * d_v + v,
            D_K,
            FORMATS,
        )
        lane = tl.load(window_ptr + 6)
        if lane >= 0:
            tl.store(states_ptr + state_offsets(lane, head, heads, d_v, v, keys, D_K), served, mask=inside)
    count = tl.load(window_ptr + 2)
    first = row.to(tl.int64) * longest + tl.load(window_ptr + 1)
    if SEVERAL:
        for piece in range(count - 1):
            index = first + piece
            tokens = tl.load(tokens_ptr + index * BLOCK_T + t)
            outputs, served = advance(
                served,
                reads_ptr,
                keys_ptr,
                values_ptr,
                vectors_ptr,
                index,
                head,
                heads,
                key_heads,
                v,
                d_v,
                BLOCK_T,
                PRODUCTS,
                RULE,
            )
            store_outputs(outputs_ptr, outputs, tokens, tokens >= 0, head, heads, d_v, v)
    if count > 0:
        index = first + count - 1
        tokens = tl.load(tokens_ptr + index * BLOCK_T + t)
        outputs = read_piece(
            served, reads_ptr, values_ptr, vectors_ptr, index, head, heads, key_heads, v, d_v, BLOCK_T, PRODUCTS, RULE
        )
        piece_ptr = pieces_ptr + index * PIECE_FIELDS
        flushed = ((tl.load(piece_ptr + 1) & STORES) != 0) & (t == tl.load(piece_ptr) - 1)
        store_outputs(outputs_ptr, outputs, tokens, (tokens >= 0) & (flushed == 0), head, heads, d_v, v)
