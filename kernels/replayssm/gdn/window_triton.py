"""Gated DeltaNet windows in Triton: what does not depend on a state, then the walk of all windows of a launch."""

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
    solve_unit_lower,
    state_offsets,
    store_lane,
)


@triton.jit
def prepare_kernel(
    query_ptr,
    key_ptr,
    log_decay_ptr,
    beta_ptr,
    scores_ptr,
    solve_ptr,
    tokens_ptr,
    heads,
    key_heads,
    D_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """What the windows need beside the state, transposed: one program per piece of a row and head.

    `scores[j, i] = G_{j→i} (k_j·q_i)` for `j ≤ i`, and `solve[j, i]`, the transposed inverse of the unit lower
    triangular `I + β_i G_{j→i} (k_j·k_i)`.
    """
    piece = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    t = tl.arange(0, BLOCK_T)
    keys = tl.arange(0, BLOCK_K)
    tokens = tl.load(tokens_ptr + piece * BLOCK_T + t)
    columns = head // (heads // key_heads) * D_K + keys
    query = load_tokens(query_ptr, tokens, key_heads * D_K, columns, keys < D_K)
    key = load_tokens(key_ptr, tokens, key_heads * D_K, columns, keys < D_K)
    beta = load_vector(beta_ptr, tokens, heads, head)
    total = tl.cumsum(load_vector(log_decay_ptr, tokens, heads, head).to(tl.float64), axis=0)
    # The exponent of a future token may overflow, so it is cut off before the exponential.
    decay = decay_between(tl.where(t[:, None] < t[None, :], -float("inf"), total[:, None] - total[None, :]), 0.0)
    scores = product(query, tl.trans(key), PRODUCTS) * decay
    overlap = product(key, tl.trans(key), PRODUCTS) * decay
    inverse = solve_unit_lower(tl.where(t[:, None] > t[None, :], overlap * beta[:, None], 0.0), BLOCK_T)
    out = (piece * heads + head) * BLOCK_T * BLOCK_T + t[:, None] + t[None, :] * BLOCK_T
    tl.store(scores_ptr + out, scores)
    tl.store(solve_ptr + out, inverse)


@triton.jit
def read_delta(state, query, key, value, beta, gain, scores, solve, PRODUCTS: tl.constexpr):
    """Outputs `[BLOCK_V, BLOCK_T]` of one piece read through `state`, and the writes that this state leads to."""
    recalled = product(state, tl.trans(key), PRODUCTS) * gain
    writes = product((value - recalled) * beta, solve, PRODUCTS)
    outputs = product(state, tl.trans(query), PRODUCTS) * gain + product(writes, scores, PRODUCTS)
    return outputs, writes


@triton.jit(do_not_specialize=["layer"])
def walk_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    log_decay_ptr,
    beta_ptr,
    scores_ptr,
    solve_ptr,
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
        beta = load_vector(beta_ptr, tokens, heads, head)[None, :]
        square = (index * heads + head) * BLOCK_T * BLOCK_T + t[:, None] * BLOCK_T + t[None, :]
        scores = tl.load(scores_ptr + square)
        solve = tl.load(solve_ptr + square)
        log_decay = load_vector(log_decay_ptr, tokens, heads, head).to(tl.float64)
        total = tl.cumsum(log_decay, axis=0)
        last = tl.sum(log_decay, axis=0)
        gain = decay_between(total, 0.0)[None, :]
        tail = decay_between(last, total)[None, :]
        decay = decay_between(last, 0.0)

        outputs, writes = read_delta(carried, query, key, value, beta, gain, scores, solve, PRODUCTS)
        carried = carried * decay + product(writes * tail, key, PRODUCTS)
        if SEPARATE:
            read, own_writes = read_delta(served, query, key, value, beta, gain, scores, solve, PRODUCTS)
            served = served * decay + product(own_writes * tail, key, PRODUCTS)
            flushed = ((flags & STORES) != 0) & (t == length - 1)
            outputs = tl.where(flushed[None, :], outputs, read)
        out = tokens.to(tl.int64)[None, :] * (heads * d_v) + (head * d_v + v)[:, None]
        tl.store(outputs_ptr + out, outputs, mask=in_v[:, None] & (tokens >= 0)[None, :])

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
