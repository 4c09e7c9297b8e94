"""Tonight against the nights before: which series changed, with the chance of a false finding kept below a bound."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64

from replayeval.arrays import Array
from replayeval.nightly.cells import name_of
from replayeval.nightly.record import Finding, Kind, Metric, NightCell, NightRecord, Series
from replayeval.report.text import tokens_label
from replayeval.stats.history import ALPHA, BASELINE, FEWEST_DOCUMENTS, SCALES, Change, change_interval, find_change
from replayeval.stats.sign_flip import holm

TOLERANCE = 0.05
"""Relative change of KL that is of no interest."""
SMALLEST = {Metric.FLIPS: 5e-4, Metric.NLL: 1e-4, Metric.DROP: 0.5}
"""Changes of the other metrics that are of no interest: a share of tokens, nats per token, percentage points."""
LOWEST_KL = 1e-9
"""KL in nats that is read as this at least: below it lies the rounding of float32 logits."""
_STILL = 0.05

Matrix = Float64[Array[np.float64], "nights documents"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a night says about its series."""

    findings: tuple[Finding, ...]
    tested: int
    untested: int


@dataclass(kw_only=True)
class _Past:
    """What earlier nights say about one series.

    Attributes:
        level: Name of the first night at the present level, or an empty text for the first of all.
        bad_since: Name of the first night of a regression that is still open.
        left_out: Nights of regressions that were resolved.
    """

    level: str = ""
    bad_since: str | None = None
    left_out: set[str] = field(default_factory=set[str])


@dataclass(frozen=True, kw_only=True)
class _Test:
    """One series tonight: its past and what its test says."""

    series: Series
    label: str
    past: _Past
    nights: tuple[str, ...]
    values: Matrix
    margin: float
    change: Change


def compare(
    cells: Sequence[NightCell],
    history: Sequence[NightRecord],
    *,
    night: str,
    alpha: float = ALPHA,
    tolerance: float = TOLERANCE,
) -> Comparison:
    """Compare a night with those before it.

    Every series is tested (`replayeval.stats.history.find_change`) against the nights at its present level; nights of a
    regression belong to no level. The p-values of all series together are corrected by Holm's method, so that a night
    without any change has a finding with a chance of `alpha` at most. A change counts when its corrected p-value is at
    most `alpha` and it is larger than what is of interest. An open regression is tested alone against its old level;
    it is resolved when tonight is within tolerance of it or the test no longer tells them apart.

    Args:
        cells: Tonight's cells.
        history: The nights before, oldest first.
        night: Tonight's name.
        alpha: Chance of any false finding.
        tolerance: Relative change of KL that is of no interest.
    """
    findings: list[Finding] = []
    fresh: list[_Test] = []
    untested = 0
    for cell in cells:
        before = [(record.night, old) for record in history for old in record.cells if old.key == cell.key]
        for series in _series(cell):
            past = _past(series, history)
            if _diverged(cell, series):
                findings += _divergence(cell, series, past, before, night)
                continue
            made = _test(cell, series, past, before, night=night, tolerance=tolerance)
            if made is None:
                untested += bool(past.bad_since is None)
                if past.bad_since is not None:
                    findings.append(_unclear(cell, series, past))
            elif past.bad_since is not None:
                findings.append(_still_open(made))
            else:
                fresh.append(made)
    for test, p_holm in zip(fresh, holm([test.change.p_value for test in fresh]), strict=True):
        if p_holm is not None and p_holm <= alpha and abs(test.change.change) > test.margin:
            kind = Kind.REGRESSION if test.change.change > 0 else Kind.IMPROVEMENT
            since = (*test.nights, night)[-test.change.nights_after]
            findings.append(_finding(test, kind, since=since, p_holm=p_holm, after=test.change.nights_after))
    order = list(Kind)
    findings.sort(key=lambda f: (order.index(f.kind), f.label, f.series.policy, f.series.metric, f.series.where))
    return Comparison(findings=tuple(findings), tested=len(fresh), untested=untested)


def trend(series: Series, nights: Sequence[tuple[str, NightCell]]) -> list[tuple[str, float]]:
    """Return the mean over documents, night by night, in the unit of the metric: geometric for KL."""
    points: list[tuple[str, float]] = []
    for name, cell in nights:
        values = [value for value in _values(cell, series).values() if value is not None]
        if values:
            mean = float(np.mean([_scaled(series.metric, value) for value in values]))
            points.append((name, math.exp(mean) if series.metric is Metric.KL else mean))
    return points


def _series(cell: NightCell) -> Iterator[Series]:
    for policy, numbers in cell.values.items():
        for name in numbers:
            metric, _, where = name.partition("/")
            yield Series(cell=cell.key, policy=policy, metric=Metric(metric), where=where)


def _values(cell: NightCell, series: Series) -> Mapping[str, float | None]:
    numbers = cell.values.get(series.policy, {}).get(name_of(series.metric, series.where))
    return {} if numbers is None else dict(zip(cell.documents, numbers, strict=True))


def _past(series: Series, history: Sequence[NightRecord]) -> _Past:
    past = _Past()
    for record in history:
        for finding in record.findings:
            if finding.series.id != series.id:
                continue
            if finding.kind in (Kind.REGRESSION, Kind.OPEN):
                past.bad_since = finding.since
            elif finding.kind is Kind.RESOLVED and past.bad_since is not None:
                past.left_out |= {r.night for r in history if past.bad_since <= r.night < record.night}
                past.bad_since = None
            elif finding.kind is Kind.IMPROVEMENT:
                past.level = finding.since
        if past.bad_since is not None and any(accepted.id == series.id for accepted in record.accepted):
            past.level, past.bad_since = past.bad_since, None
    return past


def _test(
    cell: NightCell,
    series: Series,
    past: _Past,
    before: Sequence[tuple[str, NightCell]],
    *,
    night: str,
    tolerance: float,
) -> _Test | None:
    usable = [
        (name, old)
        for name, old in before
        if name >= past.level
        and name not in past.left_out
        and (past.bad_since is None or name < past.bad_since)
        and not _diverged(old, series)
        and any(value is not None for value in _values(old, series).values())
    ]
    now = {document: value for document, value in _values(cell, series).items() if value is not None}
    common, kept = set(now), list[tuple[str, NightCell]]()
    fewest = min(FEWEST_DOCUMENTS, len(now))
    for name, old in reversed(usable[-(BASELINE - 1) :]):
        shared = common & {document for document, value in _values(old, series).items() if value is not None}
        # A night on other documents is left out, instead of thinning out what is compared; those before it count.
        if not shared or len(shared) < fewest:
            continue
        common = shared
        kept.insert(0, (name, old))
    if not kept:
        return None
    documents = [document for document in cell.documents if document in common]
    rows = [[_values(old, series)[document] for document in documents] for _, old in kept]
    rows.append([now[document] for document in documents])
    values = np.array([[_scaled(series.metric, value) for value in row if value is not None] for row in rows])
    exact = {old.exact.get(series.policy) for _, old in kept}
    margin = math.log1p(tolerance) if series.metric is Metric.KL else SMALLEST[series.metric]
    change = find_change(
        values,
        margin=margin,
        deterministic=len(exact) == 1 and None not in exact,
        scales=SCALES if past.bad_since is None else (1,),
    )
    if change is None:
        return None
    return _Test(
        series=series,
        label=cell.label,
        past=past,
        nights=tuple(name for name, _ in kept),
        values=values,
        margin=margin,
        change=change,
    )


def _scaled(metric: Metric, value: float) -> float:
    return math.log(max(value, LOWEST_KL)) if metric is Metric.KL else value


def _diverged(cell: NightCell, series: Series) -> bool:
    at = cell.diverged.get(series.policy)
    return series.metric is not Metric.DROP and at is not None and at <= int(series.where)


def _divergence(
    cell: NightCell, series: Series, past: _Past, before: Sequence[tuple[str, NightCell]], night: str
) -> Iterator[Finding]:
    had = [old for _, old in before if any(value is not None for value in _values(old, series).values())]
    text = f"diverged before generation length {tokens_label(int(series.where))}"
    if past.bad_since is not None:
        yield _plain(cell, series, Kind.OPEN, since=past.bad_since, text=text)
    elif had and not _diverged(before[-1][1], series):
        yield _plain(cell, series, Kind.REGRESSION, since=night, text=f"{text}, and did not before")


def _unclear(cell: NightCell, series: Series, past: _Past) -> Finding:
    text = "too little is left to compare it with; accept it as the new level, or measure the old documents again"
    return _plain(cell, series, Kind.OPEN, since=past.bad_since or "", text=text)


def _plain(cell: NightCell, series: Series, kind: Kind, *, since: str, text: str) -> Finding:
    return Finding(
        series=series,
        label=cell.label,
        kind=kind,
        since=since,
        method=None,
        before=None,
        now=None,
        change=None,
        ci95=None,
        p_value=None,
        p_holm=None,
        nights_before=0,
        documents=0,
        text=text,
    )


def _still_open(test: _Test) -> Finding:
    worse = test.change.change > test.margin and test.change.p_value <= _STILL
    since = test.past.bad_since or ""
    return _finding(test, Kind.OPEN if worse else Kind.RESOLVED, since=since, p_holm=None, after=1)


def _finding(test: _Test, kind: Kind, *, since: str, p_holm: float | None, after: int) -> Finding:
    ratio = test.series.metric is Metric.KL
    before, now = float(test.values[:-after].mean()), float(test.values[-1].mean())
    interval = change_interval(test.values, test.change.nights_after)
    return Finding(
        series=test.series,
        label=test.label,
        kind=kind,
        since=since,
        method=test.change.method,
        before=math.exp(before) if ratio else before,
        now=math.exp(now) if ratio else now,
        change=math.exp(test.change.change) if ratio else test.change.change,
        ci95=interval if interval is None or not ratio else (math.exp(interval[0]), math.exp(interval[1])),
        p_value=test.change.p_value,
        p_holm=p_holm,
        nights_before=test.change.nights_before,
        documents=test.change.documents,
    )
