"""A sweep of a built-in model gives, bit by bit, what `measure_kl` gives."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replayeval.errors import ConfigError, StoreError
from replayeval.measure import measure_kl
from replayeval.report.tasks_schema import TasksReport
from replayeval.sweep.collect import cells
from replayeval.sweep.grid import KLCell, expand
from replayeval.sweep.jobs import KLJob, attempt
from replayeval.sweep.live import LiveMeasurer, LiveWorker
from replayeval.sweep.plan import parse_plan
from replayeval.sweep.runner import run
from tests.models import tiny
from tests.sweep.synthetic import numbers

ARMS = ["shared:fp32", "shared:fp8+sr", "separate:nvfp4/fp16+sr@L=5"]


def text(model: Path | str, source: Path | str, **changes: Any) -> str:
    grid = {
        "kind": "kl",
        "data": str(source),
        "lengths": [16, 40],
        "docs": 3,
        "windows": [8],
        "chunk": 16,
        "arms": ARMS,
    }
    return json.dumps({"name": "live", "models": [str(model)], "grids": [grid | changes]})


@pytest.fixture
def inputs(tmp_path: Path) -> tuple[Path, Path]:
    """A tiny model, and three documents of which one is short."""
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    data = tmp_path / "data"
    data.mkdir()
    for number, tokens in enumerate((60, 30, 60)):
        np.save(data / f"{number}.npy", generator.integers(0, 256, tokens))
    return tiny.save("qwen3_5", tmp_path / "model"), data


def test_the_records_and_tokens_are_those_of_the_command_for_one_measurement(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    model, data = inputs
    done = run(parse_plan(text(model, data, windows=[8, 3], seeds=[7], prefill=4)), tmp_path / "s")
    done.raise_failures()
    found = list(cells(done.path))
    assert [(c.cell.settings["window"], c.cell.settings["seed"]) for c in found] == [(8, 7), (3, 7)]
    for cell in found:
        settings = cell.cell.settings
        alone = measure_kl(
            str(model), arms=ARMS, data=str(data), lengths=[16, 40], docs=3, chunk=16, prefill=4,
            window=settings["window"], seed=settings["seed"],
        )  # fmt: skip
        assert numbers(cell.report) == numbers(alone.report)
        for a, b in zip(cell.scores, alone.scores, strict=True):
            for name in ("kl_nats", "nll_nats", "nll_reference_nats", "top1_agrees"):
                assert getattr(a, name).tobytes() == getattr(b, name).tobytes()
        assert cell.report.provenance["data"] == str(data)
        assert alone.report.provenance["attention"] == "sdpa"
        for key in ("states", "attention"):
            assert cell.report.provenance[key] == alone.report.provenance[key]
        assert cell.report.provenance["model"] == alone.report.provenance["model"]
    assert numbers(found[0].report)["arms"][1]["kl"] != numbers(found[1].report)["arms"][1]["kl"]


def test_what_changes_numbers_changes_the_key_and_what_does_not_does_not(inputs: tuple[Path, Path]) -> None:
    model, data = inputs
    measurer = LiveMeasurer()

    def keys(**changes: Any) -> list[str]:
        (cell,) = measurer.prepare(expand(parse_plan(text(model, data, **changes))))
        return [job.key for job in cell.jobs]

    base = keys()
    assert len(set(base)) == 3
    for same in ({"chunk": 8}, {"lengths": [8, 40]}, {"docs": 3, "windows": [8]}):
        assert keys(**same) == base
    for other in ({"seeds": [1]}, {"windows": [4]}, {"prefill": 1}, {"engine": "step"}, {"arms": ARMS[:2]}):
        assert not set(keys(**other)) & set(base), other
    assert {c["backend"] for c in (job.identity for job in _jobs(measurer, text(model, data)))} == {"torch"}
    assert not set(keys(backend="triton")) & set(base)
    # The short document is read whole either way; the others are read less far.
    shorter = keys(lengths=[16, 35])
    assert [a == b for a, b in zip(shorter, base, strict=True)] == [False, True, False]
    assert keys(docs=2) == base[:2]


def _jobs(measurer: LiveMeasurer, plan: str) -> Any:
    (cell,) = measurer.prepare(expand(parse_plan(plan)))
    return cell.jobs


def test_weights_that_changed_change_the_key_and_are_refused_by_a_worker(inputs: tuple[Path, Path]) -> None:
    model, data = inputs
    (before,) = LiveMeasurer().prepare(expand(parse_plan(text(model, data))))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    (after,) = LiveMeasurer().prepare(expand(parse_plan(text(model, data))))
    assert not {job.key for job in before.jobs} & {job.key for job in after.jobs}
    with pytest.raises(StoreError, match="are not those that the sweep was planned with"):
        LiveWorker().run(before.jobs[0], lambda _: None)


def test_what_cannot_be_measured_is_named_before_anything_runs(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    model, data = inputs
    plan = parse_plan(text(model, data, data=[str(data), str(tmp_path / "nowhere")], lengths=[500]))
    with pytest.raises(ConfigError) as caught:
        LiveMeasurer().prepare(expand(plan))
    message = str(caught.value)
    assert "nowhere" in message and "500" in message


def test_ids_beyond_the_vocabulary_are_a_failure_in_words(inputs: tuple[Path, Path]) -> None:
    model, data = inputs
    np.save(data / "1.npy", np.full(60, 10_000))
    # Without a tokenizer nobody knows the vocabulary until the model is loaded.
    for file in model.glob("tokenizer*"):
        file.unlink()
    (cell,) = LiveMeasurer().prepare(expand(parse_plan(text(model, data))))
    job = cell.jobs[1]
    assert isinstance(job, KLJob) and isinstance(job.cell, KLCell)
    outcome = attempt(LiveWorker(), job, lambda _: None)
    assert getattr(outcome, "kind", None) == "input"
    assert "expected token ids of 0 to" in getattr(outcome, "text", "")


@pytest.mark.slow
def test_a_shard_of_a_task_is_a_unit_and_keeps_its_answers(tmp_path: Path) -> None:
    plan = parse_plan(
        json.dumps(
            {
                "name": "tasks",
                "models": ["builtin:gdn"],
                "grids": [{"kind": "tasks", "tasks": "smoke", "limit": 1, "arms": "shared:fp8"}],
            }
        )
    )
    done = run(plan, tmp_path)
    done.raise_failures()
    (report,) = done.results()
    assert isinstance(report, TasksReport) and report.tasks[0].arms[0].policy == "shared:fp8@L=16"
    assert list((tmp_path / "answers").rglob("*.jsonl"))
    again = run(plan, tmp_path, resume=True)
    assert (again.measured, again.reused) == (0, 1)
    assert again.results() == done.results()
