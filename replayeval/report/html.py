"""Records as one self-contained HTML page: verdict first, then interactive plots, numbers and provenance."""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from replayeval.report.cells import Source, bits_of, data_label, is_control, provenance_line
from replayeval.report.gate import GateReport
from replayeval.report.payload import payload
from replayeval.report.published import QUANTITIES, Comparison, citation, published_tables
from replayeval.report.schema import KLReport
from replayeval.report.table import DIVERGED, UNDEFINED
from replayeval.report.tasks_schema import TasksReport
from replayeval.report.text import counted, factor, percent, printable, tokens_label, with_interval
from replayeval.report.verdict import limits_text, verdict_tables

MOST_ROWS = 400
"""Rows of one table in the page; the CSV files hold all."""
MOST_CELLS = 400
"""Records that the page's plots can choose from; the CSV files hold all."""
_TEMPLATES = Path(__file__).parent / "templates"
PLOTS = (
    ("kl", "KL by length.", "Mean KL(reference ‖ arm) over the first N generated tokens. The grey arm is the floor."),
    ("pareto", "Cost against KL.", "Stored bits per state element, scales and every copy included."),
    ("drift", "Drift.", "KL at each position, not averaged over the way there."),
    ("window", "Replay window.", "KL by the number of tokens between two stores of the state."),
    (
        "ratio",
        "Rounding.",
        "KL with rounding to nearest over KL with stochastic rounding; above 1, stochastic is better.",
    ),
    ("top1", "Top-1 agreement.", "Share of tokens whose most probable next token is the reference's."),
    ("nll", "Likelihood.", "Mean NLL of the true tokens above the reference; positive is worse."),
    ("tasks", "Downstream.", "Accuracy against the reference on the same documents, paired."),
    ("quartiles", "By output length.", "The same by quartile of the reference's output length."),
)


def report_html(
    sources: Sequence[Source],
    verdict: GateReport,
    *,
    title: str = "Accuracy of state policies",
    footer: str = "",
    extra: Markup | None = None,
    trends: Sequence[Mapping[str, Any]] = (),
    published: Sequence[Comparison] = (),
) -> str:
    """Return the page.

    It loads nothing: style, scripts and plotly.js are inside, and its content security policy lets no request out and
    no script in other than those. Whatever came from outside is text.

    Args:
        sources: The records.
        verdict: What the gate says about them.
        title: Title of the page.
        footer: Last line of the page.
        extra: Section before the verdict, already escaped.
        published: Published numbers beside what was measured for them.
        trends: Curves over nights, for a page that `replayeval nightly` makes.
    """
    shown = list(sources)[:MOST_CELLS]
    data = payload(shown, verdict.limits) | {"trends": list(trends)}
    has_plots = any(model["cells"] or model["tasks"] for model in data["models"])
    plotly = _plotly() if has_plots else ""
    script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    failed = [(f"Self-check failed: {printable(c.name)}", f"in {printable(c.source)}; its numbers mean nothing.")
              for c in verdict.failed_self_checks]  # fmt: skip
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            title=printable(title),
            subtitle=_subtitle(sources),
            policy=_content_policy(plotly, script),
            css=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
            alerts=failed,
            limits_text=limits_text(verdict.limits),
            verdicts=verdict_tables(verdict, most_rows=MOST_ROWS),
            extra=extra or Markup(""),
            has_plots=has_plots,
            plots=[{"id": f"plot-{name}", "title": title, "text": text} for name, title, text in PLOTS],
            tables=[*_tables(sources), *_published_tables(published)],
            provenance=_provenance(shown),
            provenance_note=_left_out(len(sources), len(shown), "records; provenance is also in the CSV files"),
            footer=footer,
            data=_script_json(data),
            plotly=Markup(plotly),
            script=Markup(script),
        )
    )


def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )


def _plotly() -> str:
    # Reading five megabytes takes a moment, which only pages need.
    from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs]

    text: str = get_plotlyjs()
    if "</script" in text.lower():
        raise RuntimeError("this version of plotly.js cannot stand inside a script element")
    return text


def _content_policy(*scripts: str) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
        if script
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _script_json(data: Any) -> Markup:
    # Inside a script element only these can end it or start a comment; as escapes they stay the same JSON.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _subtitle(sources: Sequence[Source]) -> str:
    models = dict.fromkeys(printable(source.report.model) for source in sources)
    kl = [source.report for source in sources if isinstance(source.report, KLReport)]
    tasks = {task.task for s in sources if isinstance(s.report, TasksReport) for task in s.report.tasks}
    parts = [f"{len(models)} models" if len(models) > 3 else ", ".join(models)]
    if kl:
        documents, tokens = sum(report.docs for report in kl), sum(report.tokens for report in kl)
        size = f"{counted(documents, 'document')} and {counted(tokens, 'token')}"
        parts.append(f"{counted(len(kl), 'KL record')} of {size}")
    if tasks:
        parts.append(f"{len(tasks)} task{'s' * (len(tasks) > 1)}")
    return " · ".join(parts)


def _tables(sources: Sequence[Source]) -> list[dict[str, Any]]:
    tables: list[dict[str, Any]] = []
    kl = [
        row
        for source in sources[:MOST_ROWS]
        if isinstance(source.report, KLReport)
        for row in _kl_rows(source, source.report)
    ]
    total = sum(len(arm.by_length) for s in sources if isinstance(s.report, KLReport) for arm in s.report.arms)
    if kl:
        columns = "policy,N,bits,KL [95%],top-1 [95%],ΔNLL [95%],/floor,documents,tokens,model and data".split(",")
        tables.append(
            {
                "title": "Output distributions",
                "columns": columns,
                "rows": kl[:MOST_ROWS],
                "note": _left_out(total, min(len(kl), MOST_ROWS), "rows; kl.csv holds all"),
                "open": total <= 40,
            }
        )
    tasks = [row for s in sources if isinstance(s.report, TasksReport) for row in _task_rows(s.report)]
    if tasks:
        columns = (
            "policy,task,accuracy,reference,Δ pp [95%],Holm p,flips wrong/right,detectable pp,documents,"
            "output mean/p90,failed/cut,model"
        ).split(",")
        tables.append(
            {
                "title": "Downstream tasks",
                "columns": columns,
                "rows": tasks[:MOST_ROWS],
                "note": _left_out(len(tasks), min(len(tasks), MOST_ROWS), "rows; tasks.csv holds all"),
                "open": len(tasks) <= 40,
            }
        )
    return tables


def _published_tables(comparisons: Sequence[Comparison]) -> Iterator[dict[str, Any]]:
    titles = published_tables()
    for name in dict.fromkeys(found.published.table for found in comparisons):
        rows = [_published_row(found) for found in comparisons if found.published.table == name]
        yield {
            "title": f"Published: {titles[name]}",
            "columns": "policy,model,quantity,at,published,measured [95%],difference,published inside".split(","),
            "rows": rows[:MOST_ROWS],
            "note": f"Source: {citation()}",
            "open": len(rows) <= 40,
        }


def _published_row(found: Comparison) -> list[str]:
    number = found.published
    measured = found.reason or UNDEFINED
    if found.measured is not None:
        bounds = "" if found.ci95 is None else f" [{found.ci95[0]:.3g}, {found.ci95[1]:.3g}]"
        measured = f"{found.measured:.3g}{bounds}"
    inside = {True: "yes", False: "no", None: UNDEFINED}[found.inside]
    return [
        printable(number.policy),
        printable(number.model),
        QUANTITIES.get(number.quantity, number.quantity),
        tokens_label(number.at) if isinstance(number.at, int) else printable(number.at),
        number.note or UNDEFINED if number.value is None else f"{number.value:g}",
        measured,
        UNDEFINED if found.difference is None else f"{found.difference:+.3g}",
        inside,
    ]


def _kl_rows(source: Source, report: KLReport) -> list[list[str]]:
    about = " · ".join(filter(None, (printable(report.model), data_label(report), f"L = {report.window}")))
    rows: list[list[str]] = []
    for arm in sorted(report.arms, key=bits_of):
        for point in arm.by_length:
            gone = arm.diverged_at is not None and arm.diverged_at <= point.n
            missing = DIVERGED if gone else UNDEFINED
            rows.append(
                [
                    printable(arm.policy) + (" (control)" if is_control(arm.policy) else ""),
                    tokens_label(point.n),
                    UNDEFINED if arm.bits_per_element is None else f"{arm.bits_per_element:.3g}",
                    missing if point.mean is None else with_interval(point.mean, point.ci95),
                    missing
                    if point.top1_agreement is None
                    else _percent(point.top1_agreement, point.top1_agreement_ci95),
                    missing if point.nll_delta is None else with_interval(point.nll_delta, point.nll_delta_ci95),
                    missing if point.ratio_to_floor is None else factor(point.ratio_to_floor),
                    f"{point.documents:,}",
                    f"{point.tokens:,}",
                    about,
                ]
            )
    return rows


def _task_rows(report: TasksReport) -> list[list[str]]:
    return [
        [
            printable(arm.policy),
            printable(task.task),
            UNDEFINED if arm.accuracy is None else _percent(arm.accuracy, arm.accuracy_ci95),
            UNDEFINED if task.reference.accuracy is None else percent(task.reference.accuracy),
            UNDEFINED if arm.delta_pp is None else _points(arm.delta_pp, arm.ci95),
            UNDEFINED if arm.p_holm is None else f"{arm.p_holm:.2g}",
            f"{arm.flips_to_wrong} / {arm.flips_to_right}",
            UNDEFINED if arm.mde_pp is None else f"{arm.mde_pp:.1f}",
            f"{task.n:,}",
            f"{_whole(arm.output_tokens_mean)} / {_whole(arm.output_tokens_p90)}",
            f"{_whole(arm.extraction_failures)} / {_whole(arm.truncations)}",
            printable(report.model),
        ]
        for task in report.tasks
        for arm in task.arms
    ]


def _provenance(sources: Sequence[Source]) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    for source in sources:
        report = source.report
        failed = [printable(check.name) for check in report.checks if check.passed is False]
        passed = sum(check.passed is True for check in report.checks)
        not_run = sum(check.passed is None for check in report.checks)
        states = [f"failed: {', '.join(failed)}"] if failed else []
        states += [f"{passed} passed"] if passed else []
        states += [f"{not_run} could not run"] if not_run else []
        intervals = report.intervals
        method = "not recorded"
        if intervals is not None:
            method = f"{intervals.level:.0%}, {printable(intervals.method)}, {intervals.resamples:,} resamples"
            method += f", seed {intervals.seed}"
            if intervals.caution:
                method += f"; caution: {printable(intervals.caution)}"
        rows.append(
            {
                "where": printable(source.where),
                "made_by": provenance_line(report),
                "intervals": method,
                "checks": "; ".join(states) or "none recorded",
                "kind": "fail" if failed else "",
            }
        )
    return rows


def _left_out(total: int, shown: int, what: str) -> str | None:
    return f"Showing {shown:,} of {total:,} {what}." if shown < total else None


def _percent(value: float, interval: tuple[float, float] | None) -> str:
    bounds = "" if interval is None else f" [{', '.join(percent(bound).rstrip('%') for bound in interval)}]"
    return percent(value) + bounds


def _points(value: float, interval: tuple[float, float] | None) -> str:
    return f"{value:+.2f}" + ("" if interval is None else f" [{interval[0]:+.2f}, {interval[1]:+.2f}]")


def _whole(value: float | None) -> str:
    return UNDEFINED if value is None else f"{value:,.0f}"
