"""Training form of a Nemotron-H model: one attention block, then Mamba-2 blocks, an MLP block after each.

Parameter names and layouts are those of `NemotronHForCausalLM` in transformers, so weights load there unchanged.
"""

# torch and its companions ship partial types: what comes out of them is unknown by no fault of this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from replayeval.models.builtin.parts import CausalConv, RMSNorm, causal_attention
from replayeval.models.builtin.scan import mamba2_chunked
from replayeval.models.builtin.tokenizer import VOCAB_SIZE

_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Mamba2Shape:
    """Sizes of the model, as in its Hugging Face configuration."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 256
    mamba_blocks: int = 5
    intermediate_size: int = 640
    attention_heads: int = 4
    attention_key_heads: int = 2
    attention_head_dim: int = 64
    heads: int = 8
    head_dim: int = 64
    groups: int = 2
    d_state: int = 128
    conv_width: int = 4

    def block_types(self) -> list[str]:
        """Return the type of each block, in order."""
        return ["full_attention", "mlp"] + ["linear_attention", "mlp"] * self.mamba_blocks

    def hf_config(self) -> dict[str, Any]:
        """Return the content of `config.json`."""
        return {
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "layers_block_type": self.block_types(),
            "intermediate_size": self.intermediate_size,
            "mlp_hidden_act": "relu2",
            "num_attention_heads": self.attention_heads,
            "num_key_value_heads": self.attention_key_heads,
            "head_dim": self.attention_head_dim,
            "mamba_num_heads": self.heads,
            "mamba_head_dim": self.head_dim,
            "n_groups": self.groups,
            "ssm_state_size": self.d_state,
            "conv_kernel": self.conv_width,
            "use_conv_bias": True,
            "expand": self.heads * self.head_dim // self.hidden_size,
            "chunk_size": 64,
            "layer_norm_epsilon": _EPS,
            # The chunked scan clamps the time step from below at `time_step_min` and the one-token update does not:
            # a floor far under every step that occurs keeps the two the same function.
            "time_step_min": 1e-9,
            "max_position_embeddings": 1 << 20,
            "tie_word_embeddings": False,
        }


class _MLP(nn.Module):
    def __init__(self, shape: Mamba2Shape) -> None:
        super().__init__()
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(functional.relu(self.up_proj(hidden)).square())


class _Attention(nn.Module):
    """Attention without positions: what it sees does not depend on how far away a token is."""

    def __init__(self, shape: Mamba2Shape) -> None:
        super().__init__()
        self.head_dim = shape.attention_head_dim
        width, key_width = shape.attention_heads * self.head_dim, shape.attention_key_heads * self.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = (projection(hidden) for projection in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        return self.o_proj(causal_attention(query, key, value))


class _GroupedGatedNorm(nn.Module):
    def __init__(self, size: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        gated = (hidden * functional.silu(gate.float())).unflatten(-1, (self.groups, -1))
        normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + _EPS)
        return self.weight * normed.flatten(-2)


class _Mamba2(nn.Module):
    def __init__(self, shape: Mamba2Shape) -> None:
        super().__init__()
        self.shape = shape
        self.inner = shape.heads * shape.head_dim
        conv_channels = self.inner + 2 * shape.groups * shape.d_state
        self.conv1d = CausalConv(conv_channels, shape.conv_width, bias=True)
        self.in_proj = nn.Linear(shape.hidden_size, self.inner + conv_channels + shape.heads, bias=False)
        # Slow heads from the start, fast and slow ones in both groups.
        steps = torch.linspace(0.0, 1.0, shape.heads // shape.groups).repeat(shape.groups)
        self.A_log = nn.Parameter(math.log(0.01) * steps)
        self.dt_bias = nn.Parameter(-3.0 * steps)
        self.norm = _GroupedGatedNorm(self.inner, shape.groups)
        self.D = nn.Parameter(torch.ones(shape.heads))
        self.out_proj = nn.Linear(self.inner, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        shape, axes = self.shape, hidden.shape[:2]
        state_width = shape.groups * shape.d_state
        gate, mixed, step = self.in_proj(hidden).split([self.inner, self.inner + 2 * state_width, shape.heads], dim=-1)
        value, key, query = self.conv1d(mixed).split([self.inner, state_width, state_width], dim=-1)
        with torch.autocast(hidden.device.type, enabled=False):
            value = value.reshape(*axes, shape.heads, shape.head_dim)
            key, query = (part.reshape(*axes, shape.groups, shape.d_state) for part in (key, query))
            step = functional.softplus(step.float() + self.dt_bias)
            log_decay = -self.A_log.exp() * step
            scanned = mamba2_chunked(value * step.unsqueeze(-1), log_decay, key, query)
            scanned = scanned + value * self.D.unsqueeze(-1)
            normed = self.norm(scanned.flatten(2), gate)
        return self.out_proj(normed)


class _Block(nn.Module):
    def __init__(self, shape: Mamba2Shape, kind: str) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.hidden_size, eps=_EPS, centred=False)
        mixers = {"full_attention": _Attention, "mlp": _MLP, "linear_attention": _Mamba2}
        self.mixer = mixers[kind](shape)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mixer(self.norm(hidden))


class _Backbone(nn.Module):
    def __init__(self, shape: Mamba2Shape) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Block(shape, kind) for kind in shape.block_types())
        self.norm_f = RMSNorm(shape.hidden_size, eps=_EPS, centred=False)


class Mamba2Trainer(nn.Module):
    """The model as it is trained.

    Args:
        shape: Sizes.
    """

    def __init__(self, shape: Mamba2Shape) -> None:
        """Make the model with fresh weights drawn from torch's generator."""
        super().__init__()
        self.shape = shape
        self.model = _Backbone(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        scale_down = len(shape.block_types()) ** -0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                leaves = name.endswith(("o_proj", "out_proj", "down_proj"))
                nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5 * (scale_down if leaves else 1.0))
        nn.init.normal_(self.model.embeddings.weight, std=0.5)

    def forward(self, ids: Int64[Tensor, "rows time"]) -> Float[Tensor, "rows time vocab"]:
        """Return the logits."""
        hidden = self.model.embeddings(ids)
        for layer in self.model.layers:
            hidden = layer(hidden)
        return self.lm_head(self.model.norm_f(hidden))
