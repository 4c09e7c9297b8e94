"""Everything that is measured on one H200, in one go and within a time limit, raw numbers kept.

    python benchmarks/h200.py --out results --seconds 900

runs decode kernels (all batches, windows and read formats, as far as their time goes) and the engine on randomly
initialised models with the configurations of Qwen3.5-4B and Nemotron-3-Nano-4B at 8K, 32K and 128K tokens. All of them
compile and warm up together, then each is timed alone. Every stage writes its own file as it goes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from replayeval.engine.bench_kernels import bench_kernels, require_cuda
from replayeval.errors import ConfigError

ENGINE = Path(__file__).with_name("engine_speed.py")
MODELS = ("qwen3.5-4b", "nemotron-3-nano-4b")
KERNELS_SHARE = 0.6
"""Of the time, at most, for decode kernels, where the engine is measured too."""

Say = Callable[[str], None]


class EngineStage:
    """The engine on one model, in a process of its own: warm when `ready` exists, timed once `start` was called.

    Args:
        name: The model.
        out: Directory for its record and its log.
        signals: Directory for the files by which both processes wait for each other.
        seconds: Time limit.
    """

    def __init__(self, name: str, out: Path, signals: Path, seconds: float) -> None:
        self.name = name
        self.ready, self._wait = signals / f"{name}.ready", signals / f"{name}.go"
        words = [sys.executable, str(ENGINE), name, "--out", str(out / f"engine-{name}.json")]
        words += ["--seconds", str(seconds), "--ready", str(self.ready), "--wait", str(self._wait)]
        with (out / f"engine-{name}.log").open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)

    @property
    def failed(self) -> bool:
        """Whether it has ended before it was warm."""
        return self._process.poll() is not None and not self.ready.exists()

    def run(self, seconds: float) -> str:
        """Let it measure; how that ended."""
        self._wait.touch()
        try:
            code = self._process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            self.stop()
            return "cut off: the time is over"
        return "done" if code == 0 else f"exit {code}, see its log"

    def stop(self) -> None:
        """End it, if it still runs."""
        self._process.kill()
        self._process.wait()


def wait_until_warm(stages: Sequence[EngineStage], seconds: float) -> None:
    """Wait for processes to be warm, or to have failed."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not all(stage.ready.exists() or stage.failed for stage in stages):
        time.sleep(0.1)


def main() -> None:
    """Run the stages that fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the JSON files")
    parser.add_argument("--seconds", type=float, default=900.0, help="time limit")
    parser.add_argument("--only", choices=("kernels", "engine"), help="leave the other stages out")
    arguments = parser.parse_args()
    started = time.monotonic()
    try:
        require_cuda()
    except ConfigError as error:
        parser.error(str(error))
    arguments.out.mkdir(parents=True, exist_ok=True)

    def left() -> float:
        return arguments.seconds - (time.monotonic() - started)

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)

    def write(record: Any) -> None:
        (arguments.out / "kernels.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as signals:
        names = MODELS if arguments.only != "kernels" else ()
        stages = [EngineStage(name, arguments.out, Path(signals), left()) for name in names]
        try:
            if arguments.only != "engine":
                kernels(left() * (KERNELS_SHARE if stages else 1.0), stages, say, write)
            else:
                wait_until_warm(stages, left())
            for stage in stages:
                say(f"engine, {stage.name}")
                say(f"engine, {stage.name}: {stage.run(left())}")
        finally:
            for stage in stages:
                stage.stop()


def kernels(seconds: float, others: Sequence[EngineStage], say: Say, write: Callable[[Any], None]) -> None:
    """The decode kernels; what goes wrong there is recorded and must not cost the other stages."""
    until = time.monotonic() + seconds
    kept: dict[str, Any] = {}

    def keep(record: Any) -> None:
        kept.update(record.to_json())
        write(kept)

    try:
        # Batches in the order of their importance, for the last of them may not fit.
        found = bench_kernels(
            batches=(256, 1, 32, 8, 128, 512),
            seconds=seconds,
            say=say,
            keep=keep,
            before_timing=lambda: wait_until_warm(others, 0.5 * (until - time.monotonic())),
        )
        keep(found)
    except Exception as error:
        kept["failed"] = f"{type(error).__name__}: {error}"
        write(kept)
        say(f"kernels: {kept['failed'][:300]}")


if __name__ == "__main__":
    main()
