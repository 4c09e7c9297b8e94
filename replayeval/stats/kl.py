"""From per-token scores to what is reported about each arm."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from replayeval.errors import ConfigError
from replayeval.stats.bootstrap import LEVEL, RESAMPLES, Totals
from replayeval.stats.scope import Scope, TokenScores, document_count_note
from replayeval.stats.summary import (
    ArmSummary,
    KLDistribution,
    KLSummary,
    LengthSummary,
    RatioAtLength,
    RoundingRatio,
)

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
_LARGEST_EXPONENT = 700.0


def summarise_kl(
    scores: Sequence[TokenScores],
    *,
    lengths: Sequence[int],
    floor_arm: str | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> KLSummary:
    """Return means, intervals and percentiles of every arm.

    At generation length N only documents that decode at least N tokens count, each with its first N. An arm that
    diverged in any document has no value at lengths from there on: nothing is averaged over the survivors. All arms see
    the same resamples, so that their ratios and differences are paired.

    Args:
        scores: Documents under the same arms.
        lengths: Generation lengths in tokens, increasing.
        floor_arm: Arm that equals the reference but for rounding noise; ratios to the floor need it.
        seed: Seed of the resamples.
        resamples: Resamples per interval.

    Raises:
        ConfigError: No documents, documents under different arms, repeated documents, unknown floor arm, or lengths
            that are not positive and increasing.

    Source: bootstrap over documents; within a single document over blocks of tokens.
    """
    _check(scores, lengths, floor_arm)
    arms = scores[0].arms
    everything = Scope(scores, 0, lengths[-1], seed=seed, resamples=resamples)
    spans = [Scope(scores, 0, n, only_reaching=n, seed=seed, resamples=resamples) for n in lengths]
    octaves = [Scope(scores, n // 2, n, only_reaching=n, seed=seed, resamples=resamples) for n in lengths]
    return KLSummary(
        documents=len(scores),
        tokens=everything.tokens,
        lengths=tuple(lengths),
        floor_arm=floor_arm,
        arms=tuple(
            _summarise_arm(row, everything, [*zip(lengths, spans, octaves, strict=True)], scores, floor_arm)
            for row in range(len(arms))
        ),
        rounding_ratios=tuple(
            RoundingRatio(
                nearest=arms[nearest],
                stochastic=arms[stochastic],
                by_length=tuple(
                    _ratio_at(n, nearest, stochastic, span, octave, scores)
                    for n, span, octave in zip(lengths, spans, octaves, strict=True)
                ),
            )
            for nearest, stochastic in rounding_pairs(arms)
        ),
        ci_level=LEVEL,
        ci_method=str(everything.method),
        ci_note=document_count_note(len(scores)),
        resamples=resamples,
        seed=seed,
    )


def rounding_pairs(arms: Sequence[str]) -> list[tuple[int, int]]:
    """Return the places of arms that differ in nothing but `+sr`: (rounded to nearest, rounded stochastically)."""
    plain = {arm: place for place, arm in enumerate(arms) if "+sr" not in arm}
    pairs: list[tuple[int, int]] = []
    for place, arm in enumerate(arms):
        nearest = plain.get(arm.replace("+sr", ""))
        if nearest is not None and nearest != place:
            pairs.append((nearest, place))
    return pairs


def _summarise_arm(
    row: int,
    everything: Scope,
    by_length: Sequence[tuple[int, Scope, Scope]],
    scores: Sequence[TokenScores],
    floor_arm: str | None,
) -> ArmSummary:
    arms = scores[0].arms
    floor = None if floor_arm is None else arms.index(floor_arm)
    entries = tuple(_at_length(n, row, span, octave, scores, floor) for n, span, octave in by_length)
    first, diverged_documents = _divergence(scores, row)
    shared: dict[str, Any] = {
        "policy": arms[row],
        "by_length": entries,
        "diverged_at": first,
        "diverged_documents": diverged_documents,
    }
    undefined: dict[str, str] = {}
    ppl_reference = _perplexity(everything, everything.nll_reference(), "ppl_reference", undefined)
    reason = _diverged_reason(scores, row, by_length[-1][0])
    if reason is not None:
        names = ("top1_agreement", "top1_ci95", "flip_rate", "nll_delta", "nll_delta_ci95", "ppl", "ratio_to_floor")
        return ArmSummary(
            **shared,
            kl=KLDistribution(undefined=dict.fromkeys(("mean", "ci95", *QUANTILES, "max"), reason)),
            ppl_reference=ppl_reference,
            undefined=undefined | dict.fromkeys((*names, "ratio_to_floor_ci95"), reason),
        )
    top1, top1_ci = everything.mean(everything.top1(row), "top1_agreement", "top1_ci95", undefined)
    delta, delta_ci = everything.mean(everything.nll_delta(row), "nll_delta", "nll_delta_ci95", undefined)
    ratio, ratio_ci = _ratio_to_floor(everything, row, floor, scores, by_length[-1][0], undefined)
    return ArmSummary(
        **shared,
        kl=_distribution(everything, row),
        top1_agreement=top1,
        top1_ci95=top1_ci,
        flip_rate=None if top1 is None else 1 - top1,
        nll_delta=delta,
        nll_delta_ci95=delta_ci,
        ppl=_perplexity(everything, everything.nll(row), "ppl", undefined),
        ppl_reference=ppl_reference,
        ratio_to_floor=ratio,
        ratio_to_floor_ci95=ratio_ci,
        undefined=undefined,
    )


def _at_length(
    n: int, row: int, span: Scope, octave: Scope, scores: Sequence[TokenScores], floor: int | None
) -> LengthSummary:
    values = ("mean", "local_mean", "top1_agreement", "nll_delta", "ratio_to_floor")
    intervals = ("ci95", "local_ci95", "top1_ci95", "nll_delta_ci95")
    undefined: dict[str, str] = {}
    diverged = _diverged_reason(scores, row, n)
    reason = diverged or span.empty_reason(n)
    if reason is not None:
        return LengthSummary(
            n=n,
            documents=span.documents,
            tokens=span.tokens,
            diverged=diverged is not None,
            undefined=dict.fromkeys((*values, *intervals), reason),
        )
    mean, ci95 = span.mean(span.kl(row), "mean", "ci95", undefined)
    local, local_ci95 = octave.mean(octave.kl(row), "local_mean", "local_ci95", undefined)
    top1, top1_ci95 = span.mean(span.top1(row), "top1_agreement", "top1_ci95", undefined)
    delta, delta_ci95 = span.mean(span.nll_delta(row), "nll_delta", "nll_delta_ci95", undefined)
    ratio, _ = _ratio_to_floor(span, row, floor, scores, n, undefined)
    undefined.pop("ratio_to_floor_ci95", None)
    return LengthSummary(
        n=n,
        documents=span.documents,
        tokens=span.tokens,
        mean=mean,
        ci95=ci95,
        local_mean=local,
        local_ci95=local_ci95,
        top1_agreement=top1,
        top1_ci95=top1_ci95,
        nll_delta=delta,
        nll_delta_ci95=delta_ci95,
        ratio_to_floor=ratio,
        ci_method=str(span.method),
        ci_note=document_count_note(span.documents),
        undefined=undefined,
    )


def _distribution(scope: Scope, row: int) -> KLDistribution:
    undefined: dict[str, str] = {}
    mean, ci95 = scope.mean(scope.kl(row), "mean", "ci95", undefined)
    tokens = np.concatenate(scope.kl(row))
    quantiles = dict(zip(QUANTILES, np.quantile(tokens, list(QUANTILES.values())).tolist(), strict=True))
    return KLDistribution(mean=mean, ci95=ci95, **quantiles, max=float(tokens.max()), undefined=undefined)


def _perplexity(scope: Scope, nll: Sequence[Any], name: str, undefined: dict[str, str]) -> float | None:
    mean, _ = scope.mean(nll, name, None, undefined)
    if mean is not None and mean > _LARGEST_EXPONENT:
        undefined[name] = f"the mean NLL is {mean:.6g} nats, whose exponential overflows"
        return None
    return None if mean is None else math.exp(mean)


def _ratio_to_floor(
    scope: Scope,
    row: int,
    floor: int | None,
    scores: Sequence[TokenScores],
    n: int,
    undefined: dict[str, str],
) -> tuple[float | None, tuple[float, float] | None]:
    names = ("ratio_to_floor", "ratio_to_floor_ci95")
    reason = "no floor arm was measured" if floor is None else _diverged_reason(scores, floor, n)
    if floor is None or reason is not None:
        undefined.update(dict.fromkeys(names, f"the floor is missing: {reason}" if floor is not None else str(reason)))
        return None, None
    total = scope.totals(scope.kl(floor))
    if total.observed <= 0:
        what = "exactly 0" if total.observed == 0 else "not positive"
        undefined.update(dict.fromkeys(names, f"the floor is {what}"))
        return None, None
    return scope.ratio(scope.totals(scope.kl(row)), total, names[0], names[1], undefined)


def _ratio_at(
    n: int, nearest: int, stochastic: int, span: Scope, octave: Scope, scores: Sequence[TokenScores]
) -> RatioAtLength:
    reasons = [_diverged_reason(scores, row, n) for row in (nearest, stochastic)]
    reason = next((reason for reason in reasons if reason), None) or span.empty_reason(n)
    names = ("ratio", "ci95", "local_ratio", "local_ci95")
    if reason is not None:
        return RatioAtLength(n=n, documents=span.documents, undefined=dict.fromkeys(names, reason))
    undefined: dict[str, str] = {}

    def of(scope: Scope, value: str, interval: str) -> tuple[float | None, tuple[float, float] | None]:
        above: Totals = scope.totals(scope.kl(nearest))
        return scope.ratio(above, scope.totals(scope.kl(stochastic)), value, interval, undefined)

    ratio, ci95 = of(span, "ratio", "ci95")
    local, local_ci95 = of(octave, "local_ratio", "local_ci95")
    return RatioAtLength(
        n=n,
        documents=span.documents,
        ratio=ratio,
        ci95=ci95,
        local_ratio=local,
        local_ci95=local_ci95,
        undefined=undefined,
    )


def _divergence(scores: Sequence[TokenScores], row: int) -> tuple[int | None, tuple[str, ...]]:
    found = [(at, document.doc_id) for document in scores if (at := document.diverged_at[row]) is not None]
    return min((at for at, _ in found), default=None), tuple(doc_id for _, doc_id in found)


def _diverged_reason(scores: Sequence[TokenScores], row: int, n: int) -> str | None:
    first, _ = _divergence(scores, row)
    if first is None or first > n:
        return None
    where = next(document.doc_index for document in scores if document.diverged_at[row] == first)
    return f"diverged: {scores[0].arms[row]} gave a non-finite output at generation length {first} of document {where}"


def _check(scores: Sequence[TokenScores], lengths: Sequence[int], floor_arm: str | None) -> None:
    if not scores:
        raise ConfigError("expected the scores of at least one document, got none; finish a document first")
    arms = scores[0].arms
    for document in scores:
        if document.arms != arms:
            raise ConfigError(
                f"expected every document under the arms {list(arms)}, but document {document.doc_index} has "
                f"{list(document.arms)}; summarise runs of different arms separately"
            )
    indices = [document.doc_index for document in scores]
    if len(set(indices)) != len(indices):
        raise ConfigError(f"expected each document once, got the indices {indices}")
    if not lengths or lengths[0] < 1 or any(b <= a for a, b in zip(lengths, lengths[1:], strict=False)):
        raise ConfigError(f"expected positive increasing lengths, got {list(lengths)}")
    if floor_arm is not None and floor_arm not in arms:
        raise ConfigError(f"expected a floor arm among {list(arms)}, got {floor_arm!r}")
