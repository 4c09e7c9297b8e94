"""What `summarise_kl` returns: plain numbers, ready for JSON, with a reason beside every one that is undefined."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

Interval95 = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class LengthSummary:
    """One arm at generation length `n`, over the documents that reach it.

    Attributes:
        n: Generation length in tokens.
        documents: Documents that decode at least `n` tokens; only these count here.
        tokens: Tokens that the means run over, `documents × n`.
        mean: Mean KL in nats over the first `n` tokens.
        ci95: Its 95% interval.
        local_mean: Mean KL over the last octave, generation lengths in (n/2, n].
        local_ci95: Its 95% interval.
        top1_agreement: Share of the first `n` tokens at which arm and reference rank the same token first.
        top1_ci95: Its 95% interval.
        nll_delta: Mean of NLL(arm) − NLL(reference) over the first `n` tokens, in nats; positive is worse.
        nll_delta_ci95: Its 95% interval, paired by token.
        ratio_to_floor: `mean` of this arm over that of the floor arm.
        diverged: The arm produced a non-finite output at or before `n` in some document.
        ci_method: `documents_bca`, or `token_blocks_percentile` when a single document reaches `n`.
        ci_note: Why to distrust the intervals, or None.
        undefined: For each field that is None although it is asked for: the reason.
    """

    n: int
    documents: int
    tokens: int
    mean: float | None = None
    ci95: Interval95 | None = None
    local_mean: float | None = None
    local_ci95: Interval95 | None = None
    top1_agreement: float | None = None
    top1_ci95: Interval95 | None = None
    nll_delta: float | None = None
    nll_delta_ci95: Interval95 | None = None
    ratio_to_floor: float | None = None
    diverged: bool = False
    ci_method: str | None = None
    ci_note: str | None = None
    undefined: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True)
class KLDistribution:
    """KL per token in nats, over every decoded token up to the longest length; quantiles interpolate linearly."""

    mean: float | None = None
    ci95: Interval95 | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    p999: float | None = None
    max: float | None = None
    undefined: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True)
class ArmSummary:
    """One arm over every decoded token of every document up to the longest length.

    Attributes:
        policy: Canonical policy text.
        kl: Distribution of KL(reference || arm) over tokens.
        by_length: One entry per generation length.
        top1_agreement: Share of tokens at which arm and reference rank the same token first.
        top1_ci95: Its 95% interval.
        flip_rate: 1 − `top1_agreement`.
        nll_delta: Mean of NLL(arm) − NLL(reference) in nats; positive is worse.
        nll_delta_ci95: Its 95% interval, paired by token.
        ppl: Perplexity under the arm: exp of its mean NLL.
        ppl_reference: Perplexity under the reference on the same tokens.
        diverged_at: Smallest generation length with a non-finite output, over all documents, or None.
        diverged_documents: Documents in which the arm diverged.
        ratio_to_floor: `kl.mean` over that of the floor arm.
        ratio_to_floor_ci95: Its 95% interval, paired.
        undefined: For each field that is None although it is asked for: the reason.
    """

    policy: str
    kl: KLDistribution
    by_length: tuple[LengthSummary, ...]
    top1_agreement: float | None = None
    top1_ci95: Interval95 | None = None
    flip_rate: float | None = None
    nll_delta: float | None = None
    nll_delta_ci95: Interval95 | None = None
    ppl: float | None = None
    ppl_reference: float | None = None
    diverged_at: int | None = None
    diverged_documents: tuple[str, ...] = ()
    ratio_to_floor: float | None = None
    ratio_to_floor_ci95: Interval95 | None = None
    undefined: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True)
class RatioAtLength:
    """Mean KL with rounding to nearest over mean KL with stochastic rounding, at generation length `n`.

    Attributes:
        n: Generation length in tokens.
        documents: Documents that reach it.
        ratio: Over the first `n` tokens; above 1, stochastic rounding is better.
        ci95: Its 95% interval, paired by document (or block).
        local_ratio: Over the last octave, generation lengths in (n/2, n].
        local_ci95: Its 95% interval, paired.
        undefined: For each field that is None: the reason.
    """

    n: int
    documents: int
    ratio: float | None = None
    ci95: Interval95 | None = None
    local_ratio: float | None = None
    local_ci95: Interval95 | None = None
    undefined: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True)
class RoundingRatio:
    """Two arms that differ in nothing but stochastic rounding, compared at every length."""

    nearest: str
    stochastic: str
    by_length: tuple[RatioAtLength, ...]


@dataclass(frozen=True, kw_only=True)
class KLSummary:
    """Everything that is reported about a set of arms.

    Attributes:
        documents: Documents measured.
        tokens: Decoded tokens up to the longest length, over all documents; the reference and each arm saw all of them.
        lengths: Generation lengths in tokens.
        floor_arm: The arm whose KL is the floor, or None.
        arms: In the order of the scores.
        rounding_ratios: One entry for each pair of arms that differ only in stochastic rounding.
        ci_level: Coverage that the intervals aim at.
        ci_method: How the intervals over all tokens came about.
        ci_note: Why to distrust them, or None.
        resamples: Resamples per interval.
        seed: Seed of the resamples.
    """

    documents: int
    tokens: int
    lengths: tuple[int, ...]
    floor_arm: str | None
    arms: tuple[ArmSummary, ...]
    rounding_ratios: tuple[RoundingRatio, ...]
    ci_level: float
    ci_method: str
    ci_note: str | None
    resamples: int
    seed: int

    def arm(self, policy: str) -> ArmSummary:
        """Return the summary of one arm.

        Raises:
            KeyError: There is no such arm.
        """
        for summary in self.arms:
            if summary.policy == policy:
                return summary
        raise KeyError(f"no arm {policy!r}; there are {[summary.policy for summary in self.arms]}")

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values; tuples become lists."""
        return cast(dict[str, Any], _plain(asdict(self)))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in cast(list[Any], value)]
    return value
