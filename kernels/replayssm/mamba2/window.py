"""Mamba-2, one replay window at a time."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from replayssm.records import TokenInputs
from replayssm.window import add_outer, causal_decay, cumulate, decayed, per_value_head, read


@dataclass(frozen=True, kw_only=True)
class Mamba2Window:
    """Windows of Mamba-2: the records do not depend on the state, so neither do the terms inside a window.

        y_i = G_i S_c q_i + Σ_{j≤i} G_{j→i} (k_j·q_i) v_j
        S_L = G_L S_c     + Σ_j    G_{j→L} v_j k_jᵀ

    Source: ReplaySSM, the output and flush equations of the replay window.
    """

    query: Float[Tensor, "*lanes key_heads window d_k"]
    key: Float[Tensor, "*lanes key_heads window d_k"]
    gain: Float[Tensor, "*lanes heads 1 window"]
    within: Float[Tensor, "*lanes heads d_v window"]
    writes: Float[Tensor, "*lanes heads d_v window"]
    decay: Float[Tensor, "*lanes heads 1 1"]

    @classmethod
    def prepare(cls, inputs: TokenInputs) -> "Mamba2Window":
        """Everything inside the windows, from tokens `[steps, lanes, window, …]`."""
        query = inputs.query.transpose(-3, -2).contiguous()
        key = inputs.key.transpose(-3, -2).contiguous()
        value = inputs.value.movedim(-3, -1).contiguous()
        dtype = inputs.value.dtype
        cumulative = cumulate(inputs.log_decay.transpose(-1, -2), -1)
        scores = per_value_head(query @ key.transpose(-1, -2), value.shape[-3]) * causal_decay(cumulative, dtype)
        last = cumulative[..., -1:]
        return cls(
            query=query,
            key=key,
            gain=decayed(cumulative, dtype).unsqueeze(-2),
            within=value @ scores.transpose(-1, -2),
            writes=value * decayed(last - cumulative, dtype).unsqueeze(-2),
            decay=decayed(last, dtype).unsqueeze(-1),
        )

    def outputs(
        self, state: Float[Tensor, "lanes heads d_v d_k"]
    ) -> tuple[Float[Tensor, "lanes heads d_v window"], Float[Tensor, "lanes heads d_v window"]]:
        """Outputs read through `state`; the writes do not depend on it."""
        return read(state, self.query).mul_(self.gain).add_(self.within), self.writes

    def fold(
        self, state: Float[Tensor, "lanes heads d_v d_k"], writes: Float[Tensor, "lanes heads d_v window"]
    ) -> Float[Tensor, "lanes heads d_v d_k"]:
        """The state at the end of the window."""
        return add_outer(state * self.decay, writes, self.key)
