"""`replayeval models`: which architectures are supported and which checkpoints are built in."""

import json

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from replayeval.errors import ConfigError

EXAMPLES = """\b
Example:
  replayeval models
"""


def run() -> None:
    """List supported architectures and built-in checkpoints."""
    from replayeval.models.architectures import ARCHITECTURES
    from replayeval.models.builtin.catalog import BUILTIN_MODELS

    supported = Table(box=box.SIMPLE_HEAD, title="Supported architectures", title_justify="left")
    for column in ("architecture", "recurrence", "model_type"):
        supported.add_column(column)
    for architecture in ARCHITECTURES:
        types = architecture.model_types or (architecture.name,)
        supported.add_row(architecture.name, str(architecture.recurrence), ", ".join(types))

    builtin = Table(box=box.SIMPLE_HEAD, title="Built-in checkpoints", title_justify="left")
    builtin.add_column("--model")
    for column in ("weights", "recall", "English"):
        builtin.add_column(column, justify="right")
    for name in BUILTIN_MODELS:
        builtin.add_row(Text(f"builtin:{name}"), *_measured(name))
    builtin.caption = (
        "Recall: answers right in generated books of 4,096 tokens, float32 state. More in docs/builtin.md."
    )
    builtin.caption_justify = "left"

    console = Console()
    console.print(supported)
    console.print(builtin)


def _measured(name: str) -> list[str]:
    from replayeval.models.builtin.catalog import builtin_path

    try:
        directory = builtin_path(name)
        size = (directory / "model.safetensors").stat().st_size
    except ConfigError:
        return ["missing from this installation"]
    reports = json.loads((directory / "measurements.json").read_text(encoding="utf-8"))["reports"]
    report = next(report for report in reports if report["tokens"] == 4096)
    return [
        f"{size / 1e6:.1f} MB",
        f"{100 * report['recall']:.1f}%",
        f"{report['english_bits_per_byte']:.2f} bits/byte",
    ]
