"""Rows of a Hugging Face cache that come and go: keys and values aligned on the right, convolution states as they are.

Keys are stored with their rotation, so a row may move along the slots of a cache: its own positions went into it.
"""

# The layers of a cache are untyped and filled lazily.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from replayeval.errors import UnsupportedArmError

__all__ = ["join_caches"]

# Exact classes: one derived from them may keep more than its rows are known to consist of.
_KNOWN = (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)


def join_caches(parts: Sequence[DynamicCache], rows: Sequence[Sequence[int]], *, slots: int) -> DynamicCache:
    """A new cache of chosen rows of several caches, in order, whose last tokens are aligned.

    Args:
        parts: Caches of one model, each filled by at least one pass; they stay as they are.
        rows: Which rows of each; a row may be chosen several times.
        slots: Tokens that the new cache holds per row. Shorter parts get zeros on the left, which the caller masks;
            of longer ones the leftmost tokens are dropped, which must be padding in all chosen rows.

    Raises:
        UnsupportedArmError: When the model keeps something in its cache whose rows cannot be told apart.
    """
    joined = copy.copy(parts[0])
    joined.layers = [
        _join_layers([part.layers[index] for part in parts], rows, slots) for index in range(len(parts[0].layers))
    ]
    return joined


def _join_layers(layers: Sequence[Any], rows: Sequence[Sequence[int]], slots: int) -> Any:
    if type(layers[0]) not in _KNOWN:
        raise UnsupportedArmError(
            f"expected a cache of attention and linear-attention layers, got {type(layers[0]).__name__}, whose rows "
            "cannot be moved between batches; use a batch size of 1"
        )
    joined = copy.copy(layers[0])
    if isinstance(joined, LinearAttentionCacheLayerMixin):
        for name in ("conv_states", "recurrent_states"):
            states = [getattr(layer, name) for layer in layers]
            setattr(joined, name, {index: _cat([s[index] for s in states], rows) for index in states[0]})
    if isinstance(joined, DynamicLayer) and joined.is_initialized:
        held = slots
        if isinstance(joined, DynamicSlidingWindowLayer):
            joined.cumulative_length = slots
            held = min(slots, joined.sliding_window - 1)
        for name in ("keys", "values"):
            setattr(joined, name, _cat([getattr(layer, name) for layer in layers], rows, lambda x: _align(x, held)))
    return joined


def _cat(
    tensors: Sequence[Tensor | None], rows: Sequence[Sequence[int]], prepare: Callable[[Tensor], Tensor] = lambda x: x
) -> Tensor | None:
    found = [
        prepare(tensor.index_select(0, torch.tensor(list(wanted), device=tensor.device)))
        for tensor, wanted in zip(tensors, rows, strict=True)
        if tensor is not None and len(wanted)
    ]
    return torch.cat(found) if found else None


def _align(x: Tensor, held: int) -> Tensor:
    """Drop or add slots on the left."""
    missing = held - x.shape[-2]
    return functional.pad(x, (0, 0, missing, 0)) if missing > 0 else x[..., -missing:, :]
