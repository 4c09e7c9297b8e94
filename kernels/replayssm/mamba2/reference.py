"""Mamba-2, one token at a time."""

import torch
from jaxtyping import Float
from torch import Tensor

from replayssm.records import Recurrence, TokenInputs


def reference(
    inputs: TokenInputs, state: Float[Tensor, "rows heads d_v d_k"] | None = None
) -> tuple[Float[Tensor, "rows time heads d_v"], Float[Tensor, "rows heads d_v d_k"]]:
    """Walk `S_t = a_t S_{t-1} + v_t k_tᵀ`, `y_t = S_t q_t` token by token, in the dtype of `inputs`.

    The skip term `D x` is not part of the state and is left to the caller.

    Args:
        inputs: Tokens of each row; `beta` is `None`.
        state: State before the first token; zeros when absent. Not modified.

    Returns:
        The outputs, and the state after the last token.

    Source: ReplaySSM, table of recurrences, first line; Dao and Gu, "Transformers are SSMs", equation 1.
    """
    inputs.validate(Recurrence.MAMBA2)
    value = inputs.value
    group = value.shape[2] // inputs.key.shape[2]
    working = value.new_zeros(inputs.rows, *inputs.state_shape) if state is None else state
    outputs = torch.empty_like(value)
    for t in range(inputs.time):
        key = inputs.key[:, t].repeat_interleave(group, dim=1)
        query = inputs.query[:, t].repeat_interleave(group, dim=1)
        decay = inputs.log_decay[:, t].exp()[..., None, None]
        working = decay * working + value[:, t, :, :, None] * key[:, :, None, :]
        outputs[:, t] = (working * query[:, :, None, :]).sum(-1)
    return outputs, working
