"""Chunked forms of the two recurrences for training: matrix products, differentiable, no loop over tokens or chunks.

All arithmetic is in the dtype of the inputs, float32 in training. They are written for training memory and speed;
evaluation runs the cores of the model's own implementation.
"""

# torch and its companions ship partial types: what comes out of them is unknown by no fault of this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


class _UnitLowerInverse(torch.autograd.Function):
    """Inverse of I + A for strictly lower triangular A, with a backward made of two products."""

    @staticmethod
    def forward(ctx: Any, strictly_lower: Tensor) -> Tensor:
        size = strictly_lower.shape[-1]
        identity = torch.eye(size, dtype=strictly_lower.dtype, device=strictly_lower.device)
        inverse = torch.linalg.solve_triangular(
            strictly_lower, identity.expand_as(strictly_lower), upper=False, unitriangular=True
        )
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ cast(Tensor, grads[0]) @ transposed).tril(-1)


def states_before_chunks(
    transition: Float[Tensor, "rows heads chunks d_k d_k"], update: Float[Tensor, "rows heads chunks d_k d_v"]
) -> Float[Tensor, "rows heads chunks d_k d_v"]:
    """Solve `S_{c+1} = M_c S_c + N_c` from `S_0 = 0` by pairing chunks, in logarithmically many batched products.

    Args:
        transition: The matrices M.
        update: The matrices N.

    Returns:
        The state before each chunk.
    """
    chunks = transition.shape[2]
    if chunks == 1:
        return torch.zeros_like(update)
    if chunks % 2:
        transition = functional.pad(transition, (0, 0, 0, 0, 0, 1))
        update = functional.pad(update, (0, 0, 0, 0, 0, 1))
    first, second = transition[:, :, 0::2], transition[:, :, 1::2]
    first_update, second_update = update[:, :, 0::2], update[:, :, 1::2]
    even = states_before_chunks(second @ first, second @ first_update + second_update)
    odd = first @ even + first_update
    return torch.stack((even, odd), dim=3).flatten(2, 3)[:, :, :chunks]


def _chunks(values: Tensor, size: int) -> Tensor:
    """Cut `[rows, time, heads, ...]` into `[rows, heads, chunks, size, ...]`."""
    rows, time, heads = values.shape[:3]
    return values.reshape(rows, time // size, size, heads, *values.shape[3:]).movedim(3, 1)


def gated_delta_chunked(
    query: Float[Tensor, "rows time key_heads d_k"],
    key: Float[Tensor, "rows time key_heads d_k"],
    value: Float[Tensor, "rows time heads d_v"],
    log_decay: Float[Tensor, "rows time heads"],
    beta: Float[Tensor, "rows time heads"],
    *,
    chunk: int = 64,
) -> Float[Tensor, "rows time heads d_v"]:
    """Run the gated delta rule from a zero state.

    Args:
        query: L2-normalised and scaled queries.
        key: L2-normalised keys.
        value: Values.
        log_decay: Logarithm of the decay of each token.
        beta: Write strength of each token.
        chunk: Tokens per chunk.

    Returns:
        The outputs.

    Source:
        `u_t = beta_t (v_t - a_t S_{t-1} k_t)`, `S_t = a_t S_{t-1} + u_t k_t^T`, `y_t = S_t q_t`, solved per chunk.
    """
    time = query.shape[1]
    pad = -time % chunk
    if pad:
        query, key, value = (functional.pad(part, (0, 0, 0, 0, 0, pad)) for part in (query, key, value))
        log_decay, beta = (functional.pad(part, (0, 0, 0, pad)) for part in (log_decay, beta))
    group = value.shape[2] // query.shape[2]
    queries, keys, values = (_chunks(part, chunk) for part in (query, key, value))
    decays, betas = _chunks(log_decay, chunk), _chunks(beta, chunk)
    similarity = (keys @ keys.transpose(-1, -2)).repeat_interleave(group, dim=1)
    attention = (queries @ keys.transpose(-1, -2)).repeat_interleave(group, dim=1)
    queries, keys = queries.repeat_interleave(group, dim=1), keys.repeat_interleave(group, dim=1)
    total = decays.cumsum(-1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    inverse = cast(Tensor, _UnitLowerInverse.apply((betas.unsqueeze(-1) * similarity * between).tril(-1)))
    grown = total.exp().unsqueeze(-1)
    fresh = inverse @ (betas.unsqueeze(-1) * values)
    stale = inverse @ (betas.unsqueeze(-1) * grown * keys)
    carried = (keys * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
    identity = torch.eye(keys.shape[-1], dtype=keys.dtype, device=keys.device)
    transition = grown[..., -1:, :] * identity - carried @ stale
    states = states_before_chunks(transition, carried @ fresh)
    written = fresh - stale @ states
    outputs = (queries * grown) @ states + (attention * between) @ written
    return outputs.movedim(1, 3).flatten(1, 2)[:, :time]


def mamba2_chunked(
    value: Float[Tensor, "rows time heads d_v"],
    log_decay: Float[Tensor, "rows time heads"],
    key: Float[Tensor, "rows time key_heads d_k"],
    query: Float[Tensor, "rows time key_heads d_k"],
    *,
    chunk: int = 64,
) -> Float[Tensor, "rows time heads d_v"]:
    """Run the Mamba-2 recurrence from a zero state, without the skip term.

    Args:
        value: `dt * x`.
        log_decay: `dt * A`.
        key: B.
        query: C.
        chunk: Tokens per chunk.

    Returns:
        The outputs.

    Source:
        `S_t = a_t S_{t-1} + v_t k_t^T`, `y_t = S_t q_t`, in blocks.
    """
    time = value.shape[1]
    pad = -time % chunk
    if pad:
        value, key, query = (functional.pad(part, (0, 0, 0, 0, 0, pad)) for part in (value, key, query))
        log_decay = functional.pad(log_decay, (0, 0, 0, pad))
    group = value.shape[2] // key.shape[2]
    values, keys, queries, decays = (_chunks(part, chunk) for part in (value, key, query, log_decay))
    attention = (queries @ keys.transpose(-1, -2)).repeat_interleave(group, dim=1)
    total = decays.cumsum(-1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    within = (attention * between) @ values
    keys, queries = keys.repeat_interleave(group, dim=1), queries.repeat_interleave(group, dim=1)
    update = (keys * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2) @ values
    ends = total[..., -1].cumsum(-1)
    # State before chunk c: the updates of the chunks j < c, each decayed by the whole chunks between them.
    starts = functional.pad(ends[..., :-1], (1, 0))
    span = (starts.unsqueeze(-1) - ends.unsqueeze(-2)).tril(-1)
    decay_matrix = span.exp().tril(-1)
    states = (decay_matrix @ update.flatten(-2)).unflatten(-1, update.shape[-2:])
    outputs = within + (queries * total.exp().unsqueeze(-1)) @ states
    return outputs.movedim(1, 3).flatten(1, 2)[:, :time]
