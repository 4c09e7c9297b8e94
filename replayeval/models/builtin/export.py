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

from replayeval.models.builtin.config import TrainConfig
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


def write_card(
    directory: Path, config: TrainConfig, reports: Sequence[dict[str, object]], spectrum: Sequence[HeadDecay]
) -> None:
    """Write the model card: data, steps, measurements, licence; and the same measurements as JSON.

    Args:
        directory: The model directory.
        config: The training configuration.
        reports: Measurements, one per document length.
        spectrum: Half-lives of the heads.
    """
    measurements: dict[str, Any] = {
        "config": dataclasses.asdict(config),
        "training_tokens": config.total_tokens,
        "torch": torch.__version__,
        "reports": list(reports),
        "half_life_tokens": [dataclasses.asdict(entry) for entry in spectrum],
    }
    (directory / "measurements.json").write_text(json.dumps(measurements, indent=1) + "\n", encoding="utf-8")
    (directory / "README.md").write_text(card_text(config, reports, spectrum), encoding="utf-8")


def _percent(value: object) -> str:
    return f"{100 * value:.1f}%" if isinstance(value, float) else "—"


def _bits(value: object) -> str:
    return f"{value:.3f} bits/byte (perplexity {2**value:.3f} per byte)" if isinstance(value, float) else "—"


def card_text(config: TrainConfig, reports: Sequence[dict[str, Any]], spectrum: Sequence[HeadDecay]) -> str:
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
    stages = [f"- {stage.steps} steps of {stage.rows} documents of {stage.tokens} tokens" for stage in config.stages]
    lives = sorted(entry.half_life_tokens for entry in spectrum)
    lines = [
        "---",
        "license: apache-2.0",
        "language: en",
        "---",
        f"# builtin:{config.architecture}",
        "",
        "A small language model that has to use its recurrent state: attention stands only below the first",
        "recurrence, so anything recalled from earlier text has gone through the state.",
        "",
        "## Training",
        f"{config.total_tokens:,} tokens in the first {config.total_steps:,} of these steps, seed {config.seed}:",
        *stages,
        *(
            ["", "It started from the weights of an earlier run (`initial_weights` in `measurements.json`)."]
            if config.initial_weights
            else []
        ),
        "",
        f"{100 * (1 - config.english_share):.0f}% of the documents are recall books, "
        f"{100 * config.english_share:.0f}% plain English.",
        f"The loss weighs answer tokens {config.answer_weight:g}, plain English 1, "
        f"the rest of the books {config.context_weight:g}. English is",
        "the King James text without the held-out books (Esther, Job, Ezekiel, Acts, Hebrews); "
        f"{100 * config.generated_share:.0f}% of the recall books have filler",
        "generated from its word pairs, the others its verses.",
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
