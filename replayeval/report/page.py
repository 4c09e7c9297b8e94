"""A measurement as a piece of HTML for notebooks."""

from html import escape

from rich.console import Console

from replayeval.report.schema import KLReport
from replayeval.report.table import TABLE_WIDTH, KLTable


def kl_html(report: KLReport) -> str:
    """Return the tables of one measurement as HTML; everything that came from outside is escaped."""
    console = Console(width=TABLE_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(KLTable(report))
    failed = [check.name for check in report.checks if check.passed is False]
    warning = f"<p><strong>Failed checks: {escape(', '.join(failed))}</strong></p>" if failed else ""
    return f'<div class="replayeval">{warning}<pre>{escape(capture.get())}</pre></div>'
