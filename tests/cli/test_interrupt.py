import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.models import tiny

WAIT_SECONDS = 120.0


@pytest.mark.slow
def test_ctrl_c_and_the_command_it_prints(tmp_path: Path) -> None:
    model = tiny.save("qwen3_5", tmp_path / "model")
    texts = tmp_path / "texts"
    texts.mkdir()
    for index in range(4):
        (texts / f"{index}.txt").write_text(f"{index} the quick brown fox jumps over the lazy dog. " * 3)
    out = tmp_path / "a run"
    words = ["kl", "--model", str(model), "--data", str(texts), "--lengths", "96", "--arm", "shared:fp8+sr"]
    words += ["--engine", "step", "--out", str(out)]
    command = [sys.executable, "-m", "replayeval.cli"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    deadline = time.monotonic() + WAIT_SECONDS
    while not list(out.glob("documents/*.sha256")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    printed = shlex.split(err.splitlines()[-1])
    assert printed == ["replayeval", *words, "--resume"]
    before = len(list(out.glob("documents/*.parquet")))
    assert 1 <= before < 4
    resumed = subprocess.run(
        [*command, *printed[1:], "--json", "-"], capture_output=True, text=True, check=False, env=environment
    )
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["docs"] == 4
    assert len(list(out.glob("documents/*.parquet"))) == 4
