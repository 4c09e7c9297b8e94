"""A report as a directory: the page, Markdown, CSV files and figures."""

import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
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
MARKER = "report-files.json"
"""Lists the files that reports wrote into the folder: these alone are replaced or deleted by the next one."""
MARKER_SCHEMA = "replayeval.report_files/1"
ALWAYS = (PAGE, "report.md", "verdict.json", MARKER)
"""Files that every report has."""


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

    Files of an earlier report there are replaced, one at a time and each in one step, and those that this one has not
    are deleted. No other file is touched.

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
        ConfigError: The directory cannot be written, or a file that no report wrote is in the way.
    """
    files: dict[str, bytes] = {}
    tables = {
        "verdict.csv": rows.verdict_rows(verdict),
        "kl.csv": rows.kl_rows(sources),
        "drift.csv": rows.drift_rows(sources),
        "rounding.csv": rows.ratio_rows(sources),
        "tasks.csv": rows.task_rows(sources),
        "quartiles.csv": rows.quartile_rows(sources),
        "published.csv": rows.published_rows(published),
    }
    for name, content in tables.items():
        text = rows.csv_text(content)
        if text is not None:
            files[name] = text.encode()
    files["verdict.json"] = (verdict.to_json() + "\n").encode()
    files["report.md"] = report_markdown(sources, verdict, title=title, section=markdown).encode()
    files.update(_figures(sources))
    html = report_html(sources, verdict, title=title, footer=footer, published=published, **page)
    files[PAGE] = html.encode()
    check_folder(out, files)
    old = _written(out)
    folder = Folder(out)
    try:
        # Listed before they are there: an interrupted report leaves no file that the next one would not dare replace.
        _mark(folder, old | files.keys())
        for name, content in files.items():
            folder.write(name, content)
        for name in old - files.keys():
            (out / name).unlink(missing_ok=True)
        _mark(folder, files)
    except (OSError, StoreError) as error:
        raise ConfigError(f"cannot write the report to {printable(str(out))}: {error}. Choose another --out.") from None
    return out / PAGE


def check_folder(out: Path, names: Iterable[str] = ()) -> None:
    """Refuse a folder in which a report would overwrite what no report wrote.

    Args:
        out: The folder, which need not exist.
        names: Files that the report has besides those that all have.

    Raises:
        ConfigError: One of the files is there, and no report wrote it.
    """
    known = _written(out)
    if known:
        known.add(MARKER)
    foreign = sorted(name for name in {*ALWAYS, *names} - known if os.path.lexists(out / name))
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise ConfigError(
            f"{printable(str(out))} holds {printable(foreign[0])}{more}, which no report wrote there: expected a "
            f"new folder, or that of a report. Choose another one with --out, or move "
            f"{'them' if len(foreign) > 1 else 'it'} away."
        )


def _written(out: Path) -> set[str]:
    """Return the files that the marker of a folder lists; none where it has no marker of ours."""
    try:
        content: Any = json.loads((out / MARKER).read_text(encoding="utf-8"))
        names = cast(list[object], content["files"]) if content["schema"] == MARKER_SCHEMA else []
    except (OSError, ValueError, RecursionError, KeyError, TypeError, IndexError):
        return set()
    # A marker from elsewhere must not name files outside of its folder.
    return {name for name in names if isinstance(name, str) and _inside(name)}


def _inside(name: str) -> bool:
    parts = name.split("/")
    return (len(parts) == 1 or (len(parts) == 2 and parts[0] == FIGURES)) and not {"", ".", ".."} & set(parts)


def _mark(folder: Folder, names: Iterable[str]) -> None:
    folder.write_json(MARKER, {"schema": MARKER_SCHEMA, "files": sorted(names)})


def _figures(sources: Sequence[Source]) -> Iterator[tuple[str, bytes]]:
    for name, figure in figures(sources):
        for kind in ("png", "svg"):
            content = io.BytesIO()
            # Without a date the same records give the same file.
            metadata = {"Date": None} if kind == "svg" else {}
            cast(Any, figure).savefig(content, format=kind, dpi=150, metadata=metadata)
            yield f"{FIGURES}/{name}.{kind}", content.getvalue()
