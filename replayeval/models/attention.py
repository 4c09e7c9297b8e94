"""Attention of a chunk of tokens to its whole past, without a mask and without copies of keys for every query head."""

# transformers types its interfaces in part only.
# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "replayeval_causal"
_REPLACED = "sdpa"


def attention_name(config: PreTrainedConfig, device: torch.device) -> str:
    """How a model attends within `causal_attention`: `replayeval_causal`, or what transformers calls its own."""
    own = str(config._attn_implementation)
    return NAME if device.type == "cuda" and own == _REPLACED else own


@contextmanager
def causal_attention(config: PreTrainedConfig, device: torch.device) -> Generator[None]:
    """Let a model on a CUDA device attend to the whole past of a chunk as `causal_attention_forward` does.

    transformers gives SDPA a mask for every pass but the first, which rules out the kernels that read grouped keys as
    they are, and so repeats all keys and values for every query head: at 128K tokens several times the cache.

    Args:
        config: Configuration of the model whose passes have no padding; changed inside the block only. A model that
            attends in another way than by SDPA is left alone, and so is one on a CPU. No other thread may use it.
        device: Where the model is.
    """
    if attention_name(config, device) != NAME:
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = _REPLACED


def causal_attention_forward(
    module: nn.Module,
    query: Float[Tensor, "rows heads time d_k"],
    key: Float[Tensor, "rows key_heads past_and_time d_k"],
    value: Float[Tensor, "rows key_heads past_and_time d_v"],
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Float[Tensor, "rows time heads d_v"], None]:
    """Attention in the form in which transformers asks for it.

    Without a mask, it is that of `causal_mask`; what carries one, or is not causal, is passed on to SDPA.

    Half precision goes to the flash kernel, which knows grouped heads and aligns the last token with the last key. What
    that kernel does not take is computed row by row, so that keys are repeated for one row at a time.

    Source: Dao, FlashAttention-2, 2023; `torch.nn.attention.bias.causal_lower_right`.
    """
    time, past_and_time = query.shape[2], key.shape[2]
    causal = options.get("is_causal")
    plain = attention_mask is None and (getattr(module, "is_causal", True) if causal is None else causal)
    if not plain or time == 1 or any(options.get(name) is not None for name in ("position_bias", "softcap")):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    groups = query.shape[1] // key.shape[1]
    mask = causal_lower_right(time, past_and_time)
    attend = partial(scaled_dot_product_attention, attn_mask=mask, scale=options.get("scaling"))
    if can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, groups > 1)):
        found = attend(query, key, value, enable_gqa=groups > 1)
    else:
        rows = zip(query.split(1), key.split(1), value.split(1), strict=True)
        found = torch.cat(
            [attend(q, k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)) for q, k, v in rows]
        )
    return found.transpose(1, 2).contiguous(), None


def causal_mask(
    *, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, attention_mask: Tensor | None = None,
    mask_function: Callable[..., Any] = causal_mask_function, **options: Any,
) -> Tensor | None:  # fmt: skip
    """No mask where every token attends to all before it and itself, and only there; else that of SDPA."""
    whole = kv_offset == 0 and q_offset + q_length == kv_length
    if attention_mask is None and mask_function is causal_mask_function and whole:
        return None
    # SDPA's own reading of no mask depends on the pass.
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        mask_function=mask_function,
        **options,
    )


ALL_ATTENTION_FUNCTIONS.register(NAME, causal_attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, causal_mask)
