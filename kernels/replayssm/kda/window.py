"""Kimi Delta Attention, one replay window at a time."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from replayssm.gdn.window import DeltaWindow
from replayssm.records import TokenInputs
from replayssm.window import cumulate, decayed

_PAIRWISE_ELEMENTS = 2**24


@dataclass(frozen=True, kw_only=True)
class KdaWindow(DeltaWindow):
    """Windows of a delta rule whose decay differs by key channel: it multiplies the vectors, not their products.

    Source: ReplaySSM, the replay window with the decay of Kimi Delta Attention.
    """

    @classmethod
    def prepare(cls, inputs: TokenInputs) -> DeltaWindow:
        """Everything inside the windows of a channel-decay layer, from tokens `[steps, lanes, window, …]`."""
        heads = inputs.value.shape[-2]
        group = heads // inputs.key.shape[-2]
        query = inputs.query.repeat_interleave(group, dim=-2).transpose(-3, -2)
        key = inputs.key.repeat_interleave(group, dim=-2).transpose(-3, -2)
        dtype = inputs.value.dtype
        cumulative = cumulate(inputs.log_decay.transpose(-3, -2), -2)
        gain = decayed(cumulative, dtype)
        last = cumulative[..., -1:, :]
        overlap, scores = _products(torch.stack([key, query]), key, cumulative)
        return cls.assemble(
            inputs,
            query=query * gain,
            read_key=key * gain,
            write_key=key * decayed(last - cumulative, dtype),
            overlap=overlap,
            scores=scores,
            gain=None,
            tail=None,
            decay=decayed(last, dtype),
        )


def _products(
    left: Float[Tensor, "2 *lead window d_k"],
    key: Float[Tensor, "*lead window d_k"],
    cumulative: Float64[Tensor, "*lead window d_k"],
) -> Float[Tensor, "2 *lead window window"]:
    """`Σ_c left_ic k_jc exp(c_ic − c_jc)` for `j ≤ i`, with no exponent above zero, so nothing can overflow.

    The factored form needs `exp(−c_j)`, which overflows for strong decays; the pairwise one is built in pieces instead.
    """
    size, d_k = key.shape[-2:]
    lead = key.shape[:-2]
    flat_left = left.reshape(2, -1, size, d_k)
    flat_key, flat_decay = key.reshape(-1, size, d_k), cumulative.reshape(-1, size, d_k)
    future = torch.ones(size, size, dtype=torch.bool, device=key.device).triu_(1).unsqueeze(-1)
    product = key.new_empty(2, flat_key.shape[0], size, size)
    piece = max(1, _PAIRWISE_ELEMENTS // (size * size * d_k))
    for start in range(0, flat_key.shape[0], piece):
        part = slice(start, start + piece)
        exponent = flat_decay[part].unsqueeze(-2) - flat_decay[part].unsqueeze(-3)
        weighted = decayed(exponent.masked_fill_(future, -torch.inf), key.dtype).mul_(flat_key[part].unsqueeze(-3))
        product[:, part] = torch.einsum("xnic,nijc->xnij", flat_left[:, part], weighted)
    return product.view(2, *lead, size, size)
