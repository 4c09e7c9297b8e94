"""The training configuration of a built-in model: a strict JSON file."""

import json
import math
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from replayeval.errors import ConfigError


class Architecture(StrEnum):
    """The two built-in architectures."""

    GDN = "gdn"
    MAMBA2 = "mamba2"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stretch of training at one document length.

    Attributes:
        tokens: Tokens per document.
        rows: Documents per step.
        steps: Optimizer steps.
    """

    tokens: int
    rows: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides the weights, beside the software and the device.

    Attributes:
        architecture: Which model.
        shape: Sizes that differ from the architecture's defaults.
        seed: Seed of the initial weights and of the training documents.
        stages: The curriculum, in order.
        matrix_rate: Peak learning rate of the orthogonalised momentum that trains the matrices.
        rate: Peak learning rate of AdamW, which trains everything else.
        weight_decay: Decoupled decay of the matrices.
        warmup_steps: Steps of linear warm-up.
        decay_share: Share of all steps, at the end, over which the rates fall linearly to nothing.
        answer_weight: Weight in the loss of a token that belongs to an answer; a token of plain English weighs 1.
        context_weight: Weight of the other tokens of recall books. Their filler repeats the English often, so a low
            weight keeps the model from learning it by heart.
        english_share: Share of documents that are plain English instead of recall books.
        generated_share: Share of recall books whose filler is generated word by word instead of taken from the text.
        initial_weights: Directory of a model to start from, relative to the working directory; fresh weights when None.
        last_step: Stop after this step, wherever the rates then are; None for the end of the stages.
        tf32: Let float32 products on a GPU read their operands in TF32.
        compile: Compile the layers.
        workers: Processes that write documents.
        log_every: Steps between log lines.
        eval_every: Steps between evaluations on held-out documents.
    """

    architecture: Architecture
    shape: dict[str, Any]
    seed: int
    stages: tuple[Stage, ...]
    matrix_rate: float = 0.02
    rate: float = 3e-3
    weight_decay: float = 0.01
    warmup_steps: int = 100
    decay_share: float = 0.5
    answer_weight: float = 4.0
    context_weight: float = 0.3
    english_share: float = 0.15
    generated_share: float = 0.8
    initial_weights: str | None = None
    last_step: int | None = None
    tf32: bool = True
    compile: bool = True
    workers: int = 6
    log_every: int = 100
    eval_every: int = 1000

    @property
    def planned_steps(self) -> int:
        """Steps of all stages, over which the rates rise and fall."""
        return sum(stage.steps for stage in self.stages)

    @property
    def total_steps(self) -> int:
        """Steps that are run."""
        return self.planned_steps if self.last_step is None else min(self.last_step, self.planned_steps)

    @property
    def total_tokens(self) -> int:
        """Tokens of the steps that are run."""
        left, tokens = self.total_steps, 0
        for stage in self.stages:
            steps = min(stage.steps, left)
            tokens += steps * stage.rows * stage.tokens
            left -= steps
        return tokens

    def stage_at(self, step: int) -> tuple[Stage, int]:
        """Return the stage of a step, and the number of documents written before that step."""
        before = 0
        for stage in self.stages:
            if step < stage.steps:
                return stage, before + step * stage.rows
            step -= stage.steps
            before += stage.steps * stage.rows
        raise ConfigError(f"expected a step below {self.total_steps}, got one {step} past the end of the curriculum")

    def rate_factor(self, step: int) -> float:
        """Return the share of the peak rates that a step uses."""
        total = self.planned_steps
        falling = max(1.0, total * self.decay_share)
        return min(1.0, (step + 1) / max(1, self.warmup_steps), max(0.0, (total - step) / falling))


def _check(config: TrainConfig) -> None:
    whole = ("seed", "warmup_steps", "workers")
    positive = ("log_every", "eval_every") + (("last_step",) if config.last_step is not None else ())
    rates = ("matrix_rate", "rate", "weight_decay", "answer_weight", "context_weight")
    shares = ("decay_share", "english_share", "generated_share")
    limits: dict[str, tuple[type | tuple[type, ...], float, float]] = {
        **{name: (int, 0, math.inf) for name in whole},
        **{name: (int, 1, math.inf) for name in positive},
        **{name: ((int, float), 0, math.inf) for name in rates},
        **{name: ((int, float), 0, 1) for name in shares},
    }
    for name, (kind, low, high) in limits.items():
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
            raise ValueError(f"{name} has to be a number from {low} to {high}, got {value!r}")
    if not config.stages:
        raise ValueError("stages is empty")
    for stage in config.stages:
        if any(type(value) is not int or value < 1 for value in (stage.tokens, stage.rows, stage.steps)):
            raise ValueError(f"a stage needs tokens, rows and steps of at least 1, got {stage}")


def load_config(path: Path) -> TrainConfig:
    """Read a training configuration.

    Args:
        path: A JSON file whose keys are the fields of `TrainConfig`.

    Returns:
        The configuration.

    Raises:
        ConfigError: When the file is missing, is not JSON, or has unknown, missing or unusable keys.
    """
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"expected a JSON training configuration at {path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"expected a JSON object in {path}, got {type(raw).__name__}")
    return parse_config(cast(dict[str, Any], raw), path)


def parse_config(raw: dict[str, Any], source: Path) -> TrainConfig:
    """Make a configuration from plain values.

    Args:
        raw: The fields of `TrainConfig`; not changed.
        source: Where they come from, for messages.

    Returns:
        The configuration.

    Raises:
        ConfigError: When keys are unknown, missing or unusable.
    """
    known = {field.name for field in fields(TrainConfig)}
    unknown = sorted(set(raw) - known)
    if unknown:
        raise ConfigError(f"unknown keys in {source}: {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    try:
        typed: dict[str, Any] = {
            "architecture": Architecture(raw["architecture"]),
            "stages": tuple(Stage(**stage) for stage in raw["stages"]),
        }
        config = TrainConfig(**(raw | typed))
        _check(config)
        return config
    except KeyError as error:
        raise ConfigError(f"unusable training configuration {source}: the key {error} is missing") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"unusable training configuration {source}: {error}") from error
