"""`replayeval lm-eval`: lm-eval's own command line, with the model `replayssm` among its models."""

import importlib
import sys
from typing import Any

import typer

from replayeval.errors import ConfigError, ReplayEvalError

PASS_THROUGH: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True}

EXAMPLES = """\b
Example:
  replayeval lm-eval run --model replayssm --tasks arc_easy --batch_size 16 \\
      --model_args pretrained=builtin:gdn,policy=separate:nvfp4/fp16+sr,window=16,seed=0
"""


def run(context: typer.Context) -> None:
    """Run lm-eval with the model `replayssm`; all words after the command are lm-eval's."""
    words = list(context.args)
    try:
        _lm_eval(words)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
        raise typer.Exit(code) from None


def _lm_eval(words: list[str]) -> None:
    from lm_eval._cli import HarnessCLI  # pyright: ignore[reportMissingTypeStubs]
    from lm_eval.utils import setup_logging  # pyright: ignore[reportMissingTypeStubs]

    importlib.import_module("replayeval.tasks.lm")  # registers the model
    setup_logging()
    before = sys.argv
    # lm-eval reads the words of the process, and adds `run` where a command is missing.
    sys.argv = ["lm-eval", *words]
    try:
        parser = HarnessCLI()
        arguments = parser.parse_args()
        _tell_tasks_the_tokenizer(arguments)
        _name_our_tasks(arguments)
        _leave_the_device_open(arguments)
        parser.execute(arguments)
    except (ReplayEvalError, SystemExit, KeyboardInterrupt):
        raise
    except (ValueError, TypeError, KeyError, FileNotFoundError, ConnectionError, ImportError) as error:
        raise ConfigError(f"lm-eval: {str(error) or type(error).__name__}") from error
    finally:
        sys.argv = before


def _tell_tasks_the_tokenizer(arguments: Any) -> None:
    """Tasks that write their own texts load the tokenizer of `pretrained` themselves, and know no built-in models."""
    model_arguments: Any = getattr(arguments, "model_args", None)
    if getattr(arguments, "model", None) != "replayssm" or not isinstance(model_arguments, dict):
        return
    from replayeval.models.builtin.catalog import builtin_path
    from replayeval.models.sources import BUILTIN_PREFIX

    source = str(model_arguments.get("pretrained", ""))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    if source.startswith(BUILTIN_PREFIX) and "tokenizer" not in model_arguments:
        directory = str(builtin_path(source.removeprefix(BUILTIN_PREFIX)))
        arguments.metadata = {"tokenizer": directory} | (getattr(arguments, "metadata", None) or {})


def _name_our_tasks(arguments: Any) -> None:
    """Let lm-eval find the task files of this project, unless it was told to look elsewhere."""
    from replayeval.tasks.catalog import task_folder

    if getattr(arguments, "include_path", "") is None:
        arguments.include_path = str(task_folder())


def _leave_the_device_open(arguments: Any) -> None:
    """Without a word about the device lm-eval asks for the first GPU, on machines that have none too."""
    if getattr(arguments, "model", None) == "replayssm" and getattr(arguments, "device", "") is None:
        arguments.device = "auto"
