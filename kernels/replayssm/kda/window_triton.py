"""Kimi Delta Attention windows in Triton: GDN's, with one decay per key channel.

The decay multiplies the vectors, not their products. The terms inside a piece are built token by token, because the
factored form needs `exp(−c_j)`, which overflows for strong decays.
"""

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
    solve_unit_lower,
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
    piece, head = piece_and_head(tl.program_id(0), heads)
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
def fold_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    log_decay_ptr,
    beta_ptr,
    scores_ptr,
    solve_ptr,
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
    """Operands of one piece of a row and head: GDN's, with decays in the keys; `vectors` are the decays per channel."""
    piece, head = piece_and_head(tl.program_id(0), heads)
    t = tl.arange(0, BLOCK_T)
    keys = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    in_k = keys < D_K
    place = piece * heads + head
    tokens = tl.load(tokens_ptr + piece * BLOCK_T + t)
    columns = head // (heads // key_heads) * D_K + keys
    log_decay = load_tokens(log_decay_ptr, tokens, heads * D_K, head * D_K + keys, in_k).to(tl.float64)
    total = tl.cumsum(log_decay, axis=0)
    last = tl.sum(log_decay, axis=0)
    gain = decay_between(total, 0.0)
    query = load_tokens(query_ptr, tokens, key_heads * D_K, columns, in_k)
    key = load_tokens(key_ptr, tokens, key_heads * D_K, columns, in_k)
    beta = load_vector(beta_ptr, tokens, heads, head)
    square = place * BLOCK_T * BLOCK_T + t[:, None] * BLOCK_T + t[None, :]
    turned = place * BLOCK_T * BLOCK_T + t[:, None] + t[None, :] * BLOCK_T
    put_operand(keys_ptr, place, 0, key * decay_between(last[None, :], total), PRODUCTS, BLOCK_T)
    tl.store(vectors_ptr + place * BLOCK_K + keys, decay_between(last, 0.0))
    recalls = product(tl.load(solve_ptr + turned), key * gain * beta[:, None], PRODUCTS)
    reads = query * gain - product(tl.load(scores_ptr + turned), recalls, PRODUCTS)
    put_operand(reads_ptr, place, 0, reads, PRODUCTS, 2 * BLOCK_T)
    put_operand(reads_ptr, place, BLOCK_T, recalls, PRODUCTS, 2 * BLOCK_T)
    value = tl.trans(load_tokens(value_ptr, tokens, heads * d_v, head * d_v + v, v < d_v))
    values = product(value * beta[None, :], tl.load(solve_ptr + square), PRODUCTS)
    own = product(values, tl.load(scores_ptr + square), PRODUCTS)
    put_values(values_ptr, place, values, own, v, d_v)
