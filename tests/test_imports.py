"""What importing the packages loads, seen from a fresh interpreter."""

import importlib.util
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "datasets")


def loaded_after(statement: str, *, cwd: Path) -> set[str]:
    """Return the top-level modules that are loaded after `statement` in an interpreter of its own."""
    program = f"import sys, json\n{statement}\nprint(json.dumps(sorted({{n.partition('.')[0] for n in sys.modules}})))"
    run = subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "module",
    [
        "replayeval",
        "replayeval.errors",
        "replayeval.stats",
        "replayeval.store",
        "replayeval.report.result",
        "replayeval.sweep.collect",
    ],
)
def test_import_loads_neither_torch_nor_transformers(module: str, tmp_path: Path) -> None:
    assert not loaded_after(f"import {module}", cwd=tmp_path) & set(HEAVY)


def test_tables_frames_and_figures_need_no_torch(tmp_path: Path) -> None:
    use = (
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.report.samples import two_arms\n"
        "from replayeval.report.result import KLResult\n"
        "result = KLResult(report=two_arms(), scores=())\n"
        "result.to_json(); result.summary_frame(); result.plot(); result._repr_html_()"
    )
    found = loaded_after(use, cwd=tmp_path)
    assert {"pandas", "matplotlib", "rich"} <= found
    assert not found & set(HEAVY)


def test_the_numerical_core_stands_alone(tmp_path: Path) -> None:
    found = loaded_after("import replayssm.replay, replayssm.formats", cwd=tmp_path)
    assert "torch" in found
    assert not found & {"transformers", "datasets", "replayeval"}


def test_this_way_of_looking_sees_an_import(tmp_path: Path) -> None:
    # The tests above pass when they see nothing, so they must be able to see something.
    (tmp_path / "torch.py").write_text("")
    assert "torch" in loaded_after("import torch", cwd=tmp_path)


@pytest.mark.parametrize("words", [["--help"], ["kl", "--help"], ["--version"], ["kl", "--modle", "x"]])
def test_the_command_line_answers_without_torch(words: list[str], tmp_path: Path) -> None:
    found = loaded_after(f"from replayeval.cli import main\nmain({words!r})", cwd=tmp_path)
    assert not found & {*HEAVY, "numpy", "pandas", "pyarrow", "matplotlib"}


def test_help_takes_less_than_half_a_second_of_processor_time(tmp_path: Path) -> None:
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "replayeval.cli", "--help"]
        subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    # Processor time, and the best of three: other processes on the machine make the clock on the wall useless.
    assert min(seconds() for _ in range(3)) < 0.5


@pytest.mark.parametrize("place", ["root", "elsewhere"])
def test_the_folder_kernels_never_passes_for_the_package_of_that_name(place: str, tmp_path: Path) -> None:
    program = (
        "import json\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "print(json.dumps(is_kernels_available()))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT if place == "root" else tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout) is installed("kernels")


def test_in_this_test_run_too() -> None:
    from transformers.utils.import_utils import is_kernels_available

    assert is_kernels_available() is installed("kernels")


@pytest.mark.parametrize("name", ["kernels", "tasks"])
def test_the_installation_does_not_put_the_repository_on_the_path(name: str, tmp_path: Path) -> None:
    program = f"import importlib.util\nprint(importlib.util.find_spec({name!r}))"
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert str(ROOT) not in run.stdout


def installed(distribution: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def test_kernels_and_tasks_are_no_packages() -> None:
    for folder in ("kernels", "tasks"):
        assert not (ROOT / folder / "__init__.py").exists()
    specification = importlib.util.find_spec("replayssm")
    assert specification is not None
    assert specification.origin == str(ROOT / "kernels" / "replayssm" / "__init__.py")
