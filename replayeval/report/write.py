"""A report as a directory: the page, Markdown, CSV files and figures."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from replayeval.errors import ConfigError, StoreError
from replayeval.report import rows
from replayeval.report.cells import Source
from replayeval.report.figures import figures
from replayeval.report.gate import GateReport
from replayeval.report.html import report_html
from replayeval.report.markdown import report_markdown
from replayeval.report.published import Comparison
from replayeval.report.text import printable
from replayeval.store.files import Folder

PAGE = "index.html"
FIGURES = "figures"


def write_report(
    out: Path,
    sources: Sequence[Source],
    verdict: GateReport,
    *,
    title: str = "Accuracy of state policies",
    footer: str = "",
    markdown: str = "",
    published: Sequence[Comparison] = (),
    **page: Any,
) -> Path:
    """Write a report into a directory and return the path of its page.

    Files of an earlier report there are replaced, one at a time and each in one step.

    Args:
        out: Directory, made with its parents where missing.
        sources: The records.
        verdict: What the gate says about them.
        title: Title of the report.
        footer: Last line of the page.
        markdown: Section after the title of the Markdown document.
        published: Published numbers beside what was measured for them.
        page: Further arguments of `report_html`.

    Raises:
        ConfigError: The directory cannot be written.
    """
    tables = {
        "verdict.csv": rows.verdict_rows(verdict),
        "kl.csv": rows.kl_rows(sources),
        "drift.csv": rows.drift_rows(sources),
        "rounding.csv": rows.ratio_rows(sources),
        "tasks.csv": rows.task_rows(sources),
        "quartiles.csv": rows.quartile_rows(sources),
        "published.csv": rows.published_rows(published),
    }
    folder = Folder(out)
    try:
        for name, content in tables.items():
            text = rows.csv_text(content)
            if text is None:
                (out / name).unlink(missing_ok=True)
            else:
                folder.write(name, text.encode())
        folder.write("verdict.json", (verdict.to_json() + "\n").encode())
        folder.write("report.md", report_markdown(sources, verdict, title=title, section=markdown).encode())
        _write_figures(out, sources)
        html = report_html(sources, verdict, title=title, footer=footer, published=published, **page)
        folder.write(PAGE, html.encode())
    except (OSError, StoreError) as error:
        raise ConfigError(f"cannot write the report to {printable(str(out))}: {error}. Choose another --out.") from None
    return out / PAGE


def _write_figures(out: Path, sources: Sequence[Source]) -> None:
    folder = Folder(out / FIGURES)
    wanted: set[str] = set()
    for name, figure in figures(sources):
        for kind in ("png", "svg"):
            content = io.BytesIO()
            # Without a date the same records give the same file.
            metadata = {"Date": None} if kind == "svg" else {}
            cast(Any, figure).savefig(content, format=kind, dpi=150, metadata=metadata)
            folder.write(f"{name}.{kind}", content.getvalue())
            wanted.add(f"{name}.{kind}")
    for old in [*(out / FIGURES).glob("*.png"), *(out / FIGURES).glob("*.svg")]:
        if old.name not in wanted:
            old.unlink()
