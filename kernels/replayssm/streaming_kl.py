"""KL divergence, likelihood and top-1 agreement per token from hidden states, with the logits of few words in memory.

With `δ = z_arm − z_ref` per word and probabilities `p` of the reference, `KL = log E_p[e^δ] − E_p[δ]`. A constant `c`
taken off `δ` changes neither, so with `d = δ − c` and `φ(d) = e^d − 1 − d ≥ 0`

    KL = E_p[φ(d)] − (x − log(1 + x)),    x = E_p[d] + E_p[φ(d)],

which keeps the digits of a small divergence (both terms are of second order in `d`) and needs one pass: the moments are
summed relative to a running maximum and a fixed centre, and merged over parts of the vocabulary in float64.

Source: ReplaySSM, output divergence; Milakov and Gimelshein, "Online normalizer calculation for softmax".
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int32, Int64
from torch import Tensor

from replayssm.launch import launch

LARGEST_VOCABULARY = 1 << 24

DIRECT_NATS = 0.25
"""Above this, the plain formula is as good: its rounding error is 1e-6 nats or so."""


@dataclass(frozen=True, kw_only=True)
class Finish:
    """What the model does to its logits after the projection, in this order.

    Attributes:
        multiplier: Factor.
        divisor: Divisor.
        cap: Soft cap, `cap * tanh(z / cap)`, or None.
    """

    multiplier: float = 1.0
    divisor: float = 1.0
    cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class StreamLaunch:
    """How the work is cut.

    Attributes:
        words: Vocabulary entries whose logits are made, used and dropped at a time.
        splits: Parts of the vocabulary with sums of their own, merged in float64.
        warps: Warps of a program.
    """

    words: int = 2048
    splits: int = 4
    warps: int = 4


@dataclass(frozen=True, kw_only=True)
class StreamedStatistics:
    """What the kernel leaves behind, per part of the vocabulary.

    Attributes:
        values: Largest logit; sum of `exp(z − largest)`; logit of the target (0 where it lies in another part); centre
            `c`; sums of `p d` and of `p φ(d)` with `p = exp(z_ref − largest of the reference)`.
        places: Vocabulary entry of the largest logit, the first if there are several.
    """

    values: Float[Tensor, "splits 6 time rows"]
    places: Int32[Tensor, "splits time rows"]


@dataclass(frozen=True, kw_only=True)
class StreamedScores:
    """Scores per token; row 0 is the reference.

    Attributes:
        kl_nats: KL(reference || arm).
        nll_nats: Negative log-likelihood of the target under each row; NaN where it is unknown.
        top1: Vocabulary entry of the largest logit.
        finite: Whether all logits of the row are finite.
    """

    kl_nats: Float64[Tensor, "arms time"]
    nll_nats: Float64[Tensor, "rows time"]
    top1: Int32[Tensor, "rows time"]
    finite: Bool[Tensor, "rows time"]


def streamed_scores(
    hidden: Float[Tensor, "rows time hidden"],
    weight: Float[Tensor, "vocabulary hidden"],
    targets: Int64[Tensor, " time"],
    *,
    bias: Float[Tensor, " vocabulary"] | None = None,
    finish: Finish = Finish(),  # noqa: B008
    cut: StreamLaunch = StreamLaunch(),  # noqa: B008
) -> StreamedScores:
    """Score tokens whose row 0 is the reference and whose other rows are the arms.

    Args:
        hidden: Final hidden states; any strides. Rounded to the dtype of `weight`, as the projection of a model does.
        weight: Output projection; any strides.
        targets: The true next token, or −1 where it is unknown.
        bias: Of the projection; finite.
        finish: What happens to the logits afterwards.
        cut: How the work is cut.

    Returns:
        The scores. Products are accumulated in float32, sums over the vocabulary in float32 within a part of it and in
        float64 between parts.

    Raises:
        ValueError: When shapes do not fit, there is no arm, the vocabulary is too large, or the bias is not finite (a
            bias of −inf masks words, which this kernel does not support; score with PyTorch then).
    """
    rows, time, width = hidden.shape
    vocabulary = weight.shape[0]
    if rows < 2 or weight.shape[1] != width or tuple(targets.shape) != (time,):
        raise ValueError(
            "expected hidden states of a reference and at least one arm, a projection of as many channels and one "
            f"target per token, got hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets "
            f"{tuple(targets.shape)}"
        )
    if vocabulary > LARGEST_VOCABULARY:
        raise ValueError(f"expected a vocabulary of at most {LARGEST_VOCABULARY} words, got {vocabulary}")
    if bias is not None and not bool(bias.isfinite().all()):
        raise ValueError("expected a finite bias of the output projection; a masked vocabulary is scored with PyTorch")
    statistics = run_kernel(hidden.to(weight.dtype), weight, targets, bias=bias, finish=finish, cut=cut)
    return merge(statistics, targets)


def run_kernel(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None, finish: Finish, cut: StreamLaunch
) -> StreamedStatistics:
    """Project onto some words, add what follows from their logits to the sums, and so on; see `streamed_scores`."""
    rows, time, width = hidden.shape
    vocabulary = weight.shape[0]
    flat = hidden.reshape(rows * time, width)
    blocks = -(-vocabulary // cut.words)
    per_split = -(-blocks // min(cut.splits, blocks)) * cut.words
    splits = -(-vocabulary // per_split)
    values = torch.empty(splits, 6, time, rows, dtype=torch.float32, device=hidden.device)
    places = torch.empty(splits, time, rows, dtype=torch.int32, device=hidden.device)
    following = targets.to(device=hidden.device, dtype=torch.int32)
    kernel: Any = importlib.import_module("replayssm.streaming_kl_triton").streaming_kl_kernel
    for begin in range(0, vocabulary, cut.words):
        words = weight[begin : begin + cut.words]
        split = begin // per_split
        launch(
            kernel,
            (time,),
            project(flat, words),
            weight if bias is None else bias,
            following,
            values[split],
            places[split],
            rows,
            time,
            len(words),
            begin,
            int(begin % per_split == 0),
            finish.multiplier,
            finish.divisor,
            finish.cap or 1.0,
            BN=max(16, 1 << (len(words) - 1).bit_length()),
            HAS_BIAS=bias is not None,
            FINISH=finish != Finish(),
            HAS_CAP=finish.cap is not None,
            num_warps=cut.warps,
            fused=True,
        )
    return StreamedStatistics(values=values, places=places)


def project(
    flat: Float[Tensor, "tokens hidden"], words: Float[Tensor, "words hidden"]
) -> Float[Tensor, "tokens words"]:
    """Logits of some words, accumulated and returned in float32."""
    if words.dtype is torch.float32:
        return torch.mm(flat, words.t())
    if words.device.type == "cuda":
        return torch.mm(flat, words.t(), out_dtype=torch.float32)
    return torch.mm(flat.to(torch.float32), words.to(torch.float32).t())


def merge(statistics: StreamedStatistics, targets: Int64[Tensor, " time"]) -> StreamedScores:
    """Put the parts of the vocabulary together, in float64."""
    top, mass, chosen, centre, first, second = statistics.values.to(torch.float64).unbind(1)
    highest = top.amax(0)
    part = (top - highest).exp()
    log_sum = highest + (mass * part).sum(0).log()
    unknown = (targets < 0).to(log_sum.device).unsqueeze(1)
    nll = (log_sum - chosen.sum(0)).masked_fill(unknown, torch.nan)
    # The first of several equal maxima, as argmax over the whole vocabulary would give it.
    winner = (top == highest).to(torch.uint8).argmax(0, keepdim=True)

    weight = part[..., :1]
    total = (mass[..., :1] * weight).sum(0)
    mean = (weight * (mass[..., :1] * centre + first)).sum(0) / total
    shift = centre - mean
    grown = shift.expm1()
    moved_first = first + shift * mass[..., :1]
    moved_second = second * (1 + grown) + mass[..., :1] * (grown - shift) + first * grown
    x1 = (weight * moved_first).sum(0) / total
    x2 = (weight * moved_second).sum(0) / total
    x = x1 + x2
    small = x2 - (x - x.log1p())
    direct = log_sum - log_sum[..., :1] - mean
    # Beyond the range of exp the small form is infinite or NaN; the divergence is large there.
    kl = torch.where(direct.lt(DIRECT_NATS) & small.isfinite(), small.clamp_min(0), direct)
    return StreamedScores(
        kl_nats=kl[..., 1:].t(),
        nll_nats=nll.t(),
        top1=statistics.places.gather(0, winner).squeeze(0).t(),
        finite=(log_sum.isfinite() & highest.isfinite()).t(),
    )
