"""Gated DeltaNet, one token at a time."""

import torch
from jaxtyping import Float
from torch import Tensor

from replayssm.records import Recurrence, TokenInputs


def reference(
    inputs: TokenInputs, state: Float[Tensor, "rows heads d_v d_k"] | None = None
) -> tuple[Float[Tensor, "rows time heads d_v"], Float[Tensor, "rows heads d_v d_k"]]:
    """Walk `u_t = β_t (v_t − a_t S_{t-1} k_t)`, `S_t = a_t S_{t-1} + u_t k_tᵀ`, `y_t = S_t q_t` token by token.

    Args:
        inputs: Tokens of each row, keys normalised, queries normalised and scaled.
        state: State before the first token; zeros when absent. Not modified.

    Returns:
        The outputs, and the state after the last token, in the dtype of `inputs`.

    Source: ReplaySSM, table of recurrences, second line; Yang et al., "Gated Delta Networks", equation 10.
    """
    inputs.validate(Recurrence.GDN)
    return delta_rule(inputs, inputs.log_decay[..., None], state)


def delta_rule(
    inputs: TokenInputs,
    log_decay: Float[Tensor, "rows time heads channels"],
    state: Float[Tensor, "rows heads d_v d_k"] | None,
) -> tuple[Float[Tensor, "rows time heads d_v"], Float[Tensor, "rows heads d_v d_k"]]:
    """The gated delta rule with a decay that is shared by all key channels (`channels` = 1) or has one for each."""
    value, beta = inputs.value, inputs.beta
    if beta is None:
        raise ValueError("the delta rule needs `beta`, got None")
    group = value.shape[2] // inputs.key.shape[2]
    working = value.new_zeros(inputs.rows, *inputs.state_shape) if state is None else state
    outputs = torch.empty_like(value)
    for t in range(inputs.time):
        key = inputs.key[:, t].repeat_interleave(group, dim=1)
        query = inputs.query[:, t].repeat_interleave(group, dim=1)
        working = log_decay[:, t].exp()[:, :, None, :] * working
        recalled = (working * key[:, :, None, :]).sum(-1)
        write = beta[:, t, :, None] * (value[:, t] - recalled)
        working = working + write[..., None] * key[:, :, None, :]
        outputs[:, t] = (working * query[:, :, None, :]).sum(-1)
    return outputs, working
