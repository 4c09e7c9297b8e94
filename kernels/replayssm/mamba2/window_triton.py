"""Mamba-2 windows in Triton: what does not depend on a state, then the walk of all windows of a launch."""

# pyright: basic, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from replayssm.triton_window import (
    decay_between,
    load_tokens,
    load_vector,
    piece_and_head,
    product,
    put_operand,
    put_values,
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
    piece, head = piece_and_head(tl.program_id(0), heads)
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


@triton.jit
def fold_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    log_decay_ptr,
    scores_ptr,
    reads_ptr,
    keys_ptr,
    values_ptr,
    vectors_ptr,
    tokens_ptr,
    heads,
    key_heads,
    d_v,
    D_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Operands of one piece of a row and head.

    `reads` and `keys` are the layer's own, shared by the heads of a group; `vectors` are the decays up to each token,
    from each token to the end of the piece, and over all of it.
    """
    piece, head = piece_and_head(tl.program_id(0), heads)
    share = heads // key_heads
    t = tl.arange(0, BLOCK_T)
    keys = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    place = piece * heads + head
    tokens = tl.load(tokens_ptr + piece * BLOCK_T + t)
    if head % share == 0:
        columns = head // share * D_K + keys
        query = load_tokens(query_ptr, tokens, key_heads * D_K, columns, keys < D_K)
        key = load_tokens(key_ptr, tokens, key_heads * D_K, columns, keys < D_K)
        put_operand(reads_ptr, piece * key_heads + head // share, 0, query, PRODUCTS, BLOCK_T)
        put_operand(keys_ptr, piece * key_heads + head // share, 0, key, PRODUCTS, BLOCK_T)
    log_decay = load_vector(log_decay_ptr, tokens, heads, head).to(tl.float64)
    total = tl.cumsum(log_decay, axis=0)
    last = tl.sum(log_decay, axis=0)
    square = place * BLOCK_T * BLOCK_T + t[:, None] * BLOCK_T + t[None, :]
    value = tl.trans(load_tokens(value_ptr, tokens, heads * d_v, head * d_v + v, v < d_v))
    put_values(values_ptr, place, value, product(value, tl.load(scores_ptr + square), PRODUCTS), v, d_v)
    vectors = vectors_ptr + place * 3 * BLOCK_T + t
    tl.store(vectors, decay_between(total, 0.0))
    tl.store(vectors + BLOCK_T, decay_between(last, total))
    tl.store(vectors + 2 * BLOCK_T, tl.zeros((BLOCK_T,), tl.float32) + decay_between(last, 0.0))
