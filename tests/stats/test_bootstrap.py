"""Intervals: against SciPy, against theory, and their coverage in simulations."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scipy import stats

from replayeval.stats.bootstrap import (
    BlockResampler,
    DocumentResampler,
    block_length,
    ratio_interval,
)
from tests.stats.samples import clustered


def mean_interval(
    resampler: DocumentResampler | BlockResampler, series: Sequence[np.ndarray], *, small_sample: bool = True
) -> tuple[float, float]:
    counts = [np.ones_like(values) for values in series]
    interval = ratio_interval(
        resampler.totals(series), resampler.totals(counts), units=resampler.units, small_sample=small_sample
    )
    assert interval is not None
    return interval


def cluster_interval(series: Sequence[np.ndarray], *, seed: int = 0, small_sample: bool = True) -> tuple[float, float]:
    return mean_interval(DocumentResampler(len(series), seed=seed, resamples=1000), series, small_sample=small_sample)


def test_against_scipy_bca() -> None:
    """Without the widening for few documents, the interval is SciPy's, up to the noise of 40,000 resamples."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(50, 150, 25)
    series = [generator.lognormal(0, 0.3) * generator.gamma(2, 1, n) for n in lengths]
    sums = np.array([values.sum() for values in series])

    def ratio(above: np.ndarray, below: np.ndarray, axis: int = -1) -> np.ndarray:
        return above.sum(axis=axis) / below.sum(axis=axis)

    expected = stats.bootstrap(
        (sums, lengths), ratio, paired=True, vectorized=True, method="BCa", n_resamples=40_000, rng=1
    )
    resampler = DocumentResampler(25, seed=2, resamples=40_000)
    got = mean_interval(resampler, series, small_sample=False)
    # The 2.5% quantile of R draws has standard error √(q(1−q)/R)/density, with the normal density at 1.96; both do.
    noise: float = (
        math.sqrt(2)
        * math.sqrt(0.025 * 0.975 / 40_000)
        / stats.norm.pdf(1.96)
        * np.asarray(expected.standard_error).item()
    )
    assert got == pytest.approx(tuple(expected.confidence_interval), abs=4 * noise)
    # Percentiles without bias correction and acceleration are farther away than that: the check can tell them apart.
    plain = np.quantile(
        resampler.totals(series).replicates / resampler.totals([np.ones(n) for n in lengths]).replicates, [0.025, 0.975]
    )
    assert max(abs(plain - np.array(expected.confidence_interval))) > 4 * noise


def test_small_sample_widening_matches_t_for_symmetric_data() -> None:
    """Twelve symmetric documents: the interval is Student's, which has t and the factor √(n/(n−1))."""
    values = np.concatenate([x := np.linspace(0.2, 1.5, 6), -x])
    interval = mean_interval(DocumentResampler(12, seed=0, resamples=40_000), [np.array([v]) for v in values])
    half = stats.t.ppf(0.975, 11) * values.std(ddof=1) / math.sqrt(12)
    normal = 1.96 * values.std(ddof=0) / math.sqrt(12)
    assert interval == pytest.approx((-half, half), rel=0.03)
    assert normal < 0.9 * half


def coverage(interval: Callable[[list[np.ndarray], int], tuple[float, float]], *, documents: int, runs: int) -> float:
    generator, truth = np.random.default_rng(12345), math.exp(0.5**2 / 2)
    hits = 0
    for run in range(runs):
        low, high = interval(clustered(generator, documents, 60), run)
        hits += low <= truth <= high
    return hits / runs


@pytest.mark.parametrize("documents", [20, 40])
def test_coverage_over_documents(documents: int) -> None:
    """Skewed documents: 95% intervals cover at least 91% of the time, within three standard errors of 600 runs."""
    got = coverage(lambda series, run: cluster_interval(series, seed=run), documents=documents, runs=600)
    allowance = 3 * math.sqrt(0.95 * 0.05 / 600)
    assert 0.91 - allowance < got < 0.95 + allowance


def test_ignoring_documents_undercovers() -> None:
    """The planted wrong variant: tokens resampled as if they were independent."""

    def as_if_independent(series: list[np.ndarray], _: int) -> tuple[float, float]:
        tokens = np.concatenate(series)
        half = 1.96 * tokens.std() / math.sqrt(tokens.shape[0])
        return tokens.mean() - half, tokens.mean() + half

    assert coverage(as_if_independent, documents=20, runs=300) < 0.5


def test_paired_ratio_covers_and_unpaired_would_be_wide() -> None:
    """Arms of equal documents: the ratio's interval covers the true ratio and is far narrower than unpaired."""
    generator, hits, widths = np.random.default_rng(5), 0, list[float]()
    for run in range(300):
        levels = generator.lognormal(0, 0.8, 20)
        above = [2 * level * generator.gamma(20, 0.05, 50) for level in levels]
        below = [level * generator.gamma(20, 0.05, 50) for level in levels]
        resampler = DocumentResampler(20, seed=run, resamples=1000)
        interval = ratio_interval(resampler.totals(above), resampler.totals(below), units=20)
        assert interval is not None
        hits += interval[0] <= 2.0 <= interval[1]
        widths.append(interval[1] - interval[0])
    assert abs(hits / 300 - 0.95) < 0.03 + 3 * math.sqrt(0.95 * 0.05 / 300)
    # Unpaired, each mean has a relative error of about sd/√20 = 0.95/4.5, so their ratio a width near 4 × 2 × 0.3.
    assert np.mean(widths) < 0.3


def autoregressive(generator: np.random.Generator, tokens: int, persistence: float) -> np.ndarray:
    noise = generator.normal(0, 1, tokens + 500)
    values = np.zeros(tokens + 500)
    for t in range(1, tokens + 500):
        values[t] = persistence * values[t - 1] + noise[t]
    return values[500:]


def test_coverage_over_blocks() -> None:
    """Tokens that remember about 10 others: blocks cover near nominal, independent tokens (blocks of 1) do not."""
    generator, runs, hits, naive = np.random.default_rng(3), 250, 0, 0
    for run in range(runs):
        series = [autoregressive(generator, 2000, 0.9)]
        length = block_length(series)
        blocks = BlockResampler(2000, block_tokens=length, seed=run, resamples=600)
        low, high = mean_interval(blocks, series)
        hits += low <= 0 <= high
        half = 1.96 * series[0].std() / math.sqrt(2000)
        naive += abs(series[0].mean()) <= half
    assert 0.89 - 3 * math.sqrt(0.95 * 0.05 / runs) < hits / runs <= 1.0
    assert naive / runs < 0.6


def test_block_length_grows_with_memory_within_its_bounds() -> None:
    generator = np.random.default_rng(0)
    tokens = 4096
    lengths = [block_length([autoregressive(generator, tokens, p)]) for p in (0.0, 0.8, 0.95, 0.999)]
    assert lengths[0] == math.ceil(math.sqrt(tokens))
    assert lengths == sorted(lengths) and 2 * lengths[0] < lengths[-1] <= 3 * math.ceil(math.sqrt(tokens))
    # The most persistent quantity decides for all.
    series = [autoregressive(generator, tokens, p) for p in (0.0, 0.999)]
    assert block_length(series) == block_length(series[1:]) > block_length(series[:1])


def test_block_length_against_theory() -> None:
    """For an autoregression the best length is (3/2 × (2p/(1−p²))²)^⅓ × n^⅓; its estimate scatters around that."""
    tokens, persistence = 2000, 0.9
    best = (1.5 * (2 * persistence / (1 - persistence**2)) ** 2) ** (1 / 3) * tokens ** (1 / 3)
    generator = np.random.default_rng(0)
    estimates = [block_length([autoregressive(generator, tokens, persistence)]) for _ in range(30)]
    assert math.sqrt(tokens) < best < 3 * math.sqrt(tokens)
    assert np.median(estimates) == pytest.approx(best, rel=0.25)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 8, 9, 20])
def test_block_length_of_few_tokens(tokens: int) -> None:
    for series in (np.ones(tokens), np.arange(tokens, dtype=np.float64), np.zeros(tokens)):
        assert 1 <= block_length([series]) <= tokens


@pytest.mark.parametrize(("tokens", "block"), [(1, 1), (10, 3), (12, 4), (7, 7), (9, 1)])
def test_blocks_against_their_definition(tokens: int, block: int) -> None:
    """Replicates equal a direct evaluation of circular blocks, the last one cut."""
    values = np.random.default_rng(0).random(tokens)
    resampler = BlockResampler(tokens, block_tokens=block, seed=4, resamples=50)
    got = resampler.totals([values])
    starts = np.random.default_rng([4, 1, tokens, block]).integers(
        0, tokens, size=(50, math.ceil(tokens / block)), dtype=np.int64
    )
    for replicate, row in zip(got.replicates, starts, strict=True):
        places = np.concatenate([np.arange(start, start + block) % tokens for start in row])[:tokens]
        assert replicate == pytest.approx(values[places].sum(), rel=1e-12)
    assert resampler.totals([np.ones(tokens)]).replicates == pytest.approx(np.full(50, tokens))


def test_documents_against_their_definition() -> None:
    series = [np.array([1.0, 2.0]), np.array([10.0]), np.array([100.0, 200.0, 300.0])]
    resampler = DocumentResampler(3, seed=0, resamples=500)
    totals, counts = resampler.totals(series), resampler.totals([np.ones_like(values) for values in series])
    assert totals.observed == 613
    assert totals.leave_one_out is not None and totals.leave_one_out.tolist() == [610, 603, 13]
    possible = {(a * 3 + b * 10 + c * 600, a * 2 + b + c * 3) for a in range(4) for b in range(4) for c in range(4)
                if a + b + c == 3}  # fmt: skip
    assert set(zip(totals.replicates.tolist(), counts.replicates.tolist(), strict=True)) == possible


def test_extreme_skew_stays_within_the_resamples() -> None:
    series = [np.array([v]) for v in (0.0, 0.0, 0.0, 0.0, 1000.0)]
    low, high = cluster_interval(series)
    assert 0 <= low < 200 < high <= 1000
    low, high = cluster_interval([-values for values in series])
    assert -1000 <= low < -200 < high <= 0


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        DocumentResampler(1, seed=0)
    with pytest.raises(ValueError, match="expected 3 documents, got 1"):
        DocumentResampler(3, seed=0).totals([np.ones(3)])
    with pytest.raises(ValueError, match="1 to 5 tokens, got 6"):
        BlockResampler(5, block_tokens=6, seed=0)
    with pytest.raises(ValueError, match="one document of 5 tokens"):
        BlockResampler(5, block_tokens=2, seed=0).totals([np.ones(5), np.ones(5)])
