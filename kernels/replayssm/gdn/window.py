"""Gated DeltaNet, one replay window at a time."""

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from replayssm.records import TokenInputs
from replayssm.window import add_outer, causal_decay, cumulate, decayed, per_value_head, read


@dataclass(frozen=True, kw_only=True)
class DeltaWindow:
    """Windows of a gated delta rule; `gain` is absent where the decay is already in the vectors (KDA).

    The writes `u` of a window solve a unit lower-triangular system with the state on its right-hand side:

        u_i = β_i (v_i − G_i S_c k_i − Σ_{j<i} G_{j→i} (k_j·k_i) u_j)
        y_i = G_i S_c q_i + Σ_{j≤i} G_{j→i} (k_j·q_i) u_j
        S_L = G_L S_c     + Σ_j    G_{j→L} u_j k_jᵀ

    The inverse of the system is prepared for all windows at once, so a window costs two products with the state.

    Source: ReplaySSM, the replay window of delta-rule layers; Yang et al., "Gated Delta Networks" (the WY form).
    """

    vectors: Float[Tensor, "*lanes key_heads twice_window d_k"]
    key: Float[Tensor, "*lanes key_heads window d_k"]
    target: Float[Tensor, "*lanes heads d_v window"]
    beta: Float[Tensor, "*lanes heads 1 window"]
    gain: Float[Tensor, "*lanes heads 1 window"] | None
    solve: Float[Tensor, "*lanes heads window window"]
    scores: Float[Tensor, "*lanes heads window window"]
    tail: Float[Tensor, "*lanes heads 1 window"] | None
    decay: Float[Tensor, "*lanes heads 1 channels"]

    @classmethod
    def assemble(
        cls,
        inputs: TokenInputs,
        *,
        query: Tensor,
        read_key: Tensor,
        write_key: Tensor,
        overlap: Tensor,
        scores: Tensor,
        gain: Tensor | None,
        tail: Tensor | None,
        decay: Tensor,
    ) -> "DeltaWindow":
        """Solve the triangular systems and lay out what the walk needs.

        `overlap[i, j]` is `G_{j→i} (k_j·k_i)`, `scores[i, j]` is `G_{j→i} (k_j·q_i)`, both zero above the diagonal.
        """
        if inputs.beta is None:
            raise ValueError("the delta rule needs `beta`, got None")
        beta = inputs.beta.transpose(-1, -2)
        size = beta.shape[-1]
        identity = torch.eye(size, dtype=beta.dtype, device=beta.device)
        system = (overlap * beta.unsqueeze(-1)).tril_(-1)
        right = identity.expand_as(system)
        solved = torch.linalg.solve_triangular(  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            system, right, upper=False, unitriangular=True
        )
        inverse = cast(Tensor, solved)
        return cls(
            vectors=torch.cat([read_key, query], dim=-2),
            key=write_key,
            target=inputs.value.movedim(-3, -1) * beta.unsqueeze(-2),
            beta=(beta if gain is None else beta * gain).unsqueeze(-2),
            gain=None if gain is None else gain.unsqueeze(-2),
            solve=inverse.transpose(-1, -2).contiguous(),
            scores=scores.transpose(-1, -2).contiguous(),
            tail=None if tail is None else tail.unsqueeze(-2),
            decay=decay,
        )

    @classmethod
    def prepare(cls, inputs: TokenInputs) -> "DeltaWindow":
        """Everything inside the windows of a scalar-decay layer, from tokens `[steps, lanes, window, …]`."""
        query = inputs.query.transpose(-3, -2).contiguous()
        key = inputs.key.transpose(-3, -2).contiguous()
        dtype = inputs.value.dtype
        cumulative = cumulate(inputs.log_decay.transpose(-1, -2), -1)
        heads = cumulative.shape[-2]
        pairwise = causal_decay(cumulative, dtype)
        key_t = key.transpose(-1, -2)
        last = cumulative[..., -1:]
        return cls.assemble(
            inputs,
            query=query,
            read_key=key,
            write_key=key,
            overlap=per_value_head(key @ key_t, heads) * pairwise,
            scores=per_value_head(query @ key_t, heads) * pairwise,
            gain=decayed(cumulative, dtype),
            tail=decayed(last - cumulative, dtype),
            decay=decayed(last, dtype).unsqueeze(-1),
        )

    def outputs(
        self, state: Float[Tensor, "lanes heads d_v d_k"]
    ) -> tuple[Float[Tensor, "lanes heads d_v window"], Float[Tensor, "lanes heads d_v window"]]:
        """Outputs read through `state`, and the writes that this state leads to."""
        recalled, inherited = read(state, self.vectors).chunk(2, dim=-1)
        writes = (self.target - recalled * self.beta) @ self.solve
        inherited = inherited if self.gain is None else inherited * self.gain
        outputs = writes @ self.scores + inherited
        return outputs, writes if self.tail is None else writes * self.tail

    def fold(
        self, state: Float[Tensor, "lanes heads d_v d_k"], writes: Float[Tensor, "lanes heads d_v window"]
    ) -> Float[Tensor, "lanes heads d_v d_k"]:
        """The state at the end of the window."""
        return add_outer(state * self.decay, writes, self.key)
