"""`replayeval models`: which architectures are supported and which checkpoints are built in."""

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
    for column in ("--model", "weights"):
        builtin.add_column(column)
    for name in BUILTIN_MODELS:
        builtin.add_row(Text(f"builtin:{name}"), _size(name))

    console = Console()
    console.print(supported)
    console.print(builtin)


def _size(name: str) -> str:
    from replayeval.models.builtin.catalog import builtin_path

    try:
        return f"{(builtin_path(name) / 'model.safetensors').stat().st_size / 1e6:.1f} MB"
    except ConfigError:
        return "missing from this installation"
