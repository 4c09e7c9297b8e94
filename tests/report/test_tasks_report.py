"""The record of tasks and its tables."""

import json
from io import StringIO
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from replayeval.errors import ConfigError
from replayeval.report.schema import Intervals, KLReport, Timing
from replayeval.report.tasks_schema import Answers, QuartileAccuracy, TaskArm, TaskReport, TasksReport
from replayeval.report.tasks_table import TasksTable
from tests.report.samples import two_arms


def answers(policy: str, accuracy: float | None = 0.75) -> dict[str, object]:
    return {
        "policy": policy,
        "n": 198,
        "samples": 198,
        "accuracy": accuracy,
        "accuracy_ci95": (0.69, 0.81),
        "output_tokens_mean": 10_340.0,
        "output_tokens_p90": 26_700.0,
        "extraction_failures": 2,
        "truncations": 5,
    }


def arm(policy: str = "shared:fp8+sr@L=16", **changes: object) -> TaskArm:
    quartile = QuartileAccuracy(
        quartile=1, n=50, reference_tokens=(1, 2), accuracy_reference=0.8, accuracy=0.7, delta_pp=-10, ci95=(-20, 1)
    )
    values: dict[str, object] = {
        **answers(policy),
        "delta_pp": -2.0202,
        "ci95": (-5.55, 1.01),
        "p_value": 0.0386,
        "test": "mcnemar_exact",
        "mcnemar_p": 0.0386,
        "p_holm": 0.0772,
        "flips_to_wrong": 10,
        "flips_to_right": 2,
        "discordant": 12,
        "mde_pp": 6.43,
        "by_quartile": (quartile,),
    }
    return TaskArm.model_validate(values | changes)


def task(name: str = "gpqa_diamond", *arms: TaskArm, members: tuple[str, ...] = (), **changes: object) -> TaskReport:
    values: dict[str, object] = {
        "task": name,
        "members": members,
        "metric": "exact_match",
        "n": 198,
        "samples_per_document": 1,
        "dataset": {},
        "settings": {},
        "reference": Answers.model_validate(answers("conventional:fp32", 0.7702)),
        "arms": arms,
    }
    return TaskReport.model_validate(values | changes)


def report(*tasks: TaskReport) -> TasksReport:
    return TasksReport(
        model="m\x1b[31m",
        reference="conventional:fp32",
        window=16,
        tasks=tasks,
        intervals=Intervals(level=0.95, method="documents_bca", resamples=4000, seed=0, caution=None),
        timing=Timing(seconds=1, tokens_per_s=None, tokens_per_s_per_arm=None, peak_memory_bytes=None),
        provenance={},
    )


def shown(record: TasksReport, width: int = 100) -> str:
    console = Console(width=width, record=True, file=StringIO())
    console.print(TasksTable(record))
    return console.export_text()


def test_a_record_reads_back_and_says_what_it_is() -> None:
    record = report(task("gpqa_diamond", arm()))
    text = record.to_json()
    assert next(iter(json.loads(text))) == "schema"
    assert json.loads(text)["schema"] == "replayeval.tasks/1"
    assert TasksReport.from_json(text) == record


def test_the_two_kinds_of_records_are_not_mistaken_for_each_other() -> None:
    with pytest.raises(ConfigError, match=r"not a replayeval\.kl/1 record"):
        KLReport.from_json(report(task()).to_json())
    with pytest.raises(ConfigError, match=r"not a replayeval\.tasks/1 record"):
        TasksReport.from_json(two_arms().to_json())


@pytest.mark.parametrize(
    "change",
    [{"accuracy": 1.5}, {"p_value": float("nan")}, {"flips_to_wrong": -1}, {"delta_pp": 101}, {"test": "t"}, {"x": 1}],
)
def test_impossible_numbers_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        arm(**change)


def test_the_table_shows_every_number_and_fits() -> None:
    text = shown(report(task("gpqa_diamond", arm(), arm("separate:nvfp4/fp16+sr@L=16", p_holm=0.0001, p_value=0.0001))))
    for expected in (
        "gpqa_diamond: 198 documents, exact_match",
        "75.0%",
        "-2.0 [-5.5, +1.0]",
        "10/2",
        "0.039",
        "0.077",
        "1e-04*",
        "6.4",
        "10.3k",
        "26.7k",
        "shared:fp8+sr ",
        "McNemar's exact test",
    ):
        assert expected in text, expected
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "\x1b" not in text
    assert "@L=16" not in text


def test_undefined_numbers_are_said_to_be_so() -> None:
    undefined = arm(delta_pp=None, ci95=None, p_value=None, p_holm=None, mcnemar_p=None, test=None, mde_pp=None)
    text = shown(report(task("x", undefined)))
    assert text.count("n/a") == 4


def test_members_of_a_group_are_left_to_the_record_and_cautions_shown() -> None:
    group = task("ruler_4k", arm(), members=("ruler_4k_vt", "ruler_4k_cwe"), caution="few documents differ")
    text = shown(report(group, task("ruler_4k_vt", arm()), task("ruler_4k_cwe", arm())))
    assert "ruler_4k: 198 documents, 2 tasks together" in text
    assert "ruler_4k_vt:" not in text
    assert "few documents differ" in text
