"""Train a built-in model: `python -m replayeval.models.builtin.train --config CONFIG.json --out DIRECTORY`.

The run is decided by the configuration. It writes a log, a state to resume from, and at the end the model in Hugging
Face format with its card.
"""

# torch and its companions ship partial types: what comes out of them is unknown by no fault of this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import argparse
import contextlib
import dataclasses
import json
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from jaxtyping import Bool, Float, Int64
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from replayeval.errors import ConfigError
from replayeval.models.builtin.batches import training_batches
from replayeval.models.builtin.config import Architecture, TrainConfig, load_config
from replayeval.models.builtin.evaluate import evaluate
from replayeval.models.builtin.export import save_model, training_runs
from replayeval.models.builtin.gdn import GDNShape, GDNTrainer
from replayeval.models.builtin.mamba2 import Mamba2Shape, Mamba2Trainer
from replayeval.models.builtin.measure import measure_model, parse_lengths
from replayeval.models.builtin.optimiser import SplitOptimiser
from replayeval.models.builtin.script import run_script


def build_model(config: TrainConfig) -> GDNTrainer | Mamba2Trainer:
    """Make the model of a configuration with fresh weights.

    Args:
        config: The configuration; its seed decides the weights.

    Returns:
        The model, in float32 on the CPU.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            if config.architecture is Architecture.GDN:
                model = GDNTrainer(GDNShape(**config.shape))
            else:
                model = Mamba2Trainer(Mamba2Shape(**config.shape))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"unusable shape for {config.architecture}: {error}") from error
    if config.initial_weights is not None:
        load_weights(model, Path(config.initial_weights))
    return model


def load_weights(model: GDNTrainer | Mamba2Trainer, directory: Path) -> None:
    """Load the weights of a model directory into a training model.

    Args:
        model: The model; its parameters are replaced.
        directory: A directory that this module wrote.

    Raises:
        ConfigError: When the weights are missing or of another shape.
    """
    path = directory / "model.safetensors"
    try:
        model.load_state_dict({name: value.float() for name, value in load_file(path).items()})
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"expected weights of a {type(model).__name__} at {path}: {error}") from error


def weighted_loss(
    logits: Float[Tensor, "rows time vocab"],
    ids: Int64[Tensor, "rows time"],
    is_answer: Bool[Tensor, "rows time"],
    is_english: Bool[Tensor, " rows"],
    config: TrainConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted loss and the plain losses of the tokens outside answers and of those inside, in nats."""
    losses = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    answers = is_answer[:, 1:].flatten().float()
    base = torch.where(is_english, 1.0, config.context_weight)[:, None].expand_as(ids[:, 1:]).flatten()
    weights = torch.where(answers > 0, config.answer_weight, base)
    total = (losses * weights).sum() / weights.sum()
    with torch.no_grad():
        plain = (losses * (1.0 - answers)).sum() / (1.0 - answers).sum()
        recalled = (losses * answers).sum() / answers.sum().clamp(min=1.0)
    return total, plain, recalled


@contextlib.contextmanager
def _matmul_precision(tf32: bool) -> Generator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Training:
    """One run: model, optimiser, position, log.

    Args:
        config: The configuration.
        out: Directory to write to.
        device: Where to train.
        resume: Go on from the state in `out`.
    """

    def __init__(self, config: TrainConfig, *, out: Path, device: torch.device, resume: bool) -> None:
        """Build everything, or load it when resuming."""
        self.config = config
        self.out = out
        self.device = device
        self.step = 0
        out.mkdir(parents=True, exist_ok=True)
        self.model = build_model(config).to(device)
        self.optimiser = SplitOptimiser(self.model, config)
        if resume:
            self._load()
        if config.compile:
            # One compiled form per kind of layer and document length: more than the limit that torch starts with.
            torch._dynamo.config.recompile_limit = 64  # pyright: ignore[reportPrivateUsage]
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)

    @property
    def _fingerprint(self) -> str:
        return json.dumps(dataclasses.asdict(self.config), sort_keys=True)

    @property
    def _state_file(self) -> Path:
        return self.out / "state.pt"

    def _load(self) -> None:
        if not self._state_file.is_file():
            raise ConfigError(f"expected a state to resume from at {self._state_file}, found none: leave out --resume")
        state: dict[str, Any] = torch.load(self._state_file, map_location=self.device, weights_only=True)
        if state["config"] != self._fingerprint:
            raise ConfigError(f"{self._state_file} belongs to another configuration: use another --out directory")
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step = state["step"]

    def save(self) -> None:
        """Write the state to resume from, whole or not at all."""
        partial = self._state_file.with_suffix(".part")
        state = {
            "config": self._fingerprint,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
        }
        torch.save(state, partial)
        partial.replace(self._state_file)

    def log(self, entry: dict[str, Any]) -> None:
        """Append one line to the log and print it."""
        line = json.dumps(entry)
        print(f"{self.config.architecture} {line}", flush=True)
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(line + "\n")

    def logits(self, ids: Int64[Tensor, "rows time"]) -> Float[Tensor, "rows time vocab"]:
        """Run the model as it is trained: bfloat16 products, the recurrence in float32."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            return self.model(ids)

    def quick_evaluation(self) -> None:
        """Log recall and English on a few held-out documents."""
        with torch.compiler.set_stance("force_eager"):
            report = evaluate(
                self.logits, docs=32, tokens=self.config.stage_at(self.step - 1)[0].tokens, seed=1, device=self.device
            )
        self.log({"step": self.step, "eval": report.to_json()})

    def run(self, *, max_seconds: float | None) -> bool:
        """Train to the end or to the time limit.

        Args:
            max_seconds: Stop after this time and leave a state to resume from.

        Returns:
            Whether the end was reached.
        """
        started = since = time.monotonic()
        seen = 0
        for batch in training_batches(self.config, self.step):
            ids = torch.from_numpy(batch.ids).to(self.device, non_blocking=True)
            is_answer = torch.from_numpy(batch.is_answer).to(self.device, non_blocking=True)
            is_english = torch.from_numpy(batch.is_english).to(self.device, non_blocking=True)
            total, plain, recalled = weighted_loss(self.logits(ids), ids, is_answer, is_english, self.config)
            total.backward()
            self.optimiser.step(self.config.rate_factor(self.step))
            self.step += 1
            seen += ids.numel()
            if self.step % self.config.log_every == 0 or self.step == 1:
                entry = {"loss": total.item(), "other": plain.item(), "answer": recalled.item()}
                now = time.monotonic()
                rounded = {name: round(value, 4) for name, value in entry.items()}
                self.log(
                    {
                        "step": self.step,
                        "length": ids.shape[1],
                        **rounded,
                        "tokens_per_s": round(seen / (now - since)),
                        "seconds": round(now - started, 1),
                    }
                )
                since, seen = now, 0
                if max_seconds is not None and now - started > max_seconds:
                    break
            if self.step % self.config.eval_every == 0:
                self.quick_evaluation()
                self.save()
        self.save()
        return self.step == self.config.total_steps

    def runs(self) -> list[dict[str, Any]]:
        """Return the runs behind the weights as they are now, those of the weights it started from included."""
        start = self.config.initial_weights
        run = self.config if self.step == self.config.total_steps else replace(self.config, last_step=self.step)
        return [*(training_runs(Path(start)) if start is not None else []), dataclasses.asdict(run)]

    def finish(self, lengths: dict[int, int]) -> None:
        """Round the weights to bfloat16, measure them in float32 and write the model directory.

        Args:
            lengths: Number of evaluation documents by document length.
        """
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.bfloat16().float())
        directory = self.out / "model"
        save_model(self.model, directory)
        with torch.compiler.set_stance("force_eager"), _matmul_precision(tf32=False):
            reports = measure_model(self.model, self.runs(), directory, lengths=lengths, device=self.device)
        for report in reports:
            self.log({"step": self.step, "final": report})


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume", action="store_true", help="go on from the state in --out")
    parser.add_argument("--max-seconds", type=float, help="stop after this time, leaving a state to resume from")
    parser.add_argument("--no-compile", action="store_true", help="run the layers without compiling them")
    parser.add_argument(
        "--final-docs", default="4096:64,8192:16,32768:4", help="LENGTH:DOCUMENTS,… measured at the end"
    )
    options = parser.parse_args(arguments)
    config = load_config(options.config)
    if options.no_compile:
        config = replace(config, compile=False)
    lengths = parse_lengths(options.final_docs)
    training = Training(config, out=options.out, device=torch.device(options.device), resume=options.resume)
    with _matmul_precision(config.tf32):
        training.run(max_seconds=options.max_seconds)
        training.finish(lengths)


if __name__ == "__main__":
    run_script("train", main)
