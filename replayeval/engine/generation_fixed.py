"""A Hugging Face cache whose rows stay in their places: keys are written where each row stands, nothing moves.

Each row begins at the first slot; what lies behind its tokens is masked. Keys carry their rotation, so a prompt that
was read with padding on its left moves there as it is.
"""

# The layers of a cache are untyped and filled lazily.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

__all__ = ["FixedCache", "fixed_problem"]


class _FixedKeys:
    """Attention of a layer: writes a token of each row at the row's position, and gives all slots."""

    keys: Tensor
    values: Tensor
    positions: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        for held, fresh in ((self.keys, key_states), (self.values, value_states)):
            where = self.positions.view(-1, 1, 1, 1).expand_as(fresh)
            held.scatter_(2, where, fresh)
        return self.keys, self.values


class _FixedConvolutions:
    """Convolution states of a layer, which their mixer updates where they lie; its recurrent state lies elsewhere."""

    recurrent_states: dict[int, Tensor]

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        del recurrent_states
        return self.recurrent_states[state_idx]


class _FixedAttention(_FixedKeys, DynamicLayer):
    pass


class _FixedLinear(_FixedConvolutions, LinearAttentionLayer):
    pass


class _FixedBoth(_FixedKeys, _FixedConvolutions, LinearAttentionAndFullAttentionLayer):
    pass


# Exact classes: one derived from them may keep more than its rows are known to consist of.
_FIXED: dict[type, type] = {
    DynamicLayer: _FixedAttention,
    LinearAttentionLayer: _FixedLinear,
    LinearAttentionAndFullAttentionLayer: _FixedBoth,
}


def fixed_problem(cache: DynamicCache) -> str | None:
    """Why the rows of such a cache cannot stay in places of their own, or None if they can."""
    unknown = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in (*_FIXED, DummyLayer)})
    return f"{', '.join(unknown)} of the cache keeps no fixed slots" if unknown else None


class FixedCache:
    """Keys, values and convolution states of a number of places.

    Args:
        like: The cache of prompts that were read, whose layers this one's are like.
        places: Rows.
        positions: Where the next token of each place goes. Read at every step.
    """

    def __init__(self, like: DynamicCache, *, places: int, positions: Int64[Tensor, " places"]) -> None:
        self.cache: DynamicCache = copy.copy(like)
        self.cache.layers = [_fixed(layer, places, positions) for layer in like.layers]
        self._positions = positions
        self._slots = torch.empty(0, dtype=torch.int64, device=positions.device)

    def grow(self, capacity: int) -> None:
        """Give every place room for so many tokens; what is there stays."""
        self._slots = torch.arange(capacity, device=self._positions.device)
        for layer in self._with_keys():
            for name in ("keys", "values"):
                held: Tensor = getattr(layer, name)
                wider = held.new_zeros((*held.shape[:2], capacity, held.shape[3]))
                wider[:, :, : held.shape[2]] = held
                setattr(layer, name, wider)

    def mask(self, config: PreTrainedConfig, *, dtype: torch.dtype) -> Shaped[Tensor, "places 1 1 slots"]:
        """Which slots the next token of each place attends to, its own included, as the model's attention takes it."""
        seen = (self._slots <= self._positions[:, None])[:, None, None, :]
        if getattr(config, "_attn_implementation", None) == "sdpa":
            return seen
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)

    def admit(self, part: DynamicCache, rows: Sequence[int], places: Sequence[int], *, lengths: Sequence[int]) -> None:
        """Copy rows of a cache that ends with their last tokens.

        Args:
            part: Padded on the left.
            rows: Which of its rows.
            places: Where each goes.
            lengths: Tokens of each, without padding.
        """
        source, target = self._index(rows), self._index(places)
        alike = {n: [i for i, length in enumerate(lengths) if length == n] for n in dict.fromkeys(lengths)}
        groups = [
            (n, self._index([rows[i] for i in members]), self._index([places[i] for i in members]))
            for n, members in alike.items()
        ]
        layers: list[Any] = self.cache.layers
        for layer, given in zip(layers, cast(list[Any], part.layers), strict=True):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                for index, state in layer.conv_states.items():
                    if state is not None:
                        state[target] = given.conv_states[index].index_select(0, source)
            if isinstance(layer, _FixedKeys):
                for name in ("keys", "values"):
                    held, read = getattr(layer, name), getattr(given, name)
                    # Masked slots count with weight zero, which a number must meet: a row that diverged leaves none.
                    held[target] = 0
                    for length, chosen, there in groups:
                        held[there, :, :length] = read.index_select(0, chosen)[:, :, read.shape[2] - length :]

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._positions.device)

    def save(self) -> list[Tensor]:
        """Copies of what a step changes in places that are empty."""
        return [x.clone() for x in self._changed()]

    def restore(self, saved: Sequence[Tensor]) -> None:
        """Put back what `save` returned."""
        for x, before in zip(self._changed(), saved, strict=True):
            x.copy_(before)

    def _changed(self) -> list[Tensor]:
        found = [x[:, :, :1] for layer in self._with_keys() for x in (layer.keys, layer.values)]
        for layer in self.cache.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                found += [x for x in layer.conv_states.values() if x is not None]
        return found

    def _with_keys(self) -> list[Any]:
        return [layer for layer in self.cache.layers if isinstance(layer, _FixedKeys)]


def _fixed(given: object, places: int, positions: Tensor) -> Any:
    """A layer of a filled cache, with so many rows."""
    layer = cast(Any, given)
    attends = isinstance(layer, DynamicLayer) and layer.is_initialized
    convolves = isinstance(layer, LinearAttentionCacheLayerMixin)
    if not attends and not convolves:
        return copy.copy(layer)
    # A layer that might attend and never does is one that does not.
    kind = _FIXED[type(layer)] if attends else _FixedLinear
    made: Any = object.__new__(kind)
    vars(made).update(vars(layer))

    def rows(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.new_zeros((places, *x.shape[1:]))

    if convolves:
        made.conv_states = {i: rows(x) for i, x in layer.conv_states.items()}
        made.recurrent_states = {i: rows(x) for i, x in layer.recurrent_states.items()}
    if attends:
        for name in ("keys", "values"):
            read: Tensor = getattr(layer, name)
            setattr(made, name, read.new_zeros((places, read.shape[1], 0, read.shape[3])))
        made.positions = positions
    return made
