"""Turn the arguments with which a mixer calls its core into the inputs of a recurrence."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from replayssm.records import TokenInputs
from replayssm.token_inputs import float32_tokens, room_on

L2_NORM_EPS = 1e-6
"""Added to the sum of squares inside the root, as in the kernels that these models were trained with."""


def delta_rule_inputs(arguments: Mapping[str, Any]) -> TokenInputs:
    """Inputs of Gated DeltaNet and KDA from the arguments of their core, in float32, key heads left grouped.

    Source: ReplaySSM, table of recurrences, rows GDN and KDA; query and key are normalised after the cast to float32.
    """
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    eps = L2_NORM_EPS if arguments["use_qk_l2norm_in_kernel"] else None
    return TokenInputs(
        query=float32_tokens(query, eps=eps, scale=query.shape[-1] ** -0.5),
        key=float32_tokens(key, eps=eps),
        value=float32_tokens(value),
        log_decay=_as_float32(arguments["g"]),
        beta=_as_float32(arguments["beta"]),
        room=room_on(query.device),
    )


def mamba2_chunk_inputs(arguments: Mapping[str, Any], time_step_limit: tuple[float, float]) -> TokenInputs:
    """Inputs of Mamba-2 from the arguments of its many-token core, in float32, groups left grouped.

    The time step is computed in float32 from the start, as the GPU kernels do, whatever the dtype of the model.

    Source: ReplaySSM, table of recurrences, row Mamba-2.
    """
    dt = time_steps(
        arguments["dt"],
        bias=arguments["dt_bias"],
        softplus=bool(arguments["dt_softplus"]),
        limit=time_step_limit,
    )
    return TokenInputs(
        query=float32_tokens(arguments["C"]),
        key=float32_tokens(arguments["B"]),
        value=float32_tokens(arguments["hidden_states"], factor=dt),
        log_decay=dt * _as_float32(arguments["A"]),
        beta=None,
        room=room_on(dt.device),
    )


def mamba2_step_inputs(arguments: Mapping[str, Any], time_step_limit: tuple[float, float]) -> TokenInputs:
    """Inputs of Mamba-2 from the arguments of its one-token core.

    That core receives everything that is constant per head expanded over the elements of the state; here it is
    reduced to one number per head again. It does not clamp the time step; the range of the mixer is applied here, so
    that a token means the same whether it comes alone or in a chunk.
    """
    bias: Tensor | None = arguments["dt_bias"]
    chunk = {
        "hidden_states": arguments["hidden_states"].unsqueeze(1),
        "dt": arguments["dt"][..., 0].unsqueeze(1),
        "A": arguments["A"][:, 0, 0],
        "B": arguments["B"].unsqueeze(1),
        "C": arguments["C"].unsqueeze(1),
        "dt_bias": None if bias is None else bias[:, 0],
        "dt_softplus": arguments["dt_softplus"],
    }
    return mamba2_chunk_inputs(chunk, time_step_limit)


def time_steps(
    dt: Float[Tensor, "rows time heads"],
    *,
    bias: Float[Tensor, " heads"] | None,
    softplus: bool,
    limit: tuple[float, float],
) -> Float[Tensor, "rows time heads"]:
    """The discretisation step of each token and head: biased, made positive, clamped, in float32."""
    steps = _as_float32(dt)
    if bias is not None:
        steps = steps + _as_float32(bias)
    if softplus:
        steps = functional.softplus(steps)
    return steps.clamp(min=limit[0], max=limit[1])


def mamba2_finish(
    outputs: Float[Tensor, "rows time heads d_v"],
    hidden_states: Float[Tensor, "rows time heads d_v"],
    skip: Tensor | None,
    gate: Float[Tensor, "rows time heads d_v"] | None,
) -> Float[Tensor, "rows time heads d_v"]:
    """Add the skip connection `D x` and apply the gate where the mixer leaves it to the core.

    Rounding: once, to the dtype of the mixer's activations, at the end.
    """
    if skip is not None:
        per_head = _as_float32(skip)
        outputs = outputs + _as_float32(hidden_states) * (per_head if per_head.dim() == 2 else per_head.unsqueeze(-1))
    if gate is not None:
        outputs = outputs * functional.silu(_as_float32(gate))
    return outputs.to(hidden_states.dtype)


def _as_float32(x: Tensor) -> Tensor:
    return x.to(torch.float32)
