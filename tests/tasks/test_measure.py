"""From arms to the record: pairing, resumption, reuse; with arms that answer by rule."""

import json
from pathlib import Path
from typing import Any

import pytest

from replayeval.errors import ConfigError, StoreError
from replayeval.report.tasks_schema import TasksReport
from replayeval.tasks import measure_tasks
from replayeval.tasks.records import read_answers
from tests.tasks.fakes import FakeArm, number, questions, use

RIGHT, WRONG = "The answer is (B).", "After some thought, the answer is (A)."


def reference(**options: Any) -> FakeArm:
    return FakeArm("conventional:fp32", lambda doc, _: RIGHT if number(doc) % 4 else WRONG, **options)


def worse(**options: Any) -> FakeArm:
    """Wrong where the reference is, and on three questions more; says nothing on one of them, is cut off on another."""
    said = {1: WRONG, 2: "I do not know", 3: "cut"}
    return FakeArm(
        "shared:fp8@L=16",
        lambda doc, _: said.get(number(doc), RIGHT if number(doc) % 4 else WRONG),
        **options,
    )


def better(**options: Any) -> FakeArm:
    return FakeArm("shared:fp16@L=16", lambda doc, _: RIGHT, **options)


def test_flips_failures_and_lengths_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, reference(), worse(), better())
    report = measure_tasks("fake", ["mmlu_pro"], task_data=questions(tmp_path, 20))
    (task,) = report.tasks
    assert (task.task, task.metric, task.n, task.samples_per_document) == (
        "mmlu_pro",
        "exact_match,stated-letter",
        20,
        1,
    )
    assert task.reference.accuracy == 15 / 20
    low, high = task.arms
    assert (low.flips_to_wrong, low.flips_to_right, low.discordant) == (3, 0, 3)
    assert low.delta_pp == pytest.approx(-15)
    assert low.mcnemar_p == low.p_value == pytest.approx(2 / 8)
    assert (low.extraction_failures, low.truncations) == (1, 1)
    assert (high.flips_to_wrong, high.flips_to_right) == (0, 5)
    assert high.mcnemar_p == pytest.approx(2 / 32)
    assert (low.p_holm, high.p_holm) == (pytest.approx(2 / 8), pytest.approx(4 / 32))
    assert high.output_tokens_mean == len(RIGHT)
    assert task.reference.output_tokens_mean == pytest.approx((15 * len(RIGHT) + 5 * len(WRONG)) / 20)
    # Fifteen short answers are up to the median and the upper quartile, five long ones beyond.
    assert [q.n for q in low.by_quartile] == [15, 0, 0, 5]
    assert task.caution is not None
    assert TasksReport.from_json(report.to_json()) == report


def test_several_samples_are_all_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = FakeArm("shared:fp8@L=16", lambda doc, sample: RIGHT if sample % 2 else WRONG)
    always = FakeArm("conventional:fp32", lambda doc, sample: RIGHT)
    use(monkeypatch, always, half)
    report = measure_tasks("fake", ["mmlu_pro"], task_data=questions(tmp_path, 10), samples=4)
    arm = report.tasks[0].arms[0]
    assert (arm.n, arm.samples, arm.accuracy, arm.flips_to_wrong, arm.discordant) == (10, 40, 0.5, 20, 10)
    assert arm.test == "sign_flip_exact"
    assert arm.p_value == pytest.approx(2 / 2**10)
    assert arm.mcnemar_p is None
    assert "p_value" in arm.notes["mcnemar_p"]


def test_an_interrupted_run_asks_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = questions(tmp_path / "data", 20), tmp_path / "out"
    cut = worse(stop_after=7)
    use(monkeypatch, reference(), cut)
    with pytest.raises(KeyboardInterrupt):
        measure_tasks("fake", ["mmlu_pro"], task_data=data, out=out)
    again, rest = reference(), worse()
    use(monkeypatch, again, rest)
    resumed = measure_tasks("fake", ["mmlu_pro"], task_data=data, out=out, resume=True)
    assert again.asked == []
    assert sorted(cut.asked + rest.asked) == list(range(20))
    use(monkeypatch, reference(), worse())
    straight = measure_tasks("fake", ["mmlu_pro"], task_data=data)
    assert resumed.tasks == straight.tasks
    assert TasksReport.load(out / "report.json").tasks == straight.tasks


def test_a_later_arm_reuses_the_answers_of_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = questions(tmp_path / "data", 12), tmp_path / "out"
    use(monkeypatch, reference(), worse())
    measure_tasks("fake", ["mmlu_pro"], task_data=data, out=out)
    first, new = reference(), better()
    use(monkeypatch, first, new)
    report = measure_tasks("fake", ["mmlu_pro"], task_data=data, out=out, resume=True)
    assert (len(first.asked), len(new.asked)) == (0, 12)
    assert [arm.policy for arm in report.tasks[0].arms] == ["shared:fp16@L=16"]
    kept = {identity["arm"]: len(records) for identity, records in read_answers(out)}
    assert kept == {"conventional:fp32": 12, "shared:fp8@L=16": 12, "shared:fp16@L=16": 12}


def test_more_documents_add_to_those_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = questions(tmp_path / "data", 30), tmp_path / "out"
    use(monkeypatch, reference(), better())
    measure_tasks("fake", ["mmlu_pro"], task_data=data, out=out, limit=10)
    more = reference()
    use(monkeypatch, more, better())
    report = measure_tasks("fake", ["mmlu_pro"], task_data=data, out=out, limit=25, resume=True)
    assert len(more.asked) == 15
    assert report.tasks[0].n == 25


def test_records_hold_what_was_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    use(monkeypatch, reference(), worse())
    measure_tasks("fake", ["mmlu_pro"], task_data=questions(tmp_path / "data", 4), out=out, samples=2)
    records = {identity["arm"]: records for identity, records in read_answers(out)}["shared:fp8@L=16"]
    by_number = {record.doc_id: record for record in records}
    first, second = by_number[2].samples
    assert (first.output, first.extracted, first.unextracted, first.score) == ("I do not know", "[invalid]", True, 0.0)
    assert (first.length, first.truncated, first.seed, second.seed) == (13, False, 0, 1)
    assert first.output_tokens == tuple(range(13))
    assert len(by_number[2].prompt_sha256) == 64
    assert by_number[3].samples[0].truncated is True


def test_a_prompt_that_occurs_twice_is_not_asked_twice_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Within one portion the second occurrence would count as a second sample of the first.
    arm = reference(rows=64)
    use(monkeypatch, arm, better(rows=64))
    report = measure_tasks("fake", ["mmlu_pro"], task_data=questions(tmp_path, 6, twice=True))
    assert report.tasks[0].n == 7
    assert [len(portion) for portion in arm.portions] == [6, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "already holds answers"),
        ({"resume": True, "weights": "other"}, 'weights: "w" in the directory, "other" now'),
        ({"resume": True, "gen_kwargs": {"temperature": 1.0}}, "temperature: 0.6 in the directory, 1.0 now"),
        ({"resume": True, "other_data": True}, "asked in other words"),
    ],
)
def test_answers_of_another_kind_are_never_mixed(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = questions(tmp_path / "data", 4), tmp_path / "out"
    use(monkeypatch, reference(), better())
    measure_tasks("fake", ["mmlu_pro"], task_data=data, out=out)
    use(monkeypatch, reference(), better(), weights=options.pop("weights", "w"))
    if options.pop("other_data", False):
        content = Path(data["mmlu_pro"]).read_text(encoding="utf-8")
        Path(data["mmlu_pro"]).write_text(content.replace("Question 2?", "Question 9?"), encoding="utf-8")
    with pytest.raises(StoreError, match=message):
        measure_tasks("fake", ["mmlu_pro"], task_data=data, out=out, **options)


def test_groups_pool_their_members_and_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = FakeArm("conventional:fp32", lambda doc, _: doc.get("answer", "No or yes") + ".")
    none = FakeArm("shared:fp8@L=16", lambda doc, _: "no")
    use(monkeypatch, lengths, none)
    report = measure_tasks("fake", ["smoke_recall", "smoke_needle"], limit=3)
    assert [task.task for task in report.tasks] == ["smoke_recall", "smoke_needle"]
    assert report.tasks[0].reference.accuracy == 0  # the full stop belongs to no answer, and a fake cuts off nothing
    group = measure_tasks("fake", ["ruler_4k"], task_data={"ruler": str(_ruler(tmp_path))})
    assert group.tasks[0].task == "ruler_4k"
    assert len(group.tasks[0].members) == 13
    assert group.tasks[0].n == 26
    assert (group.tasks[0].reference.accuracy, group.tasks[0].arms[0].accuracy) == (1, pytest.approx(15 / 26))
    assert group.tasks[0].arms[0].test == "sign_flip_exact"  # half an answer is no flip
    assert [task.task for task in group.tasks[1:]] == list(group.tasks[0].members)


def _ruler(folder: Path) -> Path:
    from replayeval.tasks.ruler import KINDS

    for name in KINDS.values():
        file = folder / "4096" / "data" / name / "validation.jsonl"
        file.parent.mkdir(parents=True)
        lines = [{"index": i, "input": f"{name} {i}", "outputs": ["no", "yes"]} for i in range(2)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["gpqa_dimond"]}, "did you mean gpqa_diamond"),
        ({"tasks": ["smoke"], "chat_template": "maybe"}, "auto, on, off"),
        ({"tasks": ["smoke"], "resume": True}, "directory to resume"),
        ({"tasks": []}, "at least one task"),
        ({"tasks": ["smoke"], "endpoints": {"a": "http://x/v1"}, "precision": "fp8"}, "either endpoints or"),
    ],
)
def test_bad_input_is_refused_in_words(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure_tasks("fake", **options)
