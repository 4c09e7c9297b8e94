"""`replayeval report`: records as a page, Markdown, CSV files and figures."""

from pathlib import Path
from typing import Annotated

import typer

from replayeval.cli import gate, run_inputs, values
from replayeval.cli.session import say
from replayeval.errors import ConfigError

EXAMPLES = """\b
Examples:
  replayeval report runs/a
  replayeval report kl.json tasks.json runs/sweep --out report --max-kl 1e-3 --at 8K
"""


def run(
    runs: run_inputs.Runs,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory of the report.")] = Path("report"),
    title: Annotated[str, typer.Option(metavar="TEXT", help="Title of the report.")] = "Accuracy of state policies",
    max_kl: gate.MaxKL = None,
    min_top1: gate.MinTop1 = None,
    max_nll_delta: gate.MaxNllDelta = None,
    max_drop: gate.MaxDrop = None,
    at: gate.At = None,
    min_docs: gate.MinDocs = gate.DEFAULT_MIN_DOCS,
) -> None:
    """Write a report: which policies pass which limits, cheapest first, and every number behind it.

    Without limits it asks for KL <= 1e-3, top-1 >= 0.995, and accuracy no more than a point below the reference.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out: expected a directory, got the file {values.shown(out)}.")
    asked = gate.limits(
        max_kl=max_kl,
        min_top1=min_top1,
        max_nll_delta=max_nll_delta,
        max_drop=max_drop,
        at=at,
        min_docs=min_docs,
        required=False,
    )
    sources = run_inputs.load_sources(runs)

    from replayeval.report import gate as judge
    from replayeval.report.gate_output import summary
    from replayeval.report.schema import KLReport
    from replayeval.report.verdict import default_limits
    from replayeval.report.write import write_report

    if not any((asked.of_distributions, asked.max_drop is not None)):
        kl = [isinstance(source.report, KLReport) for source in sources]
        defaults = default_limits(kl=any(kl), tasks=not all(kl))
        asked = defaults.model_copy(update={"at": asked.at, "fewest_documents": asked.fewest_documents})
    verdict = judge.gate(sources, asked)
    published = run_inputs.load_published(runs, sources)
    page = write_report(out, sources, verdict, title=title, footer=_footer(), published=published)
    say(summary(verdict))
    print(page)


def _footer() -> str:
    from datetime import UTC, datetime
    from importlib.metadata import version

    return f"replayeval {version('replayeval')}, {datetime.now(UTC).strftime('%Y-%m-%d %H:%M')} UTC"
