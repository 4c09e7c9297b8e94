"""Gated DeltaNet windows in Triton: what does not depend on a state, then the walk of all windows of a launch."""

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

    `scores[j, i] = G_{j→i} (k_j·q_i)` for `j ≤ i`, and `solve[j, i]`, the transposed inverse of the unit lower
    triangular `I + β_i G_{j→i} (k_j·k_i)`.
    """
    piece, head = piece_and_head(tl.program_id(0), heads)
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
    """Operands of one piece of a row and head, with `R` the inverse of its triangle (Yang et al., 2024, "WY form").

    Of `writes = R (β v − β G S k)` the part without the state becomes `values = R β v` and the rest
    `recalls = R β G k`; put into `outputs = G S q + scores · writes`, this gives `own = scores · values` and
    `reads = G q − scores · recalls`. `keys` are the layer's own, and `vectors` are unused, the decays to the end of the
    piece, and the decay over all of it.
    """
    piece, head = piece_and_head(tl.program_id(0), heads)
    share = heads // key_heads
    t = tl.arange(0, BLOCK_T)
    keys = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    place = piece * heads + head
    tokens = tl.load(tokens_ptr + piece * BLOCK_T + t)
    columns = head // share * D_K + keys
    query = load_tokens(query_ptr, tokens, key_heads * D_K, columns, keys < D_K)
    key = load_tokens(key_ptr, tokens, key_heads * D_K, columns, keys < D_K)
    beta = load_vector(beta_ptr, tokens, heads, head)
    log_decay = load_vector(log_decay_ptr, tokens, heads, head).to(tl.float64)
    total = tl.cumsum(log_decay, axis=0)
    last = tl.sum(log_decay, axis=0)
    gain = decay_between(total, 0.0)
    square = place * BLOCK_T * BLOCK_T + t[:, None] * BLOCK_T + t[None, :]
    turned = place * BLOCK_T * BLOCK_T + t[:, None] + t[None, :] * BLOCK_T
    recalls = product(tl.load(solve_ptr + turned), key * (beta * gain)[:, None], PRODUCTS)
    reads = query * gain[:, None] - product(tl.load(scores_ptr + turned), recalls, PRODUCTS)
    put_operand(reads_ptr, place, 0, reads, PRODUCTS, 2 * BLOCK_T)
    put_operand(reads_ptr, place, BLOCK_T, recalls, PRODUCTS, 2 * BLOCK_T)
    if head % share == 0:
        put_operand(keys_ptr, piece * key_heads + head // share, 0, key, PRODUCTS, BLOCK_T)
    value = tl.trans(load_tokens(value_ptr, tokens, heads * d_v, head * d_v + v, v < d_v))
    values = product(value * beta[None, :], tl.load(solve_ptr + square), PRODUCTS)
    own = product(values, tl.load(scores_ptr + square), PRODUCTS)
    put_values(values_ptr, place, values, own, v, d_v)
    vectors = vectors_ptr + place * 3 * BLOCK_T + t
    tl.store(vectors, gain)
    tl.store(vectors + BLOCK_T, decay_between(last, total))
    tl.store(vectors + 2 * BLOCK_T, tl.zeros_like(gain) + decay_between(last, 0.0))
