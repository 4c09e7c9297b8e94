"""Everything that is measured on one H200, in one go and within a time limit, raw numbers kept.

    python benchmarks/h200.py --out results --seconds 520

runs, in order of importance: decode kernels at batch 256 (all windows and read formats), the engine on randomly
initialised models with the configurations of Qwen3.5-4B and Nemotron-3-Nano-4B at 8K, 32K and 128K tokens, decode
kernels at the other batches. A stage for which not enough time is left is recorded as skipped. Every stage writes its
own file.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from replayeval.engine.bench_kernels import bench_kernels, require_cuda
from replayeval.engine.fitting import Fitting
from replayeval.engine.forcing import DocumentTokens, Engine, Forcing, score_document
from replayeval.engine.precision import exact_float32
from replayeval.engine.scoring import Scorer
from replayeval.errors import ConfigError
from replayeval.models.head import OutputHead, check_head
from replayssm.backend import Execution
from replayssm.policy import precision_arms

CONFIGS = Path(__file__).parent / "configs"
MODELS = ("qwen3.5-4b", "nemotron-3-nano-4b")
ARMS = precision_arms("nvfp4")
TRITON = Execution.parse("triton")
CHUNK = 2048
STEP_TOKENS = 48

# Seconds that a stage is expected to take at most, its compilation and loading included.
KERNELS_SECONDS = 200
BATCH_SECONDS = 45


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
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    result = run()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started, torch.cuda.max_memory_allocated() if cuda else 0, result


def plain_prefill(head: OutputHead, tokens: np.ndarray, rows: int, chunk: int) -> None:
    """The model as transformers runs it, with a cache, chunk by chunk; logits of the last token only."""
    cache = head.new_cache(rows)
    ids = torch.as_tensor(np.repeat(tokens[None], rows, axis=0), device=head.input_device)
    with torch.inference_mode():
        for start in range(0, len(tokens), chunk):
            hidden = head.hidden(ids[:, start : start + chunk], cache, start)
            if start + chunk >= len(tokens):
                head.logits(hidden[:, -1:])


def cache_bytes(head: OutputHead, rows: int, tokens: int) -> int:
    """Bytes of keys and values that attention keeps for these rows."""
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
    return of_two // 2 * rows * tokens


def measure_engine(head: OutputHead, tokens: np.ndarray, *, chunk: int, say: Callable[[str], None]) -> dict[str, Any]:
    """One document of this length: the engine with five arms, a plain prefill of as many rows, the step engine."""
    count, rows = len(tokens), 1 + len(ARMS)
    document = DocumentTokens(index=0, doc_id="bench", tokens=tokens, read_tokens=count)
    warm = DocumentTokens(index=0, doc_id="warm", tokens=tokens[: 2 * chunk], read_tokens=min(count, 2 * chunk))
    forcing = Forcing(arms=ARMS, chunk_tokens=chunk, scorer=Scorer.TRITON, execution=TRITON)
    weights = sum(p.numel() * p.element_size() for p in head.model.parameters())
    record: dict[str, Any] = {
        "backend": str(TRITON),
        "tokens": count,
        "rows": rows,
        "chunk": chunk,
        "weights_bytes": weights,
    }
    record["cache_bytes"] = cache_bytes(head, rows, count)

    # The opening once more with PyTorch alone: what both kernels, window and scores, change there is on record.
    opening = DocumentTokens(index=0, doc_id="open", tokens=tokens[:256], read_tokens=min(count, 256))
    ours = score_document(head, opening, forcing)
    truth = score_document(head, opening, Forcing(arms=ARMS, chunk_tokens=chunk))
    record["nll_difference_nats"] = float(np.nanmax(np.abs(ours.nll_nats - truth.nll_nats)))
    record["kl_difference_relative"] = float(np.nanmax(np.abs(ours.kl_nats.mean(1) / truth.kl_nats.mean(1) - 1)))

    say(f"  plain prefill of {rows} rows, {count} tokens")
    plain_prefill(head, warm.tokens, rows, chunk)
    seconds, peak, _ = timed(lambda: plain_prefill(head, tokens, rows, chunk))
    record["prefill"] = {"seconds": seconds, "row_tokens_per_s": rows * count / seconds, "peak_bytes": peak}
    say(f"  engine, {len(ARMS)} arms, {count} tokens")
    score_document(head, warm, forcing)
    said: list[str] = []
    seconds, peak, scores = timed(lambda: Fitting(said.append).score(head, document, forcing))
    record["engine"] = {
        "seconds": seconds,
        "row_tokens_per_s": rows * count / seconds,
        "peak_bytes": peak,
        "beyond_weights_and_cache_bytes": peak - weights - record["cache_bytes"],
        "lowered": said,
        "mean_kl_nats": dict(zip(scores.arms, np.nanmean(scores.kl_nats, axis=1).tolist(), strict=True)),
    }
    record["engine_over_prefill"] = record["prefill"]["seconds"] / seconds
    return record


def measure_step(head: OutputHead, tokens: np.ndarray) -> dict[str, Any]:
    """Tokens per second of the step engine with the same rows, from a short run after a shorter one."""
    step = Forcing(arms=ARMS, engine=Engine.STEP)
    short = DocumentTokens(index=0, doc_id="step", tokens=tokens[:STEP_TOKENS], read_tokens=STEP_TOKENS)
    warm = DocumentTokens(index=0, doc_id="step", tokens=tokens[:4], read_tokens=4)
    score_document(head, warm, step)
    seconds, _, _ = timed(lambda: score_document(head, short, step))
    rows = 1 + len(ARMS)
    return {"tokens": STEP_TOKENS, "seconds": seconds, "row_tokens_per_s": rows * STEP_TOKENS / seconds}


def breakdown(head: OutputHead, tokens: np.ndarray, *, chunk: int) -> list[dict[str, Any]]:
    """Where the time of the engine goes: the kernels that take most of two chunks."""
    document = DocumentTokens(index=0, doc_id="profile", tokens=tokens[: 2 * chunk], read_tokens=2 * chunk)
    forcing = Forcing(arms=ARMS, chunk_tokens=chunk, scorer=Scorer.TRITON, execution=TRITON)
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        score_document(head, document, forcing)
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events)
    return [
        {
            "kernel": e.key[:120],
            "calls": e.count,
            "us": e.self_device_time_total,
            "share": e.self_device_time_total / total,
        }
        for e in events[:25]
    ]


def engine_stage(
    name: str, lengths: list[tuple[int, int]], left: Callable[[], float], say: Callable[[str], None]
) -> Any:
    """All lengths of one model; `lengths` pairs tokens with the seconds that must be left for them."""
    model = build(name, torch.device("cuda"))
    head = OutputHead(model)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, head.vocabulary, max(n for n, _ in lengths) + 1)
    record: dict[str, Any] = {"model": name, "head_check": check_head(head), "runs": [], "skipped": []}
    with exact_float32():
        record["step"] = measure_step(head, tokens)
        for count, need in lengths:
            if left() < need:
                record["skipped"].append({"tokens": count, "reason": f"{left():.0f} s left, {need} needed"})
                continue
            record["runs"].append(measure_engine(head, tokens[:count], chunk=CHUNK, say=say))
        for run in record["runs"]:
            run["engine_over_step"] = run["engine"]["row_tokens_per_s"] / record["step"]["row_tokens_per_s"]
        record["breakdown"] = breakdown(head, tokens, chunk=CHUNK)
    del model, head
    torch.cuda.empty_cache()
    return record


def main() -> None:
    """Run the stages that fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the JSON files")
    parser.add_argument("--seconds", type=float, default=520.0, help="time limit")
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

    def stage(file: str, need: float, run: Callable[[], Any]) -> None:
        path = arguments.out / f"{file}.json"
        if left() < need:
            path.write_text(json.dumps({"skipped": f"{left():.0f} s left, {need:.0f} needed"}) + "\n", encoding="utf-8")
            say(f"{file}: skipped")
            return
        say(file)
        try:
            record = run()
        except Exception as error:
            # One broken stage must not cost the others; the file says what happened.
            record = {"failed": f"{type(error).__name__}: {error}"}
            say(f"{file}: {record['failed'][:300]}")
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    stage("kernels-256", KERNELS_SECONDS, lambda: bench_kernels(batches=(256,), say=say).to_json())
    lengths = [(8192, 20), (32768, 45), (131072, 150)]
    for name in MODELS:
        stage(f"engine-{name}", 60, lambda name=name: engine_stage(name, lengths, left, say))
    for batch in (1, 32, 8, 128, 512):
        need = BATCH_SECONDS
        stage(
            f"kernels-{batch}",
            need,
            lambda batch=batch: bench_kernels(
                batches=(batch,), windows=(16,), read_formats=("fp32",), say=say
            ).to_json(),
        )
    say("done")


if __name__ == "__main__":
    main()
