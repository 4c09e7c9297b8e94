"""Mamba-2 windows in Triton: what does not depend on a state, then the walk of all windows of a launch."""

# pyright: basic

import triton
import triton.language as tl

from replayssm.triton_window import (
    PIECE_FIELDS,
    ROW_FIELDS,
    STORES,
    WRITES,
    decay_between,
    load_tokens,
    load_vector,
    product,
    state_offsets,
    store_lane,
)


@triton.jit
def prepare_kernel(
    query_ptr,
    key_ptr,
    log_decay_ptr,
    scores_ptr,
    tokens_ptr,
    heads,
    key_heads,
    D_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """`scores[j, i] = G_{j→i} (k_j·q_i)` of each piece, zero for `j > i`; one program per piece of a row and head."""
    piece = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    t = tl.arange(0, BLOCK_T)
    keys = tl.arange(0, BLOCK_K)
    tokens = tl.load(tokens_ptr + piece * BLOCK_T + t)
    columns = head // (heads // key_heads) * D_K + keys
    query = load_tokens(query_ptr, tokens, key_heads * D_K, columns, keys < D_K)
    key = load_tokens(key_ptr, tokens, key_heads * D_K, columns, keys < D_K)
    total = tl.cumsum(load_vector(log_decay_ptr, tokens, heads, head).to(tl.float64), axis=0)
    # The exponent of a future token may overflow, so it is cut off before the exponential.
    future = t[:, None] > t[None, :]
    decay = decay_between(tl.where(future, -float("inf"), total[None, :] - total[:, None]), 0.0)
    scores = product(key, tl.trans(query), PRODUCTS) * decay
    tl.store(scores_ptr + (piece * heads + head) * BLOCK_T * BLOCK_T + t[:, None] * BLOCK_T + t[None, :], scores)


@triton.jit(do_not_specialize=["layer"])
def walk_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    log_decay_ptr,
    scores_ptr,
    states_ptr,
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
    SEPARATE: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Walk the pieces of one row, one head and BLOCK_V value rows; see `replayssm.triton_window` for the tables."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    keys = tl.arange(0, BLOCK_K)
    t = tl.arange(0, BLOCK_T)
    in_v = v < d_v
    inside = in_v[:, None] & (keys < D_K)[None, :]
    columns = head // (heads // key_heads) * D_K + keys
    row_ptr = rows_ptr + row * ROW_FIELDS
    at = state_offsets(tl.load(row_ptr), head, heads, d_v, v, keys, D_K)
    carried = tl.load(states_ptr + at, mask=inside, other=0.0)
    served = carried
    read_at = at
    if SEPARATE:
        read_at = state_offsets(tl.load(row_ptr + 1), head, heads, d_v, v, keys, D_K)
        served = tl.load(states_ptr + read_at, mask=inside, other=0.0)

    for piece in range(tl.load(row_ptr + 7)):
        index = row.to(tl.int64) * longest + piece
        length = tl.load(pieces_ptr + index * PIECE_FIELDS)
        flags = tl.load(pieces_ptr + index * PIECE_FIELDS + 1)
        tokens = tl.load(tokens_ptr + index * BLOCK_T + t)
        query = load_tokens(query_ptr, tokens, key_heads * D_K, columns, keys < D_K)
        key = load_tokens(key_ptr, tokens, key_heads * D_K, columns, keys < D_K)
        value = tl.trans(load_tokens(value_ptr, tokens, heads * d_v, head * d_v + v, in_v))
        square = t[:, None] * BLOCK_T + t[None, :]
        scores = tl.load(scores_ptr + (index * heads + head) * BLOCK_T * BLOCK_T + square)
        log_decay = load_vector(log_decay_ptr, tokens, heads, head).to(tl.float64)
        total = tl.cumsum(log_decay, axis=0)
        last = tl.sum(log_decay, axis=0)
        gain = decay_between(total, 0.0)[None, :]
        decay = decay_between(last, 0.0)

        within = product(value, scores, PRODUCTS)
        outputs = product(carried, tl.trans(query), PRODUCTS) * gain + within
        if SEPARATE:
            flushed = ((flags & STORES) != 0) & (t == length - 1)
            read = product(served, tl.trans(query), PRODUCTS) * gain + within
            outputs = tl.where(flushed[None, :], outputs, read)
        out = tokens.to(tl.int64)[None, :] * (heads * d_v) + (head * d_v + v)[:, None]
        tl.store(outputs_ptr + out, outputs, mask=in_v[:, None] & (tokens >= 0)[None, :])

        added = product(value * decay_between(last, total)[None, :], key, PRODUCTS)
        carried = carried * decay + added
        if SEPARATE:
            served = served * decay + added
        if (flags & STORES) != 0:
            token = tl.load(pieces_ptr + index * PIECE_FIELDS + 2).to(tl.uint32)
            head_rows = head * d_v + v
            if SEPARATE:
                served = store_lane(carried, tl.load(row_ptr + 3), row_ptr, layer, token, 1, head_rows, D_K, FORMATS)
            carried = store_lane(carried, tl.load(row_ptr + 2), row_ptr, layer, token, 0, head_rows, D_K, FORMATS)
            if (flags & WRITES) != 0:
                tl.store(states_ptr + at, carried, mask=inside)
                if SEPARATE:
                    tl.store(states_ptr + read_at, served, mask=inside)
