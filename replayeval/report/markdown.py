"""Records as one Markdown document, for a pull request or a wiki."""

from collections.abc import Iterator, Sequence

from replayeval.report.cells import Source, bits_of, data_label, lengths_of, provenance_line
from replayeval.report.gate import GateReport
from replayeval.report.schema import KLReport
from replayeval.report.table import DIVERGED, UNDEFINED, short_policy
from replayeval.report.tasks_schema import TasksReport
from replayeval.report.text import counted, percent, printable, tokens_label, with_interval
from replayeval.report.verdict import VerdictTable, limits_text, verdict_tables

MOST_RECORDS = 100
"""Records with a table of their own; the CSV files hold all."""


def report_markdown(sources: Sequence[Source], verdict: GateReport, *, title: str, section: str = "") -> str:
    """Return the verdict, a table per record, and what made each.

    Args:
        sources: The records.
        verdict: What the gate says about them.
        title: Title of the document.
        section: Markdown that stands between the title and the verdict.
    """
    first = [f"# {escaped(title)}", "", *([section, ""] if section else [])]
    return "\n".join([*first, *_lines(sources, verdict)]) + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Return the lines of a Markdown table; the first column is aligned to the left, all others to the right."""
    yield f"| {' | '.join(escaped(column) for column in columns)} |"
    yield f"|{'|'.join([':--', *['--:'] * (len(columns) - 1)])}|"
    for row in rows:
        yield f"| {' | '.join(escaped(value) for value in row)} |"


def escaped(text: str) -> str:
    """Return a foreign text that neither Markdown nor the HTML inside it takes for more than text."""
    text = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{character}" if character in "\\`*_[]|#~$!" else character for character in text)


def _lines(sources: Sequence[Source], verdict: GateReport) -> Iterator[str]:
    yield from (escaped(limits_text(verdict.limits)), "")
    for check in verdict.failed_self_checks:
        yield from (f"**Self-check failed** in {escaped(check.source)}: {escaped(check.name)}.", "")
    for model in verdict_tables(verdict, most_rows=MOST_RECORDS):
        yield from _verdict(model)
    for source in sources[:MOST_RECORDS]:
        if isinstance(source.report, KLReport):
            yield from _kl(source.report)
        else:
            yield from _tasks(source.report)
        intervals = source.report.intervals
        caution = "" if intervals is None or intervals.caution is None else f" Caution: {escaped(intervals.caution)}."
        yield from ("", f"{escaped(source.where)}: {escaped(provenance_line(source.report))}.{caution}", "")
    if len(sources) > MOST_RECORDS:
        yield f"{len(sources) - MOST_RECORDS:,} more records are in the CSV files."


def _verdict(model: VerdictTable) -> Iterator[str]:
    yield from (f"## {escaped(model.name)}", "", f"**{escaped(model.answer)}**", "")
    rows = [
        [
            row.policy + (" (control)" if row.control else ""),
            row.bits,
            *(f"{cell.mark} {cell.value} ({cell.detail})" if cell.value else cell.mark for cell in row.cells),
            f"{row.outcome}{': ' + row.need if row.need else ''}",
        ]
        for row in model.rows
    ]
    yield from table(["policy", "bits", *model.columns, "verdict"], rows)
    yield from ("", *([escaped(model.left_out), ""] if model.left_out else []))


def _kl(report: KLReport) -> Iterator[str]:
    data = data_label(report)
    about = f"{report.model}{', ' + data if data else ''}, window {report.window}, reference {report.reference}"
    size = f"{counted(report.docs, 'document')}, {counted(report.tokens, 'token')}."
    yield from (f"### KL: {escaped(about)}", "", size, "")
    lengths = lengths_of(report)
    rows: list[list[str]] = []
    for arm in sorted(report.arms, key=bits_of):
        cells: list[str] = []
        points = {point.n: point for point in arm.by_length}
        for n in lengths:
            point = points.get(n)
            gone = arm.diverged_at is not None and arm.diverged_at <= n
            if point is None or point.mean is None:
                cells.append(DIVERGED if gone else UNDEFINED)
            else:
                cells.append(f"{with_interval(point.mean, point.ci95)}, n={point.documents}")
        bits = UNDEFINED if arm.bits_per_element is None else f"{arm.bits_per_element:.3g}"
        top1 = UNDEFINED if arm.top1_agreement is None else percent(arm.top1_agreement)
        delta = UNDEFINED if arm.nll_delta is None else with_interval(arm.nll_delta, arm.nll_delta_ci95)
        rows.append([short_policy(arm.policy, window=report.window), bits, *cells, top1, delta])
    yield from table(["policy", "bits", *(f"KL to {tokens_label(n)}" for n in lengths), "top-1", "ΔNLL"], rows)


def _tasks(report: TasksReport) -> Iterator[str]:
    yield from (f"### Tasks: {escaped(report.model)}, reference {escaped(report.reference)}", "")
    rows = [
        [
            arm.policy,
            task.task,
            UNDEFINED if arm.accuracy is None else percent(arm.accuracy),
            UNDEFINED if arm.delta_pp is None else _points(arm.delta_pp, arm.ci95),
            UNDEFINED if arm.p_holm is None else f"{arm.p_holm:.2g}",
            f"{arm.flips_to_wrong} / {arm.flips_to_right}",
            f"{task.n:,}",
        ]
        for task in report.tasks
        for arm in task.arms
    ]
    yield from table(["policy", "task", "accuracy", "Δ pp", "Holm p", "flips wrong / right", "documents"], rows)


def _points(value: float, interval: tuple[float, float] | None) -> str:
    return f"{value:+.2f}" + ("" if interval is None else f" [{interval[0]:+.2f}, {interval[1]:+.2f}]")
