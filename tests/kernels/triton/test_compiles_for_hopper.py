"""The kernels compile for an H200 on a machine without a card, keep subnormal numbers, and fit its shared memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "windows.py"
SHARED_LIMIT = 227 * 1024
LINE = re.compile(
    r"(?P<name>.*) \{'registers': (?P<registers>\d+), 'stack': (?P<stack>\d+), 'shared': (?P<shared>\d+)\}"
)


@pytest.mark.parametrize("shape", ["Nemotron-3-Nano-4B", "Qwen3.5-4B", "Kimi-Linear-48B-A3B"])
def test_every_kernel_compiles(shape: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "compile", "--shape", shape], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = [LINE.fullmatch(line) for line in done.stdout.splitlines()]
    kernels = [match for match in found if match is not None]
    names = " ".join(match["name"] for match in kernels)
    for kind in ("pack", "unpack", "prepare", "fold", "serve fp32", "walk fp32", "walk fp16+sr", "walk nvfp4"):
        assert kind in names, done.stdout
    assert len(kernels) == len(found), done.stdout
    for match in kernels:
        assert int(match["shared"]) <= SHARED_LIMIT, match[0]
        # Beyond this the compiler has given up on keeping a product's operands in registers.
        assert int(match["stack"]) <= 1024, match[0]


def test_it_says_so_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(SCRIPT), "compile"], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "unset it" in done.stderr
