"""Everything that is measured on one H200, in one go and within a time limit, raw numbers kept.

    python benchmarks/h200.py --out results --seconds 520

runs decode kernels (all batches, windows and read formats, as far as their time goes) and the engine on randomly
initialised models with the configurations of Qwen3.5-4B and Nemotron-3-Nano-4B at 8K, 32K and 128K tokens. A stage for
which not enough time is left is recorded as skipped. Every stage writes its own file.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replayeval.engine.bench_kernels import bench_kernels, require_cuda
from replayeval.errors import ConfigError

ENGINE = Path(__file__).with_name("engine_speed.py")
MODELS = ("qwen3.5-4b", "nemotron-3-nano-4b")

# Seconds that a stage is expected to take at most, its compilation and loading included.
KERNELS_SECONDS = 480
ENGINE_SECONDS = 120


def engine_stage(name: str, folder: Path, seconds: float) -> Any:
    """The engine on one model, in a process of its own, whose memory is free again afterwards."""
    out = folder / f"engine-{name}.json"
    words = [sys.executable, str(ENGINE), name, "--out", str(out), "--seconds", str(seconds)]
    subprocess.run(words, check=True, timeout=seconds + 30)
    return json.loads(out.read_text(encoding="utf-8"))


def main() -> None:
    """Run the stages that fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the JSON files")
    parser.add_argument("--seconds", type=float, default=520.0, help="time limit")
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

    def write(file: str, record: Any) -> None:
        (arguments.out / f"{file}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    def stage(file: str, need: float, run: Callable[[], Any]) -> None:
        if left() < need:
            write(file, {"skipped": f"{left():.0f} s left, {need:.0f} needed"})
            say(f"{file}: skipped")
            return
        say(file)
        try:
            record = run()
        except Exception as error:
            # One broken stage must not cost the others, nor what it has written; the file says what happened.
            path = arguments.out / f"{file}.json"
            record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            record["failed"] = f"{type(error).__name__}: {error}"
            say(f"{file}: {record['failed'][:300]}")
        write(file, record)

    if arguments.only != "engine":
        # Batches in the order of their importance, for the last of them may not fit.
        stage(
            "kernels",
            60,
            lambda: bench_kernels(
                batches=(256, 1, 32, 8, 128, 512),
                seconds=min(left(), KERNELS_SECONDS),
                say=say,
                keep=lambda found: write("kernels", found.to_json()),
            ).to_json(),
        )
    if arguments.only == "kernels":
        return
    for name in MODELS:
        stage(f"engine-{name}", ENGINE_SECONDS, lambda name=name: engine_stage(name, arguments.out, left()))
    say("done")


if __name__ == "__main__":
    main()
