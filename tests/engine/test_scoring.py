"""Divergence and likelihoods per token, against sums in 60 decimal digits."""

from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from replayeval.engine import scoring
from replayeval.engine.scoring import kl_divergence, score_tokens

# Log-probabilities carry an absolute error of a few 2**-53 times the largest logit (below 64 here, so 1e-14). The terms
# of the divergence are of second order in the difference of log-probabilities, which the smallest perturbation of these
# tests makes 1e-7, so a divergence errs by 2e-14 / 1e-7 = 2e-7 of itself. Three digits are asked for.
RELATIVE_TOLERANCE = 1e-3
LARGE_RELATIVE_TOLERANCE = 1e-10  # differences of order one, whose error is 1e-14 per term


def oracle(reference: np.ndarray, other: np.ndarray) -> float:
    """KL of two rows of logits, from its definition."""
    with mpmath.workdps(60):
        weights = [[mpmath.exp(mpmath.mpf(float(x))) for x in row] for row in (reference, other)]
        totals = [mpmath.fsum(w) for w in weights]
        p, q = ([x / total for x in w] for w, total in zip(weights, totals, strict=True))
        terms = (a * mpmath.log(a / b) for a, b in zip(p, q, strict=True) if a != 0)
        return float(mpmath.fsum(terms))


def evaluate(reference: np.ndarray, other: np.ndarray) -> float:
    p, q = (torch.from_numpy(x).log_softmax(-1) for x in (reference, other))
    return float(kl_divergence(p, q))


def naive_float64(reference: np.ndarray, other: np.ndarray) -> float:
    p, q = (torch.from_numpy(x).log_softmax(-1) for x in (reference, other))
    return float((p.exp() * (p - q)).sum())


def in_float32(reference: np.ndarray, other: np.ndarray) -> float:
    p, q = (torch.from_numpy(x).float().log_softmax(-1) for x in (reference, other))
    return float(kl_divergence(p, q))


def reversed_arguments(reference: np.ndarray, other: np.ndarray) -> float:
    return evaluate(other, reference)


def pair(vocabulary: int, size: float, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, vocabulary])
    reference = 4 * rng.standard_normal(vocabulary)
    return reference, reference + size * rng.standard_normal(vocabulary)


def relative_error(function: Callable[[np.ndarray, np.ndarray], float], vocabulary: int, size: float) -> float:
    reference, other = pair(vocabulary, size)
    truth = oracle(reference, other)
    return abs(function(reference, other) - truth) / truth


@pytest.mark.parametrize("vocabulary", [2, 7, 33, 257, 1021])
@pytest.mark.parametrize("size", [1e-7, 1e-5, 1e-2])
def test_small_divergences_keep_three_digits(vocabulary: int, size: float) -> None:
    assert relative_error(evaluate, vocabulary, size) <= RELATIVE_TOLERANCE


@pytest.mark.parametrize("vocabulary", [2, 7, 33, 257])
@pytest.mark.parametrize("size", [1.0, 20.0])
def test_large_divergences_are_exact_to_rounding(vocabulary: int, size: float) -> None:
    assert relative_error(evaluate, vocabulary, size) <= LARGE_RELATIVE_TOLERANCE


def test_the_usual_sum_and_float32_are_rejected_on_small_divergences() -> None:
    assert relative_error(naive_float64, 257, 1e-7) > RELATIVE_TOLERANCE
    assert relative_error(in_float32, 257, 1e-7) > RELATIVE_TOLERANCE


def test_float32_and_the_reverse_divergence_are_rejected_on_large_ones() -> None:
    assert relative_error(in_float32, 257, 1.0) > LARGE_RELATIVE_TOLERANCE
    assert relative_error(reversed_arguments, 257, 1.0) > RELATIVE_TOLERANCE


def test_one_word_and_equal_distributions_have_no_divergence() -> None:
    assert evaluate(np.array([3.0]), np.array([-8.0])) == 0.0
    reference, _ = pair(101, 0.0)
    assert evaluate(reference, reference) == 0.0


@pytest.mark.parametrize(
    ("reference", "other"),
    [
        ([0.0, 1.0, -np.inf], [1.0, 0.5, -np.inf]),  # masked in both
        ([0.0, -np.inf], [0.0, 0.0]),  # masked in the reference alone: log 2
        ([0.0, -900.0], [-900.0, 0.0]),  # probabilities below the smallest float64
        ([0.0, -720.0], [0.0, 3.0]),  # a ratio above the largest float64
        ([30.0, -400.0, 2.0], [-30.0, 400.0, 2.0]),
    ],
)
def test_extreme_probabilities(reference: list[float], other: list[float]) -> None:
    truth = oracle(np.array(reference), np.array(other))
    assert evaluate(np.array(reference), np.array(other)) == pytest.approx(truth, rel=LARGE_RELATIVE_TOLERANCE)


def test_a_word_that_the_arm_rules_out_makes_the_divergence_infinite() -> None:
    assert evaluate(np.array([0.0, 0.0]), np.array([0.0, -np.inf])) == np.inf


class Recorder:
    """A projection that hands its input on as logits and notes how much of it was asked for at a time."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, hidden: Tensor) -> Tensor:
        self.shapes.append(tuple(hidden.shape))
        return hidden


def logits(rows: int, time: int, vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * time * vocabulary)
    base = 3 * torch.randn(1, time, vocabulary, generator=generator)
    return base + 0.1 * torch.randn(rows, time, vocabulary, generator=generator)


def test_scores_of_every_row_and_token_against_the_oracle() -> None:
    table = logits(3, 5, 17)
    targets = torch.tensor([4, 0, 16, -1, 2])
    scores = score_tokens(lambda x: x, table, targets)
    assert scores.kl_nats.dtype == scores.nll_nats.dtype == torch.float64
    for t in range(5):
        rows = table[:, t].double().numpy()
        nll = [float(mpmath.log(mpmath.fsum(map(mpmath.exp, map(float, r)))) - float(r[targets[t]])) for r in rows]
        for arm in (1, 2):
            assert float(scores.kl_nats[arm - 1, t]) == pytest.approx(oracle(rows[0], rows[arm]), rel=1e-9)
            assert bool(scores.top1_agrees[arm - 1, t]) == (rows[0].argmax() == rows[arm].argmax())
        if t == 3:
            assert bool(scores.nll_nats[:, t].isnan().all() and scores.nll_reference_nats[t].isnan())
        else:
            assert float(scores.nll_reference_nats[t]) == pytest.approx(nll[0], rel=1e-12)
            assert scores.nll_nats[:, t].tolist() == pytest.approx(nll[1:], rel=1e-12)
    assert bool(scores.finite.all() and scores.reference_finite.all())


def test_top1_disagreement_is_seen() -> None:
    table = torch.zeros(2, 2, 3)
    table[0, :, 1] = 1.0
    table[1, 0, 1] = 1.0
    table[1, 1, 2] = 1.0
    assert score_tokens(lambda x: x, table, torch.tensor([0, 0])).top1_agrees.tolist() == [[True, False]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_logit_flags_its_row_and_token_only(bad: float) -> None:
    table = logits(4, 3, 11)
    table[2, 1, 7] = bad
    table[3, 2, 0] = -float("inf")  # a masked word is no failure
    scores = score_tokens(lambda x: x, table, torch.tensor([1, 2, 3]))
    assert scores.finite.tolist() == [[True] * 3, [True, False, True], [True] * 3]
    assert scores.reference_finite.tolist() == [True] * 3
    clean = score_tokens(lambda x: x, logits(4, 3, 11), torch.tensor([1, 2, 3]))
    untouched = torch.tensor([[True] * 3, [True, False, True], [True, True, False]])
    assert torch.equal(scores.kl_nats[untouched], clean.kl_nats[untouched])

    table = logits(4, 3, 11)
    table[0, 1, 7] = bad
    scores = score_tokens(lambda x: x, table, torch.tensor([1, 2, 3]))
    assert scores.reference_finite.tolist() == [True, False, True]
    assert bool(scores.finite.all())


def test_a_row_without_any_probability_is_flagged() -> None:
    table = logits(2, 2, 5)
    table[1, 1] = -torch.inf
    assert score_tokens(lambda x: x, table, torch.tensor([1, 2])).finite.tolist() == [[True, False]]


@pytest.mark.parametrize("budget", [1, 3 * 13, 2 * 3 * 13, 5 * 3 * 13 + 1, 2**25])
def test_blocks_bound_what_is_projected_and_change_nothing(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    table = logits(3, 23, 13)
    targets = torch.arange(23) % 13
    whole = score_tokens(lambda x: x, table, targets)
    monkeypatch.setattr(scoring, "BLOCK_ELEMENTS", budget)
    recorder = Recorder()
    blocked = score_tokens(recorder, table, targets)
    for name, value in vars(whole).items():
        assert torch.equal(getattr(blocked, name), value), name
    largest = max(1, budget // (3 * 13))
    assert sum(shape[1] for shape in recorder.shapes) == 23
    assert all(shape[1] <= largest for shape in recorder.shapes)
    if largest < 22:
        assert max(shape[1] for shape in recorder.shapes) == largest
