"""Generation against transformers' `generate` on a card: built-in models, and random weights at the size of real ones.

    python benchmarks/generate.py --out FILE --model builtin:gdn --rows 8,32
    python benchmarks/generate.py --out FILE --config qwen3.5-4b --rows 8,32 --tokens 48 --profile

Greedy tokens are compared first, as `replayeval bench generate` does. `--profile` adds where the time of steps goes.
"""

import argparse
import faulthandler
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_speed import MODELS, build

from replayeval.engine.bench_generate import bench_generate
from replayeval.engine.generation import Generator, Graphs, Request
from replayeval.errors import ReplayEvalError
from replayeval.models.head import OutputHead
from replayeval.models.loading import load_model
from replayssm.backend import Execution
from replayssm.policy import REFERENCE, Policy

ARMS = ("shared:fp32@L=16", "separate:nvfp4/fp16+sr@L=16")
KERNELS_SHOWN = 30


def breakdown(head: OutputHead, prompts: list[np.ndarray], execution: Execution, tokens: int) -> dict[str, Any]:
    """Device time by kernel of `tokens` steps of the float32 policy, and how long the host saw them take."""
    engine = Generator(head, REFERENCE, slots=len(prompts), execution=execution)

    def requests(most: int) -> list[Request]:
        return [Request(prompt=[int(t) for t in p], sequence=i, max_tokens=most) for i, p in enumerate(prompts)]

    engine.generate(requests(tokens + 1))

    def profiled(most: int) -> tuple[dict[str, tuple[int, float]], float]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            started = time.perf_counter()
            engine.generate(requests(most))
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        return {e.key: (e.count, e.self_device_time_total) for e in profile.key_averages()}, seconds

    (first, seconds_first), (whole, seconds) = profiled(1), profiled(tokens + 1)
    spent = {
        key: ((count - first.get(key, (0, 0.0))[0]) / tokens, (us - first.get(key, (0, 0.0))[1]) / tokens)
        for key, (count, us) in whole.items()
    }
    slowest = sorted(spent.items(), key=lambda item: -item[1][1])[:KERNELS_SHOWN]
    return {
        "steps": str(engine.steps),
        "host_ms_per_step": 1e3 * (seconds - seconds_first) / tokens,
        "device_ms_per_step": sum(us for _, us in spent.values()) / 1e3,
        "kernels_per_step": sum(count for count, _ in spent.values()),
        "kernels": [{"kernel": k[:110], "calls": round(c, 2), "us": round(us, 2)} for k, (c, us) in slowest],
    }


def main() -> None:
    """Run what was asked for; what fails is recorded, and the rest runs all the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--model")
    chosen.add_argument("--config", choices=MODELS)
    parser.add_argument("--layers", type=int, help="of --config; a few of them compile what all need")
    parser.add_argument("--dtype", default="float32", help="of --model; configurations are bfloat16")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rows", default="8,32")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--arms", default=" ".join(ARMS))
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--graphs", choices=[str(g) for g in Graphs], default="auto")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--trace-after", type=float, help="seconds after which to print where everything stands")
    given = parser.parse_args()
    if given.trace_after is not None:
        faulthandler.dump_traceback_later(given.trace_after, exit=False)
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - started:6.1f} s  {text}", flush=True)

    model: Any = (
        build(given.config, torch.device(given.device), layers=given.layers)
        if given.config
        else load_model(given.model, dtype=given.dtype, device=given.device, need_tokenizer=False).model
    )
    head = OutputHead(model)
    say(f"{given.config or given.model} in {model.dtype} on {head.input_device}")
    execution = Execution.parse(given.backend)
    records: list[dict[str, Any]] = []
    for rows in (int(n) for n in given.rows.split(",")):
        draw = np.random.default_rng(0)
        prompts = list(draw.integers(0, head.vocabulary, (rows, given.prompt)))
        record: dict[str, Any] = {
            "model": given.config or given.model,
            "layers": head.config.num_hidden_layers,
            "dtype": str(model.dtype),
            "rows": rows,
        }
        try:
            outcome = bench_generate(
                head,
                prompts,
                [Policy.parse(a) for a in given.arms.split()],
                new_tokens=given.tokens,
                repeats=given.repeats,
                execution=execution,
                graphs=Graphs(given.graphs),
                say=say,
            )
            record |= outcome.to_json()
            for timing in outcome.timings:
                say(f"  {timing}")
            if given.profile:
                record["profile"] = breakdown(head, prompts, execution, tokens=8)
                say(f"  {record['profile']['device_ms_per_step']:.3f} ms on the device a step")
        except (ReplayEvalError, RuntimeError, ValueError) as error:
            record["error"] = f"{type(error).__name__}: {error}"
            say(record["error"][:1000])
        records.append(record)
        given.out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
