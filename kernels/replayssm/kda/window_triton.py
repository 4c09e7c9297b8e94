"""Kimi Delta Attention windows in Triton: GDN's, with one decay per key channel.

The decay multiplies the vectors, not their products. The terms inside a piece are built token by token, because the
factored form needs `exp(−c_j)`, which overflows for strong decays.
"""

# pyright: basic

import triton
import triton.language as tl

from replayssm.triton_window import (
    PIECE_FIELDS,
    ROW_FIELDS,
    STORES,
    WINDOW_FIELDS,
    add_product,
    decay_between,
    load_tokens,
    load_vector,
    product,
    read_twice,
    solve_unit_lower,
    state_offsets,
    store_outputs,
    store_piece,
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

    `scores[j, i] = Σ_c k_jc q_ic exp(c_ic − c_jc)` for `j ≤ i`, and `solve[j, i]`, the transposed inverse of the unit
    lower triangular `I + β_i Σ_c k_jc k_ic exp(c_ic − c_jc)`. These products are float32 whatever PRODUCTS says.
    """
    piece = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    t = tl.arange(0, BLOCK_T)
    keys = tl.arange(0, BLOCK_K)
    in_k = keys < D_K
    tokens = tl.load(tokens_ptr + piece * BLOCK_T + t)
    columns = head // (heads // key_heads) * D_K + keys
    query = load_tokens(query_ptr, tokens, key_heads * D_K, columns, in_k)
    key = load_tokens(key_ptr, tokens, key_heads * D_K, columns, in_k)
    beta = load_vector(beta_ptr, tokens, heads, head)
    total = tl.cumsum(load_tokens(log_decay_ptr, tokens, heads * D_K, head * D_K + keys, in_k).to(tl.float64), axis=0)
    scores = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    overlap = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    reached = tl.zeros((BLOCK_K,), dtype=tl.float64)
    for j in range(BLOCK_T):
        token = tl.load(tokens_ptr + piece * BLOCK_T + j)
        here = in_k & (token >= 0)
        place = token.to(tl.int64)
        reached += tl.load(log_decay_ptr + place * heads * D_K + head * D_K + keys, mask=here, other=0.0).to(tl.float64)
        own = tl.load(key_ptr + place * key_heads * D_K + columns, mask=here, other=0.0)
        exponent = tl.where(t[:, None] >= j, total - reached[None, :], -float("inf"))
        weighted = decay_between(exponent, 0.0) * own[None, :]
        here_only = t[None, :] == j
        scores = tl.where(here_only, tl.sum(query * weighted, axis=1)[:, None], scores)
        overlap = tl.where(here_only, tl.sum(key * weighted, axis=1)[:, None], overlap)
    inverse = solve_unit_lower(tl.where(t[:, None] > t[None, :], overlap * beta[:, None], 0.0), BLOCK_T)
    out = (piece * heads + head) * BLOCK_T * BLOCK_T + t[:, None] + t[None, :] * BLOCK_T
    tl.store(scores_ptr + out, scores)
    tl.store(solve_ptr + out, inverse)


@triton.jit
def advance(
    state,
    query_ptr,
    key_ptr,
    value_ptr,
    log_decay_ptr,
    beta_ptr,
    scores_ptr,
    solve_ptr,
    tokens,
    index,
    head,
    heads,
    key_heads,
    d_v,
    v,
    D_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Outputs `[BLOCK_V, BLOCK_T]` of one piece read through `state`, and the state after it."""
    in_k = tl.arange(0, BLOCK_K) < D_K
    columns = head // (heads // key_heads) * D_K + tl.arange(0, BLOCK_K)
    channels = head * D_K + tl.arange(0, BLOCK_K)
    t = tl.arange(0, BLOCK_T)
    log_decay = load_tokens(log_decay_ptr, tokens, heads * D_K, channels, in_k).to(tl.float64)
    total = tl.cumsum(log_decay, axis=0)
    last = tl.sum(log_decay, axis=0)
    gain = decay_between(total, 0.0)
    query = load_tokens(query_ptr, tokens, key_heads * D_K, columns, in_k) * gain
    key = load_tokens(key_ptr, tokens, key_heads * D_K, columns, in_k)
    value = tl.trans(load_tokens(value_ptr, tokens, heads * d_v, head * d_v + v, v < d_v))
    beta = load_vector(beta_ptr, tokens, heads, head)[None, :]
    square = (index * heads + head) * BLOCK_T * BLOCK_T + t[:, None] * BLOCK_T + t[None, :]
    recalled, inherited = read_twice(state, key * gain, query, PRODUCTS)
    writes = product((value - recalled) * beta, tl.load(solve_ptr + square), PRODUCTS)
    outputs = add_product(inherited, writes, tl.load(scores_ptr + square), PRODUCTS)
    key = key * decay_between(last[None, :], total)
    state = add_product(state * decay_between(last, 0.0)[None, :], writes, key, PRODUCTS)
    return outputs, state


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
    copies_ptr,
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
):
    """Walk the pieces of one row, one head and BLOCK_V value rows; see `replayssm.triton_window` for the tables."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
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
            query_ptr,
            key_ptr,
            value_ptr,
            log_decay_ptr,
            beta_ptr,
            scores_ptr,
            solve_ptr,
            tokens,
            index,
            head,
            heads,
            key_heads,
            d_v,
            v,
            D_K,
            BLOCK_K,
            BLOCK_T,
            PRODUCTS,
        )
        store_outputs(outputs_ptr, outputs, tokens, tokens >= 0, head, heads, d_v, v)
        piece_ptr = pieces_ptr + index * PIECE_FIELDS
        if (tl.load(piece_ptr + 1) & STORES) != 0:
            carried = store_piece(
                carried, piece_ptr, row_ptr, states_ptr, copies_ptr, layer, head, heads, d_v, v, inside, D_K, FORMATS
            )


@triton.jit
def serve_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    log_decay_ptr,
    beta_ptr,
    scores_ptr,
    solve_ptr,
    copies_ptr,
    outputs_ptr,
    windows_ptr,
    pieces_ptr,
    tokens_ptr,
    heads,
    key_heads,
    d_v,
    longest,
    D_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Read one window of one row through its read copy, but for a token that flushes; one head, BLOCK_V rows."""
    window_ptr = windows_ptr + tl.program_id(0) * WINDOW_FIELDS
    head = tl.program_id(1)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    t = tl.arange(0, BLOCK_T)
    keys = tl.arange(0, BLOCK_K)
    inside = (v < d_v)[:, None] & (keys < D_K)[None, :]
    at = state_offsets(tl.load(window_ptr + 3), head, heads, d_v, v, keys, D_K)
    served = tl.load(copies_ptr + at, mask=inside, other=0.0)
    first = tl.load(window_ptr).to(tl.int64) * longest + tl.load(window_ptr + 1)
    for piece in range(tl.load(window_ptr + 2)):
        index = first + piece
        tokens = tl.load(tokens_ptr + index * BLOCK_T + t)
        outputs, served = advance(
            served,
            query_ptr,
            key_ptr,
            value_ptr,
            log_decay_ptr,
            beta_ptr,
            scores_ptr,
            solve_ptr,
            tokens,
            index,
            head,
            heads,
            key_heads,
            d_v,
            v,
            D_K,
            BLOCK_K,
            BLOCK_T,
            PRODUCTS,
        )
        piece_ptr = pieces_ptr + index * PIECE_FIELDS
        flushed = ((tl.load(piece_ptr + 1) & STORES) != 0) & (t == tl.load(piece_ptr) - 1)
        store_outputs(outputs_ptr, outputs, tokens, (tokens >= 0) & (flushed == 0), head, heads, d_v, v)
