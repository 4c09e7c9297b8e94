"""Power of McNemar's test: against enumeration, against simulation, and the answers that rest on it."""

import math

import numpy as np
import pytest

from replayeval.stats.power import (
    documents_needed,
    flips_needed,
    mcnemar_power,
    minimum_detectable,
    minimum_detectable_mean,
)
from replayeval.stats.sign_flip import mcnemar_exact, sign_flip
from tests.oracles import paired as oracle


@pytest.mark.parametrize("n", [1, 5, 6, 13, 24])
@pytest.mark.parametrize(("discordant", "difference"), [(0.3, 0.0), (0.4, 0.25), (0.4, -0.25), (0.1, 0.6), (1.0, 0.5)])
def test_power_by_enumeration(n: int, discordant: float, difference: float) -> None:
    for alpha in (0.05, 0.0625, 0.3):
        expected = oracle.power(n=n, discordant=discordant, difference=difference, alpha=alpha)
        got = mcnemar_power(n=n, discordant=discordant, difference=difference, alpha=alpha)
        # Numbers of flips rarer than 1e-12 on either side are left out.
        assert got == pytest.approx(expected, abs=1e-10)


def test_power_of_no_difference_never_exceeds_the_level() -> None:
    for n in (10, 50, 198, 2000):
        for discordant in (0.02, 0.1, 0.5, 1.0):
            assert mcnemar_power(n=n, discordant=discordant, difference=0.0) <= 0.05


def test_the_smallest_detectable_difference_is_found_as_often_as_promised() -> None:
    n, discordant, runs = 198, 0.1, 2000
    found = minimum_detectable(n=n, discordant=discordant).difference
    assert found is not None
    generator = np.random.default_rng(0)
    wrong, right = (discordant + found) / 2, (discordant - found) / 2
    flips = generator.multinomial(n, [wrong, right, 1 - wrong - right], size=runs)
    rate = np.mean([mcnemar_exact(int(b), int(c)) <= 0.05 for b, c, _ in flips])
    assert rate == pytest.approx(0.8, abs=4 * math.sqrt(0.8 * 0.2 / runs))
    assert mcnemar_power(n=n, discordant=discordant, difference=found - 0.002) < 0.8


def test_a_difference_needs_flips() -> None:
    # Six of six in one direction give p = 2/64 < 5%; five give 2/32.
    assert flips_needed() == 6
    assert mcnemar_exact(6, 0) <= 0.05 < mcnemar_exact(5, 0)
    assert minimum_detectable(n=5, discordant=0.1).difference is None
    assert "6 flips" in (minimum_detectable(n=5, discordant=0.1).reason or "")
    # Where answers never differ by chance, the difference itself has to bring the flips.
    alone = minimum_detectable(n=198, discordant=0.0).difference
    assert alone is not None
    assert 6 / 198 < alone < 12 / 198


def test_documents_needed_turns_the_question_around() -> None:
    n = documents_needed(discordant=0.1, difference=0.02)
    assert n is not None
    assert mcnemar_power(n=n, discordant=0.1, difference=0.02) >= 0.8
    assert mcnemar_power(n=round(0.97 * n), discordant=0.1, difference=0.02) < 0.8
    # Normal approximation: (1.96 sqrt(psi) + 0.84 sqrt(psi - d^2))^2 / d^2, plus the continuity of the exact test.
    approximate = (1.96 * math.sqrt(0.1) + 0.8416 * math.sqrt(0.1 - 0.0004)) ** 2 / 0.0004
    assert approximate < n < 1.06 * approximate
    assert documents_needed(discordant=0.5, difference=1e-5) is None
    with pytest.raises(ValueError, match="other than 0"):
        documents_needed(discordant=0.1, difference=0.0)


def test_detectable_mean_of_clustered_answers_is_found_as_often_as_promised() -> None:
    n, samples, runs = 100, 4, 500
    generator = np.random.default_rng(1)
    ease = generator.uniform(0.2, 0.8, size=(runs, n, 1))
    first = (generator.random((runs, n, samples)) < ease).mean(axis=2)
    spread = float(np.std((generator.random((runs, n, samples)) < ease).mean(axis=2) - first))
    found = minimum_detectable_mean(n=n, spread=spread).difference
    assert found is not None
    second = (generator.random((runs, n, samples)) < ease - found).mean(axis=2)
    rate = np.mean([sign_flip(row, seed=0).p <= 0.05 for row in second - first])
    # The approximation itself is good to a few points.
    assert rate == pytest.approx(0.8, abs=0.03 + 4 * math.sqrt(0.8 * 0.2 / runs))


def test_undefined_answers_say_why() -> None:
    assert minimum_detectable_mean(n=1, spread=0.0).reason == "one document has no spread"
    assert "spread is unknown" in (minimum_detectable_mean(n=5, spread=0.0).reason or "")
    assert minimum_detectable_mean(n=2, spread=1.0).difference is None


@pytest.mark.parametrize(
    "arguments",
    [{"n": 0, "discordant": 0.1}, {"n": 9, "discordant": 1.1}, {"n": 9, "discordant": -0.1}],
)
def test_impossible_sizes_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        minimum_detectable(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="between 0 and 1"):
        minimum_detectable(n=10, discordant=0.1, alpha=0.0)
    with pytest.raises(ValueError, match="between -1 and 1"):
        mcnemar_power(n=10, discordant=0.1, difference=2.0)
