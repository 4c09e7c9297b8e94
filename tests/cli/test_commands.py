import subprocess
import sys

import pytest

from replayeval.cli import main
from replayeval.cli.doctor import Finding, Status, _guarded

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("words", [["--help"], ["kl", "--help"], ["kl", "-h"], ["formats", "--help"], ["models", "-h"]])
def test_help_exits_0_and_shows_examples(capsys: Captured, words: list[str]) -> None:
    assert main(words) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "Usage: replayeval" in output.out
    assert len(words) == 1 or "Example" in output.out


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_no_command_shows_help_and_exits_2(capsys: Captured, words: list[str]) -> None:
    assert main(words) == 2
    assert "Usage: replayeval" in capsys.readouterr().err


def test_version(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("replayeval 0.")


def test_the_package_runs_as_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "replayeval", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("replayeval ")
    wrong = subprocess.run([sys.executable, "-m", "replayeval", "kl", "--docs", "x"], capture_output=True, check=False)
    assert wrong.returncode == 2


def test_formats_lists_bits_with_scales(capsys: Captured) -> None:
    assert main(["formats", "--shape", "2,64,128"]) == 0
    rows = {words[0]: words[1] for line in capsys.readouterr().out.splitlines() if len(words := line.split()) > 1}
    assert rows["fp32"] == "32"
    # 8 bits and a 32 bit scale per row of 128.
    assert rows["fp8"] == "8.25"
    # 4 bits, an 8 bit scale per 16, and a 32 bit scale per head of 64 x 128.
    assert rows["nvfp4"] == "4.5039"


def test_formats_explains_one(capsys: Captured) -> None:
    assert main(["formats", "FP8[tile=32,max=240] +sr"]) == 0
    text = capsys.readouterr().out
    assert "fp8[tile=32,max=240]+sr" in text
    assert "32 value rows x all keys" in text
    assert "largest magnitude / 240" in text
    assert "stochastic" in text


def test_a_state_that_a_format_does_not_fit(capsys: Captured) -> None:
    assert main(["formats", "--shape", "2,64,40"]) == 0
    assert "does not fit" in capsys.readouterr().out
    assert main(["formats", "nvfp4", "--shape", "2,64,40"]) == 2
    assert "multiple of 16" in capsys.readouterr().err


def test_models_lists_architectures_and_checkpoints(capsys: Captured) -> None:
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    for word in ("qwen3_5", "nemotron_h", "kimi_linear", "builtin:gdn", "builtin:mamba2"):
        assert word in text


def test_doctor_passes_here(capsys: Captured) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "FAILED" not in text
    for word in ("torch", "cpu", "triton", "cores", "random bits", "nvfp4"):
        assert word in text


def test_doctor_exits_1_when_a_look_fails(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr("replayeval.cli.doctor.PHILOX_ZERO", (1, 2, 3, 4))
    assert main(["doctor"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_doctor_survives_a_broken_package() -> None:
    def _broken() -> list[Finding]:
        raise ImportError("libcudart.so not found")

    (finding,) = _guarded(_broken)  # pyright: ignore[reportArgumentType]
    assert finding.status is Status.FAILED
    assert "libcudart" in finding.detail
