"""`replayeval kl`: how far each state policy moves the output distribution, by generation length."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from replayeval.cli import options, values
from replayeval.cli.progress import RunProgress
from replayeval.cli.session import Session, say
from replayeval.errors import ConfigError

if TYPE_CHECKING:
    from replayeval.report.result import KLResult

EXAMPLES = """\b
Examples:
  replayeval kl --model builtin:gdn --precision nvfp4,fp8 --lengths 1K,4K
  replayeval kl --model Qwen/Qwen3.5-4B --arm shared:fp32 --arm shared:fp8+sr \\
      --arm separate:nvfp4/fp16+sr@L=32 --docs 20 --out runs/a
"""


def run(
    context: typer.Context,
    model: options.Model = options.DEFAULT_MODEL,
    precision: options.Precision = None,
    arm: options.Arm = None,
    data: options.Data = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Generation lengths in tokens; K is 1024. Default 1K,8K,32K, or 512,1K,2K of built-in text.",
        ),
    ] = None,
    docs: Annotated[
        str | None, typer.Option(metavar="N", help="Documents to score. Default 8, or 4 of built-in text.")
    ] = None,
    window: options.Window = "16",
    engine: Annotated[
        str, typer.Option(metavar="chunk|step", help="Whole chunks per forward pass, or token by token.")
    ] = "chunk",
    backend: Annotated[
        str,
        typer.Option(
            metavar="torch|triton", help="What advances the states; triton:tf32 and triton:bf16 multiply coarsely."
        ),
    ] = "torch",
    chunk: options.Chunk = "1024",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    seed: Annotated[str, typer.Option(metavar="N", help="Seed of stochastic rounding and of the bootstrap.")] = "0",
    prefill: Annotated[str, typer.Option(metavar="N", help="Tokens of each document taken as its prompt.")] = "0",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep results per token here; see --resume.")] = None,
    json: options.Json = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw KL by length (.png, .svg, .pdf).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the documents missing in --out.")] = False,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Measure the KL of state policies against the float32 reference."""
    window_tokens = options.window_tokens(window)
    arguments: dict[str, Any] = {
        "arms": options.arms(precision, arm or (), window=window_tokens),
        "window": window_tokens,
        "data": data,
        "lengths": None if lengths is None else _lengths(lengths),
        "docs": None if docs is None else values.integer(docs, option="--docs", least=1),
        "engine": values.one_of(engine, values.ENGINES, option="--engine"),
        "backend": backend,
        "chunk": values.tokens(chunk, option="--chunk"),
        "dtype": values.dtype(dtype),
        "device": values.device(device),
        "seed": values.integer(seed, option="--seed", least=0, most=(1 << 64) - 1),
        "prefill": values.tokens(prefill, option="--prefill", least=0),
        "out": out,
        "resume": resume,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
    }
    json_target = values.json_target(json)
    plot_path = None if plot is None else _plot_path(plot)
    if resume and out is None:
        raise ConfigError("--resume: expected --out DIR with the run to go on with, got no --out.")

    from replayeval.measure import measure_kl

    try:
        with RunProgress() as progress:
            result = measure_kl(model, progress=progress, **arguments)
    except KeyboardInterrupt:
        _say_how_to_resume(cast(Session, context.obj), out)
        raise typer.Exit(130) from None
    _write(result, json_target=json_target, plot_path=plot_path)
    if not result.passed:
        raise typer.Exit(1)


def _lengths(text: str) -> tuple[int, ...]:
    from replayeval.data import parse_lengths

    try:
        return parse_lengths(text)
    except ConfigError as error:
        raise ConfigError(f"--lengths: {error}") from None


def _plot_path(path: Path) -> Path:
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in known:
        raise ConfigError(
            f"--plot: expected a file name that ends in one of .{', .'.join(known)}, got {values.shown(path)}."
        )
    return values.output_file(path, option="--plot")


def _write(result: "KLResult", *, json_target: Path | str | None, plot_path: Path | None) -> None:
    from rich.console import Console

    from replayeval.report.table import TABLE_WIDTH

    if isinstance(json_target, Path):
        result.save(json_target)
    if plot_path is not None:
        cast(Any, result.plot()).savefig(plot_path, dpi=150)
    to_stdout = json_target == values.STDOUT
    if to_stdout:
        print(result.to_json())
    # With JSON on stdout, people at a terminal still see the table; a script sees nothing but the JSON.
    if not to_stdout or sys.stderr.isatty():
        console = Console(stderr=to_stdout)
        if not console.is_terminal:
            console = Console(stderr=to_stdout, width=TABLE_WIDTH)
        console.print(result.table())
    for check in result.report.checks:
        if check.passed is False:
            say(f"check failed: {check.name}: {check.value} is beyond the limit {check.limit}")


def _say_how_to_resume(session: Session, out: Path | None) -> None:
    if out is None:
        say("interrupted; nothing was kept. With --out DIR a run can be resumed.")
    else:
        say(f"interrupted; go on with:\n  {session.resume_command()}")
