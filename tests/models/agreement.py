"""How logits are compared with a model's own, and how far they may differ.

A model computes its cores in float32. Its logits and the hooked ones then differ by the rounding of two different
summation orders, through a few layers with norms that amplify small outputs; `LIMIT` allows about 170 units of float32
rounding (eps = 2**-23) relative to the largest logit. Planted mistakes must exceed `PLANTED`, fifty times as much.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from replayeval.models.head import OutputHead
from replayeval.models.hook import hooked

LIMIT = 2e-5
PLANTED = 50 * LIMIT
TOKENS = 19


def own_logits(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        outputs: Any = model(input_ids=ids, use_cache=False, **kwargs)
        return outputs.logits


def in_chunks(
    model: PreTrainedModel, ids: Tensor, cuts: Sequence[int], driver: Any, mask: Tensor | None = None
) -> Tensor:
    """Logits of a hooked model that receives its tokens in chunks of the given lengths."""
    head = OutputHead(model)
    logits: list[Tensor] = []
    with hooked(model, driver) as report:
        cache, start = head.new_cache(ids.shape[0]), 0
        for length in cuts:
            seen = None if mask is None else mask[:, : start + length]
            logits.append(head.logits(head.hidden(ids[:, start : start + length], cache, start, seen)))
            start += length
        report.verify()
    assert start == ids.shape[1]
    return torch.cat(logits, dim=1)


def gap(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())
