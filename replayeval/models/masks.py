"""Know which tokens of the current forward pass are padding, although models drop that knowledge on the way."""

import inspect
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from replayeval.errors import NumericsError
from replayeval.models.backbone import find_backbone


@dataclass(kw_only=True)
class _Pass:
    """The mask of one pass of the backbone, and what was made of it: all mixers ask for the same."""

    mask: Tensor
    made: dict[tuple[int, int, torch.device], Tensor | None] = field(
        default_factory=dict[tuple[int, int, torch.device], Tensor | None]
    )


class MaskTracker:
    """Follows the two-dimensional attention mask that a model was called with.

    transformers hands a mixer no mask when the pass has a single token, and wrappers may turn the mask into other
    shapes. So it is read where the backbone receives it, trimmed to the tokens of the pass, and given to the mixers.
    """

    def __init__(self) -> None:
        self._pass: ContextVar[_Pass | None] = ContextVar("padding_mask", default=None)

    def attach(self, model: PreTrainedModel, mixers: Sequence[nn.Module]) -> list[RemovableHandle]:
        """Register the hooks that follow the mask; the caller removes them."""
        backbone = find_backbone(model, mixers)
        signature = inspect.signature(backbone.forward)
        outer: list[_Pass | None] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            del module
            arguments = signature.bind_partial(*args, **kwargs).arguments
            outer.append(self._pass.get())
            mask = _padding_mask(arguments)
            self._pass.set(None if mask is None else _Pass(mask=mask))

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            del module, args, output
            # The framework also calls this when a hook before it failed.
            if outer:
                self._pass.set(outer.pop())

        return [
            backbone.register_forward_pre_hook(enter, with_kwargs=True),
            backbone.register_forward_hook(leave, always_call=True),
        ]

    def valid(self, *, rows: int, tokens: int, device: torch.device) -> Bool[Tensor, "rows time"] | None:
        """Which tokens of the pass are real, or `None` when all are.

        Raises:
            NumericsError: If the mask does not fit the pass.
        """
        current = self._pass.get()
        if current is None:
            return None
        key = (rows, tokens, device)
        if key not in current.made:
            current.made[key] = _trim(current.mask, rows, tokens, device)
        return current.made[key]

    def with_padding(self, mixer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a mixer, with the mask of the pass wherever a token is padding."""
        del mixer
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        valid = self.valid(rows=hidden.shape[0], tokens=hidden.shape[1], device=hidden.device)
        return dict(kwargs) if valid is None else {**kwargs, "attention_mask": valid}


def _padding_mask(arguments: Mapping[str, Any]) -> Tensor | None:
    mask: object = arguments.get("attention_mask")
    if isinstance(mask, Mapping):
        mask = cast(Mapping[str, object], mask).get("linear_attention")
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def _trim(mask: Tensor, rows: int, tokens: int, device: torch.device) -> Tensor | None:
    if mask.shape[0] != rows or mask.shape[1] < tokens:
        raise NumericsError(
            f"expected an attention mask with {rows} rows and at least {tokens} columns, got {tuple(mask.shape)}; "
            "it must cover the past and the current tokens"
        )
    current = mask[:, mask.shape[1] - tokens :].to(device=device, dtype=torch.bool)
    return None if bool(current.all()) else current
