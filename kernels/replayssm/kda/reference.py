"""Kimi Delta Attention, one token at a time."""

from jaxtyping import Float
from torch import Tensor

from replayssm.gdn.reference import delta_rule
from replayssm.records import Recurrence, TokenInputs


def reference(
    inputs: TokenInputs, state: Float[Tensor, "rows heads d_v d_k"] | None = None
) -> tuple[Float[Tensor, "rows time heads d_v"], Float[Tensor, "rows heads d_v d_k"]]:
    """Walk the gated delta rule with one decay per key channel, token by token.

    Args:
        inputs: Tokens of each row; `log_decay` has a channel axis.
        state: State before the first token; zeros when absent. Not modified.

    Returns:
        The outputs, and the state after the last token, in the dtype of `inputs`.

    Source: ReplaySSM, table of recurrences, third line; Kimi Linear, equation 1.
    """
    inputs.validate(Recurrence.KDA)
    return delta_rule(inputs, inputs.log_decay, state)
