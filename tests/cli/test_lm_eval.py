"""`replayeval lm-eval` passes everything through to lm-eval, and `replayeval bench generate` reports its comparison."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replayeval.cli import main
from replayeval.errors import NumericsError
from replayeval.models.builtin.catalog import builtin_path
from tests.models import tiny

pytestmark = pytest.mark.filterwarnings("ignore")

RUN = ["lm-eval", "run", "--tasks", "arc_easy"]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reaches lm-eval instead of being run."""
    from lm_eval._cli import HarnessCLI

    seen: list[Any] = []
    monkeypatch.setattr(HarnessCLI, "execute", lambda _, arguments: seen.append(arguments))
    return seen


def test_every_option_of_lm_eval_is_passed_through(executed: list[Any]) -> None:
    words = ["--model", "replayssm", "--model_args", "pretrained=builtin:gdn,policy=shared:fp8[tile=32,max=240]+sr"]
    words += ["--limit", "3", "--num_fewshot", "2", "--gen_kwargs", "temperature=0.5", "--batch_size", "auto"]
    assert main([*RUN, *words, "--device", "cpu", "--seed", "7", "-o", "out", "--log_samples"]) == 0
    arguments = executed[0]
    assert arguments.model_args == {"pretrained": "builtin:gdn", "policy": "shared:fp8[tile=32,max=240]+sr"}
    assert (arguments.limit, arguments.num_fewshot, arguments.batch_size) == (3.0, 2, "auto")
    assert (arguments.gen_kwargs, arguments.device, arguments.log_samples) == ({"temperature": 0.5}, "cpu", True)
    assert arguments.metadata == {"tokenizer": str(builtin_path("gdn"))}


def test_other_models_and_tokenizers_are_left_alone(executed: list[Any]) -> None:
    for words in (
        ["--model", "hf", "--model_args", "pretrained=builtin:gdn"],
        ["--model", "replayssm", "--model_args", "pretrained=some/model"],
        ["--model", "replayssm", "--model_args", "pretrained=builtin:gdn,tokenizer=some/model"],
    ):
        assert main([*RUN, *words]) == 0
    assert [arguments.metadata for arguments in executed] == [None, None, None]
    given = ["--model", "replayssm", "--model_args", "pretrained=builtin:gdn", "--metadata", '{"tokenizer": "mine"}']
    assert main([*RUN, *given]) == 0
    assert executed[-1].metadata == {"tokenizer": "mine"}


def test_no_gpu_is_asked_for_where_nobody_asks_for_one(executed: list[Any]) -> None:
    for words in (["--model", "replayssm"], ["--model", "replayssm", "--device", "cuda:1"], ["--model", "hf"]):
        assert main([*RUN, *words]) == 0
    assert [arguments.device for arguments in executed] == ["auto", "cuda:1", None]


def test_the_model_is_registered(executed: list[Any]) -> None:
    from lm_eval.api.registry import get_model

    assert main(RUN) == 0
    assert get_model("replayssm").__name__ == "ReplayLM"


def test_help_and_usage_are_those_of_lm_eval(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lm-eval", "--help"]) == 0
    assert "Language Model Evaluation Harness" in capsys.readouterr().out
    assert main(["lm-eval", "run", "--no-such-option"]) == 2
    assert "lm-eval: error: unrecognized arguments: --no-such-option" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("Tasks not found: nosuch"), 2, "lm-eval: Tasks not found: nosuch"),
        (KeyError(), 2, "lm-eval: KeyError"),
        (NumericsError("logits differ"), 1, "logits differ"),
    ],
    ids=str,
)
def test_an_error_is_one_message(
    error: Exception, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval._cli import HarnessCLI

    def fail(self: HarnessCLI, arguments: Namespace) -> None:
        raise error

    monkeypatch.setattr(HarnessCLI, "execute", fail)
    assert main(RUN) == code
    assert capsys.readouterr().err == f"replayeval: error: {message}\n"


def test_words_of_the_process_are_put_back(executed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["replayeval", "lm-eval"])
    main(RUN)
    import sys

    assert sys.argv == ["replayeval", "lm-eval"]


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    model = tiny.save("qwen3_5", tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 4)

    def run(*words: str) -> tuple[int, str, str]:
        base = ["bench", "generate", "--model", str(model), "--data", str(text), "--rows", "1", "--device", "cpu"]
        code = main([*base, "--prompt", "9", "--tokens", "3", "--repeats", "1", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_bench_generate_reports_ratios(bench: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = bench("--arm", "shared:bf16@L=2", "--json", "-")
    assert code == 0
    record = json.loads(out)
    assert record["schema"] == "replayeval.bench.generate/1"
    names = [timing["name"] for timing in record["timings"]]
    assert names == ["transformers generate", "conventional:fp32", "shared:bf16@L=2"]
    assert (record["rows"], record["prompt_tokens"], record["new_tokens"], record["compared_tokens"]) == (1, 9, 3, 3)
    assert record["device"] == "cpu"
    assert [timing["steps"] for timing in record["timings"]] == ["transformers", *["windows (backend torch)"] * 2]
    code, out, _ = bench()
    assert code == 0
    assert "over generate" in out and "shared" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "0"], "--rows"),
        (["--tokens", "none"], "--tokens"),
        (["--arm", "shared"], "--arm"),
        (["--backend", "cuda"], "--backend"),
        (["--graphs", "maybe"], "--graphs"),
        (["--graphs", "on"], "graphs on: steps need the decode kernels: backend torch"),
    ],
    ids=str,
)
def test_bench_generate_refuses_what_it_cannot_read(
    words: list[str], message: str, bench: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = bench(*words)
    assert code == 2
    assert err.startswith(f"replayeval: error: {message}") and err.count("\n") == 1
