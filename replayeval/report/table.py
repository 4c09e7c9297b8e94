"""A measurement as tables that fit a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from replayeval.report.schema import ArmReport, KLAtLength, KLReport
from replayeval.report.text import factor, percent, printable, tokens_label, with_interval

TABLE_WIDTH = 100
UNDEFINED = "n/a"
DIVERGED = "div."
_PADDING = 1
_GAP = _PADDING + 1  # and the box's own blank between two columns
_MARGIN = 1

Column: TypeAlias = tuple[str, Sequence[str]]


@dataclass(frozen=True)
class KLTable:
    """The tables of one measurement, for a rich console.

    One table when all lengths fit; otherwise the first keeps the longest length and the others follow in tables of
    their own. Names from outside are escaped.

    Attributes:
        report: The measurement.
        width: Widest line in columns; a narrower console folds more lengths away.
    """

    report: KLReport
    width: int = TABLE_WIDTH

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Fold for the console at hand."""
        yield from kl_tables(self.report, width=min(self.width, options.max_width))


def kl_tables(report: KLReport, *, width: int) -> list[Table]:
    """Return the tables that `KLTable` shows at one width."""
    policy = ("policy", [short_policy(arm.policy, window=report.window) for arm in report.arms])
    lengths = sorted({point.n for arm in report.arms for point in arm.by_length})
    by_length = [_length_column(report, n) for n in lengths]
    before = [policy, ("bits", [_optional(arm.bits_per_element, "{:.3g}") for arm in report.arms])]
    after = [
        ("top-1", [_optional_fraction(arm.top1_agreement) for arm in report.arms]),
        ("dNLL", [_optional(arm.nll_delta, "{:+.1e}") for arm in report.arms]),
        ("/floor", [UNDEFINED if arm.ratio_to_floor is None else factor(arm.ratio_to_floor) for arm in report.arms]),
    ]
    everything = [*before, *by_length, *after]
    if _width(everything) <= width or len(by_length) <= 1:
        tables = [_table(everything, title=_title(report))]
    else:
        tables = [_table([*before, *by_length[-1:], *after], title=_title(report))]
        for index, columns in enumerate(_folded(policy, by_length, width=width)):
            tables.append(_table(columns, title=None if index else "Mean KL by generation length"))
    tables[-1].caption = Text(_caption(report, lengths), style="dim")
    return tables


def short_policy(policy: str, *, window: int) -> str:
    """Return a policy text for a table whose title already names the window."""
    return printable(policy.removesuffix(f"@L={window}"))


def _title(report: KLReport) -> str:
    return (
        f"{printable(report.model)}: {report.docs} document{'s' if report.docs != 1 else ''}, "
        f"{report.tokens:,} tokens, window {report.window}, reference {printable(report.reference)}"
    )


def _caption(report: KLReport, lengths: Sequence[int]) -> str:
    lines = ["KL(reference || arm) in nats per token up to each length [95% interval]; dNLL in nats per token."]
    documents = {n: _documents_at(report, n) for n in lengths}
    if len(set(documents.values())) > 1:
        counts = ", ".join(f"{tokens_label(n)}: {count}" for n, count in documents.items())
        lines.append(f"Documents that reach each length: {counts}.")
    if any(arm.diverged_at is not None for arm in report.arms):
        lines.append(f"{DIVERGED}: the state or an output stopped being finite before that length.")
    reasons = {arm.notes.get("ratio_to_floor") for arm in report.arms if arm.diverged_at is None}
    lines += [f"No ratio to the floor: {printable(reason)}." for reason in sorted(filter(None, reasons))]
    if report.intervals is not None and report.intervals.caution is not None:
        lines.append(f"Intervals: {printable(report.intervals.caution)}.")
    return " ".join(lines)


def _documents_at(report: KLReport, n: int) -> int:
    return max((point.documents for arm in report.arms for point in arm.by_length if point.n == n), default=0)


def _length_column(report: KLReport, n: int) -> Column:
    cells: list[str] = []
    for arm in report.arms:
        point = next((point for point in arm.by_length if point.n == n), None)
        cells.append(UNDEFINED if point is None else _kl_cell(arm, point))
    return f"KL to {tokens_label(n)}", cells


def _kl_cell(arm: ArmReport, point: KLAtLength) -> str:
    if arm.diverged_at is not None and arm.diverged_at <= point.n:
        return DIVERGED
    return UNDEFINED if point.mean is None else with_interval(point.mean, point.ci95)


def _optional(value: float | None, form: str) -> str:
    return UNDEFINED if value is None else form.format(value)


def _optional_fraction(value: float | None) -> str:
    return UNDEFINED if value is None else percent(value)


def _width(columns: Sequence[Column]) -> int:
    cells = (max(cell_len(text) for text in (title, *cells)) for title, cells in columns)
    return 2 * _MARGIN + sum(width + _GAP for width in cells)


def _folded(first: Column, columns: Sequence[Column], *, width: int) -> list[list[Column]]:
    """Cut `columns` into as few tables as fit `width`, each led by `first`."""
    tables: list[list[Column]] = []
    for column in columns:
        if tables and _width([*tables[-1], column]) <= width:
            tables[-1].append(column)
        else:
            tables.append([first, column])
    return tables


def _table(columns: Sequence[Column], *, title: str | None) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=None if title is None else Text(title),
        title_justify="left",
        caption_justify="left",
        pad_edge=False,
        padding=(0, _PADDING, 0, 0),
    )
    for index, (name, cells) in enumerate(columns):
        # A cell that is cut would lose digits, so a console too narrow for one length breaks lines instead.
        width = max(cell_len(text) for text in (name, *cells))
        table.add_column(Text(name), no_wrap=True, min_width=width, justify="right" if index else "left")
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*(Text(cell) for cell in row))
    return table
