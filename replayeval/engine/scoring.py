"""KL divergence, likelihoods and top-1 agreement per token, from hidden states, without a table of all logits."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

BLOCK_ELEMENTS = 2**25
"""Logits that are held at a time, over all rows of a block of tokens (256 MiB in float64)."""


class Scorer(StrEnum):
    """What turns final hidden states into scores.

    `torch`: float32 logits block by block, float64 after them. `triton`: the streaming kernel, which keeps no logits.
    """

    TORCH = "torch"
    TRITON = "triton"


Projection = Callable[[Float[Tensor, "*batch hidden"]], Float[Tensor, "*batch vocabulary"]]


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """Scores of one chunk of one document.

    Attributes:
        kl_nats: KL(reference || arm).
        nll_nats: Negative log-likelihood of the true next token under each arm; NaN where it is unknown.
        nll_reference_nats: The same under the reference.
        top1_agrees: Whether arm and reference rank the same token first.
        finite: Whether all logits of the arm are finite.
        reference_finite: Whether all logits of the reference are finite.
    """

    kl_nats: Float64[Tensor, "arms time"]
    nll_nats: Float64[Tensor, "arms time"]
    nll_reference_nats: Float64[Tensor, " time"]
    top1_agrees: Bool[Tensor, "arms time"]
    finite: Bool[Tensor, "arms time"]
    reference_finite: Bool[Tensor, " time"]


def kl_divergence(
    reference: Float64[Tensor, "*batch vocabulary"], other: Float64[Tensor, "*batch vocabulary"]
) -> Float64[Tensor, "*batch"]:
    """`KL(p || q)` in nats from normalised log-probabilities.

    Evaluated as `Σ (q − p − p d)` with `d = log q − log p`. This equals the usual sum, because the `q − p` add up to
    zero, but each term is non-negative. Where `d` is small it is taken as `p (e^d − 1 − d)`, of second order in `d`, so
    small divergences keep their digits.

    Source: ReplaySSM, output divergence; Schulman, "Approximating KL divergence" (estimator k3, here summed exactly).
    """
    difference = other - reference
    p = reference.exp()
    near = (torch.expm1(difference) - difference).mul_(p)
    far = (other.exp() - p).sub_(p.mul_(difference))
    # With p = 0 the term is q: d is infinite there, or undefined where q is 0 as well.
    return torch.where(reference == -torch.inf, other.exp(), torch.where(difference > 1, far, near)).sum(-1)


def score_tokens(
    project: Projection,
    hidden: Float[Tensor, "rows time hidden"],
    targets: Int64[Tensor, " time"],
) -> TokenScores:
    """Score one document whose row 0 is the reference and whose other rows are the arms.

    Logits are float32 as the model gives them; everything after them is float64. They are made block by block, so
    memory grows with the block and the vocabulary, never with the number of tokens.

    Args:
        project: Hidden states to logits.
        hidden: Final hidden states.
        targets: The true next token, or −1 where it is unknown.
    """
    time = hidden.shape[1]
    blocks: list[TokenScores] = []
    start = 0
    step = 1
    while start < time:
        logits = project(hidden[:, start : start + step])
        blocks.append(_score_block(logits, targets[start : start + step].to(logits.device)))
        start += step
        step = max(1, BLOCK_ELEMENTS // (logits.shape[0] * logits.shape[-1]))
    return TokenScores(
        kl_nats=torch.cat([b.kl_nats for b in blocks], dim=1),
        nll_nats=torch.cat([b.nll_nats for b in blocks], dim=1),
        nll_reference_nats=torch.cat([b.nll_reference_nats for b in blocks]),
        top1_agrees=torch.cat([b.top1_agrees for b in blocks], dim=1),
        finite=torch.cat([b.finite for b in blocks], dim=1),
        reference_finite=torch.cat([b.reference_finite for b in blocks]),
    )


def _score_block(logits: Float[Tensor, "rows time vocabulary"], targets: Int64[Tensor, " time"]) -> TokenScores:
    top = logits.argmax(-1)
    # Some logits of −inf are a mask that a model may put on its vocabulary; only them, +inf or NaN are a failure.
    finite = logits.amax(-1).isfinite()
    log_probabilities = logits.to(torch.float64).log_softmax(-1)
    chosen = targets.clamp_min(0).expand(logits.shape[0], -1).unsqueeze(-1)
    nll = -log_probabilities.gather(-1, chosen).squeeze(-1).masked_fill(targets < 0, torch.nan)
    kl = [kl_divergence(log_probabilities[0], arm) for arm in log_probabilities[1:]]
    return TokenScores(
        kl_nats=torch.stack(kl),
        nll_nats=nll[1:],
        nll_reference_nats=nll[0],
        top1_agrees=top[1:] == top[0],
        finite=finite[1:],
        reference_finite=finite[0],
    )
