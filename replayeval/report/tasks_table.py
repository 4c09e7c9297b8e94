"""Accuracies of tasks as tables that fit a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from replayeval.report.table import TABLE_WIDTH, UNDEFINED, short_policy
from replayeval.report.tasks_schema import Answers, TaskArm, TaskReport, TasksReport
from replayeval.report.text import printable

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class TasksTable:
    """The tables of one measurement, for a rich console: one per task; members of a group are left to the record.

    Attributes:
        report: The measurement.
        width: Widest line in columns.
    """

    report: TasksReport
    width: int = TABLE_WIDTH

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the tables and what has to be said about them."""
        yield Text(
            f"{printable(self.report.model)}: reference {printable(self.report.reference)}"
            + ("" if self.report.window is None else f", window {self.report.window}")
        )
        members = {member for task in self.report.tasks for member in task.members}
        for task in self.report.tasks:
            if task.task not in members:
                yield task_table(task, window=self.report.window)
        yield Text(_caption(self.report), style="dim")


def task_table(task: TaskReport, *, window: int | None) -> Table:
    """Return the table of one task: the reference first, then the arms."""
    table = Table(
        box=box.SIMPLE_HEAD, title=Text(_title(task)), title_justify="left", pad_edge=False, padding=(0, 1, 0, 0)
    )
    lengths = any(answers.output_tokens_mean is not None for answers in (task.reference, *task.arms))
    extracts = any(answers.extraction_failures is not None for answers in (task.reference, *task.arms))
    names = ["arm", "accuracy", "change, pp [95%]", "flips -/+", "p", "p Holm", "MDE"]
    names += ["tokens, p90"] * lengths + ["none/cut"] * (lengths or extracts)
    for index, name in enumerate(names):
        table.add_column(Text(name), no_wrap=True, justify="right" if index else "left")
    for answers in (task.reference, *task.arms):
        cells = [short_policy(answers.policy, window=window or 0), _percent(answers.accuracy)]
        cells += _compared(answers) if isinstance(answers, TaskArm) else [""] * 5
        cells += [_lengths(answers)] * lengths + [_failures(answers)] * (lengths or extracts)
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _title(task: TaskReport) -> str:
    parts = [f"{printable(task.task)}: {task.n:,} documents"]
    if task.samples_per_document not in (None, 1):
        parts.append(f"{task.samples_per_document} samples each")
    if task.members:
        parts.append(f"{len(task.members)} tasks together")
    return ", ".join([*parts, printable(task.metric)])


def _compared(arm: TaskArm) -> list[str]:
    change = UNDEFINED if arm.delta_pp is None else f"{arm.delta_pp:+.1f}"
    if arm.ci95 is not None:
        change += f" [{arm.ci95[0]:+.1f}, {arm.ci95[1]:+.1f}]"
    return [
        change,
        f"{arm.flips_to_wrong}/{arm.flips_to_right}",
        _probability(arm.p_value),
        _probability(arm.p_holm) + ("*" if arm.p_holm is not None and arm.p_holm <= SIGNIFICANT else " "),
        UNDEFINED if arm.mde_pp is None else f"{arm.mde_pp:.1f}",
    ]


def _lengths(answers: Answers) -> str:
    if answers.output_tokens_mean is None or answers.output_tokens_p90 is None:
        return UNDEFINED
    return f"{_tokens(answers.output_tokens_mean)}, {_tokens(answers.output_tokens_p90)}"


def _tokens(count: float) -> str:
    return f"{count:.0f}" if count < 10_000 else f"{count / 1000:.1f}k"


def _failures(answers: Answers) -> str:
    return "/".join("-" if n is None else str(n) for n in (answers.extraction_failures, answers.truncations))


def _percent(fraction: float | None) -> str:
    return UNDEFINED if fraction is None else f"{100 * fraction:.1f}%"


def _probability(p: float | None) -> str:
    if p is None:
        return UNDEFINED
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def _caption(report: TasksReport) -> str:
    lines = [
        "change: accuracy minus the reference's on the same documents, in percentage points, with a bootstrap interval "
        "clustered by document. flips: answers that got worse/better.",
        _tests(report.tasks),
        "p Holm: corrected over the arms of a task, * at most 0.05. MDE: smallest true change in points found 80% of "
        "the time. none/cut: answers without anything to extract/cut off at the token limit.",
    ]
    lines += [f"{printable(task.task)}: {printable(task.caution)}." for task in report.tasks if task.caution]
    return " ".join(line for line in lines if line)


def _tests(tasks: Sequence[TaskReport]) -> str:
    tests = {arm.test for task in tasks for arm in task.arms}
    said: list[str] = []
    if "mcnemar_exact" in tests:
        said.append("McNemar's exact test")
    if tests & {"sign_flip_exact", "sign_flip_monte_carlo"}:
        said.append("sign flips of documents' differences where a document has several samples or partial scores")
    return f"p: {'; '.join(said)}." if said else ""
