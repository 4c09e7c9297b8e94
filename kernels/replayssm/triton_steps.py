"""The walk of rows whose state is rounded after every token: the recurrence itself, without operands or products."""

# pyright: basic

import triton
import triton.language as tl

from replayssm.triton_pieces import KDA, MAMBA2
from replayssm.triton_window import PIECE_FIELDS, ROW_FIELDS, state_offsets, store_piece


@triton.jit
def token_inputs(
    query_ptr,
    key_ptr,
    value_ptr,
    log_decay_ptr,
    beta_ptr,
    token,
    head,
    heads,
    key_heads,
    v,
    d_v,
    D_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RULE: tl.constexpr,
):
    """Query, key, value, decay and beta of one token, zero for a token of −1."""
    keys = tl.arange(0, BLOCK_K)
    here = token >= 0
    place = token.to(tl.int64)
    columns = head // (heads // key_heads) * D_K + keys
    query = tl.load(query_ptr + place * key_heads * D_K + columns, mask=here & (keys < D_K), other=0.0)
    key = tl.load(key_ptr + place * key_heads * D_K + columns, mask=here & (keys < D_K), other=0.0)
    value = tl.load(value_ptr + (place * heads + head) * d_v + v, mask=here & (v < d_v), other=0.0)
    if RULE == KDA:
        log_decay = tl.load(log_decay_ptr + (place * heads + head) * D_K + keys, mask=here & (keys < D_K), other=0.0)
    else:
        log_decay = tl.load(log_decay_ptr + place * heads + head, mask=here, other=0.0)
    beta = tl.full((), 1.0, tl.float32)
    if RULE != MAMBA2:
        beta = tl.load(beta_ptr + place * heads + head, mask=here, other=0.0)
    return query, key, value, tl.exp(log_decay), beta


@triton.jit(do_not_specialize=["layer", "longest"])
def step_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    log_decay_ptr,
    beta_ptr,
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
    RULE: tl.constexpr,
):
    """Walk the tokens of one row, one head and BLOCK_V value rows; see `replayssm.triton_window` for the tables."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    keys = tl.arange(0, BLOCK_K)
    inside = (v < d_v)[:, None] & (keys < D_K)[None, :]
    row_ptr = rows_ptr + row * ROW_FIELDS
    at = state_offsets(tl.load(row_ptr), head, heads, d_v, v, keys, D_K)
    carried = tl.load(states_ptr + at, mask=inside, other=0.0)
    count = tl.load(row_ptr + 7)
    first = row.to(tl.int64) * longest
    token = tl.load(tokens_ptr + first * BLOCK_T)
    query, key, value, decay, beta = token_inputs(
        query_ptr,
        key_ptr,
        value_ptr,
        log_decay_ptr,
        beta_ptr,
        token,
        head,
        heads,
        key_heads,
        v,
        d_v,
        D_K,
        BLOCK_K,
        RULE,
    )
    for piece in range(count):
        index = first + piece
        # The next token is on its way while this one is folded in.
        next_token = tl.load(tokens_ptr + (index + 1) * BLOCK_T, mask=piece + 1 < count, other=-1)
        next_query, next_key, next_value, next_decay, next_beta = token_inputs(
            query_ptr,
            key_ptr,
            value_ptr,
            log_decay_ptr,
            beta_ptr,
            next_token,
            head,
            heads,
            key_heads,
            v,
            d_v,
            D_K,
            BLOCK_K,
            RULE,
        )
        if RULE == KDA:
            carried = carried * decay[None, :]
        else:
            carried = carried * decay
        write = value
        if RULE != MAMBA2:
            write = (value - tl.sum(carried * key[None, :], axis=1)) * beta
        carried += write[:, None] * key[None, :]
        out = (token.to(tl.int64) * heads + head) * d_v + v
        tl.store(outputs_ptr + out, tl.sum(carried * query[None, :], axis=1), mask=v < d_v)
        carried = store_piece(
            carried,
            pieces_ptr + index * PIECE_FIELDS,
            row_ptr,
            states_ptr,
            states_ptr,
            layer,
            head,
            heads,
            d_v,
            v,
            inside,
            D_K,
            FORMATS,
        )
        token, query, key, value, decay, beta = next_token, next_query, next_key, next_value, next_decay, next_beta
