"""What the window forms of the recurrences have in common.

A window is the run of tokens since a checkpoint. Everything that does not depend on the checkpoint is computed for many
windows at once (`prepare`); what is left for the sequential walk is one product with the state per window (`outputs`)
and one outer-product update (`fold`).

Axes: `steps` counts windows along a sequence, `lanes` the states that advance side by side. Tensors over value heads
are kept with `d_v` before `window`, which is how the product with a state of shape `[d_v, d_k]` leaves them.
"""

from dataclasses import fields, is_dataclass
from typing import Any, Protocol, TypeVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from replayssm.records import TokenInputs

T = TypeVar("T")


class Window(Protocol):
    """Windows of one recurrence, ready to be walked; every tensor starts with `[steps, lanes]`, or `[lanes]`."""

    @classmethod
    def prepare(cls, inputs: TokenInputs) -> "Window":
        """Compute all that does not depend on a state, from tokens of shape `[steps, lanes, window, …]`."""
        ...

    def outputs(
        self, state: Float[Tensor, "lanes heads d_v d_k"]
    ) -> tuple[Float[Tensor, "lanes heads d_v window"], Float[Tensor, "lanes heads d_v window"]]:
        """Outputs of one window read through `state`, and the writes, decayed to the end of the window."""
        ...

    def fold(
        self, state: Float[Tensor, "lanes heads d_v d_k"], writes: Float[Tensor, "lanes heads d_v window"]
    ) -> Float[Tensor, "lanes heads d_v d_k"]:
        """The state at the end of the window (the flush, before it is rounded)."""
        ...


def pick(windows: T, *index: Any) -> T:
    """Index every tensor of a frozen dataclass of windows (for instance one step, or the first lanes)."""
    if not is_dataclass(windows) or isinstance(windows, type):
        raise ValueError(f"expected windows of a recurrence, got {type(windows).__name__}")
    values = {f.name: None if (x := getattr(windows, f.name)) is None else x[index] for f in fields(windows)}
    return type(windows)(**values)


def repeat_lanes(windows: T, lanes: Tensor) -> T:
    """Copy windows of shape `[steps, rows, …]` to `[steps, len(lanes), …]`, one for each state that reads them."""
    if not is_dataclass(windows) or isinstance(windows, type):
        raise ValueError(f"expected windows of a recurrence, got {type(windows).__name__}")
    values = {
        f.name: None if (x := getattr(windows, f.name)) is None else x.index_select(1, lanes) for f in fields(windows)
    }
    return type(windows)(**values)


def cumulate(log_decay: Float[Tensor, "*lead"], dim: int) -> Float64[Tensor, "*lead"]:
    """Sum of log-decays since the checkpoint, in float64.

    Decays between tokens are exponentials of differences of these sums. In float32 one strong decay early in a window
    would cost every later difference its low digits; in float64 the differences are good to float32.
    """
    return log_decay.cumsum(dim, dtype=torch.float64)


def decayed(exponent: Float64[Tensor, "*lead"], dtype: torch.dtype) -> Float[Tensor, "*lead"]:
    """`exp` of a difference of cumulated log-decays, in the working precision."""
    return exponent.to(dtype).exp()


def causal_decay(
    cumulative: Float64[Tensor, "*lead window"], dtype: torch.dtype
) -> Float[Tensor, "*lead window window"]:
    """`exp(c_i − c_j)` for `j ≤ i`, and 0 above the diagonal, where the exponent would be positive and may overflow."""
    size = cumulative.shape[-1]
    future = torch.ones(size, size, dtype=torch.bool, device=cumulative.device).triu_(1)
    exponent = cumulative.unsqueeze(-1) - cumulative.unsqueeze(-2)
    return decayed(exponent.masked_fill_(future, -torch.inf), dtype)


def per_value_head(x: Float[Tensor, "*lead key_heads window_i window_j"], heads: int) -> Tensor:
    """Repeat a quantity of key heads for the value heads that each of them serves."""
    group = heads // x.shape[-3]
    return x if group == 1 else x.repeat_interleave(group, dim=-3)


def read(
    state: Float[Tensor, "lanes heads d_v d_k"], vectors: Float[Tensor, "lanes key_heads window d_k"]
) -> Float[Tensor, "lanes heads d_v window"]:
    """`S x` for every vector `x` of a window, one batched product per key head and the value heads it serves."""
    lanes, heads, d_v, d_k = state.shape
    key_heads, window = vectors.shape[1], vectors.shape[2]
    product = torch.bmm(
        state.reshape(lanes * key_heads, heads // key_heads * d_v, d_k),
        vectors.reshape(lanes * key_heads, window, d_k).transpose(1, 2),
    )
    return product.view(lanes, heads, d_v, window)


def add_outer(
    decayed: Float[Tensor, "lanes heads d_v d_k"],
    writes: Float[Tensor, "lanes heads d_v window"],
    key: Float[Tensor, "lanes key_heads window d_k"],
) -> Float[Tensor, "lanes heads d_v d_k"]:
    """`S + Σ_j u_j k_jᵀ`, in place on `decayed`, which must be contiguous."""
    lanes, heads, d_v, d_k = decayed.shape
    key_heads, window = key.shape[1], key.shape[2]
    rows = heads // key_heads * d_v
    decayed.view(lanes * key_heads, rows, d_k).baddbmm_(
        writes.reshape(lanes * key_heads, rows, window), key.reshape(lanes * key_heads, window, d_k)
    )
    return decayed
