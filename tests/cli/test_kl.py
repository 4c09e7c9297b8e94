import json
import sys
from pathlib import Path
from typing import Any

import pytest

from replayeval.cli import main
from replayeval.errors import NumericsError
from replayeval.report.result import KLResult
from replayeval.report.schema import KLReport
from tests.cli.fakes import FakeMeasure, measuring
from tests.report.samples import two_arms

Captured = pytest.CaptureFixture[str]


def policies(fake: FakeMeasure) -> list[str]:
    return [str(policy) for policy in fake.options["arms"]]


def test_defaults_are_those_of_the_documentation(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    with measuring(monkeypatch, FakeMeasure()) as fake:
        assert main(["kl", "--model", "m"]) == 0
    assert fake.calls[0][0] == "m"
    assert policies(fake) == [
        "shared:fp32@L=16",
        "shared:nvfp4@L=16",
        "shared:nvfp4+sr@L=16",
        "separate:nvfp4/fp32@L=16",
        "separate:nvfp4/fp16+sr@L=16",
    ]
    expected: dict[str, Any] = dict(
        window=16,
        lengths=None,
        docs=None,
        data=None,
        engine="chunk",
        chunk=1024,
        dtype="auto",
        device="auto",
        prefill=0,
        seed=0,
        resume=False,
    )
    assert {name: fake.options[name] for name in expected} == expected
    output = capsys.readouterr()
    assert "separate:nvfp4/fp16+sr" in output.out
    assert output.err == ""


def test_precisions_and_arms_add_up_without_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    with measuring(monkeypatch, FakeMeasure()) as fake:
        assert (
            main(
                "kl --model m --precision fp8[tile=32,max=240],nvfp4 --arm shared:fp32 --arm conventional:bf16 "
                "--arm shared:int8[ef=int8]@L=32 --window 8".split()
            )
            == 0
        )
    found = policies(fake)
    assert len(found) == len(set(found)) == 1 + 4 + 4 + 1 + 1
    assert found[0] == "shared:fp32@L=8"
    assert "shared:fp8[tile=32,max=240]+sr@L=8" in found
    assert found[-2:] == ["conventional:bf16", "shared:int8[ef=int8]@L=32"]


def test_arm_alone_measures_that_arm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with measuring(monkeypatch, FakeMeasure()) as fake:
        assert main(["kl", "--model", "m", "--arm", "shared:fp8"]) == 0
    assert policies(fake) == ["shared:fp8@L=16"]


def test_json_on_stdout_is_pure(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    with measuring(monkeypatch, FakeMeasure()):
        assert main(["kl", "--model", "m", "--json", "-"]) == 0
    output = capsys.readouterr()
    assert KLReport.from_json(output.out) == two_arms()
    assert output.err == ""


def test_files_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with measuring(monkeypatch, FakeMeasure()):
        words = ["kl", "--model", "m", "--json", str(tmp_path / "kl.json"), "--plot", str(tmp_path / "kl.svg")]
        assert main(words) == 0
    assert json.loads((tmp_path / "kl.json").read_text())["schema"] == "replayeval.kl/1"
    assert "<svg" in (tmp_path / "kl.svg").read_text()


def test_a_failed_check_exits_1_and_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    record = two_arms()
    failed = record.model_copy(update={"checks": (record.checks[0].model_copy(update={"passed": False}),)})
    with measuring(monkeypatch, FakeMeasure(lambda _: KLResult(report=failed, scores=()))):
        assert main(["kl", "--model", "m"]) == 1
    assert "check failed: control arm" in capsys.readouterr().err


def interrupt(_: dict[str, Any]) -> KLResult:
    raise KeyboardInterrupt


def test_an_interrupted_run_tells_how_to_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    words = ["kl", "--model", "m", "--arm", "shared:fp8[tile=32]+sr", "--out", str(tmp_path / "a b")]
    with measuring(monkeypatch, FakeMeasure(interrupt)):
        assert main(words) == 130
    message = capsys.readouterr().err
    command = f"replayeval kl --model m --arm 'shared:fp8[tile=32]+sr' --out '{tmp_path}/a b' --resume"
    assert message.splitlines()[-1].strip() == command


def test_an_interrupted_run_without_a_directory_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    with measuring(monkeypatch, FakeMeasure(interrupt)):
        assert main(["kl", "--model", "m"]) == 130
    assert "--out" in capsys.readouterr().err


def numerics(_: dict[str, Any]) -> KLResult:
    raise NumericsError("the control arm\x1b[31m differs by 1e-3")


def bug(_: dict[str, Any]) -> KLResult:
    raise TypeError("unsupported operand")


def memory(_: dict[str, Any]) -> KLResult:
    raise MemoryError("tried to allocate")


@pytest.mark.parametrize(
    ("action", "code", "words"),
    [
        (numerics, 1, r"the control arm\x1b[31m differs by 1e-3"),
        (bug, 1, "unexpected TypeError: unsupported operand"),
        (bug, 1, "--debug"),
        (memory, 1, "smaller --chunk"),
    ],
)
def test_failures_are_one_message_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, action: Any, code: int, words: str
) -> None:
    with measuring(monkeypatch, FakeMeasure(action)):
        assert main(["kl", "--model", "m"]) == code
    message = capsys.readouterr().err
    assert words in message
    assert "Traceback" not in message
    assert message.startswith("replayeval: error: ")


@pytest.mark.parametrize("place", [0, 3])
def test_debug_anywhere_lets_the_traceback_through(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    words = ["kl", "--model", "m"]
    words.insert(place, "--debug")
    with measuring(monkeypatch, FakeMeasure(bug)), pytest.raises(TypeError, match="unsupported operand"):
        main(words)


def test_the_program_itself_hides_the_module_under_test() -> None:
    # The stand-in must not leak: a later test would measure with it.
    assert not isinstance(getattr(sys.modules.get("replayeval.measure"), "measure_kl", None), FakeMeasure)
