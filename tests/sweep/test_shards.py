"""Tasks in shards: whatever their size, order and worker, the record is that of `measure_tasks`."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from replayeval.errors import ConfigError, StoreError
from replayeval.report.tasks_schema import TasksReport
from replayeval.store.sweeps import locate_run
from replayeval.store.units import Unit
from replayeval.sweep import live
from replayeval.sweep.collect import cells, results
from replayeval.sweep.estimate import estimate, estimate_cells
from replayeval.sweep.executors import Event, LocalExecutor, Skip
from replayeval.sweep.grid import TaskCell, expand
from replayeval.sweep.jobs import Job, Measurer
from replayeval.sweep.plan import Plan, parse_plan
from replayeval.sweep.runner import SweepRun, run
from replayeval.sweep.tables import total_line
from replayeval.tasks import measure_tasks
from replayeval.tasks.shards import Outline, TaskOutline, cut, merge, shard_result
from tests.models import tiny
from tests.sweep.synthetic import numbers
from tests.tasks.fakes import FakeArm, number, questions, use

ARMS = ["shared:fp8", "shared:fp16"]
RIGHT, WRONG = "The answer is (B).", "After some thought, the answer is (A)."
EVERYTHING = 10_000


def plan(data: Mapping[str, str], *, shard: int, **changes: Any) -> Plan:
    grid = {"kind": "tasks", "tasks": "mmlu_pro", "arms": ARMS, "shard": shard}
    options = {"task_data": dict(data), **changes.pop("options", {})}
    return parse_plan(
        json.dumps({"name": "shards", "models": ["fake"], "grids": [grid | {"options": options} | changes]})
    )


def fakes(monkeypatch: pytest.MonkeyPatch, *, stop_after: int | None = None) -> list[FakeArm]:
    """Three arms whose answers, lengths and flips differ from document to document and sample to sample."""

    def reference(doc: Mapping[str, Any], sample: int) -> str:
        return "Hm. " * (number(doc) * 7 % 5) + (RIGHT if (number(doc) + sample) % 4 else WRONG)

    def worse(doc: Mapping[str, Any], sample: int) -> str:
        said = {1: WRONG, 2: "I do not know", 3: "cut", 6: WRONG}
        return said.get(number(doc), reference(doc, sample))

    arms = [
        FakeArm("conventional:fp32", reference),
        FakeArm("shared:fp8@L=16", worse, stop_after=stop_after),
        FakeArm("shared:fp16@L=16", lambda doc, _: RIGHT),
    ]
    use(monkeypatch, *arms)
    subject = SimpleNamespace(tokenizer="a tokenizer", layers=(), details={"dtype": "none"})
    pin = SimpleNamespace(revision="f" * 40, weights_sha256=None, tokenizer=SimpleNamespace(chat_template=None))
    monkeypatch.setattr(live, "_pin", lambda _: pin)
    monkeypatch.setattr(live.LiveWorker, "_load", lambda *_: subject)
    return arms


class Backwards:
    """Two workers that take turns, the last unit first."""

    name = "backwards"

    def run(
        self, jobs: Sequence[Job], measurer: Measurer, *, skip: Skip, advanced: Callable[[Event], None]
    ) -> Iterator[Event]:
        for first in (0, 1):
            yield from LocalExecutor().run(list(jobs)[::-1][first::2], measurer, skip=skip, advanced=advanced)


def swept(plan: Plan, store: Path, **options: Any) -> tuple[SweepRun, TasksReport]:
    done = run(plan, store, **options)
    done.raise_failures()
    (report,) = done.results()
    assert isinstance(report, TasksReport)
    return done, report


@pytest.mark.parametrize("samples", [1, 3])
def test_every_shard_size_gives_the_numbers_of_measure_tasks(
    samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes(monkeypatch)
    data = questions(tmp_path / "data", 20, twice=True)
    alone = measure_tasks("fake", ["mmlu_pro"], arms=ARMS, task_data=data, samples=samples, seed=5)
    # The comparison below says something only where everything that could go wrong has a value.
    (arm, _), reference = alone.tasks[0].arms, alone.tasks[0].reference
    assert arm.ci95 and arm.p_holm is not None and arm.truncations and arm.extraction_failures
    assert reference.accuracy not in (0, 1) and len([q for q in arm.by_quartile if q.n]) > 1
    for shard, units in ((1, 21), (3, 7), (EVERYTHING, 1)):
        for executor in (LocalExecutor(), Backwards()) if shard == 3 else (LocalExecutor(),):
            done, report = swept(
                plan(data, shard=shard, seeds=5, options={"samples": samples}),
                tmp_path / f"{shard} {executor.name}",
                executor=executor,
            )
            assert done.measured == units
            assert json.dumps(numbers(report)) == json.dumps(numbers(alone))
            assert cast(Any, report.provenance["sweep"])["units"] == units
            assert report.timing.seconds > 0


def test_the_mean_over_shards_is_not_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong way to merge, which the comparison above must reject: 20 questions are no multiple of 3."""
    fakes(monkeypatch)
    data = questions(tmp_path / "data", 20)
    alone = measure_tasks("fake", ["mmlu_pro"], arms=ARMS, task_data=data).tasks[0]
    done, _ = swept(plan(data, shard=3), tmp_path / "s")
    store, manifest = locate_run(done.path)
    parts = [store.units.read(key).result["shard"] for key in manifest.units]

    def accuracy(result: Mapping[str, Any], arm: int) -> float:
        scores = [answer["by_arm"][arm]["samples"][0]["score"] for answer in result["answers"]]
        return sum(scores) / len(scores)

    whole = [alone.reference.accuracy, *(arm.accuracy for arm in alone.arms)]
    for arm in (0, 1):
        assert sum(accuracy(part, arm) for part in parts) / len(parts) != pytest.approx(whole[arm], abs=1e-6)
    everything = {"answers": [answer for part in parts for answer in part["answers"]]}
    assert [accuracy(everything, arm) for arm in range(3)] == pytest.approx(whole)


def test_a_kill_costs_one_shard_at_most_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = questions(tmp_path / "data", 20)
    fakes(monkeypatch)
    _, undisturbed = swept(plan(data, shard=3), tmp_path / "alone")
    cut_off = fakes(monkeypatch, stop_after=8)  # in the third shard
    with pytest.raises(KeyboardInterrupt):
        run(plan(data, shard=3), tmp_path / "s")
    store, manifest = locate_run(tmp_path / "s")
    assert len(store.units.known()) == 2 and manifest.finished is None
    (partial,) = results(tmp_path / "s")
    assert isinstance(partial, TasksReport)
    assert partial.intervals.caution == "the sweep is not finished: 2 of 7 shards of documents"
    assert (partial.tasks[0].n, partial.tasks[0].dataset["documents"]) == (6, 6)
    assert (partial.tasks[0].caution or "").startswith("the sweep is not finished: 2 of 7 shards of documents")
    assert len(cut_off[1].asked) == 8

    again = fakes(monkeypatch)
    done, report = swept(plan(data, shard=3), tmp_path / "s", resume=True)
    assert (done.measured, done.reused) == (5, 2)
    # Answers of the shard that was killed are kept too: only what is missing is asked.
    assert [len(arm.asked) for arm in again] == [20 - 9, 20 - 8, 20 - 6]
    assert json.dumps(numbers(report)) == json.dumps(numbers(undisturbed))
    assert report.intervals.caution is None


def test_a_partial_record_is_that_of_its_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes(monkeypatch)
    few = measure_tasks("fake", ["mmlu_pro"], arms=ARMS, task_data=questions(tmp_path / "few", 9)).tasks[0]
    data = questions(tmp_path / "data", 20)
    done, _ = swept(plan(data, shard=3), tmp_path / "s")
    store, manifest = locate_run(done.path)
    for key in manifest.units[3:]:
        (tmp_path / "s" / "units" / key[:2] / f"{key}.json").unlink()
    (cell,) = cells(done.path)
    assert isinstance(cell.report, TasksReport) and len(cell.units) == 3
    task = cell.report.tasks[0]
    assert (task.reference, task.arms) == (few.reference, few.arms)


def test_shards_are_fixed_and_addressed_by_what_decides_their_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes(monkeypatch)
    data = questions(tmp_path / "data", 8)

    def keys(**changes: Any) -> list[str]:
        (cell,) = live.LiveMeasurer().prepare(expand(plan(data, **{"shard": 3, **changes})))
        return [job.key for job in cell.jobs]

    base = keys()
    assert len(base) == len(set(base)) == 3 and keys() == base
    assert keys(limit=8) == base  # the same documents
    others: list[dict[str, Any]] = [{"seeds": 1}, {"windows": 8}, {"arms": ARMS[:1]}, {"options": {"samples": 2}}]
    for other in [*others, {"shard": 4}]:
        assert not set(keys(**other)) & set(base), other
    # Another question changes the shard that holds it, and no other.
    file = Path(data["mmlu_pro"])
    file.write_text(file.read_text().replace("Question 7?", "Question 77?"))
    assert [a == b for a, b in zip(keys(), base, strict=True)] == [True, True, False]


def test_a_worker_with_other_documents_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes(monkeypatch)
    data = questions(tmp_path / "data", 8)
    (cell,) = live.LiveMeasurer().prepare(expand(plan(data, shard=3)))
    text = Path(data["mmlu_pro"]).read_text()
    Path(data["mmlu_pro"]).write_text(text.replace("Question 4?", "Question 44?"))
    worker = live.LiveWorker()
    worker.run(cell.jobs[0], lambda _: None)
    with pytest.raises(ConfigError, match="1 of 3 are missing here or asked in other words, .*document 4 of mmlu_pro"):
        worker.run(cell.jobs[1], lambda _: None)


def outline() -> Outline:
    def task(name: str, count: int) -> TaskOutline:
        documents = tuple((index, f"{name}{index}") for index in range(count))
        return TaskOutline(name=name, documents=documents, samples=1, source={"path": name}, settings={})

    tasks = {name: task(name, count) for name, count in (("a", 3), ("b", 1), ("c", 2))}
    return Outline(tasks=tasks, entries=(("group", ("a", "b")), ("c", ())))


def test_shards_hold_every_document_once_and_in_order() -> None:
    whole = outline()
    for size in (1, 2, 3, 4, 6, 7):
        shards = cut(whole, size)
        assert [document for shard in shards for document in shard] == list(whole.documents)
        assert {len(shard) for shard in shards[:-1]} <= {size}


def shard_of(start: int, stop: int, **changes: Any) -> dict[str, Any]:
    from replayeval.tasks.records import AnswerRecord, SampleRecord

    sample = SampleRecord(
        output="x", output_tokens=(1,), length=1, truncated=False, loglikelihoods=None, extracted="x",
        unextracted=False, score=1.0, metric="m", seed=0,
    )  # fmt: skip
    documents = outline().documents[start:stop]
    records: dict[tuple[str, str], dict[int, AnswerRecord]] = {}
    for task, doc_id, prompt in documents:
        record = AnswerRecord(doc_id=doc_id, prompt_sha256=prompt, samples=(sample,), seconds=1.0)
        records.setdefault((task, "ref"), {})[doc_id] = record
    return shard_result(outline(), documents, records, arms=["ref"]) | changes


def test_what_is_merged_is_whole_in_any_order_and_names_only_what_is_there() -> None:
    found, records, arms = merge([shard_of(4, 6), shard_of(0, 2), shard_of(2, 4)])
    assert (found, arms) == (outline(), ["ref"])
    assert sorted(len(by_document) for by_document in records.values()) == [1, 2, 3]
    partly, _, _ = merge([shard_of(0, 2)])
    assert partly.entries == (("group", ("a",)),) and list(partly.tasks) == ["a"]
    alone, _, _ = merge([shard_of(4, 5)])
    assert alone.entries == (("c", ()),)


def test_what_does_not_belong_together_is_not_merged() -> None:
    with pytest.raises(StoreError, match="document 1 of a in two"):
        merge([shard_of(0, 2), shard_of(1, 3)])
    with pytest.raises(StoreError, match="other tasks"):
        merge([shard_of(0, 2), shard_of(2, 4, tasks=[])])
    with pytest.raises(StoreError, match="cannot read"):
        merge([{"arms": ["ref"]}])


def test_a_unit_with_the_answers_of_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes(monkeypatch)
    done, _ = swept(plan(questions(tmp_path / "data", 4), shard=2), tmp_path / "s")
    store, manifest = locate_run(done.path)
    first, second = (store.units.read(key) for key in manifest.units)
    (tmp_path / "s" / "units" / first.key[:2] / f"{first.key}.json").unlink()
    planted = Unit(
        key=first.key, identity=first.identity, content_sha256="", result=second.result, provenance=first.provenance
    )
    store.units.write(planted)
    with pytest.raises(StoreError, match="other documents than its identity names"):
        results(done.path)


def test_a_group_of_generated_and_chosen_answers_on_a_model(tmp_path: Path) -> None:
    """Four tasks, of which one compares choices; no token or likelihood depends on who is asked beside it."""
    torch.set_num_threads(1)
    model = str(tiny.save("qwen3_5", tmp_path / "model"))
    # Rows beside each other are rounded in other ways in other batches, so there is one.
    how: dict[str, Any] = {"gen_kwargs": {"max_gen_toks": 3}, "batch_size": 1}
    alone = measure_tasks(model, ["smoke"], arms=["shared:fp8+sr"], limit=1, seed=3, **how)
    grid = {"kind": "tasks", "tasks": "smoke", "limit": 1, "arms": "shared:fp8+sr", "seeds": 3, "options": how}
    found: list[list[str]] = []
    for shard, units in ((3, 2), (64, 1)):
        asked = parse_plan(json.dumps({"name": "group", "models": [model], "grids": [grid | {"shard": shard}]}))
        done, report = swept(asked, tmp_path / str(shard))
        assert done.measured == units
        assert json.dumps(numbers(report)) == json.dumps(numbers(alone))
        assert report.provenance["versions"] == alone.provenance["versions"]
        shards = [unit.result["shard"] for unit in next(cells(done.path)).units]
        found.append([arm["answers_sha256"] for s in shards for answer in s["answers"] for arm in answer["by_arm"]])
    assert [task.n for task in alone.tasks] == [4, 1, 1, 1, 1] and len(found[0]) == 8
    assert found[0] == found[1]


def test_units_of_a_task_are_unknown_until_its_documents_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes(monkeypatch)
    found = expand(plan(questions(tmp_path / "data", 8), shard=3))
    before = estimate_cells(found)
    assert (before[0].units, before[0].seconds) == (None, None)
    assert total_line(before).startswith("at least 1 units in 1 cells")
    prepared = live.LiveMeasurer().prepare(found)
    after = estimate(prepared, {prepared[0].jobs[0].key}, {})
    assert (after[0].units, after[0].done) == (3, 1)
    assert total_line(after).startswith("3 units in 1 cells; 1 done")


def test_a_cell_of_a_plan_has_shards_of_64_documents_unless_it_says_otherwise() -> None:
    (cell,) = expand(parse_plan("{name: x, models: [a], grids: [{kind: tasks, tasks: t, arms: 'shared:fp8'}]}"))
    assert isinstance(cell, TaskCell) and cell.shard == 64
