"""`replayeval tasks` and `replayeval power`."""

import json
from pathlib import Path

import pytest

from replayeval.cli import main
from replayeval.report.tasks_schema import TasksReport
from replayeval.stats.power import mcnemar_power


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "gpqa_dimond"], "did you mean gpqa_diamond"),
        (["--tasks", "lm-eval:arc_eazy"], "did you mean arc_easy"),
        (["--tasks", "smoke,"], "got an empty one"),
        (["--tasks", "smoke", "--limit", "0"], "--limit: expected a whole number from 1"),
        (["--tasks", "smoke", "--arm", "shared:fp9"], "--arm:"),
        (["--tasks", "smoke", "--resume"], "--resume: expected --out DIR"),
        (["--tasks", "smoke", "--gen-kwargs", "temperature"], "--gen-kwargs: expected KEY=VALUE"),
        (["--tasks", "smoke", "--task-data", "ruler"], "--task-data: expected TASK=PATH"),
        (["--tasks", "smoke", "--endpoint", "x"], "--endpoint: expected NAME=URL"),
        (["--tasks", "smoke", "--endpoint", "http://a/v1", "--arm", "shared:fp8"], "--endpoint: expected no --arm"),
        (["--tasks", "smoke", "--endpoint", "a=http://a/v1", "--endpoint", "a=http://b/v1"], "names that differ"),
        (["--tasks", "smoke", "--tokenizer", "x"], "--tokenizer: expected --endpoint"),
        (["--tasks", "smoke", "--chat-template", "maybe"], "--chat-template"),
        (["--tasks", "smoke", "--context", "past"], "--context"),
        (["--tasks", "smoke_recall", "--samples", "4"], "would be copies"),
        ([], "--tasks"),
    ],
)
def test_bad_input_ends_in_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_a_built_in_model_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "tasks",
        "--model",
        "builtin:gdn",
        "--tasks",
        "smoke_recall,smoke_choice",
        "--limit",
        "1",
        "--dtype",
        "float32",
    ]
    words += ["--device", "cpu", "--out", str(tmp_path / "out")]
    assert main([*words, "--arm", "shared:nvfp4", "--json", str(tmp_path / "a.json")]) == 0
    shown = capsys.readouterr().out
    assert "smoke_recall: 1 document," in shown
    assert "shared:nvfp4" in shown
    first = TasksReport.load(tmp_path / "a.json")
    assert first.reference == "conventional:fp32"
    assert first.tasks[0].arms[0].n == 1
    assert first.tasks[0].reference.output_tokens_mean is not None
    assert first.provenance["arguments"]["given"]["limit"] == 1  # type: ignore[index]
    # A second policy: the reference's answers are there already.
    lines = {p.parent.name: p.read_bytes() for p in (tmp_path / "out").rglob("conventional*.jsonl")}
    assert main([*words, "--arm", "conventional:bf16", "--resume", "--json", "-"]) == 0
    second = TasksReport.from_json(capsys.readouterr().out)
    assert [arm.policy for arm in second.tasks[0].arms] == ["conventional:bf16"]
    assert second.tasks[0].reference == first.tasks[0].reference
    assert lines == {
        p.parent.name: p.read_bytes() for p in (tmp_path / "out").rglob("conventional*.jsonl") if "fp32" in p.name
    }
    assert main([*words, "--arm", "conventional:bf16"]) == 2
    assert "--resume" in capsys.readouterr().err


def test_power_tells_what_a_benchmark_sees(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", "--n", "198", "--discordant", "0.1"]) == 0
    text = capsys.readouterr().out
    assert "10% discordant documents, 198 documents" in text
    assert "found 80% of the time: a change of 6.4 points" in text
    assert main(["power", "--n", "198", "--discordant", "0.1", "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    found = {entry["power"]: entry["points"] for entry in record["detectable"]}
    assert mcnemar_power(n=198, discordant=0.1, difference=found[0.8] / 100) == pytest.approx(0.8, abs=1e-5)
    # With five arms the strictest step of Holm's correction tests at 1%.
    assert main(["power", "--n", "198", "--arms", "5", "--json", "-"]) == 0
    strict = json.loads(capsys.readouterr().out)
    assert strict["level"] == pytest.approx(0.01)
    assert strict["detectable"][1]["points"] > found[0.8]


def test_power_tells_what_a_difference_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", "--detect", "2", "--json", str(tmp_path / "p.json")]) == 0
    assert "80% of the time with 2,043 documents" in capsys.readouterr().out
    assert json.loads((tmp_path / "p.json").read_text())["needed"][1] == {"power": 0.8, "n": 2043}
    assert main(["power", "--n", "5"]) == 0
    assert "nothing, because not even 6 flips" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--n", "198", "--detect", "1"],
        ["--n", "0"],
        ["--n", "ten"],
        ["--n", "10", "--discordant", "1.5"],
        ["--n", "10", "--discordant", "nan"],
        ["--detect", "0"],
        ["--detect", "200"],
    ],
)
def test_power_refuses_impossible_sizes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", *words]) == 2
    assert "expected" in capsys.readouterr().err
