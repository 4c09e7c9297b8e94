"""Changes over nights: how often none is flagged, how often a planted one is found, and against SciPy's tests."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats

from replayeval.stats.history import (
    FEWEST_BEFORE,
    Change,
    Method,
    change_interval,
    find_change,
    one_sample_p,
    two_sample_p,
)

Draw = Callable[[np.random.Generator, int], np.ndarray]
LEVEL = 0.05
"""Level of the simulations: rates near it need fewer trials than rates near 1%."""


def nights_of(
    generator: np.random.Generator, nights: int, *, documents: int = 8, shock: Draw | None = None
) -> np.ndarray:
    """Documents with levels of their own, noise of each, and a shock that moves a whole night."""
    shocks = generator.normal(0, 0.02, nights) if shock is None else shock(generator, nights)
    levels = generator.normal(0, 1, documents)
    return levels + shocks[:, None] + generator.normal(0, 0.05, (nights, documents))


def rate(nights: int, trials: int, *, seed: int = 0, level: float = LEVEL, shock: Draw | None = None) -> float:
    generator = np.random.default_rng(seed)
    found = [find_change(nights_of(generator, nights, shock=shock)) for _ in range(trials)]
    return sum(change is not None and change.p_value <= level for change in found) / trials


def flagged_against_last_night(values: np.ndarray) -> bool:
    """What suggests itself: tonight against last night, document by document."""
    return one_sample_p(values[-1] - values[-2]) <= LEVEL


@pytest.mark.parametrize("nights", [6, 9, 14, 28])
def test_a_series_without_a_change_is_flagged_no_more_often_than_it_says(nights: int) -> None:
    # Three standard errors of a share of 0.05 in 1500 trials are 0.017.
    assert rate(nights, 1500) <= LEVEL + 0.017


def test_comparing_with_last_night_alone_would_be_flagged_far_more_often() -> None:
    generator = np.random.default_rng(0)
    values = [nights_of(generator, 14) for _ in range(500)]
    assert sum(map(flagged_against_last_night, values)) / len(values) > 2 * LEVEL


def test_heavy_tails_are_borne() -> None:
    def tails(generator: np.random.Generator, nights: int) -> np.ndarray:
        return 0.02 * generator.standard_t(5, nights)

    assert rate(14, 1500, shock=tails) <= 1.6 * LEVEL


@pytest.mark.slow
@pytest.mark.parametrize("nights", [6, 10, 20, 28])
def test_the_rate_at_one_percent(nights: int) -> None:
    trials = 8000
    assert rate(nights, trials, level=0.01) <= 0.01 + 3 * (0.01 * 0.99 / trials) ** 0.5


@pytest.mark.parametrize("lasted", [1, 2, 5])
def test_a_planted_step_is_found_with_the_night_it_began(lasted: int) -> None:
    generator = np.random.default_rng(lasted)
    hits: list[Change] = []
    for _ in range(100):
        values = nights_of(generator, 20)
        # Six standard deviations of a night's mean.
        values[-lasted:] += 6 * (0.02**2 + 0.05**2 / 8) ** 0.5
        change = find_change(values)
        assert change is not None
        if change.p_value <= 0.01 and change.change > 0:
            hits.append(change)
    assert len(hits) >= 90
    # Scales are 1, 2, 3, 5 and 8; noise may shift the night by one scale.
    assert np.mean([abs(hit.nights_after - lasted) <= 2 for hit in hits]) > 0.9


def test_a_small_step_is_found_once_it_has_lasted() -> None:
    generator = np.random.default_rng(0)
    steps = {1: 0, 8: 0}
    for lasted in steps:
        for _ in range(100):
            values = nights_of(generator, 28)
            values[-lasted:] += 2.5 * (0.02**2 + 0.05**2 / 8) ** 0.5
            change = find_change(values)
            steps[lasted] += change is not None and change.p_value <= 0.01
    assert steps[8] > 80 > 40 > steps[1]


def test_the_tests_are_those_of_scipy() -> None:
    generator = np.random.default_rng(3)
    before, after = generator.normal(0, 1, 9), generator.normal(0.5, 1, 3)
    two: Any = scipy_stats.ttest_ind(after, before)
    one: Any = scipy_stats.ttest_1samp(before, 0)
    assert two_sample_p(after, before) == pytest.approx(two.pvalue, rel=1e-9)
    assert one_sample_p(before) == pytest.approx(one.pvalue, rel=1e-9)


def test_few_nights_are_compared_by_document_beyond_the_margin() -> None:
    generator = np.random.default_rng(4)
    values = nights_of(generator, 3, documents=10, shock=lambda _, nights: np.zeros(nights))
    moved = values.copy()
    moved[-1] += 0.04
    # Whatever moves all documents by less than the margin is no change, however surely it moved them.
    assert one_sample_p(np.full(10, 0.04) + generator.normal(0, 1e-3, 10), margin=0.05) == 1.0
    change = find_change(moved, margin=0.05)
    assert change is not None
    assert change.method is Method.DOCUMENTS
    assert change.p_value > 0.01
    moved[-1] += 0.5
    change = find_change(moved, margin=0.05)
    assert change is not None
    assert change.p_value < 1e-6


def test_a_night_that_varies_in_nothing_proves_no_determinism() -> None:
    # No flip in six nights, one flip tonight: discrete numbers agree by chance.
    values = np.zeros((7, 8))
    values[-1, 3] = 1 / 64
    change = find_change(values, margin=5e-4)
    assert change is not None
    assert change.method is Method.DOCUMENTS
    assert change.p_value > 0.1


def test_nights_that_agree_bit_by_bit_make_any_difference_real() -> None:
    values = np.tile(np.random.default_rng(5).normal(size=8), (3, 1))
    same = find_change(values, deterministic=True)
    assert same is not None
    assert (same.method, same.p_value) == (Method.IDENTICAL, 1.0)
    values[-1, 0] += 0.3
    other = find_change(values, deterministic=True)
    assert other is not None
    assert (other.p_value, other.change) == (0.0, pytest.approx(0.3 / 8))
    # One night shows nothing about whether nights agree.
    single = find_change(values[1:], deterministic=True)
    assert single is not None
    assert single.method is Method.DOCUMENTS


def test_too_little_to_test() -> None:
    assert find_change(np.zeros((1, 8))) is None
    assert find_change(np.zeros((3, 3))) is None
    assert find_change(np.zeros((3, 0))) is None
    assert find_change(np.random.default_rng(0).normal(size=(1 + FEWEST_BEFORE, 1))) is not None


def test_the_interval_is_paired() -> None:
    generator = np.random.default_rng(6)
    values = nights_of(generator, 12, documents=20)
    values[-1] += 0.5
    found = change_interval(values, 1)
    assert found is not None
    # Documents differ by 1 from each other and by 0.05 from themselves: 0.05 * sqrt(1 + 1/11) / sqrt(20) * 2.1 * 2.
    assert found[0] < 0.5 + 0.04
    assert found[1] - found[0] < 0.08
    assert change_interval(values[:, :1], 1) is None
