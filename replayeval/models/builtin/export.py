"""Write a trained model as a Hugging Face directory: config, weights, tokenizer and model card."""

# torch and its companions ship partial types: what comes out of them is unknown by no fault of this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from replayeval.models.builtin.config import TrainConfig, parse_config
from replayeval.models.builtin.evaluate import HeadDecay
from replayeval.models.builtin.gdn import GDNTrainer
from replayeval.models.builtin.mamba2 import Mamba2Trainer
from replayeval.models.builtin.tokenizer import BOS_ID, EOS_ID, PAD_ID, save_tokenizer


def save_model(model: GDNTrainer | Mamba2Trainer, directory: Path) -> None:
    """Write config, weights and tokenizer.

    Args:
        model: The trained model.
        directory: Made when missing; files of the same names are replaced.

    Rounding:
        The weights are stored in bfloat16, to nearest even.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = model.shape.hf_config() | {
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        # Stored in half the size, computed with as float32 unless asked otherwise.
        "dtype": "float32",
        "use_cache": True,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(directory)


MEASUREMENTS = "measurements.json"


def training_runs(directory: Path) -> list[dict[str, Any]]:
    """Return the runs that made a model: the plain values of their configurations, the first run first.

    Args:
        directory: A model directory with its measurements; without them nothing is known.
    """
    path = directory / MEASUREMENTS
    return json.loads(path.read_text(encoding="utf-8"))["runs"] if path.is_file() else []


def write_card(
    directory: Path,
    runs: Sequence[dict[str, Any]],
    reports: Sequence[dict[str, object]],
    spectrum: Sequence[HeadDecay],
) -> None:
    """Write the model card: data, steps, measurements, licence; and the same measurements as JSON.

    Args:
        directory: The model directory.
        runs: The training configurations as plain values, the first run first.
        reports: Measurements, one per document length.
        spectrum: Half-lives of the heads.
    """
    measurements: dict[str, Any] = {
        "runs": list(runs),
        "measured_with_torch": torch.__version__,
        "reports": list(reports),
        "half_life_tokens": [dataclasses.asdict(entry) for entry in spectrum],
    }
    (directory / MEASUREMENTS).write_text(json.dumps(measurements, indent=1) + "\n", encoding="utf-8")
    card = card_text([parse_config(run, directory / MEASUREMENTS) for run in runs], reports, spectrum)
    (directory / "README.md").write_text(card, encoding="utf-8")


def _percent(value: object) -> str:
    return f"{100 * value:.1f}%" if isinstance(value, float) else "—"


def _bits(value: object) -> str:
    return f"{value:.3f} bits/byte (perplexity {2**value:.3f} per byte)" if isinstance(value, float) else "—"


def _run_text(config: TrainConfig) -> list[str]:
    share = config.english_share
    return [
        f"{config.total_tokens:,} tokens in {config.total_steps:,} steps, seed {config.seed}, in this order:",
        *(f"- {s.steps} steps of {s.rows} documents of {s.tokens} tokens" for s in config.stages),
        *([f"- stopped after step {config.last_step}"] if config.last_step is not None else []),
        "",
        f"{100 * (1 - share):.0f}% of its documents are recall books, {100 * share:.0f}% plain English;",
        f"{100 * config.generated_share:.0f}% of the books have filler generated from word pairs, the others verses.",
        f"The loss weighs answer tokens {config.answer_weight:g}, plain English 1, the rest of the books "
        f"{config.context_weight:g}.",
        "",
    ]


def card_text(runs: Sequence[TrainConfig], reports: Sequence[dict[str, Any]], spectrum: Sequence[HeadDecay]) -> str:
    """Return the model card in Markdown."""
    rows = [
        f"| {r['tokens']} | {_percent(r['recall'])} | {r['answers']} | {_bits(r['english_bits_per_byte'])} |"
        for r in reports
    ]
    kinds = [
        f"| {r['tokens']} | " + " | ".join(_percent(value[0]) for value in r["by_kind"].values()) + " |"
        for r in reports
    ]
    names = list(reports[0]["by_kind"]) if reports else []
    lives = sorted(entry.half_life_tokens for entry in spectrum)
    lines = [
        "---",
        "license: apache-2.0",
        "language: en",
        "---",
        f"# builtin:{runs[-1].architecture}",
        "",
        "A small language model that has to use its recurrent state: attention stands only below the first",
        "recurrence, so anything recalled from earlier text has gone through the state.",
        "",
        "## Training",
        *(line for number, run in enumerate(runs, 1) for line in (f"Run {number}:", *_run_text(run))),
        "English is the King James text without the held-out books (Esther, Job, Ezekiel, Acts, Hebrews).",
        "",
        "## Measured on held-out built-in documents, weights rounded to bfloat16, arithmetic in float32",
        "| tokens | recall | answers | held-out English |",
        "|---|---|---|---|",
        *rows,
        "",
        "Recall by task:",
        "| tokens | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
        *kinds,
        "",
        f"Half-lives of the heads: {lives[0]:.3g} to {lives[-1]:.3g} tokens, median {lives[len(lives) // 2]:.3g}."
        if lives
        else "",
        "",
        "## Data and licence",
        "The King James text is in the public domain; recall books are generated by the package. The weights are",
        "released under the licence of the package.",
        "",
    ]
    return "\n".join(lines)
