"""`replayeval kl`: how far each state policy moves the output distribution, by generation length."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from replayeval.cli import values
from replayeval.cli.progress import RunProgress
from replayeval.cli.session import Session, say
from replayeval.errors import ConfigError

if TYPE_CHECKING:
    from replayeval.report.result import KLResult
    from replayssm.policy import Policy

DEFAULT_PRECISION = "nvfp4"
STDOUT = "-"
EXAMPLES = """\b
Examples:
  replayeval kl --model builtin:gdn --precision nvfp4,fp8 --data builtin --lengths 1K,4K
  replayeval kl --model Qwen/Qwen3.5-4B --arm shared:fp8+sr --arm separate:nvfp4/fp16+sr@L=32 --docs 20 --out runs/a
"""


def run(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Hub id, directory, or builtin:NAME (see `replayeval models`).")],
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="P[,P...]",
            help="Formats; each stands for shared:fp32 (control), shared:P, shared:P+sr, separate:P/fp32 and "
            f"separate:P/fp16+sr. Default {DEFAULT_PRECISION}, unless --arm is given.",
        ),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY", help="One state policy, such as conventional:bf16 or shared:fp8[tile=32]+sr; repeatable."
        ),
    ] = None,
    data: Annotated[str, typer.Option(metavar="pg19|FILE|DIR|builtin", help="The text to force.")] = "pg19",
    lengths: Annotated[str, typer.Option(help="Generation lengths to report, in tokens; K is 1024.")] = "1K,8K,32K",
    docs: Annotated[str, typer.Option(metavar="N", help="Documents to score.")] = "8",
    window: Annotated[str, typer.Option(metavar="N", help="Replay window in tokens, 1 to 128.")] = "16",
    engine: Annotated[
        str, typer.Option(metavar="chunk|step", help="Whole chunks per forward pass, or token by token.")
    ] = "chunk",
    chunk: Annotated[str, typer.Option(metavar="N", help="Tokens per forward pass of the chunk engine.")] = "1024",
    dtype: Annotated[
        str, typer.Option(metavar="auto|float32|bfloat16|float16", help="Precision of the weights.")
    ] = "auto",
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda|cuda:N", help="Where to run.")] = "auto",
    seed: Annotated[str, typer.Option(metavar="N", help="Seed of stochastic rounding and of the bootstrap.")] = "0",
    prefill: Annotated[str, typer.Option(metavar="N", help="Tokens of each document taken as its prompt.")] = "0",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep results per token here; see --resume.")] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write the record as JSON; - is stdout.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw KL by length (.png, .svg, .pdf).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the documents missing in --out.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the Python code that comes with the model.")
    ] = False,
) -> None:
    """Measure the KL of state policies against the float32 reference."""
    options = {
        "lengths": values.token_list(lengths, option="--lengths"),
        "docs": values.integer(docs, option="--docs", least=1),
        "engine": values.one_of(engine, values.ENGINES, option="--engine"),
        "chunk": values.tokens(chunk, option="--chunk"),
        "dtype": values.dtype(dtype),
        "device": values.device(device),
        "seed": values.integer(seed, option="--seed", least=0, most=(1 << 64) - 1),
        "prefill": values.tokens(prefill, option="--prefill", least=0),
    }
    window_tokens = _window(window)
    json_path = None if json in (None, STDOUT) else values.output_file(Path(json), option="--json")
    plot_path = None if plot is None else _plot_path(plot)
    if resume and out is None:
        raise ConfigError("--resume: expected --out DIR with the run to go on with, got no --out.")
    arms = _arms(precision, arm or (), window=window_tokens)

    from replayeval.measure import measure_kl

    try:
        with RunProgress() as progress:
            result = measure_kl(
                model,
                arms=arms,
                window=window_tokens,
                data=data,
                out=out,
                resume=resume,
                revision=revision,
                trust_remote_code=trust_remote_code,
                progress=progress,
                **options,
            )
    except KeyboardInterrupt:
        _say_how_to_resume(cast(Session, context.obj), out)
        raise typer.Exit(130) from None
    _write(result, to_stdout=json == STDOUT, json_path=json_path, plot_path=plot_path)
    if not result.passed:
        raise typer.Exit(1)


def _window(text: str) -> int:
    from replayssm.policy import MAX_WINDOW

    return values.integer(text, option="--window", least=1, most=MAX_WINDOW)


def _arms(precision: str | None, texts: list[str] | tuple[()], *, window: int) -> "list[Policy]":
    from replayssm.policy import Policy, precision_arms

    if precision is None and not texts:
        precision = DEFAULT_PRECISION
    arms: list[Policy] = []
    option = "--precision"
    try:
        for name in () if precision is None else values.split_list(precision, option=option):
            arms.extend(precision_arms(name, window=window))
        option = "--arm"
        for text in texts:
            arms.extend(Policy.parse(part, default_window=window) for part in values.split_list(text, option=option))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    return list(dict.fromkeys(arms))


def _plot_path(path: Path) -> Path:
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in known:
        raise ConfigError(
            f"--plot: expected a file name that ends in one of .{', .'.join(known)}, got {values.shown(path)}."
        )
    return values.output_file(path, option="--plot")


def _write(result: "KLResult", *, to_stdout: bool, json_path: Path | None, plot_path: Path | None) -> None:
    from rich.console import Console

    from replayeval.report.table import TABLE_WIDTH

    if json_path is not None:
        result.save(json_path)
    if plot_path is not None:
        result.plot().savefig(plot_path, dpi=150)
    if to_stdout:
        print(result.to_json())
    # With JSON on stdout, people at a terminal still see the table; a script sees nothing but the JSON.
    if not to_stdout or sys.stderr.isatty():
        console = Console(stderr=to_stdout)
        if not console.is_terminal:
            console = Console(stderr=to_stdout, width=TABLE_WIDTH)
        console.print(result.table())
    for check in result.report.checks:
        if not check.passed:
            say(f"check failed: {check.name}: {check.value} is beyond the limit {check.limit}")


def _say_how_to_resume(session: Session, out: Path | None) -> None:
    if out is None:
        say("interrupted; nothing was kept. With --out DIR a run can be resumed.")
    else:
        say(f"interrupted; go on with:\n  {session.resume_command()}")
