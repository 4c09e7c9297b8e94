"""Measure a built-in model again and refresh its card: `python -m replayeval.models.builtin.measure DIRECTORY`."""

# torch and its companions ship partial types: what comes out of them is unknown by no fault of this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from replayeval.errors import ConfigError
from replayeval.models.builtin.config import Architecture, TrainConfig, parse_config
from replayeval.models.builtin.documents import builtin_documents
from replayeval.models.builtin.evaluate import decay_spectrum, evaluate
from replayeval.models.builtin.export import MEASUREMENTS, training_runs, write_card
from replayeval.models.builtin.gdn import GDNTrainer
from replayeval.models.builtin.mamba2 import Mamba2Trainer
from replayeval.models.builtin.script import run_script


def parse_lengths(text: str) -> dict[int, int]:
    """Read `LENGTH:DOCUMENTS,…`.

    Args:
        text: For instance `2048:64,8192:16`.

    Returns:
        Number of documents by length.

    Raises:
        ConfigError: When the text has another form.
    """
    try:
        pairs = [part.split(":") for part in text.split(",") if part]
        return {int(tokens): int(docs) for tokens, docs in pairs}
    except ValueError as error:
        raise ConfigError(f"expected LENGTH:DOCUMENTS,… such as 2048:64,8192:16, got {text!r}") from error


def measure_model(
    model: GDNTrainer | Mamba2Trainer,
    runs: Sequence[dict[str, Any]],
    directory: Path,
    *,
    lengths: dict[int, int],
    device: torch.device,
    seed: int = 0,
) -> list[dict[str, object]]:
    """Measure a model in float32 on held-out documents and write its card.

    Args:
        model: The model with the weights as stored.
        runs: How it was trained, for the card.
        directory: Where the card goes.
        lengths: Number of documents by length.
        device: Where to run.
        seed: Seed of the documents.

    Returns:
        One plain report per length.
    """
    reports: list[dict[str, object]] = []
    for tokens, docs in lengths.items():
        rows = max(1, 16384 // tokens)
        reports.append(evaluate(model, docs=docs, tokens=tokens, seed=seed, device=device, rows=rows).to_json())
    text = torch.stack([torch.from_numpy(ids) for ids in builtin_documents(2, 4096)]).to(device)
    write_card(directory, runs, reports, decay_spectrum(model, text))
    return reports


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    from replayeval.models.builtin.train import build_model, load_weights

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--docs", default="2048:32,4096:32,8192:8", help="LENGTH:DOCUMENTS,…")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    runs = training_runs(options.directory)
    if not runs:
        raise ConfigError(f"expected a model of the training script in {options.directory}, found no {MEASUREMENTS}")
    config = parse_config(runs[-1], options.directory / MEASUREMENTS)
    model = build_model(
        TrainConfig(architecture=Architecture(config.architecture), shape=config.shape, seed=0, stages=())
    )
    load_weights(model, options.directory)
    device = torch.device(options.device)
    lengths = parse_lengths(options.docs)
    for report in measure_model(model.to(device), runs, options.directory, lengths=lengths, device=device):
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    run_script("measure", main)
