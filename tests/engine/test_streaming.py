"""The streaming scores against float64 dense ones and against the PyTorch scoring, in Triton's interpreter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from replayeval.engine.forcing import Forcing, score_document
from replayeval.engine.scoring import Scorer, TokenScores, score_tokens
from replayeval.engine.streaming import score_streaming
from replayeval.errors import ConfigError, NumericsError
from replayeval.models.head import OutputHead
from replayssm import streaming_kl
from replayssm.streaming_kl import Finish, StreamedScores, StreamLaunch, merge, run_kernel, streamed_scores
from tests.engine.forced import document, policies
from tests.models import tiny

pytest.importorskip("triton")

CUT = StreamLaunch(words=32, splits=3)
EPS = 2.0**-23


def case(
    rows: int, time: int, width: int, vocabulary: int, size: float, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocabulary + rows)
    base = torch.randn(1, time, width, generator=generator)
    hidden = base + size * torch.randn(rows, time, width, generator=generator)
    hidden[0] = base[0]
    weight = 3 * width**-0.5 * torch.randn(vocabulary, width, generator=generator)
    targets = torch.randint(0, vocabulary, (time,), generator=generator)
    targets[-1] = -1
    return hidden.to(dtype), weight.to(dtype), targets


def dense(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, finish: Finish) -> TokenScores:
    def project(x: Tensor) -> Tensor:
        z = x.double() @ weight.double().t()
        z = (z if bias is None else z + bias.double()) * finish.multiplier / finish.divisor
        return z if finish.cap is None else finish.cap * torch.tanh(z / finish.cap)

    return score_tokens(project, hidden, targets)


def limits(hidden: Tensor, weight: Tensor, bias: Tensor | None, finish: Finish, truth: Tensor) -> tuple[float, Tensor]:
    """Bounds of the error of a log-likelihood and of each divergence.

    A logit is a float32 sum of `width` products and errs by `width * eps` of the sum of magnitudes; what follows it
    (bias, factor, divisor, cap) by a few eps of itself. A log-sum of exponentials adds the rounding of one exponential
    and of the running sum over the tiles of a part. A divergence is half the variance of a difference of two logits to
    leading order, `KL = s²/2`: an error `e` of the differences moves it by `s e + e²/2`, and its own sums by 32 eps.
    """
    magnitude = hidden.abs().double() @ weight.abs().double().t()
    if bias is not None:
        magnitude = magnitude + bias.abs().double()
    logit = float(magnitude.max()) * (hidden.shape[-1] + 8) * EPS * finish.multiplier / finish.divisor
    difference = 2 * logit
    return logit + 32 * EPS * (1 + logit), (2 * truth).sqrt() * difference + difference**2 / 2 + 32 * EPS * truth


def assert_scores(ours: StreamedScores, truth: TokenScores, nll_limit: float, kl_limit: Tensor) -> None:
    known = ~truth.nll_reference_nats.isnan()
    assert bool((ours.nll_nats[:, ~known]).isnan().all())
    nll = torch.cat([truth.nll_reference_nats[None], truth.nll_nats])
    assert float((ours.nll_nats - nll)[:, known].abs().max()) <= nll_limit
    assert bool(((ours.kl_nats - truth.kl_nats).abs() <= kl_limit).all())
    assert torch.equal(ours.top1[1:] == ours.top1[0], truth.top1_agrees)
    assert bool(ours.finite.all())


CASES = [
    (3, 5, 20, 100, 1e-2, Finish(), False),
    (2, 3, 33, 77, 1e-4, Finish(), False),
    (6, 2, 16, 33, 1.0, Finish(), False),
    (2, 3, 20, 64, 10.0, Finish(), False),
    (3, 4, 20, 77, 0.1, Finish(multiplier=2.0, divisor=3.0, cap=5.0), True),
    (2, 2, 20, 5, 0.1, Finish(cap=30.0), False),
]


@pytest.mark.parametrize(("rows", "time", "width", "vocabulary", "size", "finish", "with_bias"), CASES)
def test_against_float64(
    rows: int, time: int, width: int, vocabulary: int, size: float, finish: Finish, with_bias: bool
) -> None:
    hidden, weight, targets = case(rows, time, width, vocabulary, size)
    bias = torch.linspace(-1, 1, vocabulary) if with_bias else None
    truth = dense(hidden, weight, targets, bias, finish)
    nll_limit, kl_limit = limits(hidden, weight, bias, finish, truth.kl_nats)
    ours = streamed_scores(hidden, weight, targets, bias=bias, finish=finish, cut=CUT)
    assert_scores(ours, truth, nll_limit, kl_limit)
    # A wrong variant of each step is outside the bounds.
    for wrong in (replace(finish, multiplier=1.01 * finish.multiplier), replace(finish, cap=4.0)):
        planted = streamed_scores(hidden, weight, targets, bias=bias, finish=wrong, cut=CUT)
        assert float((planted.nll_nats[1:] - truth.nll_nats)[:, :-1].abs().max()) > nll_limit


def test_the_usual_sum_in_float32_is_outside_the_bounds() -> None:
    hidden, weight, targets = case(2, 3, 33, 77, 1e-4)
    truth = dense(hidden, weight, targets, None, Finish())
    _, limit = limits(hidden, weight, None, Finish(), truth.kl_nats)
    both = (hidden @ weight.t()).log_softmax(-1)
    p, q = both[0], both[1]
    assert bool((((p.exp() * (p - q)).sum(-1) - truth.kl_nats[0]).abs() > limit[0]).any())


@pytest.mark.parametrize("fault", ["centre", "shift", "mass"])
def test_a_wrong_merge_is_seen(fault: str) -> None:
    hidden, weight, targets = case(3, 4, 20, 100, 1e-2)
    truth = dense(hidden, weight, targets, None, Finish())
    nll_limit, kl_limit = limits(hidden, weight, None, Finish(), truth.kl_nats)
    statistics = run_kernel(hidden, weight, targets, bias=None, finish=Finish(), cut=CUT)
    assert statistics.values.shape[0] > 1
    assert_scores(merge(statistics, targets), truth, nll_limit, kl_limit)
    values = statistics.values.clone()
    if fault == "centre":
        values[:, 3] = 0  # the sums are not relative to zero
    elif fault == "shift":
        values[1:, 4] = 0
    else:
        values[1, 1] *= 1.001
    with pytest.raises(AssertionError):
        assert_scores(merge(replace(statistics, values=values), targets), truth, nll_limit, kl_limit)


def test_half_precision_weights_strided_inputs_and_poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = case(3, 4, 20, 77, 0.1, dtype=torch.bfloat16)
    truth = dense(hidden, weight, targets, None, Finish())
    empty = torch.empty

    def poisoned(*size: int, **options: object) -> Tensor:
        made = empty(*size, **options)  # type: ignore[arg-type]
        return made.fill_(-7 if made.dtype is torch.int32 else torch.nan)

    monkeypatch.setattr(streaming_kl.torch, "empty", poisoned)
    turned = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.full((77, 40), torch.nan, dtype=torch.bfloat16)
    wide[:, ::2] = weight
    assert not turned.is_contiguous()
    ours = streamed_scores(turned, wide[:, ::2], targets, cut=CUT)
    monkeypatch.undo()
    assert_scores(ours, truth, *limits(hidden, weight, None, Finish(), truth.kl_nats))


def test_the_first_of_equal_maxima_wins_across_tiles_and_parts() -> None:
    hidden = torch.ones(2, 1, 16)
    weight = torch.zeros(100, 16)
    weight[[9, 40, 99]] = 1.0
    assert streamed_scores(hidden, weight, torch.tensor([9]), cut=CUT).top1.tolist() == [[9], [9]]
    weight[0] = 2.0
    assert streamed_scores(hidden, weight, torch.tensor([9]), cut=CUT).top1.tolist() == [[0], [0]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_equal_rows_have_no_divergence_and_a_bad_row_spoils_no_other() -> None:
    hidden, weight, targets = case(4, 3, 20, 77, 0.1)
    hidden[1] = hidden[0]
    clean = streamed_scores(hidden, weight, targets, cut=CUT)
    assert float(clean.kl_nats[0].abs().max()) == 0.0
    hidden[2, 1] = torch.nan
    spoilt = streamed_scores(hidden, weight, targets, cut=CUT)
    assert spoilt.finite.tolist() == [[True] * 3, [True] * 3, [True, False, True], [True] * 3]
    good = spoilt.finite[1:]
    assert torch.equal(spoilt.kl_nats[good], clean.kl_nats[good])


def test_impossible_requests_are_refused() -> None:
    hidden, weight, targets = case(2, 3, 20, 77, 0.1)
    with pytest.raises(ValueError, match="at least one arm"):
        streamed_scores(hidden[:1], weight, targets)
    masked = torch.zeros(77)
    masked[5] = -torch.inf
    with pytest.raises(ValueError, match="finite bias"):
        streamed_scores(hidden, weight, targets, bias=masked)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_documents_are_scored_as_by_pytorch(cap: float | None) -> None:
    head = OutputHead(tiny.shared("qwen3_5"))
    head.cap = cap
    forcing = Forcing(arms=policies(["shared:fp32", "shared:nvfp4"]), chunk_tokens=8)
    doc = document(9)
    torch_scores = score_document(head, doc, forcing)
    ours = score_document(head, doc, replace(forcing, scorer=Scorer.TRITON))
    # Tiny models have logits of order one and hidden states of 64 channels at most: 64 eps in each logit.
    assert abs(ours.nll_nats - torch_scores.nll_nats)[:, :-1].max() < 200 * EPS
    assert abs(ours.kl_nats - torch_scores.kl_nats)[1].max() < 1e-3 * torch_scores.kl_nats[1].max()
    assert (ours.top1_agrees == torch_scores.top1_agrees).all()


def test_no_triton_no_streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replayeval.engine.streaming.triton_problem", lambda device: "no card")
    hidden, _, targets = case(2, 3, 20, 77, 0.1)
    with pytest.raises(ConfigError, match="no card"):
        score_streaming(OutputHead(tiny.shared("qwen3_5")), hidden, targets)


@pytest.mark.parametrize("fault", ["nll_reference_nats", "nll_nats", "kl_nats"])
def test_a_wrong_kernel_stops_a_run(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = OutputHead(tiny.shared("mamba2"))
    doc, forcing = document(4), Forcing(arms=policies(["shared:nvfp4"]), scorer=Scorer.TRITON)

    def wrong(*given: Any, **named: Any) -> TokenScores:
        scores = score_streaming(*given, **named)
        return replace(scores, **{fault: getattr(scores, fault) + 2e-3 * (1 + getattr(scores, fault))})

    monkeypatch.setattr("replayeval.engine.forcing.score_streaming", wrong)
    with pytest.raises(NumericsError, match="agree with PyTorch"):
        score_document(head, doc, forcing)
