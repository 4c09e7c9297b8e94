"""Tiny checkpoints with random weights of every supported architecture, written as local directories.

Every shape that could be confused with another differs (rows and columns of a state, key and value heads, layers with
and without attention), and no weight is left at an initial value under which a mistake would not show.
"""

import functools
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from replayeval.models.quiet import quiet

VOCABULARY = 300

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "initializer_range": 0.15,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
_ATTENTION: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_head": 16,
    "mamba_chunk_size": 8,
    "time_step_limit": (0.01, 1.0),
}
# The norm behind a delta rule divides outputs that are sometimes almost zero; with the usual epsilon it would blow up
# the float32 rounding of the models' own cores until planted mistakes could hide in it.
_GDN: dict[str, Any] = {
    "rms_norm_eps": 1e-3,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_MOE: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
}
_KDA: dict[str, Any] = {
    "rms_norm_eps": 1e-3,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "moe_intermediate_size": 16,
}
_QWEN35: dict[str, Any] = {
    **_COMMON,
    **_ATTENTION,
    **_GDN,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_NEMOTRON: dict[str, Any] = {
    **_COMMON,
    **_ATTENTION,
    "head_dim": 16,
    "intermediate_size": 48,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 8,
    "expand": 1,
    "time_step_min": 0.01,
}

# Architecture -> (causal model class, configuration).
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (
        "Mamba2",
        {
            **_COMMON,
            "num_hidden_layers": 3,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 32,
            "n_groups": 2,
            "chunk_size": 8,
            "time_step_limit": (0.01, 1.0),
        },
    ),
    "bamba": (
        "Bamba",
        {
            **_COMMON,
            **_ATTENTION,
            **_MAMBA,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {**_NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    ),
    "nemotron_h_moe": (
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **_COMMON,
            **_ATTENTION,
            **_MAMBA,
            "intermediate_size": 16,
            "shared_intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
            "logits_scaling": 1.7,
            "position_embedding_type": "rope",
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {
            **_COMMON,
            **_ATTENTION,
            **_MAMBA,
            "mamba_d_ssm": 64,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "lm_head_multiplier": 1.9,
            "embedding_multiplier": 2.0,
            "ssm_in_multiplier": 0.8,
            "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 0.7],
            "mlp_multipliers": [1.1, 0.9],
        },
    ),
    "falcon_h1_norm": (
        "FalconH1",
        {
            **_COMMON,
            **_ATTENTION,
            **_MAMBA,
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            **_COMMON,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "n_mamba_heads": 4,
            "mamba_ngroups": 2,
            "mamba_d_state": 32,
            "chunk_size": 8,
            "num_mem_blocks": 2,
            "adapter_rank": 4,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "time_step_min": 0.01,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **_COMMON,
            **_ATTENTION,
            **_GDN,
            **_MOE,
            "head_dim": 16,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "qwen3_5": ("Qwen3_5", _QWEN35),
    "qwen3_5_moe": ("Qwen3_5Moe", {**_QWEN35, **_MOE}),
    "olmo_hybrid": (
        "OlmoHybrid",
        {
            **_COMMON,
            **_ATTENTION,
            **_GDN,
            "linear_allow_neg_eigval": True,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "lara_mini": (
        "LaraMini",
        {
            **_COMMON,
            **_ATTENTION,
            **_GDN,
            **_MOE,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "sliding_window": 512,
            "layer_types": ["linear_attention", "sliding_attention", "linear_attention"],
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            **_COMMON,
            **_KDA,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "linear_num_heads": 2,
            "linear_head_dim": 16,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "bailing_hybrid": (
        "BailingHybrid",
        {
            **_COMMON,
            **_KDA,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 48,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_mtp_layers": 0,
        },
    ),
}
WRAPPERS = {"qwen3_5_wrapper": "qwen3_5", "qwen3_5_moe_wrapper": "qwen3_5_moe"}
NAMES: tuple[str, ...] = (*CONFIGURATIONS, *WRAPPERS)


def build(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A new model of the named architecture; the same weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name in WRAPPERS:
            prefix, values = CONFIGURATIONS[WRAPPERS[name]]
            config = getattr(transformers, f"{prefix}Config")(text_config=values, vision_config=_VISION)
            model: PreTrainedModel = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
        else:
            prefix, values = CONFIGURATIONS[name]
            suffix = "TextConfig" if prefix.startswith("Qwen3_5") else "Config"
            config = getattr(transformers, f"{prefix}{suffix}")(**values)
            model = getattr(transformers, f"{prefix}ForCausalLM")(config)
        _perturb(model)
    model.tie_weights()
    return model.to(dtype=dtype).eval()  # pyright: ignore[reportCallIssue]


def _perturb(model: PreTrainedModel) -> None:
    """Give every parameter values under which leaving it out, or mixing it up, changes the output."""
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        leaf = name.rsplit(".", 1)[-1]
        with torch.no_grad():
            if leaf == "A_log":
                # Decay rates from 0.02 to 1, so that old tokens matter and heads differ.
                parameter.copy_(torch.linspace(math.log(0.02), 0.0, parameter.numel()).view_as(parameter))
            elif leaf == "dt_bias":
                parameter.copy_(0.5 * noise)
            elif leaf == "D":
                parameter.copy_(1.0 + 0.3 * noise)
            elif "norm" in name:
                parameter.add_(0.2 * noise)
            elif leaf == "bias" or float(parameter.abs().max()) == 0.0:
                parameter.add_(0.1 * noise)
            elif parameter.dim() == 3 and "conv1d" in name:
                parameter.copy_(0.5 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(0.05 * torch.randn_like(buffer))


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    raw.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=raw)
    wrapped.add_special_tokens({"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"})
    return wrapped


def save(name: str, directory: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint of the named architecture, with tokenizer, and return its directory."""
    with quiet():
        build(name, dtype=dtype).save_pretrained(directory)
        tokenizer().save_pretrained(directory)
    return directory


@functools.cache
def shared(name: str) -> PreTrainedModel:
    """The model of a name, built once; tests must leave it as they found it."""
    return build(name)


def token_ids(rows: int, tokens: int, *, seed: int = 1) -> torch.Tensor:
    """Random tokens, different in every row."""
    return torch.randint(0, 256, (rows, tokens), generator=torch.Generator().manual_seed(seed))
