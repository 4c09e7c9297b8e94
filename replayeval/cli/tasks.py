"""`replayeval tasks`: what state policies cost on downstream tasks, answer by answer against the reference."""

import json as json_module
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from replayeval.cli import options, values
from replayeval.cli.progress import RunProgress
from replayeval.cli.session import Session, say
from replayeval.errors import ConfigError

if TYPE_CHECKING:
    from replayeval.report.tasks_schema import TasksReport

EXAMPLES = """\b
Examples:
  replayeval tasks --model builtin:gdn --arm shared:nvfp4 --tasks smoke
  replayeval tasks --model Qwen/Qwen3.5-4B --arm shared:fp8+sr --arm separate:nvfp4/fp16+sr \\
      --tasks gpqa_diamond,math_l5 --samples 4 --out runs/qwen
  replayeval tasks --model Qwen/Qwen3.5-4B --tasks gpqa_diamond \\
      --endpoint fp32=http://localhost:8000/v1 --endpoint fp8=http://localhost:8001/v1
"""

CHAT = ("auto", "on", "off")
CONTEXT = ("prompt", "decoded")


def run(
    context: typer.Context,
    tasks: Annotated[
        str,
        typer.Option(
            metavar="TASK[,TASK...]",
            help="mmlu_pro, gpqa_diamond, math_l5, ruler (or ruler_4k to ruler_128k), smoke, or any task of lm-eval.",
        ),
    ],
    model: options.Model = options.DEFAULT_MODEL,
    precision: options.Precision = None,
    arm: options.Arm = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]URL",
            help="An OpenAI-compatible server instead of policies; repeatable, the first is the reference.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="With --endpoint: tokenizer of the served model, for multiple choice."),
    ] = None,
    limit: Annotated[
        str | None, typer.Option(metavar="N", help="Most documents per task: a fixed sample of the whole task.")
    ] = None,
    samples: Annotated[
        str | None, typer.Option(metavar="N", help="Answers per document, where answers are sampled. Default 1.")
    ] = None,
    gen_kwargs: Annotated[
        str | None,
        typer.Option(metavar="K=V[,K=V...]", help="Replace generation settings of the tasks: temperature=1.0,top_p=1."),
    ] = None,
    task_data: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK=PATH", help="Local files of mmlu_pro, gpqa_diamond, math_l5 or ruler; repeatable."),
    ] = None,
    chat_template: Annotated[
        str, typer.Option(metavar="auto|on|off", help="Ask as a chat; auto: where task and model are made for it.")
    ] = "auto",
    likelihood_context: Annotated[
        str,
        typer.Option("--context", metavar="prompt|decoded", help="What the context of multiple choice counts as."),
    ] = "prompt",
    window: options.Window = "16",
    batch_size: Annotated[str, typer.Option(metavar="auto|N", help="Answers decoded side by side.")] = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    seed: Annotated[
        str, typer.Option(metavar="N", help="Seed of sampling, of stochastic rounding and bootstrap.")
    ] = "0",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep every answer here; see --resume.")] = None,
    json: options.Json = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Reuse the answers in --out; ask what is missing, of new arms too.")
    ] = False,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Compare state policies with the float32 reference on the same questions."""
    window_tokens = options.window_tokens(window)
    arguments: dict[str, Any] = {
        "window": window_tokens,
        "limit": None if limit is None else values.integer(limit, option="--limit", least=1),
        "samples": None if samples is None else values.integer(samples, option="--samples", least=1, most=1024),
        "gen_kwargs": None if gen_kwargs is None else _settings(gen_kwargs),
        "task_data": dict(_pair(text, option="--task-data", form="TASK=PATH") for text in task_data or ()) or None,
        "chat_template": values.one_of(chat_template, CHAT, option="--chat-template"),
        "context": values.one_of(likelihood_context, CONTEXT, option="--context"),
        "batch_size": "auto" if batch_size == "auto" else values.integer(batch_size, option="--batch-size", least=1),
        "dtype": values.dtype(dtype),
        "device": values.device(device),
        "seed": values.integer(seed, option="--seed", least=0, most=(1 << 64) - 1),
        "out": out,
        "resume": resume,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
    }
    names = values.split_list(tasks, option="--tasks")
    arguments |= _who(endpoint or (), tokenizer, precision=precision, arm=arm or (), window=window_tokens)
    json_target = values.json_target(json)
    if resume and out is None:
        raise ConfigError("--resume: expected --out DIR with the answers to reuse, got no --out.")

    from replayeval.tasks.catalog import check_names

    # Before anything heavy is loaded, so that a typing error shows at once.
    check_names(names)

    from replayeval.tasks.measure import measure_tasks

    try:
        with RunProgress(unit="documents", action="answering") as progress:
            report = measure_tasks(model, names, progress=progress, **arguments)
    except KeyboardInterrupt:
        if out is None:
            say("interrupted; nothing was kept. With --out DIR a run can be resumed.")
        else:
            say(f"interrupted; go on with:\n  {cast(Session, context.obj).resume_command()}")
        raise typer.Exit(130) from None
    _write(report, json_target)


def _who(
    endpoints: Sequence[str], tokenizer: str | None, *, precision: str | None, arm: Sequence[str], window: int
) -> dict[str, Any]:
    """Return the arguments that say who answers: policies or servers."""
    if not endpoints:
        if tokenizer is not None:
            raise ConfigError("--tokenizer: expected --endpoint URL with it; a local model brings its own tokenizer.")
        return {"arms": options.arms(precision, arm, window=window)}
    if precision is not None or arm:
        raise ConfigError("--endpoint: expected no --arm and no --precision beside it; a server has its own state.")
    from replayeval.tasks.endpoint import parse_endpoint

    parsed = [parse_endpoint(text) for text in endpoints]
    named = dict(parsed)
    if len(named) < len(parsed):
        raise ConfigError(
            f"--endpoint: expected names that differ, got {', '.join(name for name, _ in parsed)}; write NAME=URL."
        )
    return {"endpoints": named, "tokenizer": tokenizer}


def _settings(text: str) -> dict[str, Any]:
    """Return generation settings with values as JSON reads them; what is no JSON is a text."""
    pairs = [
        _pair(part, option="--gen-kwargs", form="KEY=VALUE") for part in values.split_list(text, option="--gen-kwargs")
    ]
    found: dict[str, Any] = {}
    for key, value in pairs:
        try:
            found[key] = json_module.loads(value.lower() if value.lower() in ("true", "false") else value)
        except ValueError:
            found[key] = value
    return found


def _pair(text: str, *, option: str, form: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (equals and key.strip() and value.strip()):
        raise ConfigError(f"{option}: expected {form}, got {values.shown(text)}.")
    return key.strip(), value.strip()


def _write(report: "TasksReport", json_target: Path | str | None) -> None:
    from rich.console import Console

    from replayeval.report.table import TABLE_WIDTH
    from replayeval.report.tasks_table import TasksTable

    if isinstance(json_target, Path):
        json_target.write_text(report.to_json() + "\n", encoding="utf-8")
    to_stdout = json_target == values.STDOUT
    if to_stdout:
        print(report.to_json())
    # With JSON on stdout, people at a terminal still see the table; a script sees nothing but the JSON.
    if not to_stdout or sys.stderr.isatty():
        console = Console(stderr=to_stdout)
        if not console.is_terminal:
            console = Console(stderr=to_stdout, width=TABLE_WIDTH)
        console.print(TasksTable(report))
