"""Servers as arms: real server processes, asked over HTTP."""

import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from replayeval.errors import ConfigError
from replayeval.tasks import measure_tasks
from replayeval.tasks.endpoint import (
    _length,  # pyright: ignore[reportPrivateUsage]
    parse_endpoint,
)
from replayeval.tasks.records import read_answers
from tests.tasks.fakes import questions

SERVER = Path(__file__).with_name("server.py")

Start = Callable[..., str]


@pytest.fixture
def start() -> Generator[Start]:
    """Start servers, which end with the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*words: str) -> str:
        process = subprocess.Popen([sys.executable, str(SERVER), *words], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return f"http://127.0.0.1:{int(process.stdout.readline())}/v1"

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_two_servers_get_the_same_paired_report(start: Start, tmp_path: Path) -> None:
    urls = {"fp32": start("rule", "1000003"), "fp8": start("rule", "4")}
    data, out = questions(tmp_path / "data", 12), tmp_path / "out"
    report = measure_tasks(
        "rule", ["mmlu_pro"], endpoints=urls, task_data=data, samples=4, out=out, chat_template="off"
    )
    assert (report.reference, report.window, report.model) == ("fp32", None, "rule")
    (task,) = report.tasks
    (arm,) = task.arms
    assert (arm.policy, arm.n, arm.samples, arm.test) == ("fp8", 12, 48, "sign_flip_exact")
    # Question 6 is cut off on both; on the eleven others one seed of four in a row gives a wrong answer.
    assert task.reference.accuracy == pytest.approx(11 / 12)
    assert (task.reference.truncations, arm.truncations) == (4, 4)
    assert (arm.flips_to_wrong, arm.flips_to_right) == (11, 0)
    assert arm.delta_pp == pytest.approx(-100 * 11 / 48)
    assert task.reference.output_tokens_mean == pytest.approx((11 * 7 + 2) / 12)
    kept = {identity["arm"]: records for identity, records in read_answers(out)}
    assert [sample.seed for sample in kept["fp8"][0].samples] == [0, 1, 2, 3]
    # Nothing is missing, so nothing is asked again, and the numbers are the same.
    again = measure_tasks(
        "rule", ["mmlu_pro"], endpoints=urls, task_data=data, samples=4, out=out, chat_template="off", resume=True
    )
    assert again.tasks == report.tasks


def test_a_chat_is_sent_as_messages(start: Start, tmp_path: Path) -> None:
    urls = {"a": start("rule", "1000003")}
    report = measure_tasks("rule", ["mmlu_pro"], endpoints=urls, task_data=questions(tmp_path, 5), seed=3)
    assert report.tasks[0].settings["chat_template"] is True
    assert report.tasks[0].reference.accuracy == 1
    assert report.tasks[0].arms == ()


def test_a_failing_server_is_named_and_answers_are_kept(start: Start, tmp_path: Path) -> None:
    urls = {"good": start("rule", "7"), "bad": start("rule", "5")}
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"bad at http.*400.*--resume"):
        measure_tasks("rule", ["mmlu_pro"], endpoints=urls, task_data=questions(tmp_path / "d", 8), out=out)
    assert {identity["arm"]: len(records) for identity, records in read_answers(out)} == {"good": 8, "bad": 0}


def test_what_no_server_can_do_is_refused_in_words(start: Start) -> None:
    url = start("rule", "7")
    with pytest.raises(ConfigError, match="takes the model's tokenizer"):
        measure_tasks("rule", ["smoke_choice"], endpoints={"a": url}, limit=1)
    with pytest.raises(ConfigError, match=r"a serves rule, not 'other'"):
        measure_tasks("other", ["smoke_recall"], endpoints={"a": url}, limit=1)
    with pytest.raises(ConfigError, match="nothing answers at http://127.0.0.1:9/v1"):
        measure_tasks("rule", ["smoke_recall"], endpoints={"a": "http://127.0.0.1:9/v1"}, limit=1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fp8=http://host:8000/v1", ("fp8", "http://host:8000/v1")),
        ("http://host:8000/v1", ("host:8000", "http://host:8000/v1")),
        ("https://host/v1?key=a=b", ("host", "https://host/v1?key=a=b")),
    ],
)
def test_endpoints_are_read(text: str, expected: tuple[str, str]) -> None:
    assert parse_endpoint(text) == expected


@pytest.mark.parametrize("text", ["", "x", "a=b", "ftp://host/v1", "a=http://"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME=URL"):
        parse_endpoint(text)


@pytest.mark.slow
def test_a_served_checkpoint_answers_as_the_local_one_does(start: Start, tmp_path: Path) -> None:
    model = "builtin:gdn"
    urls = {"a": start(model, "conventional:fp32"), "b": start(model, "shared:nvfp4@L=4")}
    served, local = tmp_path / "served", tmp_path / "local"
    tasks = ["smoke_recall", "smoke_choice"]
    remote = measure_tasks(model, tasks, endpoints=urls, tokenizer=model, limit=4, out=served)
    here = measure_tasks(model, tasks, arms=["shared:nvfp4@L=4"], dtype="float32", limit=4, out=local, device="cpu")
    names = {"a": "conventional:fp32", "b": "shared:nvfp4@L=4"}

    def outputs(path: Path, task: str) -> dict[str, list[tuple[str | None, int | None]]]:
        return {
            names.get(str(identity["arm"]), str(identity["arm"])): [
                (r.samples[0].extracted, r.samples[0].length) for r in records
            ]
            for identity, records in read_answers(path)
            if identity["task"] == task
        }

    assert outputs(served, "smoke_recall") == outputs(local, "smoke_recall")
    # The test server gives the likelihoods of the reference, whichever policy it generates with.
    reference = outputs(local, "smoke_choice")["conventional:fp32"]
    assert set(map(tuple, outputs(served, "smoke_choice").values())) == {tuple(reference)}
    assert remote.tasks[0].reference.accuracy == here.tasks[0].reference.accuracy


def test_an_impossible_length_of_an_answer_is_refused() -> None:
    assert (_length(None), _length(0), _length(7)) == (None, 0, 7)
    for wrong in (-1, True, 2.5, "7"):
        with pytest.raises(ConfigError, match="whole number of completion_tokens"):
            _length(wrong)
