"""How fast `replayeval kl` goes through a document on one card, against a plain prefill and the step engine.

    python benchmarks/engine_speed.py qwen3.5-4b --out engine.json --lengths 8192 32768 131072 --seconds 300

measures a randomly initialised model with the configuration of `configs/MODEL.json` in bfloat16 under the reference and
the five default arms of nvfp4 (six rows): seconds and row-tokens per second of the engine (projection and divergences
included), of a prefill of the same rows as transformers runs it, and of the step engine; memory beyond weights and
caches of keys and values; the scores of an opening against PyTorch alone; and where the time of the card goes.
Everything is compiled and tuned before it is timed. The file is written after every measurement; what does not fit into
the time is recorded as skipped. `--ready` and `--wait` name files that let several processes warm up together and
measure in turn.
"""

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from replayeval.engine.fitting import Fitting
from replayeval.engine.forcing import DocumentTokens, Engine, Forcing, score_document
from replayeval.engine.precision import exact_float32
from replayeval.engine.scoring import Scorer
from replayeval.models.head import OutputHead, check_head
from replayssm.backend import Execution
from replayssm.policy import precision_arms

CONFIGS = Path(__file__).parent / "configs"
FEW_LAYERS = {"qwen3.5-4b": 4, "nemotron-3-nano-4b": 13}
"""The first layers of each model that have one of each kind, and so compile what all of them need."""
MODELS = tuple(FEW_LAYERS)
ARMS = precision_arms("nvfp4")
ROWS = 1 + len(ARMS)
CHUNK = 2048
STEP_TOKENS = 16
OPENING_TOKENS = 256
SMALLEST_CHUNK = 64
KERNELS_LISTED = 40

Say = Callable[[str], None]


def build(name: str, device: torch.device, *, layers: int | None = None) -> PreTrainedModel:
    """A model as `configs/NAME.json` says, or its first layers: random bfloat16 weights, a fixed seed."""
    values = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    if layers is not None:
        values["num_hidden_layers"] = layers
        for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
            if key in values:
                values[key] = values[key][:layers]
    config = CONFIG_MAPPING[values.pop("model_type")](**values)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def timed(run: Callable[[], Any]) -> tuple[float, int, Any]:
    """Seconds, peak memory and result of one run."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    result = run()
    torch.cuda.synchronize()
    return time.perf_counter() - started, torch.cuda.max_memory_allocated(), result


def document(tokens: np.ndarray, count: int) -> DocumentTokens:
    """The first tokens of a text as a document."""
    return DocumentTokens(index=0, doc_id="bench", tokens=tokens[: count + 1], read_tokens=count)


def forcing(execution: str) -> Forcing:
    """The engine as it is measured."""
    return Forcing(arms=ARMS, chunk_tokens=CHUNK, scorer=Scorer.TRITON, execution=Execution.parse(execution))


def plain_prefill(head: OutputHead, tokens: np.ndarray, chunk: int) -> None:
    """The model as transformers runs it, with a cache, chunk by chunk; logits of the last token only."""
    cache = head.new_cache(ROWS)
    ids = torch.as_tensor(np.repeat(tokens[None], ROWS, axis=0), device=head.input_device)
    with torch.inference_mode():
        for start in range(0, len(tokens), chunk):
            hidden = head.hidden(ids[:, start : start + chunk], cache, start)
            if start + chunk >= len(tokens):
                head.logits(hidden[:, -1:])


def prefill_chunk(head: OutputHead, tokens: np.ndarray) -> int:
    """The longest chunk, of those that halve CHUNK, that a prefill has memory for; warms it up."""
    chunk = CHUNK
    while True:
        try:
            plain_prefill(head, tokens[: 2 * chunk], chunk)
        except torch.OutOfMemoryError:
            if chunk <= SMALLEST_CHUNK:
                raise
        else:
            return chunk
        chunk //= 2
        gc.collect()
        torch.cuda.empty_cache()


def cache_bytes(head: OutputHead, tokens: int) -> int:
    """Bytes of keys and values that attention keeps for all rows."""
    cache = head.new_cache(1)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=head.input_device)
    with torch.inference_mode():
        head.hidden(ids, cache, 0)
    of_two = sum(
        x.numel() * x.element_size()
        for layer in cache.layers
        for x in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if isinstance(x, torch.Tensor) and x.ndim == 4 and x.shape[-2] == 2
    )
    return of_two // 2 * ROWS * tokens


def relative_kl(ours: np.ndarray, truth: np.ndarray, arms: Sequence[str]) -> dict[str, Any]:
    """Largest relative difference of mean divergences, over arms that differ from the reference under PyTorch.

    Args:
        ours: `[arms]`, mean divergence of each under the kernels, nats.
        truth: Likewise under PyTorch.
        arms: Their names.
    """
    differ = truth != 0
    found: dict[str, Any] = {"mean_kl_difference_relative": None}
    if differ.any():
        found["mean_kl_difference_relative"] = float(np.abs(ours[differ] / truth[differ] - 1).max())
    else:
        found["reason"] = "under PyTorch every arm equals the reference, so its mean KL is 0"
    of_equal = {arm: mean for arm, mean, other in zip(arms, ours.tolist(), differ.tolist(), strict=True) if not other}
    return {**found, "mean_kl_nats_of_arms_equal_under_pytorch": of_equal}


def against_pytorch(head: OutputHead, tokens: np.ndarray, execution: str) -> dict[str, Any]:
    """An opening under kernels and under PyTorch alone: what windows and scores change there."""
    opening = document(tokens, OPENING_TOKENS)
    ours = score_document(head, opening, forcing(execution))
    truth = score_document(head, opening, Forcing(arms=ARMS, chunk_tokens=CHUNK))
    return {
        "nll_difference_nats": float(np.nanmax(np.abs(ours.nll_nats - truth.nll_nats))),
        "mean_nll_difference_nats": float(np.nanmax(np.abs(np.nanmean(ours.nll_nats - truth.nll_nats, axis=1)))),
        **relative_kl(ours.kl_nats.mean(1), truth.kl_nats.mean(1), ours.arms),
    }


def measure_prefill(head: OutputHead, tokens: np.ndarray, count: int, chunk: int) -> dict[str, Any]:
    """A plain prefill of as many rows."""
    seconds, peak, _ = timed(lambda: plain_prefill(head, tokens[:count], chunk))
    return {"chunk": chunk, "seconds": seconds, "row_tokens_per_s": ROWS * count / seconds, "peak_bytes": peak}


def measure_engine(head: OutputHead, tokens: np.ndarray, count: int, execution: str) -> dict[str, Any]:
    """One document of this length under all arms."""
    weights = sum(p.numel() * p.element_size() for p in head.model.parameters())
    cache = cache_bytes(head, count)
    said: list[str] = []
    seconds, peak, scores = timed(lambda: Fitting(said.append).score(head, document(tokens, count), forcing(execution)))
    return {
        "execution": str(Execution.parse(execution)),
        "seconds": seconds,
        "row_tokens_per_s": ROWS * count / seconds,
        "peak_bytes": peak,
        "weights_bytes": weights,
        "cache_bytes": cache,
        "beyond_weights_and_cache_bytes": peak - weights - cache,
        "lowered": said,
        "mean_kl_nats": dict(zip(scores.arms, np.nanmean(scores.kl_nats, axis=1).tolist(), strict=True)),
    }


def measure_step(head: OutputHead, tokens: np.ndarray) -> dict[str, Any]:
    """The step engine with the same rows, on a short document after a shorter one."""
    step = Forcing(arms=ARMS, engine=Engine.STEP)
    score_document(head, document(tokens, 2), step)
    seconds, _, _ = timed(lambda: score_document(head, document(tokens, STEP_TOKENS), step))
    return {"tokens": STEP_TOKENS, "seconds": seconds, "row_tokens_per_s": ROWS * STEP_TOKENS / seconds}


def breakdown(run: Callable[[], Any]) -> dict[str, Any]:
    """Microseconds of the card's time that each kernel takes; side by side, they may add up to more than passes."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    return {
        "seconds_profiled": time.perf_counter() - started,
        "total_us": sum(e.self_device_time_total for e in events),
        "kernels": [
            {"kernel": e.key[:120], "calls": e.count, "us": e.self_device_time_total} for e in events[:KERNELS_LISTED]
        ],
    }


def compile_ahead(name: str, what: str) -> None:
    """Compile and tune, with few layers, what the engine or the prefill needs; the files stay in Triton's cache."""
    head = OutputHead(build(name, torch.device("cuda"), layers=FEW_LAYERS[name]))
    tokens = np.random.default_rng(0).integers(0, head.vocabulary, 2 * CHUNK + 1)
    with exact_float32():
        if what == "prefill":
            prefill_chunk(head, tokens)
        else:
            score_document(head, document(tokens, 2 * CHUNK), forcing(what))
    torch.cuda.synchronize()


def measure(
    name: str,
    *,
    executions: list[str],
    lengths: list[int],
    left: Callable[[], float],
    say: Say,
    save: Callable[[dict[str, Any]], None],
    ready: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Everything about one model; lengths for which too little time is left are skipped, prefill before engine."""
    context = multiprocessing.get_context("spawn")
    helpers = [context.Process(target=compile_ahead, args=(name, what)) for what in (*executions, "prefill")]
    for helper in helpers:
        helper.start()
    model = build(name, torch.device("cuda"))
    head = OutputHead(model)
    tokens = np.random.default_rng(0).integers(0, head.vocabulary, max(lengths) + 1)
    say("built")
    for helper in helpers:
        # One that failed has only saved no time.
        helper.join()
    say("compiled")
    record: dict[str, Any] = {
        "model": name,
        "device": torch.cuda.get_device_name(),
        "rows": ["conventional:fp32 (reference)", *map(str, ARMS)],
        "chunk": CHUNK,
        "runs": [],
        "skipped": [],
    }
    rate: dict[str, float] = {}

    def fits(what: str, count: int) -> bool:
        # Attention makes a token of a long document dearer than one of a short one.
        expected = 1.6 * ROWS * count / rate[what] if what in rate else 0.0
        if expected > left():
            record["skipped"].append({"tokens": count, "what": what, "left_s": left(), "expected_s": expected})
            return False
        return True

    with exact_float32():
        record["head_check"] = check_head(head)
        warm = document(tokens, 2 * CHUNK)
        for execution in executions:
            score_document(head, warm, forcing(execution))
            say(f"engine is warm, {execution}")
        prefilled = prefill_chunk(head, tokens)
        say(f"prefill is warm, chunk {prefilled}")
        ready()
        for count in lengths:
            run: dict[str, Any] = {"tokens": count}
            record["runs"].append(run)
            for execution in executions if count == lengths[0] else executions[:1]:
                if fits(execution, count):
                    run.setdefault("engine", []).append(measure_engine(head, tokens, count, execution))
                    rate[execution] = run["engine"][-1]["row_tokens_per_s"]
                    say(f"{count} tokens, {execution}: {rate[execution]:.0f} row-tokens/s")
                    save(record)
            if fits("prefill", count):
                run["prefill"] = measure_prefill(head, tokens, count, prefilled)
                rate["prefill"] = run["prefill"]["row_tokens_per_s"]
                say(f"{count} tokens, prefill: {rate['prefill']:.0f} row-tokens/s")
                for engine in run.get("engine", ()):
                    engine["over_prefill"] = engine["row_tokens_per_s"] / rate["prefill"]
                save(record)
            if count == lengths[0]:
                record["opening"] = against_pytorch(head, tokens, executions[0])
                record["step"] = measure_step(head, tokens)
                for engine in run.get("engine", ()):
                    engine["over_step"] = engine["row_tokens_per_s"] / record["step"]["row_tokens_per_s"]
                say(f"step engine: {record['step']['row_tokens_per_s']:.1f} row-tokens/s")
                # A profile may take longer than the time that is left.
                save(record)
                record["breakdown"] = {
                    "tokens": 2 * CHUNK,
                    "engine": breakdown(lambda: score_document(head, warm, forcing(executions[0]))),
                    "prefill": breakdown(lambda: plain_prefill(head, tokens[: 2 * CHUNK], prefilled)),
                }
                save(record)
    return record


def main() -> int:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--executions", nargs="+", default=["triton"], help="backends; the first at all lengths")
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit")
    parser.add_argument("--ready", type=Path, help="made when everything is warm")
    parser.add_argument("--wait", type=Path, help="measuring begins when this exists")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("expected a CUDA device, found none", file=sys.stderr)
        return 2
    started = time.monotonic()

    def ready() -> None:
        if arguments.ready is not None:
            arguments.ready.touch()
        while arguments.wait is not None and not arguments.wait.exists():
            time.sleep(0.05)

    measure(
        arguments.model,
        executions=arguments.executions,
        lengths=sorted(arguments.lengths),
        left=lambda: arguments.seconds - (time.monotonic() - started),
        say=lambda text: print(f"[{time.monotonic() - started:6.1f} s] {arguments.model}: {text}", flush=True),
        save=lambda record: void(arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")),
        ready=ready,
    )
    return 0


def void(_: object) -> None:
    """Nothing, whatever comes."""


if __name__ == "__main__":
    sys.exit(main())
