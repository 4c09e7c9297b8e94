"""Accuracies of tasks as tables that fit a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
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
                yield from task_tables(task, window=self.report.window)
        yield Text(_caption(self.report), style="dim")


def task_tables(task: TaskReport, *, window: int | None) -> list[Table]:
    """Return the tables of one task, the reference first: accuracies, then outputs where they are generated."""
    rows: list[Answers] = [task.reference, *task.arms]
    arms = ("arm", [short_policy(answers.policy, window=window or 0) for answers in rows])
    compared = [_compared(answers) for answers in rows]
    names = ("change, pp [95%]", "flips -/+", "p", "p Holm", "MDE")
    columns: list[tuple[str, list[str]]] = [arms, ("accuracy", [_percent(answers.accuracy) for answers in rows])]
    columns += [(name, [cells[index] for cells in compared]) for index, name in enumerate(names)]
    tables = [_table(columns, title=_title(task))]
    if any(answers.output_tokens_mean is not None or answers.extraction_failures is not None for answers in rows):
        outputs = [
            arms,
            ("mean tokens", [_tokens(answers.output_tokens_mean) for answers in rows]),
            ("p90", [_tokens(answers.output_tokens_p90) for answers in rows]),
            ("no answer", [_count(answers.extraction_failures) for answers in rows]),
            ("cut off", [_count(answers.truncations) for answers in rows]),
        ]
        tables.append(_table(outputs, title="Outputs"))
    return tables


def _table(columns: Sequence[tuple[str, list[str]]], *, title: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=Text(title), title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
    for index, (name, cells) in enumerate(columns):
        # A cell that is cut would lose digits, so a console too narrow breaks lines instead.
        width = max(cell_len(text) for text in (name, *cells))
        table.add_column(Text(name), no_wrap=True, min_width=width, justify="right" if index else "left")
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*(Text(cell) for cell in row))
    return table


def _title(task: TaskReport) -> str:
    parts = [f"{printable(task.task)}: {task.n:,} document{'' if task.n == 1 else 's'}"]
    if task.samples_per_document not in (None, 1):
        parts.append(f"{task.samples_per_document} samples each")
    if task.members:
        parts.append(f"{len(task.members)} tasks together")
    return ", ".join([*parts, printable(task.metric)])


def _compared(answers: Answers) -> list[str]:
    if not isinstance(answers, TaskArm):
        return [""] * 5
    change = UNDEFINED if answers.delta_pp is None else f"{answers.delta_pp:+z.1f}"
    if answers.ci95 is not None:
        change += f" [{answers.ci95[0]:+z.1f}, {answers.ci95[1]:+z.1f}]"
    return [
        change,
        f"{answers.flips_to_wrong}/{answers.flips_to_right}",
        _probability(answers.p_value),
        _probability(answers.p_holm) + ("*" if answers.p_holm is not None and answers.p_holm <= SIGNIFICANT else " "),
        UNDEFINED if answers.mde_pp is None else f"{answers.mde_pp:.1f}",
    ]


def _tokens(count: float | None) -> str:
    if count is None:
        return UNDEFINED
    return f"{count:.0f}" if count < 10_000 else f"{count / 1000:.1f}k"


def _count(count: int | None) -> str:
    return UNDEFINED if count is None else str(count)


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
        "the time. no answer: outputs that ended without one that could be extracted; cut off: at the token limit.",
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
