"""`replayeval bench`: how fast this machine measures."""

from typing import Annotated

import typer

from replayeval.cli import values

app = typer.Typer(help="Measure speed.", no_args_is_help=True, rich_markup_mode=None)

EXAMPLES = """\b
Example:
  replayeval bench engine --model builtin:gdn --tokens 4K --chunk 1024
"""


@app.callback()
def group() -> None:
    """Measure speed."""


@app.command("engine", epilog=EXAMPLES)
def engine(
    model: Annotated[str, typer.Option(help="Hub id, directory, or builtin:NAME.")],
    tokens: Annotated[str, typer.Option(metavar="N", help="Tokens to force.")] = "4K",
    chunk: Annotated[str, typer.Option(metavar="N", help="Tokens per forward pass.")] = "1024",
    dtype: Annotated[str, typer.Option(help="Precision of the weights.")] = "auto",
    device: Annotated[str, typer.Option(help="Where to run.")] = "auto",
) -> None:
    """Time the chunk engine and the step engine on one model."""
    options = {
        "tokens": values.tokens(tokens, option="--tokens"),
        "chunk": values.tokens(chunk, option="--chunk"),
        "dtype": values.dtype(dtype),
        "device": values.device(device),
    }

    from rich.console import Console

    from replayeval.engine.bench import bench_engine

    Console().print(bench_engine(model, **options))
