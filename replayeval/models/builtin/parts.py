"""Layers that both training models are made of."""

# torch and its companions ship partial types: what comes out of them is unknown by no fault of this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32; `centred` scales by `1 + weight`, as Qwen3.5 does."""

    def __init__(self, size: int, *, eps: float, centred: bool) -> None:
        """Make the norm with a neutral weight."""
        super().__init__()
        self.eps = eps
        self.centred = centred
        self.weight = nn.Parameter(torch.zeros(size) if centred else torch.ones(size))

    def forward(self, hidden: Float[Tensor, "*axes size"]) -> Float[Tensor, "*axes size"]:
        """Normalise the last axis."""
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        scale = 1.0 + self.weight.float() if self.centred else self.weight
        return (scale * normed).to(hidden.dtype)


class CausalConv(nn.Module):
    """Depthwise causal convolution followed by SiLU, in float32; parameters are laid out as in `nn.Conv1d`."""

    def __init__(self, channels: int, width: int, *, bias: bool) -> None:
        """Make the convolution."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width).uniform_(-(width**-0.5), width**-0.5))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, hidden: Float[Tensor, "rows time channels"]) -> Float[Tensor, "rows time channels"]:
        """Mix each channel over the last `width` tokens."""
        width, time = self.weight.shape[-1], hidden.shape[1]
        padded = functional.pad(hidden.float(), (0, 0, width - 1, 0))
        mixed = padded[:, :time] * self.weight[:, 0, 0]
        for tap in range(1, width):
            mixed = mixed + padded[:, tap : tap + time] * self.weight[:, 0, tap]
        return functional.silu(mixed if self.bias is None else mixed + self.bias)


def causal_attention(
    query: Float[Tensor, "rows time heads head_dim"],
    key: Float[Tensor, "rows time key_heads head_dim"],
    value: Float[Tensor, "rows time key_heads head_dim"],
) -> Float[Tensor, "rows time width"]:
    """Grouped-query causal attention with the usual scale."""
    group = query.shape[2] // key.shape[2]
    key, value = (part.repeat_interleave(group, dim=2) for part in (key, value))
    mixed = functional.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
    )
    return mixed.transpose(1, 2).flatten(2)
