"""Scoring hidden states with the streaming kernel, which keeps no logits, in place of `scoring.score_tokens`."""

from jaxtyping import Float, Int64
from torch import Tensor

from replayeval.engine.scoring import TokenScores
from replayeval.errors import ConfigError
from replayeval.models.head import OutputHead
from replayssm.launch import triton_problem
from replayssm.streaming_kl import Finish, StreamLaunch, streamed_scores


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
