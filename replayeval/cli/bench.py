"""`replayeval bench`: how fast this machine measures."""

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from replayeval.cli import options, values
from replayeval.cli.session import say
from replayeval.errors import ConfigError

if TYPE_CHECKING:
    from replayeval.engine.bench import EngineBench

app = typer.Typer(help="Measure speed.", no_args_is_help=True, rich_markup_mode=None)

EXAMPLES = """\b
Example:
  replayeval bench engine --model builtin:gdn --precision nvfp4 --tokens 4K
"""


@app.callback()
def group() -> None:
    """Measure speed."""


@app.command("engine", epilog=EXAMPLES)
def engine(
    model: options.Model = options.DEFAULT_MODEL,
    precision: options.Precision = None,
    arm: options.Arm = None,
    data: options.Data = None,
    tokens: Annotated[str, typer.Option(metavar="N", help="Tokens of the document.")] = "4K",
    window: options.Window = "16",
    chunk: options.Chunk = "1024",
    repeats: Annotated[str, typer.Option(metavar="N", help="Timed repetitions; the median counts.")] = "3",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Time the chunk engine against a plain forward pass and the step engine."""
    count = values.tokens(tokens, option="--tokens", least=2)
    chunk_tokens = values.tokens(chunk, option="--chunk")
    times = values.integer(repeats, option="--repeats", least=1, most=1000)
    target = values.json_target(json)
    dtype_name, device_name = values.dtype(dtype), values.device(device)
    arms = options.arms(precision, arm or (), window=options.window_tokens(window))

    import numpy as np

    from replayeval.data import load_documents
    from replayeval.engine.bench import bench_engine
    from replayeval.models.head import OutputHead
    from replayeval.models.loading import load_model

    loaded = load_model(
        model,
        revision=revision,
        dtype=dtype_name,
        device=device_name,
        trust_remote_code=trust_remote_code,
        need_tokenizer=False,
    )
    head = OutputHead(loaded.model)
    source = data or ("builtin" if model.startswith("builtin:") else "pg19")
    (document,) = load_documents(
        source, loaded.tokenizer, docs=1, tokens=count, lengths=(count,), vocab_size=head.vocabulary
    )
    outcome = bench_engine(
        head, np.asarray(document.token_ids), tuple(arms), chunk_tokens=chunk_tokens, repeats=times, say=say
    )
    text = json_text.dumps(outcome.to_json(), indent=2)
    if isinstance(target, Path):
        _save(target, text)
    if target == values.STDOUT:
        print(text)
    else:
        _show(outcome)


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: cannot write {values.shown(path)}: {error.strerror}.") from None


def _show(outcome: "EngineBench") -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("what")
    for name in ("rows", "tokens", "seconds", "tokens/s x rows"):
        table.add_column(name, justify="right")
    for timing in outcome.timings:
        numbers = (f"{timing.tokens:,}", f"{timing.seconds:.3f}", f"{timing.row_tokens_per_s:,.0f}")
        table.add_row(timing.name, str(timing.rows), *numbers)
    console = Console()
    console.print(table)
    console.print(f"chunk engine over step engine, one arm: {outcome.chunk_over_step:.1f}x")
    console.print(f"chunk engine over a plain forward pass of as many rows: {outcome.chunk_over_forward:.2f}x")
    console.print(f"largest difference of the engines in the NLL of the reference: {outcome.agreement_nats:.1e} nats")
    console.print(f"peak memory: {outcome.peak_memory_bytes / 2**30:.2f} GiB")
