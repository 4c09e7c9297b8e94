"""Paired statistics: against enumeration, by hand, and at their nominal rates in simulations."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from replayeval.stats.paired import ArmAnswers, caution, compare, summarise_answers
from replayeval.stats.sign_flip import PairedTest, holm, mcnemar_exact, sign_flip
from tests.oracles import paired as oracle


def arm(scores: np.ndarray | list[float], policy: str = "arm", **more: object) -> ArmAnswers:
    """One arm; a column per sample."""
    table = np.asarray(scores, dtype=np.float64)
    rows = [np.atleast_1d(row) for row in table]
    return ArmAnswers(policy=policy, scores=rows, **more)  # type: ignore[arg-type]


def test_mcnemar_by_hand() -> None:
    # 10 to 2: 2 (C(12,0) + C(12,1) + C(12,2)) / 2^12 = 2 * 79 / 4096.
    assert mcnemar_exact(10, 2) == pytest.approx(158 / 4096, rel=1e-14)
    assert mcnemar_exact(2, 10) == mcnemar_exact(10, 2)
    assert mcnemar_exact(5, 0) == pytest.approx(2 / 32)
    assert mcnemar_exact(6, 0) == pytest.approx(2 / 64)
    assert mcnemar_exact(3, 3) == 1
    assert mcnemar_exact(0, 0) == 1
    with pytest.raises(ValueError, match="at least 0"):
        mcnemar_exact(-1, 2)


def test_mcnemar_by_enumeration() -> None:
    for b in range(12):
        for c in range(12):
            assert mcnemar_exact(b, c) == pytest.approx(oracle.mcnemar(b, c), rel=1e-12)


def test_mcnemar_is_not_the_mid_p_nor_the_one_sided_test() -> None:
    one_sided, mid = oracle.mcnemar(10, 2) / 2, oracle.mcnemar(10, 2) - math.comb(12, 2) / 2**12
    assert abs(mcnemar_exact(10, 2) - one_sided) > 0.01
    assert abs(mcnemar_exact(10, 2) - mid) > 0.01


@pytest.mark.parametrize("samples", [2, 3, 4, 5])
def test_sign_flips_by_enumeration(samples: int) -> None:
    generator = np.random.default_rng(samples)
    for _ in range(8):
        whole = generator.integers(-samples, samples + 1, size=9)
        expected = oracle.sign_flip([Fraction(int(w), samples) for w in whole])
        result = sign_flip(whole / samples, seed=0)
        assert result.test is PairedTest.SIGN_FLIP_EXACT
        assert result.p == pytest.approx(expected, rel=1e-12)


def test_with_one_answer_per_document_sign_flips_are_mcnemar() -> None:
    differences = np.array([-1.0] * 9 + [1.0] * 2 + [0.0] * 50)
    assert sign_flip(differences, seed=0).p == pytest.approx(mcnemar_exact(9, 2), rel=1e-12)


def test_sign_flips_of_long_fractions_are_drawn_and_agree_with_enumeration() -> None:
    generator = np.random.default_rng(1)
    differences = generator.normal(0.15, 0.3, size=14)
    result = sign_flip(differences, seed=3)
    expected = oracle.sign_flip([Fraction(float(d)) for d in differences])
    assert result.test is PairedTest.SIGN_FLIP_MONTE_CARLO
    # Standard error of a share over 20,000 draws, four times.
    assert result.p == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 20_000))
    assert sign_flip(differences, seed=3) == result


def test_tiny_p_values_do_not_vanish() -> None:
    differences = np.concatenate([np.full(60, 0.5), np.full(60, 1.0)])
    assert sign_flip(differences, seed=0).p == pytest.approx(2.0**-119, rel=1e-9)


def test_no_difference_at_all_is_p_one() -> None:
    assert sign_flip(np.zeros(5), seed=0).p == 1


def test_holm_by_hand() -> None:
    # Sorted .005 .01 .03 .04 times 4 3 2 1: .02 .03 .06 .04, then never below a smaller one's.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, None, 0.9]) == pytest.approx([1.0, None, 1.0])
    assert holm([]) == []


def test_holm_is_closed_testing() -> None:
    generator = np.random.default_rng(2)
    for _ in range(20):
        p = (generator.random(5) ** 3).tolist()
        assert holm(p) == pytest.approx(oracle.holm(p), rel=1e-12)


@pytest.mark.parametrize("wrong_right", [(20, 8), (12, 0), (3, 9)])
def test_interval_of_the_difference_from_the_whole_bootstrap_distribution(wrong_right: tuple[int, int]) -> None:
    n, (wrong, right) = 80, wrong_right
    change = np.array([-1.0] * wrong + [1.0] * right + [0.0] * (n - wrong - right))
    reference = np.where(change < 0, 1.0, 0.0)
    result = compare(arm(reference, "ref"), [arm(reference + change)], seed=5).arms[0]
    expected = oracle.bca_of_mean(change.tolist())
    # An end is the quantile of 4000 draws, standard error sqrt(q(1-q)/R)/density, of a lattice with steps 1/n. The
    # quantile itself moves with the bias, which is estimated from the same draws: about one more standard error.
    spread = float(change.std()) / math.sqrt(n)
    noise = math.sqrt(0.025 * 0.975 / 4000) / float(stats.norm.pdf(1.96)) * spread
    assert result.ci95 == pytest.approx(expected, abs=1 / n + 4 * noise)
    assert result.delta == pytest.approx((right - wrong) / n)


def test_the_interval_is_paired() -> None:
    generator = np.random.default_rng(3)
    reference = (generator.random(400) < 0.6).astype(float)
    same = reference.copy()
    same[:12] = 1 - same[:12]
    result = compare(arm(reference, "ref"), [arm(same)], seed=0).arms[0]
    assert result.ci95 is not None
    unpaired = 2 * 1.96 * math.sqrt(2 * 0.24 / 400)
    assert result.ci95[1] - result.ci95[0] < unpaired / 3


def test_samples_of_a_document_do_not_count_as_documents() -> None:
    one = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0] * 5)
    other = np.array([1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0] * 5)
    single = compare(arm(one, "ref"), [arm(other)], seed=0).arms[0]
    copied = compare(arm(np.tile(one[:, None], 4), "ref"), [arm(np.tile(other[:, None], 4))], seed=0).arms[0]
    # Four identical samples per document hold no more than one.
    assert copied.ci95 == single.ci95
    assert copied.p == pytest.approx(single.p, rel=1e-12)
    assert (single.test, copied.test) == (PairedTest.MCNEMAR_EXACT, PairedTest.SIGN_FLIP_EXACT)
    assert copied.to_wrong == 4 * single.to_wrong
    assert copied.discordant == single.discordant == 15
    assert copied.mcnemar_p is None
    assert "one right-or-wrong answer" in copied.undefined["mcnemar_p"]


def test_flips_and_counts_by_hand() -> None:
    reference = arm(
        [1, 1, 1, 0, 0, 1],
        "ref",
        output_tokens=[np.array([float(t)]) for t in (10, 20, 30, 40, 50, 60)],
        unextracted=[np.array([f]) for f in (False, False, False, True, True, False)],
        truncated=[np.array([f]) for f in (False, False, False, True, False, True)],
    )
    comparison = compare(reference, [arm([0, 0, 1, 1, 0, 1], "x"), arm([1, 1, 1, 0, 0, 1], "y")], seed=0)
    first, second = comparison.arms
    assert (first.to_wrong, first.to_right, first.discordant) == (2, 1, 3)
    assert first.delta == pytest.approx(-1 / 6)
    assert first.p == 1
    assert (second.delta, second.p, second.ci95) == (0, 1, None)
    # 1 - 0.05^(1/6) = 39.3%: what six documents without a difference leave open.
    assert "less than 39% of documents" in second.undefined["ci95"]
    own = comparison.reference
    assert own.accuracy == pytest.approx(4 / 6)
    assert own.output_tokens_mean == pytest.approx(35)
    assert own.output_tokens_p90 == pytest.approx(55)
    # The unextracted answer of the fourth was cut off, so it is no failure to extract.
    assert (own.extraction_failures, own.truncations) == (1, 2)
    assert first.answers.extraction_failures is None
    assert set(first.answers.undefined) >= {"extraction_failures", "truncations", "output_tokens_mean"}
    assert caution(comparison) is not None


def test_quartiles_by_hand() -> None:
    lengths = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    reference = arm([1, 1, 1, 1, 1, 1, 0, 1], "ref", output_tokens=[np.array([t]) for t in lengths])
    result = compare(reference, [arm([1, 1, 1, 0, 0, 0, 0, 0])], seed=0).arms[0]
    assert [q.documents for q in result.quartiles] == [2, 2, 2, 2]
    assert [q.accuracy_reference for q in result.quartiles] == [1, 1, 1, 0.5]
    assert [q.accuracy for q in result.quartiles] == [1, 0.5, 0, 0]
    assert [q.delta for q in result.quartiles] == [0, -0.5, -1, -0.5]
    assert [q.reference_tokens for q in result.quartiles] == [(1, 2), (3, 4), (5, 6), (7, 8)]


def test_documents_of_equal_length_stay_together() -> None:
    reference = arm([1.0] * 8, "ref", output_tokens=[np.array([5.0])] * 8)
    quartiles = compare(reference, [arm([0.0] * 8)], seed=0).arms[0].quartiles
    assert [q.documents for q in quartiles] == [8, 0, 0, 0]
    assert quartiles[1].delta is None
    assert "equal length" in quartiles[1].undefined["delta_pp"]


def test_other_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="compare the same ones"):
        compare(arm([1, 0], "ref"), [arm([1, 0, 1])], seed=0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        arm([2.0])
    with pytest.raises(ValueError, match="as many truncated"):
        arm([1.0], truncated=[])


def test_nothing_answered_is_undefined_everywhere() -> None:
    empty = compare(arm([], "ref"), [arm([])], seed=0).arms[0]
    assert (empty.delta, empty.p, empty.ci95, empty.detectable) == (None, None, None, None)
    assert set(empty.undefined) >= {"delta_pp", "p_value", "ci95", "mde_pp"}
    assert summarise_answers(arm([]), seed=0).accuracy is None


def simulate(generator: np.random.Generator, *, documents: int, samples: int, drop: float) -> list[np.ndarray]:
    """Scores of a reference and of an arm that answers each document worse by `drop` on average.

    Documents differ in difficulty, and in how the arm takes them: on some it is better, on others worse, symmetrically
    around `drop`. Samples of a document share that, so they are correlated.
    """
    ease = generator.uniform(0.45, 0.55, size=(documents, 1))
    taste = generator.choice([-0.4, 0.4], size=(documents, 1))
    first = generator.random((documents, samples)) < ease
    second = generator.random((documents, samples)) < np.clip(ease + taste - drop, 0, 1)
    return [first.astype(float), second.astype(float)]


def test_null_differences_are_found_at_the_nominal_rate_and_no_more() -> None:
    generator = np.random.default_rng(11)
    runs, found, covered, naive = 150, 0, 0, 0
    for _ in range(runs):
        first, second = simulate(generator, documents=60, samples=8, drop=0.0)
        result = compare(arm(first, "ref"), [arm(second)], seed=0).arms[0]
        assert result.p is not None
        assert result.ci95 is not None
        found += result.p <= 0.05
        covered += result.ci95[0] <= 0 <= result.ci95[1]
        naive += mcnemar_exact(int((second < first).sum()), int((second > first).sum())) <= 0.05
    # A rate of 5% over 150 runs has a standard deviation of 1.8%; four of them are allowed.
    slack = 4 * math.sqrt(0.05 * 0.95 * runs)
    assert abs(found - 0.05 * runs) < slack
    assert abs(covered - 0.95 * runs) < slack
    # Counting samples as if they were documents finds differences that are not there: the simulation can tell.
    assert naive > 0.05 * runs + slack


def test_single_answers_under_the_null_are_found_at_most_at_the_nominal_rate() -> None:
    generator = np.random.default_rng(12)
    runs, found = 400, 0
    for _ in range(runs):
        first, second = simulate(generator, documents=198, samples=1, drop=0.0)
        found += mcnemar_exact(int((second < first).sum()), int((second > first).sum())) <= 0.05
    # The exact test is conservative: below 5%, and not by much with so many flips.
    assert 0.01 * runs < found < 0.05 * runs + 4 * math.sqrt(0.05 * 0.95 * runs)


def test_planted_differences_are_found() -> None:
    generator = np.random.default_rng(13)
    runs, found, covered, drop = 25, 0, 0, 0.05
    for _ in range(runs):
        first, second = simulate(generator, documents=1500, samples=2, drop=drop)
        result = compare(arm(first, "ref"), [arm(second)], seed=0).arms[0]
        assert result.p is not None
        assert result.ci95 is not None
        found += result.p <= 0.05
        covered += result.ci95[0] <= -drop <= result.ci95[1]
    # The difference is three standard errors: power 85%, of which four standard deviations may be missing.
    assert found > (0.85 - 4 * math.sqrt(0.85 * 0.15 / runs)) * runs
    assert covered >= 0.95 * runs - 4 * math.sqrt(0.05 * 0.95 * runs)


def test_holm_keeps_the_rate_of_any_false_alarm_over_arms() -> None:
    generator = np.random.default_rng(14)
    runs, any_plain, any_holm = 400, 0, 0
    for _ in range(runs):
        reference, *_ = simulate(generator, documents=150, samples=1, drop=0.0)
        p: list[float] = []
        for _ in range(6):
            other = simulate(generator, documents=150, samples=1, drop=0.0)[0]
            p.append(mcnemar_exact(int((other < reference).sum()), int((other > reference).sum())))
        any_plain += min(p) <= 0.05
        any_holm += min(q for q in holm(p) if q is not None) <= 0.05
    assert any_holm <= 0.05 * runs + 4 * math.sqrt(0.05 * 0.95 * runs)
    assert any_plain > 2 * 0.05 * runs
