"""Scoring hidden states with the streaming kernel, which keeps no logits, in place of `scoring.score_tokens`."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from replayeval.engine.scoring import TokenScores, score_tokens
from replayeval.errors import ConfigError, NumericsError
from replayeval.models.head import OutputHead
from replayssm.launch import triton_problem
from replayssm.streaming_kl import Finish, StreamLaunch, streamed_scores

CHECKED_TOKENS = 32

AGREEMENT = 2.0**-10
"""Allowed difference from PyTorch, in nats of a logit. Logits of size 2**5 err by 2**-19 per rounding, and sums of
2**12 products by the root of that many roundings, 2**-13; anything that is wrong moves them by far more."""


def score_streaming(
    head: OutputHead,
    hidden: Float[Tensor, "rows time hidden"],
    targets: Int64[Tensor, " time"],
    *,
    cut: StreamLaunch = StreamLaunch(),  # noqa: B008
) -> TokenScores:
    """Score one document whose row 0 is the reference and whose other rows are the arms.

    The scores mean what those of `score_tokens` mean. Logits are the same float32 numbers up to the order of their
    sums; what follows them is float32 within a part of the vocabulary, where `score_tokens` is float64 throughout.

    Args:
        head: The output head, with its scaling and capping.
        hidden: Final hidden states.
        targets: The true next token, or −1 where it is unknown.
        cut: How the kernel is cut.

    Raises:
        ConfigError: Where Triton kernels cannot run, or the head masks part of its vocabulary.
    """
    weight, bias = head.projection.weight, head.projection.bias
    problem = triton_problem(weight.device)
    if problem is not None:
        raise ConfigError(f"the streaming scores cannot be computed: {problem}")
    finish = Finish(multiplier=head.multiplier, divisor=head.divisor, cap=head.cap)
    try:
        scores = streamed_scores(hidden.to(weight.device), weight, targets, bias=bias, finish=finish, cut=cut)
    except ValueError as error:
        raise ConfigError(f"the streaming scores cannot be computed: {error}") from None
    return TokenScores(
        kl_nats=scores.kl_nats,
        nll_nats=scores.nll_nats[1:],
        nll_reference_nats=scores.nll_nats[0],
        top1_agrees=scores.top1[1:] == scores.top1[0],
        finite=scores.finite[1:],
        reference_finite=scores.finite[0],
    )


def check_streaming(
    head: OutputHead, hidden: Float[Tensor, "rows time hidden"], targets: Int64[Tensor, " time"], scores: TokenScores
) -> None:
    """Check the first of some streaming scores against PyTorch's.

    Log-likelihoods are compared as they are, divergences as the size of the differences of logits that they stand for,
    `sqrt(2 KL)`, since that is what rounding of logits adds to.

    Raises:
        NumericsError: When they differ by more than rounding; nothing of this run can be trusted.
    """
    kept = slice(0, CHECKED_TOKENS)
    truth = score_tokens(head.logits, hidden[:, kept], targets[kept])
    pairs = {
        "log-likelihoods of the reference": (scores.nll_reference_nats[kept], truth.nll_reference_nats),
        "log-likelihoods of the arms": (scores.nll_nats[:, kept], truth.nll_nats),
        "divergences": ((2 * scores.kl_nats[:, kept]).sqrt(), (2 * truth.kl_nats.clamp_min(0)).sqrt()),
    }
    for name, (ours, theirs) in pairs.items():
        known = theirs.isfinite()
        excess = ((ours - theirs).abs() / (1 + theirs.abs()))[known]
        largest = float(excess.max()) if excess.numel() else 0.0
        if not largest <= AGREEMENT or not bool(torch.equal(ours.isfinite(), known)):
            raise NumericsError(
                f"expected the streaming scores to agree with PyTorch's on the {name} of {CHECKED_TOKENS} tokens "
                f"within {AGREEMENT:.1e} nats of a logit, got {largest:.1e}; score with backend torch and report this"
            )
