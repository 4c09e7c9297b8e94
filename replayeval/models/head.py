"""From tokens to final hidden states, and from those to float32 logits, for every supported model."""

import inspect
import math
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from replayeval.errors import ConfigError, NumericsError
from replayeval.models.architectures import find_mixers
from replayeval.models.attention import causal_attention
from replayeval.models.backbone import find_backbone
from replayeval.models.hook import hooked
from replayeval.models.quiet import quiet
from replayssm.policy import REFERENCE
from replayssm.replay import StateBank

VOCAB_BLOCK = 16384
"""Rows of a half-precision output projection that are raised to float32 at a time."""

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_HALF = (torch.bfloat16, torch.float16)


class OutputHead:
    """Runs the text model inside `model` and projects its hidden states to logits in float32.

    The projection multiplies the weights as they are, accumulates in float32 and is never rounded to the dtype of the
    model: logits in bfloat16 tie on one to two percent of tokens. What the model does to its logits afterwards is
    applied in float32: `logits_scaling` divides, `lm_head_multiplier` multiplies, `final_logit_softcapping` bounds.

    Args:
        model: A causal language model, or a multimodal model around one.

    Raises:
        ConfigError: If the model has no output projection that can be evaluated, or takes no cache.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.backbone = find_backbone(model, [mixer for _, mixer in find_mixers(model)])
        self.config: PreTrainedConfig = self.backbone.config
        projection = cast(object, model.get_output_embeddings())  # pyright: ignore[reportUnknownMemberType]
        weight = getattr(projection, "weight", None)
        if not isinstance(projection, nn.Linear) or not isinstance(weight, Tensor) or not weight.is_floating_point():
            raise ConfigError(
                f"expected {type(model).__name__} to have a plain output projection, got "
                f"{type(projection).__name__}; load a checkpoint with a language-model head that is not quantized"
            )
        if weight.device.type == "meta":
            raise ConfigError(
                f"the output projection of {type(model).__name__} is offloaded; "
                "use more GPUs, a smaller dtype or a smaller model so that everything fits"
            )
        self.projection = projection
        parameters = inspect.signature(self.backbone.forward).parameters
        cache_name = next((name for name in _CACHE_NAMES if name in parameters), None)
        if cache_name is None:
            raise ConfigError(
                f"expected {type(self.backbone).__name__} to take one of {', '.join(_CACHE_NAMES)}, "
                f"got parameters {', '.join(parameters)}"
            )
        self._cache_name = cache_name
        self._takes_positions = "position_ids" in parameters
        self.divisor = float(getattr(self.config, "logits_scaling", None) or 1.0)
        self.multiplier = float(getattr(self.config, "lm_head_multiplier", None) or 1.0)
        cap = getattr(self.config, "final_logit_softcapping", None)
        self.cap = None if cap is None else float(cap)

    @property
    def vocabulary(self) -> int:
        """Number of logits per token."""
        return self.projection.out_features

    @property
    def input_device(self) -> torch.device:
        """Where token ids have to lie."""
        return cast(Tensor, self.backbone.get_input_embeddings().weight).device

    def new_cache(self, rows: int) -> DynamicCache:
        """An empty cache for `rows` sequences; it takes its size from the first tokens that it sees.

        Raises:
            ValueError: If `rows` is not positive.
        """
        if rows < 1:
            raise ValueError(f"expected at least 1 row, got {rows}")
        return DynamicCache(config=self.config)

    def hidden(
        self,
        input_ids: Int64[Tensor, "rows time"],
        cache: DynamicCache | None = None,
        start_position: int = 0,
        attention_mask: Bool[Tensor, "rows past_and_time"]
        | Int64[Tensor, "rows past_and_time"]
        | Shaped[Tensor, "rows 1 time slots"]
        | None = None,
        positions: Int64[Tensor, "rows time"] | None = None,
    ) -> Float[Tensor, "rows time hidden"]:
        """Final hidden states, after the last norm, in the dtype that the model gives them.

        Args:
            input_ids: Tokens of this pass.
            cache: Holds the past; it is extended. Without one the pass has no past.
            start_position: Number of tokens (padding included) that the cache has seen.
            attention_mask: False or 0 at padding; covers the past and this pass. One with four axes says of each slot
                of the cache whether a token attends to it, in the form that the model's attention takes.
            positions: Position of each token in its own sequence, where padding makes rows differ; else they count from
                `start_position`. Models that take no positions find the distance of two tokens by themselves.

        Raises:
            ValueError: If the mask does not cover `start_position` tokens and this pass, or there is a past without a
                cache.
        """
        rows, tokens = input_ids.shape
        if cache is None and start_position:
            raise ValueError(f"expected a cache for a pass that starts at position {start_position}, got none")
        whole = attention_mask is not None and attention_mask.ndim == 4
        if attention_mask is not None and not whole and tuple(attention_mask.shape) != (rows, start_position + tokens):
            raise ValueError(
                f"expected an attention mask of shape {(rows, start_position + tokens)} (past and current tokens), "
                f"got {tuple(attention_mask.shape)}"
            )
        arguments: dict[str, Any] = {self._cache_name: cache, "use_cache": cache is not None}
        if attention_mask is not None:
            arguments["attention_mask"] = attention_mask if whole else attention_mask.to(torch.int64)
        if self._takes_positions:
            # Not every model derives the position from its cache.
            if positions is None:
                positions = torch.arange(start_position, start_position + tokens, device=input_ids.device).unsqueeze(0)
            arguments["position_ids"] = positions
        outputs = self.backbone(input_ids=input_ids, return_dict=True, **arguments)
        return cast(Tensor, outputs.last_hidden_state)

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocabulary"]:
        """Logits in float32, with everything that the model does to them.

        Rounding: hidden states are first rounded to the dtype of the projection where the model does so too; products
        are accumulated and returned in float32.
        """
        weight, bias = self.projection.weight, self.projection.bias
        flat = hidden.reshape(-1, hidden.shape[-1]).to(device=weight.device, dtype=weight.dtype)
        logits = _project(flat, weight)
        if bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
            logits += bias.to(torch.float32)
        # Each of these is one more pass over a tensor as wide as the vocabulary.
        if self.multiplier != 1.0:
            logits *= self.multiplier
        if self.divisor != 1.0:
            logits /= self.divisor
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits.view(*hidden.shape[:-1], weight.shape[0])


def _project(flat: Float[Tensor, "tokens hidden"], weight: Float[Tensor, "vocabulary hidden"]) -> Tensor:
    if weight.dtype not in _HALF:
        return functional.linear(flat, weight).to(torch.float32)
    if weight.device.type == "cuda":
        return torch.mm(flat, weight.t(), out_dtype=torch.float32)
    raised = flat.to(torch.float32)
    logits = torch.empty((flat.shape[0], weight.shape[0]), dtype=torch.float32, device=flat.device)
    for start in range(0, weight.shape[0], VOCAB_BLOCK):
        block = weight[start : start + VOCAB_BLOCK].to(torch.float32)
        logits[:, start : start + VOCAB_BLOCK] = raised @ block.t()
    return logits


def check_head(head: OutputHead, *, tokens: int = 16, seed: int = 0) -> float:
    """Check that `head` computes the hidden states and logits of the model's own forward pass, on a few random tokens.

    Two comparisons are made. Logits: the model runs once, and the hidden states of that very pass go through `head`;
    what may differ is the order of float32 summation (bounded by `hidden * 2**-23` of the summed magnitudes) and the
    model's rounding of each logit to its own dtype, at most three times. Hidden states: `head.hidden` in two chunks,
    with a cache and the attention of the engine, against those of that pass, to within five percent in half precision
    or 0.1 percent in float32 of their norm; this catches wrong wiring, not rounding.

    Both run on states of this project: what the model would advance them with may be kernels that tune themselves for a
    minute before their first answer. So call it on a model that is not hooked.

    Returns:
        The largest difference of a logit, relative to the largest logit.

    Raises:
        NumericsError: If either comparison fails, or a logit is not finite.
    """
    model, name = head.model, type(head.model).__name__
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, head.vocabulary, (1, tokens), generator=generator).to(head.input_device)
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del module, args
        seen.append(output.last_hidden_state)

    handle = head.backbone.register_forward_hook(keep)
    try:
        with torch.no_grad(), quiet():
            with hooked(model, _float32_states()):
                own = cast(Tensor, model(input_ids=ids, use_cache=False, return_dict=True).logits).to(torch.float32)
            handle.remove()
            with hooked(model, _float32_states()), causal_attention(head.config, head.input_device):
                cache, first = head.new_cache(1), tokens // 2
                parts = (head.hidden(ids[:, :first], cache), head.hidden(ids[:, first:], cache, first))
                wired = torch.cat(parts, dim=1)
            logits = head.logits(seen[0])
            weight = head.projection.weight
            summed = _project(seen[0][0].abs().to(weight.device, weight.dtype), weight.abs()).max()
    finally:
        handle.remove()
    if not bool(torch.isfinite(own).all()):
        raise NumericsError(
            f"expected finite logits from {name} on {tokens} random tokens, got NaN or infinity; "
            "the weights are damaged or overflow in this dtype"
        )
    eps = torch.finfo(head.projection.weight.dtype).eps
    scale = float(own.abs().max())
    hidden_size = seen[0].shape[-1]
    summation = hidden_size * 2.0**-23 * float(summed) * abs(head.multiplier / head.divisor)
    limit = summation + 1.5 * eps * scale
    gap = float((logits.to(own.device) - own).abs().max())
    if not gap <= limit:
        raise NumericsError(
            f"expected the logits of {name} to be reproduced from its hidden states within {limit:.3g}, got a "
            f"difference of {gap:.3g} (largest logit {scale:.3g}); this model treats its logits in a way that is not "
            "supported"
        )
    drift = _norm(wired.to(seen[0].device) - seen[0]) / max(_norm(seen[0]), math.ulp(0.0))
    tolerance = 5e-2 if seen[0].dtype in _HALF else 1e-3
    if not drift <= tolerance:
        raise NumericsError(
            f"expected {type(head.backbone).__name__} with a cache to give the hidden states of {name} within "
            f"{tolerance:.1%} of their norm, got a difference of {drift:.2%}; this model is wired in a way that is not "
            "supported"
        )
    return gap / scale if scale else gap


def _float32_states() -> StateBank:
    return StateBank([REFERENCE], sequences=[0], seed=0)


def _norm(x: Tensor) -> float:
    return float(x.to(torch.float64).square().sum().sqrt())
