"""What a night adds to a report: the list of changes, and the trends over nights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from replayeval.nightly.compare import trend
from replayeval.nightly.record import Finding, Kind, Metric, NightRecord, Series
from replayeval.report.cells import AnyReport, PolicyText, Source, is_control, provenance_line
from replayeval.report.markdown import escaped, table
from replayeval.report.table import short_policy
from replayeval.report.text import counted, percent, printable, scientific, tokens_label
from replayeval.stats.history import BASELINE, Method

MOST_TRENDS = 400
"""Series whose trend the page can draw; all numbers are in the records of the nights."""
NAMES = {Metric.KL: "KL", Metric.FLIPS: "top-1 flips", Metric.NLL: "ΔNLL", Metric.DROP: "accuracy drop"}
_METHODS = {
    None: "no test needed",
    Method.IDENTICAL: "nights before agree bit by bit",
    Method.NIGHTS: "change point over nights",
    Method.DOCUMENTS: "paired by document",
}
_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, kw_only=True)
class NightPage:
    """What `replayeval.report.write.write_report` takes for a night."""

    sources: list[Source]
    section: Markup
    markdown: str
    trends: list[dict[str, Any]]
    footer: str


def night_page(nights: Sequence[NightRecord], reports: Sequence[AnyReport]) -> NightPage:
    """Return the parts of the report of the last of some nights.

    Args:
        nights: Nights, oldest first.
        reports: The records of the cells of the last one, in their order.
    """
    record = nights[-1]
    headline, kind = headline_of(record)
    section = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    ).get_template("night.html.j2")
    # Cells of one model and text differ by their label alone; the label tells their records apart.
    sources = [
        Source(report=report, where=printable(f"{record.night}: {cell.label}"))
        for cell, report in zip(record.cells, reports, strict=True)
    ]
    return NightPage(
        sources=sources,
        section=Markup(
            section.render(
                headline=headline,
                kind=kind,
                columns=_COLUMNS,
                rows=[_row(finding) for finding in record.findings],
                note=note(record, len(nights)),
                restarted=[printable(text) for text in record.restarted],
            )
        ),
        markdown="\n".join(_markdown(record, len(nights))),
        trends=_trends(nights),
        footer=f"Night {record.night}, {counted(len(nights), 'night')} looked at; {provenance_line(reports[0])}",
    )


def headline_of(record: NightRecord) -> tuple[str, str]:
    """Return the night in one sentence, and its kind: `pass`, `fail` or `undecided`."""
    new = [finding for finding in record.findings if finding.kind is Kind.REGRESSION]
    still = [finding for finding in record.findings if finding.kind is Kind.OPEN]
    better = [finding for finding in record.findings if finding.kind in (Kind.IMPROVEMENT, Kind.RESOLVED)]
    parts = [f"{len(new)} new regression{'s' * (len(new) != 1)}"] if new else []
    parts += [f"{len(still)} regression{'s' * (len(still) != 1)} still open"] if still else []
    parts += [f"{len(better)} improved or resolved"] if better else []
    if parts:
        return f"{', '.join(parts)}.", "fail" if new or still else "pass"
    if not record.tested:
        return "Nothing to compare with yet.", "undecided"
    return f"No change in {record.tested} series.", "pass"


def finding_line(finding: Finding) -> str:
    """Return one finding as a line of text."""
    policy, _, what, change, before, since, cell, test = _row(finding)
    told = f"{change} ({before})" if finding.change is not None else finding.text
    return f"{finding.kind:<11} {policy}, {what}, {cell}: {told}, since {since}; {test}"


def note(record: NightRecord, nights: int) -> str:
    """Return how findings come about, with the chance of a false one."""
    untested = f" {untested_text(record)}" if record.untested else ""
    earlier = counted(nights - 1, "earlier night")
    return (
        f"{record.tested} series were tested against up to {BASELINE - 1} of {earlier}. In a night "
        f"without any change the chance of a false finding is at most {record.alpha:.2g} over all series together, for "
        f"independent nights. KL changes of less than {100 * record.tolerance:g}% do not count.{untested}"
    )


def untested_text(record: NightRecord) -> str:
    """Return how many series were not tested, in one sentence."""
    return (
        f"{record.untested} series {'was' if record.untested == 1 else 'were'} not tested: too few earlier nights "
        "share enough documents."
    )


_COLUMNS = ("policy", "kind", "number", "change [95%]", "before → tonight", "since", "cell", "test")


def _row(finding: Finding) -> tuple[str, ...]:
    metric = finding.series.metric
    where = finding.series.where
    place = printable(where) if metric is Metric.DROP else tokens_label(int(where))
    what = f"{NAMES[metric]} {'in' if metric is Metric.DROP else 'to'} {place}"
    if finding.change is None:
        change, levels = finding.text, ""
    else:
        change = _change(metric, finding.change, finding.ci95)
        levels = f"{_value(metric, finding.before)} → {_value(metric, finding.now)}"
    p = "" if finding.p_holm is None else f", p = {finding.p_holm:.1e} after Holm"
    nights, documents = counted(finding.nights_before, "night"), counted(finding.documents, "document")
    basis = f"{nights}, {documents}" if finding.documents else ""
    test = "; ".join(filter(None, (_METHODS[finding.method] + p, basis)))
    since = f"{finding.since[:10]} {finding.since[11:16].replace('-', ':')}"
    policy, cell = printable(finding.series.policy), printable(finding.label)
    return policy, str(finding.kind), what, change, levels, since, cell, test


def _change(metric: Metric, change: float, interval: tuple[float, float] | None) -> str:
    if metric is Metric.KL:
        bounds = "" if interval is None else f" [{_percent(interval[0])}, {_percent(interval[1])}]"
        return _percent(change) + bounds
    form = {Metric.FLIPS: "{:+.3%}", Metric.NLL: "{:+.1e}", Metric.DROP: "{:+.2f} pp"}[metric]
    bounds = "" if interval is None else f" [{form.format(interval[0])}, {form.format(interval[1])}]"
    return form.format(change) + bounds


def _percent(ratio: float) -> str:
    return f"x{ratio:.3g}" if ratio >= 3 or ratio <= 1 / 3 else f"{100 * (ratio - 1):+.1f}%"


def _value(metric: Metric, value: float | None) -> str:
    if value is None:
        return "n/a"
    if metric is Metric.FLIPS:
        return percent(value) if value else "0%"
    return f"{value:.2f} pp" if metric is Metric.DROP else scientific(value)


def _markdown(record: NightRecord, nights: int) -> Iterator[str]:
    headline, _ = headline_of(record)
    yield from ("## Changes", "", f"**{escaped(headline)}**", "", escaped(note(record, nights)), "")
    if record.findings:
        yield from table(_COLUMNS, [_row(finding) for finding in record.findings])
        yield ""
    yield from (f"- {escaped(text)}" for text in record.restarted)


def _trends(nights: Sequence[NightRecord]) -> list[dict[str, Any]]:
    """Return curves over nights: those with findings first, then the longest length of every arm."""
    record = nights[-1]
    windows = {cell.key: cell.window for cell in record.cells}
    shown: dict[tuple[str, ...], tuple[Series, str, str]] = {}
    for finding in record.findings:
        shown[finding.series.id] = (finding.series, finding.label, str(finding.kind))
    for cell in record.cells:
        for policy, numbers in cell.values.items():
            name = [key for key in numbers if key.startswith((f"{Metric.KL}/", f"{Metric.DROP}/"))][-1:]
            for metric, _, where in (key.partition("/") for key in name):
                series = Series(cell=cell.key, policy=policy, metric=Metric(metric), where=where)
                shown.setdefault(series.id, (series, cell.label, ""))
    by_key: dict[str, list[tuple[str, Any]]] = {}
    for night in nights[-4 * BASELINE :]:
        for cell in night.cells:
            by_key.setdefault(cell.key, []).append((night.night, cell))
    curves: list[dict[str, Any]] = []
    for series, label, kind in list(shown.values())[:MOST_TRENDS]:
        policy, window = PolicyText.parse(series.policy), windows[series.cell]
        where = printable(series.where) if series.metric is Metric.DROP else tokens_label(int(series.where))
        curves.append(
            {
                "group": f"{NAMES[series.metric]}, {printable(label)}, {where}",
                "log": series.metric is Metric.KL,
                "policy": printable(series.policy) if window is None else short_policy(series.policy, window=window),
                "format": printable(policy.read),
                "sr": policy.stochastic,
                "sharing": policy.sharing,
                "control": is_control(series.policy),
                "kind": kind,
                "points": [[name, float(f"{value:.5g}")] for name, value in trend(series, by_key[series.cell])],
            }
        )
    return curves
