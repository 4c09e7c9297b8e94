"""Has a quantity changed over nights? Tested over nights, and by document while nights are few."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from jaxtyping import Float64
from scipy import special  # pyright: ignore[reportMissingTypeStubs]

from replayeval.arrays import Array
from replayeval.stats.bootstrap import DocumentResampler, ratio_interval

Nights = Float64[Array[np.float64], "nights documents"]

ALPHA = 0.01
"""Chance that a night without any change is flagged at all, over all series together, in either direction."""
FEWEST_BEFORE = 5
"""Nights before a change that its test over nights needs; with fewer, documents are compared instead."""
FEWEST_DOCUMENTS = 4
"""Documents that the comparison by document needs."""
SCALES = (1, 2, 3, 5, 8)
"""For how many nights a change may have lasted when it is looked for."""
BASELINE = 28
"""Nights that are looked back on, tonight included."""
_LAST_BITS = 1e-12
"""Differences below this are the order of a sum in float64, not a change."""


class Method(StrEnum):
    """How a change was tested."""

    IDENTICAL = "nights_before_identical"
    NIGHTS = "change_point_over_nights"
    DOCUMENTS = "paired_by_document"


@dataclass(frozen=True, kw_only=True)
class Change:
    """The likeliest change of a series that ends tonight.

    Attributes:
        method: What its p-value rests on.
        nights_after: Nights that it has lasted, tonight included.
        nights_before: Nights of the baseline.
        documents: Documents that all of these nights share.
        change: Mean after minus mean before, over documents.
        p_value: Two-sided, corrected for the scales looked at, not yet for the number of series.
    """

    method: Method
    nights_after: int
    nights_before: int
    documents: int
    change: float
    p_value: float


def find_change(
    values: Nights,
    *,
    margin: float = 0.0,
    deterministic: bool = False,
    scales: Sequence[int] = SCALES,
) -> Change | None:
    """Test whether the last nights differ from those before them.

    *Over nights.* For each scale k the mean of the last k nights is compared with that of all nights before, by
    Student's test with pooled variance; each night is one number, its mean over documents. Documents being the same
    every night, their differences cancel, and what moves a whole night (another machine, another seed) is part of the
    noise. The smallest p-value counts, times the number of scales (Bonferroni): for independent normal nights a series
    without a change is flagged at level a with a chance of a at most.

    *By document.* With fewer than 5 nights before tonight, or where nights do not vary at all, noise between nights is
    unknown. Then tonight is compared with the mean of the nights before document by document, and Student's paired
    test asks whether the change exceeds `margin`: what moves all documents of a night by less is no change.

    *Identical.* Where the caller knows that nights without a change agree bit by bit, any difference is a change.

    Args:
        values: One number per night and document, the last row tonight; finite.
        margin: Change that is of no interest, in the unit of `values`.
        deterministic: All nights before tonight agree bit by bit in a continuous quantity, and there are at least two.
        scales: For how many nights the change may have lasted.

    Returns:
        The change, or None where no test can be made.

    Source: the two-sample form of the likelihood ratio test for one change in the mean of a normal sequence; the test
    by document is the two one-sided form for a minimal effect.
    """
    nights, documents = values.shape
    before = nights - 1
    if before < 1 or not documents:
        return None
    if deterministic and before >= 2:
        change = float((values[-1] - values[:-1].mean(axis=0)).mean())
        return _change(values, 1, Method.IDENTICAL, 0.0 if abs(change) > _LAST_BITS else 1.0)
    means = values.mean(axis=1)
    if before >= FEWEST_BEFORE and float(np.ptp(means[:-1])) > _LAST_BITS:
        usable = [k for k in scales if nights - k >= FEWEST_BEFORE]
        p_values = [two_sample_p(means[-k:], means[:-k]) for k in usable]
        best = min(range(len(usable)), key=lambda place: (p_values[place], usable[place]))
        return _change(values, usable[best], Method.NIGHTS, min(1.0, p_values[best] * len(usable)))
    if documents < FEWEST_DOCUMENTS:
        return None
    difference = values[-1] - values[:-1].mean(axis=0)
    return _change(values, 1, Method.DOCUMENTS, one_sample_p(difference, margin=margin))


def two_sample_p(after: Float64[Array[np.float64], " after"], before: Float64[Array[np.float64], " before"]) -> float:
    """Return the two-sided p of Student's two-sample test with pooled variance."""
    count_after, count_before = len(after), len(before)
    freedom = count_after + count_before - 2
    squares = float(((after - after.mean()) ** 2).sum() + ((before - before.mean()) ** 2).sum())
    error = math.sqrt(squares / freedom * (1 / count_after + 1 / count_before))
    return _student_p(abs(float(after.mean() - before.mean())), error, freedom)


def one_sample_p(differences: Float64[Array[np.float64], " documents"], *, margin: float = 0.0) -> float:
    """Return the two-sided p of Student's test that the mean lies further from 0 than `margin`."""
    count = len(differences)
    error = float(differences.std(ddof=1)) / math.sqrt(count)
    return _student_p(abs(float(differences.mean())) - margin, error, count - 1)


def _student_p(distance: float, error: float, freedom: int) -> float:
    if distance <= _LAST_BITS:
        return 1.0
    return 2 * float(special.stdtr(freedom, -distance / error)) if error > 0 else 0.0


def change_interval(values: Nights, nights_after: int, *, seed: int = 0) -> tuple[float, float] | None:
    """Return the 95% interval of a change over documents, each paired with itself; None for fewer than two.

    It says how much documents differ in what happened to them, not how much nights do.

    Args:
        values: One number per night and document, the last row tonight.
        nights_after: Nights that the change has lasted.
        seed: Seed of the resamples.
    """
    by_document = values[-nights_after:].mean(axis=0) - values[:-nights_after].mean(axis=0)
    documents = len(by_document)
    if documents < 2:
        return None
    resampler = DocumentResampler(documents, seed=seed)
    total = resampler.totals([np.array([value]) for value in by_document])
    return ratio_interval(total, resampler.totals([np.ones(1)] * documents), units=documents)


def _change(values: Nights, after: int, method: Method, p_value: float) -> Change:
    means = values.mean(axis=1)
    return Change(
        method=method,
        nights_after=after,
        nights_before=len(values) - after,
        documents=values.shape[1],
        change=float(means[-after:].mean() - means[:-after].mean()),
        p_value=p_value,
    )
