"""Training form of a Qwen3.5 text model: full attention in the first layer, Gated DeltaNet above.

Parameter names and layouts are those of `Qwen3_5ForCausalLM` in transformers, so weights load there unchanged.
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
from replayeval.models.builtin.scan import gated_delta_chunked
from replayeval.models.builtin.tokenizer import VOCAB_SIZE

_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class GDNShape:
    """Sizes of the model, as in its Hugging Face configuration."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 256
    layers: int = 6
    intermediate_size: int = 640
    attention_heads: int = 4
    attention_key_heads: int = 2
    attention_head_dim: int = 64
    rope_theta: float = 500.0
    rotary_fraction: float = 0.25
    key_heads: int = 2
    value_heads: int = 4
    d_k: int = 64
    d_v: int = 64
    conv_width: int = 4

    def hf_config(self) -> dict[str, Any]:
        """Return the content of `config.json`."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "layer_types": ["full_attention"] + ["linear_attention"] * (self.layers - 1),
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.attention_heads,
            "num_key_value_heads": self.attention_key_heads,
            "head_dim": self.attention_head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": _EPS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotary_fraction,
            },
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.d_k,
            "linear_value_head_dim": self.d_v,
            "linear_conv_kernel_dim": self.conv_width,
            "max_position_embeddings": 1 << 20,
            "tie_word_embeddings": False,
        }


class _MLP(nn.Module):
    def __init__(self, shape: GDNShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class _Attention(nn.Module):
    def __init__(self, shape: GDNShape) -> None:
        super().__init__()
        self.head_dim = shape.attention_head_dim
        self.rotary = int(self.head_dim * shape.rotary_fraction)
        self.rope_theta = shape.rope_theta
        width, key_width = shape.attention_heads * self.head_dim, shape.attention_key_heads * self.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, 2 * width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps=_EPS, centred=True)
        self.k_norm = RMSNorm(self.head_dim, eps=_EPS, centred=True)

    def _rotate(self, heads: Tensor) -> Tensor:
        time = heads.shape[1]
        exponents = torch.arange(0, self.rotary, 2, dtype=torch.float32, device=heads.device) / self.rotary
        angles = torch.arange(time, device=heads.device).float()[:, None] * (1.0 / self.rope_theta**exponents)
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        turned, kept = heads[..., : self.rotary], heads[..., self.rotary :]
        left, right = turned.chunk(2, dim=-1)
        swapped = torch.cat((-right, left), dim=-1)
        turned = turned * angles.cos().to(heads.dtype) + swapped * angles.sin().to(heads.dtype)
        return torch.cat((turned, kept), dim=-1)

    def forward(self, hidden: Tensor) -> Tensor:
        axes = (*hidden.shape[:2], -1)
        query, gate = self.q_proj(hidden).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        query = self._rotate(self.q_norm(query))
        key = self._rotate(self.k_norm(self.k_proj(hidden).view(*axes, self.head_dim)))
        value = self.v_proj(hidden).view(*axes, self.head_dim)
        mixed = causal_attention(query, key, value) * gate.reshape(*axes).sigmoid()
        return self.o_proj(mixed)


class _GatedNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        wide = hidden.float()
        normed = self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS))
        return normed * functional.silu(gate.float())


def _unit(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)


class _GatedDeltaNet(nn.Module):
    def __init__(self, shape: GDNShape) -> None:
        super().__init__()
        self.shape = shape
        key_width, value_width = shape.key_heads * shape.d_k, shape.value_heads * shape.d_v
        self.conv1d = CausalConv(2 * key_width + value_width, shape.conv_width, bias=False)
        # Slow heads from the start: horizons of about one to a few thousand tokens, in steps over the heads.
        steps = torch.linspace(0.0, 1.0, shape.value_heads)
        self.A_log = nn.Parameter(math.log(0.01) * steps)
        self.dt_bias = nn.Parameter(-3.0 * steps)
        self.norm = _GatedNorm(shape.d_v)
        self.in_proj_qkv = nn.Linear(shape.hidden_size, 2 * key_width + value_width, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden_size, value_width, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden_size, shape.value_heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden_size, shape.value_heads, bias=False)
        self.out_proj = nn.Linear(value_width, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        shape, axes = self.shape, hidden.shape[:2]
        widths = [shape.key_heads * shape.d_k] * 2 + [shape.value_heads * shape.d_v]
        gate = self.in_proj_z(hidden).view(*axes, -1, shape.d_v)
        query, key, value = self.conv1d(self.in_proj_qkv(hidden)).split(widths, dim=-1)
        beta, step = self.in_proj_b(hidden), self.in_proj_a(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            query = _unit(query.reshape(*axes, -1, shape.d_k)) * shape.d_k**-0.5
            key = _unit(key.reshape(*axes, -1, shape.d_k))
            value = value.reshape(*axes, -1, shape.d_v)
            log_decay = -self.A_log.exp() * functional.softplus(step.float() + self.dt_bias)
            mixed = gated_delta_chunked(query, key, value, log_decay, beta.float().sigmoid())
            mixed = self.norm(mixed, gate)
        return self.out_proj(mixed.flatten(2))


class _Layer(nn.Module):
    def __init__(self, shape: GDNShape, *, attention: bool) -> None:
        super().__init__()
        if attention:
            self.self_attn = _Attention(shape)
        else:
            self.linear_attn = _GatedDeltaNet(shape)
        self.mlp = _MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, eps=_EPS, centred=True)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, eps=_EPS, centred=True)
        self.is_attention = attention

    def forward(self, hidden: Tensor) -> Tensor:
        mixer = self.self_attn if self.is_attention else self.linear_attn
        hidden = hidden + mixer(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Backbone(nn.Module):
    def __init__(self, shape: GDNShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Layer(shape, attention=index == 0) for index in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, eps=_EPS, centred=True)


class GDNTrainer(nn.Module):
    """The model as it is trained.

    Args:
        shape: Sizes.
    """

    def __init__(self, shape: GDNShape) -> None:
        """Make the model with fresh weights drawn from torch's generator."""
        super().__init__()
        self.shape = shape
        self.model = _Backbone(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        scale_down = (2 * shape.layers) ** -0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                leaves = name.endswith(("o_proj", "out_proj", "down_proj"))
                nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5 * (scale_down if leaves else 1.0))
        nn.init.normal_(self.model.embed_tokens.weight, std=0.5)

    def forward(self, ids: Int64[Tensor, "rows time"]) -> Float[Tensor, "rows time vocab"]:
        """Return the logits."""
        hidden = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            hidden = layer(hidden)
        return self.lm_head(self.model.norm(hidden))
