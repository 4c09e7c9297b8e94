"""From answers to the record: pool, compare, and say what it cost."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from replayeval.errors import ConfigError
from replayeval.report.schema import Timing
from replayeval.report.tasks_schema import TaskReport, TasksReport
from replayeval.report.tasks_summary import intervals_report, task_report
from replayeval.stats.paired import ArmAnswers, Comparison, caution, compare
from replayeval.tasks.records import SampleRecord
from replayeval.tasks.shards import Outline, Records, TaskOutline


def tally(
    outline: Outline,
    answers: Records,
    *,
    arms: Sequence[str],
    model: str,
    window: int | None,
    seed: int,
    made: Mapping[str, Any],
) -> TasksReport:
    """Compare the arms on all tasks, and on groups with the documents of their members pooled.

    Args:
        outline: The tasks.
        answers: The answers, by task and arm; every document of every task is in them.
        arms: Names of the arms, the reference first.
        model: Where the weights came from.
        window: Default replay window in tokens, or None for servers.
        seed: Seed of the bootstrap.
        made: Provenance.

    Raises:
        ConfigError: There are no tasks.
    """
    reports: list[TaskReport] = []
    comparison: Comparison | None = None
    alone = [name for name, members in outline.entries if not members]
    for name, members in [*((n, m) for n, m in outline.entries if m), *((n, ()) for n in alone)]:
        parts = [outline.tasks[member] for member in (members or (name,))]
        comparison = _compared(arms, parts, answers, seed=seed)
        reports.append(_one_report(name, members, parts, comparison, answers, arms[0]))
        reports.extend(
            _one_report(part.name, (), [part], _compared(arms, [part], answers, seed=seed), answers, arms[0])
            for part in parts
            if members
        )
    if comparison is None:
        raise ConfigError("expected at least one task, got none")
    records = [record for by_document in answers.values() for record in by_document.values()]
    seconds = sum(record.seconds for record in records)
    tokens = sum(sample.length or 0 for record in records for sample in record.samples)
    rate = tokens / seconds if seconds > 0 and tokens else None
    undefined = dict.fromkeys(("tokens_per_s", "tokens_per_s_per_arm"), "no tokens were generated, or none counted")
    memory = {"peak_memory_bytes": "not measured: answers may come from several processes"}
    return TasksReport(
        model=model,
        reference=arms[0],
        window=window,
        tasks=tuple(reports),
        intervals=intervals_report(comparison, seed=seed),
        timing=Timing(
            seconds=seconds,
            tokens_per_s=rate,
            tokens_per_s_per_arm=rate,
            peak_memory_bytes=None,
            notes=memory if rate is not None else {**undefined, **memory},
        ),
        provenance=dict(made),
    )


def _compared(arms: Sequence[str], parts: Sequence[TaskOutline], answers: Records, *, seed: int) -> Comparison:
    reference, *others = [_arm_answers(arm, parts, answers) for arm in arms]
    return compare(reference, others, seed=seed)


def _one_report(
    name: str,
    members: tuple[str, ...],
    parts: Sequence[TaskOutline],
    comparison: Comparison,
    answers: Records,
    reference: str,
) -> TaskReport:
    metrics = sorted({_samples_of(answers, part, reference)[0][0].metric for part in parts})
    samples = {part.samples for part in parts}
    return task_report(
        comparison,
        task=name,
        members=members,
        metric=" or ".join(metrics),
        samples_per_document=samples.pop() if len(samples) == 1 else None,
        dataset=parts[0].dataset if not members else {},
        settings=parts[0].settings if not members else {},
        caution=caution(comparison),
    )


def _samples_of(answers: Records, task: TaskOutline, arm: str) -> list[tuple[SampleRecord, ...]]:
    records = answers[task.name, arm]
    return [records[doc_id].samples for doc_id, _ in task.documents]


def _arm_answers(arm: str, parts: Sequence[TaskOutline], answers: Records) -> ArmAnswers:
    documents = [samples for part in parts for samples in _samples_of(answers, part, arm)]

    def column(name: str, kind: type[Any]) -> list[Any] | None:
        values = [[getattr(sample, name) for sample in samples] for samples in documents]
        if not values or any(value is None for row in values for value in row):
            return None
        return [np.array(row, dtype=kind) for row in values]

    return ArmAnswers(
        policy=arm,
        scores=column("score", np.float64) or [],
        output_tokens=column("length", np.float64),
        unextracted=column("unextracted", np.bool_),
        truncated=column("truncated", np.bool_),
    )
