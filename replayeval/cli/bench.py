"""`replayeval bench`: how fast this machine measures."""

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from replayeval.cli import options, values
from replayeval.cli.session import say
from replayeval.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from replayeval.engine.bench import EngineBench
    from replayeval.engine.bench_generate import GenerateBench
    from replayeval.engine.bench_kernels import KernelBench
    from replayeval.models.head import OutputHead
    from replayssm.backend import Execution

app = typer.Typer(help="Measure speed.", no_args_is_help=True, rich_markup_mode=None)

EXAMPLES = """\b
Example:
  replayeval bench engine --model builtin:gdn --precision nvfp4 --tokens 4K
"""

GENERATE_EXAMPLES = """\b
Example:
  replayeval bench generate --model builtin:gdn --arm separate:nvfp4/fp16+sr --rows 8 --prompt 256 --tokens 64
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

    from replayeval.engine.bench import bench_engine

    head, (ids,) = _model_and_texts(
        model,
        data,
        docs=1,
        tokens=count,
        dtype=dtype_name,
        device=device_name,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    outcome = bench_engine(head, ids, tuple(arms), chunk_tokens=chunk_tokens, repeats=times, say=say)
    if _write(outcome.to_json(), target):
        _show(outcome)


@app.command("generate", epilog=GENERATE_EXAMPLES)
def generate(
    model: options.Model = options.DEFAULT_MODEL,
    arm: options.Arm = None,
    data: options.Data = None,
    rows: Annotated[str, typer.Option(metavar="N", help="Sequences side by side.")] = "8",
    prompt: Annotated[str, typer.Option(metavar="N", help="Tokens of each prompt.")] = "256",
    tokens: Annotated[str, typer.Option(metavar="N", help="Tokens to generate behind each prompt.")] = "64",
    window: options.Window = "16",
    backend: Annotated[str, typer.Option(metavar="torch|triton", help="What advances the states.")] = "torch",
    graphs: Annotated[
        str, typer.Option(metavar="auto|on|off", help="Replay steps of backend triton as CUDA graphs.")
    ] = "auto",
    repeats: Annotated[str, typer.Option(metavar="N", help="Timed repetitions; the median counts.")] = "3",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Time generation under policies against transformers' generate, after a check that greedy tokens agree."""
    count = values.integer(rows, option="--rows", least=1, most=1 << 16)
    prompt_tokens = values.tokens(prompt, option="--prompt")
    new_tokens = values.tokens(tokens, option="--tokens")
    times = values.integer(repeats, option="--repeats", least=1, most=1000)
    target = values.json_target(json)
    dtype_name, device_name = values.dtype(dtype), values.device(device)
    execution, graphs_word = _execution(backend), values.one_of(graphs, ("auto", "on", "off"), option="--graphs")
    arms = options.arms(None, arm, window=options.window_tokens(window)) if arm else []

    from replayeval.engine.bench_generate import bench_generate
    from replayeval.engine.generation import Graphs

    head, texts = _model_and_texts(
        model,
        data,
        docs=count,
        tokens=prompt_tokens,
        dtype=dtype_name,
        device=device_name,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    prompts = [ids[:prompt_tokens] for ids in texts]
    outcome = bench_generate(
        head,
        prompts,
        arms,
        new_tokens=new_tokens,
        repeats=times,
        execution=execution,
        graphs=Graphs(graphs_word),
        say=say,
    )
    if _write(outcome.to_json(), target):
        _show_generation(outcome)


def _execution(text: str) -> "Execution":
    from replayssm.backend import Execution

    try:
        return Execution.parse(text.strip().lower())
    except ValueError as error:
        raise ConfigError(f"--backend: {error}") from None


def _show_generation(outcome: "GenerateBench") -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("what")
    for name in ("seconds", "tokens/s", "over generate", "ms a step", "over generate"):
        table.add_column(name, justify="right")
    for timing in outcome.timings:
        numbers = (f"{timing.seconds:.3f}", f"{timing.tokens_per_s:,.1f}", f"{timing.ratio:.2f}x")
        step = "" if timing.step_ms is None else f"{timing.step_ms:.3f}"
        table.add_row(timing.name, *numbers, step, "" if timing.step_ratio is None else f"{timing.step_ratio:.2f}x")
    console = Console()
    console.print(table)
    console.print(
        f"{outcome.rows} rows, prompts of {outcome.prompt_tokens} tokens, {outcome.new_tokens} generated; states "
        f"advanced by {outcome.backend} on {outcome.device}"
    )
    for way in dict.fromkeys(timing.steps for timing in outcome.timings[1:]):
        console.print(f"steps: {way}")
    console.print(
        f"greedy tokens of conventional:fp32 equal to those of generate: {outcome.compared_tokens:,}"
        + (f", until a tie in {outcome.ties} rows" if outcome.ties else "")
    )
    console.print(f"peak memory: {outcome.peak_memory_bytes / 2**30:.2f} GiB")


KERNEL_EXAMPLES = """\b
Example:
  replayeval bench kernels --json kernels.json
"""


@app.command("kernels", epilog=KERNEL_EXAMPLES)
def kernels(
    shape: Annotated[
        str | None,
        typer.Option(metavar="NAME[,NAME...]", help="Layers, by the model they are of. Default: those of the paper."),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="N[,N...]", help="Sequences.")] = "1,8,32,128,256,512",
    window: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Replay windows, at the largest batch up to 256.")
    ] = "4,8,16,32",
    json: options.Json = None,
) -> None:
    """Time decode kernels against the field's conventional ones and the card's bandwidth."""
    from replayeval.engine.bench_kernels import bench_kernels, require_cuda
    from replayeval.engine.kernel_cases import SHAPES

    target = values.json_target(json)
    batches = [values.integer(n, option="--batch", least=1, most=65536) for n in _numbers(batch, option="--batch")]
    windows = [values.integer(n, option="--window", least=2, most=128) for n in _numbers(window, option="--window")]
    wanted = _numbers(shape, option="--shape") if shape else tuple(SHAPES)[:4]
    by_word = {name.lower(): name for name in SHAPES}
    unknown = [n for n in wanted if n.lower() not in by_word]
    if unknown:
        raise ConfigError(
            f"--shape: expected some of {', '.join(SHAPES)}, got {values.shown(', '.join(unknown))}."
            f"{values.suggestion(unknown[0], tuple(SHAPES))}"
        )
    names = [by_word[n.lower()] for n in wanted]
    require_cuda()
    outcome = bench_kernels(shapes=names, batches=batches, windows=windows, say=say)
    if _write(outcome.to_json(), target):
        _show_kernels(outcome)


def _numbers(text: str, *, option: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values.split_list(text, option=option)))


def _show_kernels(outcome: "KernelBench") -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("layer", "policy"):
        table.add_column(name)
    for name in ("batch", "cycle", "floor", "no flush", "flush", "conventional", "speedup"):
        table.add_column(name, justify="right")
    for t in outcome.timings:
        times = (t.cycle_us, t.floor_us, t.read_us, t.flush_us, t.conventional_us)
        table.add_row(t.shape, t.policy, str(t.batch), *(f"{x:.1f}" for x in times), f"{t.speedup:.2f}x")
    console = Console()
    console.print(table)
    console.print("microseconds per layer and token")
    speeds = ", ".join(f"{name.replace('_', ' ')} {speed / 1e12:.2f}" for name, speed in outcome.ceilings.items())
    console.print(f"{outcome.device}; TB/s: {speeds}")


def _model_and_texts(
    model: str,
    data: str | None,
    *,
    docs: int,
    tokens: int,
    dtype: str,
    device: str,
    revision: str | None,
    trust_remote_code: bool,
) -> "tuple[OutputHead, list[NDArray[np.int64]]]":
    """Load the model and so many texts of a length for it, as token ids."""
    import numpy as np

    from replayeval.data import default_source, load_documents
    from replayeval.models.head import OutputHead
    from replayeval.models.loading import load_model

    loaded = load_model(
        model,
        revision=revision,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        need_tokenizer=False,
    )
    head = OutputHead(loaded.model)
    documents = load_documents(
        data or default_source(model),
        loaded.tokenizer,
        docs=docs,
        tokens=tokens,
        lengths=(tokens,),
        vocab_size=head.vocabulary,
    )
    return head, [np.asarray(document.token_ids) for document in documents]


def _write(record: Any, target: Path | str | None) -> bool:
    """Write the record where --json says; return whether the terminal is left for the table."""
    text = json_text.dumps(record, indent=2)
    if isinstance(target, Path):
        try:
            target.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json: cannot write {values.shown(target)}: {error.strerror}.") from None
    elif target == values.STDOUT:
        print(text)
        return False
    return True


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
