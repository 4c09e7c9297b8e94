"""Paired comparison of arms that answered the same documents as a reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Bool, Float64
from numpy.typing import NDArray

from replayeval.arrays import Array
from replayeval.stats.bootstrap import LEVEL, RESAMPLES, Totals, ratio_interval
from replayeval.stats.power import minimum_detectable, minimum_detectable_mean
from replayeval.stats.sign_flip import PairedTest, holm, mcnemar_exact, sign_flip

Samples = Float64[Array[np.float64], " samples"]
Flags = Bool[Array[np.bool_], " samples"]

FEW_DISCORDANT = 10
FEW_ANSWERED = 10
_STREAM = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class ArmAnswers:
    """What one arm answered: one array per document, one entry per sample.

    Attributes:
        policy: Name of the arm.
        scores: Score of each answer, between 0 and 1.
        output_tokens: Length of each output in tokens, or None where lengths are unknown.
        unextracted: Whether an answer held nothing that the task could extract; None where a task extracts nothing.
        truncated: Whether an output was cut off at the token limit; None where that is unknown.
    """

    policy: str
    scores: Sequence[Samples]
    output_tokens: Sequence[Samples] | None = None
    unextracted: Sequence[Flags] | None = None
    truncated: Sequence[Flags] | None = None

    def __post_init__(self) -> None:
        """Refuse answers that do not fit each other."""
        if any(scores.size == 0 for scores in self.scores):
            raise ValueError(f"{self.policy}: expected at least one answer per document")
        if not all(np.isfinite(s).all() and (s >= 0).all() and (s <= 1).all() for s in self.scores):
            raise ValueError(f"{self.policy}: expected scores between 0 and 1")
        sizes = [scores.size for scores in self.scores]
        for name in ("output_tokens", "unextracted", "truncated"):
            values: Sequence[NDArray[np.generic]] | None = getattr(self, name)
            if values is not None and [value.size for value in values] != sizes:
                raise ValueError(f"{self.policy}: expected as many {name} as scores for each document")


@dataclass(frozen=True, kw_only=True)
class AnswerSummary:
    """How one arm answered; fractions where nothing else is said, undefined values None with a reason."""

    policy: str
    documents: int
    samples: int
    accuracy: float | None
    accuracy_ci95: tuple[float, float] | None
    output_tokens_mean: float | None
    output_tokens_p90: float | None
    extraction_failures: int | None
    truncations: int | None
    undefined: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True)
class QuartileSummary:
    """One quartile of the documents by the reference's output length."""

    quartile: int
    documents: int
    reference_tokens: tuple[float, float] | None
    accuracy_reference: float | None
    accuracy: float | None
    delta: float | None
    ci95: tuple[float, float] | None
    undefined: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True)
class PairedSummary:
    """One arm against the reference; differences are fractions, arm minus reference."""

    answers: AnswerSummary
    delta: float | None
    ci95: tuple[float, float] | None
    p: float | None
    test: PairedTest | None
    mcnemar_p: float | None
    p_holm: float | None
    to_wrong: int
    to_right: int
    discordant: int
    detectable: float | None
    quartiles: tuple[QuartileSummary, ...]
    undefined: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All arms against the reference."""

    reference: AnswerSummary
    arms: tuple[PairedSummary, ...]
    level: float = LEVEL
    resamples: int = RESAMPLES


def compare(reference: ArmAnswers, arms: Sequence[ArmAnswers], *, seed: int) -> Comparison:
    """Compare arms with the reference on the same documents.

    A document's score is the mean over its samples; every statistic rests on documents, which are independent, and
    weighs them alike. Intervals are a BCa bootstrap over documents, in which both arms of a pair see the same
    resamples. The test is McNemar's exact one when every document has one answer that is right or wrong, else the
    sign-flip test over documents. Holm's correction runs over the arms.

    Args:
        reference: The arm that the others are compared with.
        arms: The others; document `d`, sample `s` of each is paired with document `d`, sample `s` of the reference.
        seed: Seed of the bootstrap, and of the sign flips where they cannot be enumerated.

    Raises:
        ValueError: An arm answered other documents, or another number of samples.
    """
    for arm in arms:
        if [s.size for s in arm.scores] != [s.size for s in reference.scores]:
            raise ValueError(
                f"{arm.policy} has {len(arm.scores)} documents and {sum(s.size for s in arm.scores)} answers, the "
                f"reference {len(reference.scores)} and {sum(s.size for s in reference.scores)}: compare the same ones"
            )
    compared = [_paired(reference, arm, seed=seed) for arm in arms]
    adjusted = holm([summary.p for summary in compared])
    return Comparison(
        reference=summarise_answers(reference, seed=seed),
        arms=tuple(replace(summary, p_holm=p) for summary, p in zip(compared, adjusted, strict=True)),
    )


def summarise_answers(answers: ArmAnswers, *, seed: int) -> AnswerSummary:
    """Summarise one arm by itself.

    Args:
        answers: What it answered.
        seed: Seed of the bootstrap.
    """
    undefined: dict[str, str] = {}
    means = _document_means(answers.scores)
    interval, reason = _mean_interval(means, seed=seed)
    if interval is None:
        undefined["accuracy_ci95"] = reason
    if not means.size:
        undefined["accuracy"] = "no document was answered"
    tokens = None if not answers.output_tokens else np.concatenate(list(answers.output_tokens))
    if tokens is None:
        undefined |= dict.fromkeys(("output_tokens_mean", "output_tokens_p90"), "the lengths of outputs are unknown")
    if answers.unextracted is None:
        undefined["extraction_failures"] = "nothing is extracted from an output of this task"
    if answers.truncated is None:
        undefined["truncations"] = "whether outputs were cut off is unknown"
    return AnswerSummary(
        policy=answers.policy,
        documents=len(answers.scores),
        samples=sum(scores.size for scores in answers.scores),
        accuracy=float(means.mean()) if means.size else None,
        accuracy_ci95=interval,
        output_tokens_mean=None if tokens is None else float(tokens.mean()),
        output_tokens_p90=None if tokens is None else float(np.quantile(tokens, 0.9)),
        extraction_failures=_unextracted(answers),
        truncations=None if answers.truncated is None else sum(int(flags.sum()) for flags in answers.truncated),
        undefined=undefined,
    )


def _unextracted(answers: ArmAnswers) -> int | None:
    """Count answers that ended by themselves without one that could be extracted."""
    if answers.unextracted is None:
        return None
    if answers.truncated is None:
        return sum(int(flags.sum()) for flags in answers.unextracted)
    pairs = zip(answers.unextracted, answers.truncated, strict=True)
    return sum(int((missing & ~cut).sum()) for missing, cut in pairs)


def _paired(reference: ArmAnswers, arm: ArmAnswers, *, seed: int) -> PairedSummary:
    undefined: dict[str, str] = {}
    before, after = _document_means(reference.scores), _document_means(arm.scores)
    change = after - before
    interval, reason = _mean_interval(change, seed=seed)
    if interval is None:
        undefined["ci95"] = reason
    flips = [a - b for a, b in zip(arm.scores, reference.scores, strict=True)]
    to_wrong = sum(int((f < 0).sum()) for f in flips)
    to_right = sum(int((f > 0).sum()) for f in flips)
    discordant = int((change != 0).sum())
    binary = all(s.size == 1 and s[0] in (0.0, 1.0) for s in (*reference.scores, *arm.scores))
    p, test, mcnemar = _test(change, binary=binary, flips=(to_wrong, to_right), seed=seed, undefined=undefined)
    if not change.size:
        undefined |= dict.fromkeys(("delta_pp", "mde_pp"), "no document was answered")
        detectable = None
    else:
        found = (
            minimum_detectable(n=change.size, discordant=discordant / change.size)
            if binary
            else minimum_detectable_mean(n=change.size, spread=float(np.std(change, ddof=1)) if change.size > 1 else 0)
        )
        detectable = found.difference
        if found.reason is not None:
            undefined["mde_pp"] = found.reason
    quartiles = _quartiles(reference, before, after, seed=seed)
    if not quartiles:
        undefined["by_quartile"] = "the lengths of the reference's outputs are unknown"
    return PairedSummary(
        answers=summarise_answers(arm, seed=seed),
        delta=float(change.mean()) if change.size else None,
        ci95=interval,
        p=p,
        test=test,
        mcnemar_p=mcnemar,
        p_holm=None,
        to_wrong=to_wrong,
        to_right=to_right,
        discordant=discordant,
        detectable=detectable,
        quartiles=quartiles,
        undefined=undefined,
    )


def _test(
    change: Float64[Array[np.float64], " documents"],
    *,
    binary: bool,
    flips: tuple[int, int],
    seed: int,
    undefined: dict[str, str],
) -> tuple[float | None, PairedTest | None, float | None]:
    if not change.size:
        undefined |= dict.fromkeys(("p_value", "test", "mcnemar_p", "p_holm"), "no document was answered")
        return None, None, None
    if binary:
        p = mcnemar_exact(*flips)
        return p, PairedTest.MCNEMAR_EXACT, p
    undefined["mcnemar_p"] = "McNemar's test takes one right-or-wrong answer per document; see `p_value` and `test`"
    result = sign_flip(change, seed=seed)
    return result.p, result.test, None


def _quartiles(
    reference: ArmAnswers,
    before: Float64[Array[np.float64], " documents"],
    after: Float64[Array[np.float64], " documents"],
    *,
    seed: int,
) -> tuple[QuartileSummary, ...]:
    """Split the documents at the quartiles of the reference's mean output length."""
    if not reference.output_tokens:
        return ()
    tokens = _document_means(reference.output_tokens)
    edges = np.quantile(tokens, [0.25, 0.5, 0.75])
    # Equal lengths fall on the same side of every edge.
    part = np.searchsorted(edges, tokens, side="left")
    summaries: list[QuartileSummary] = []
    for index in range(4):
        inside = part == index
        count = int(inside.sum())
        if count == 0:
            summaries.append(_empty_quartile(index + 1))
            continue
        interval, reason = _mean_interval((after - before)[inside], seed=seed)
        summaries.append(
            QuartileSummary(
                quartile=index + 1,
                documents=count,
                reference_tokens=(float(tokens[inside].min()), float(tokens[inside].max())),
                accuracy_reference=float(before[inside].mean()),
                accuracy=float(after[inside].mean()),
                delta=float((after - before)[inside].mean()),
                ci95=interval,
                undefined={} if interval is not None else {"ci95": reason},
            )
        )
    return tuple(summaries)


def _empty_quartile(quartile: int) -> QuartileSummary:
    names: list[str] = ["reference_tokens", "accuracy_reference", "accuracy", "delta_pp", "ci95"]
    return QuartileSummary(
        quartile=quartile,
        documents=0,
        reference_tokens=None,
        accuracy_reference=None,
        accuracy=None,
        delta=None,
        ci95=None,
        undefined=dict.fromkeys(names, "no document: outputs of equal length are never separated"),
    )


def _document_means(values: Sequence[Samples]) -> Float64[Array[np.float64], " documents"]:
    return np.array([value.mean() for value in values], dtype=np.float64)


def _mean_interval(
    values: Float64[Array[np.float64], " documents"], *, seed: int
) -> tuple[tuple[float, float] | None, str]:
    """Return the bootstrap interval of a mean over documents, or the reason why there is none."""
    count = values.size
    if count < 2:
        return None, "an interval takes at least 2 documents"
    patterns, frequencies = np.unique(values, return_counts=True)
    if patterns.size == 1:
        # Rule of three: the exact one-sided 95% bound on a rate that was never seen in `count` independent trials.
        bound = 1 - 0.05 ** (1 / count)
        return None, (
            f"all {count} documents have the same value, which leaves nothing to resample; with 95% confidence less "
            f"than {100 * bound:.2g}% of documents would have another"
        )
    # Documents of equal value are interchangeable, so counts of values say as much as counts of documents and need
    # no matrix of resamples times documents.
    generator = np.random.default_rng([seed, _STREAM, count])
    draws = generator.multinomial(count, frequencies / count, size=RESAMPLES)
    total = float(values.sum())
    sums = Totals(observed=total, replicates=draws @ patterns, leave_one_out=total - values)
    ones = Totals(
        observed=float(count), replicates=np.full(RESAMPLES, float(count)), leave_one_out=np.full(count, count - 1.0)
    )
    interval = ratio_interval(sums, ones, units=count)
    if interval is None:
        return None, "the bootstrap is degenerate"
    return interval, ""


def caution(comparison: Comparison) -> str | None:
    """Return why to distrust a comparison, or None."""
    documents = comparison.reference.documents
    if documents < FEW_ANSWERED:
        return f"with {documents} documents nothing but a large difference can be seen"
    few = [arm for arm in comparison.arms if 0 < arm.discordant < FEW_DISCORDANT]
    if few:
        return (
            f"fewer than {FEW_DISCORDANT} documents differ for {', '.join(arm.answers.policy for arm in few)}: "
            "the bootstrap interval is coarse there, trust p"
        )
    return None
