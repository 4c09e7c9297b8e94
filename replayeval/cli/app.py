"""The `replayeval` command: which commands there are, and what happens to errors."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from replayeval.cli import bench, doctor, formats, gate, kl, lm_eval, models, nightly, power, report, runs, sweep, tasks
from replayeval.cli.session import PROGRAM, Session, complain, hush_libraries
from replayeval.errors import ReplayEvalError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name=PROGRAM,
    help="Measure how far a low-precision recurrent state moves a hybrid SSM model's output distribution.",
    epilog="Exit codes: 0 done; 1 a check failed; 2 input that cannot be used; 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("kl", epilog=kl.EXAMPLES)(kl.run)
app.command("tasks", epilog=tasks.EXAMPLES)(tasks.run)
app.command("power", epilog=power.EXAMPLES)(power.run)
app.command("sweep", epilog=sweep.EXAMPLES)(sweep.run)
app.command("report", epilog=report.EXAMPLES)(report.run)
app.command("nightly", epilog=nightly.EXAMPLES)(nightly.run)
app.command("gate", epilog=gate.EXAMPLES)(gate.run)
app.command("lm-eval", epilog=lm_eval.EXAMPLES, context_settings=lm_eval.PASS_THROUGH, add_help_option=False)(
    lm_eval.run
)
app.command("formats", epilog=formats.EXAMPLES)(formats.run)
app.command("models", epilog=models.EXAMPLES)(models.run)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.run)
app.add_typer(bench.app, name="bench")
app.add_typer(runs.app, name="runs")


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        print(f"{PROGRAM} {version(PROGRAM)}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error. Accepted anywhere on the line.")
    ] = False,
) -> None:
    """Options of every command; what they do happens in `main` and in the callback of `--version`."""
    del version, debug


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    Args:
        arguments: The words after the program's name; those of this process by default.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    session = Session(arguments=tuple(words), debug=debug)
    hush_libraries()
    try:
        return _invoke(words, session)
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return EXIT_BAD_INPUT
        complain(_usage_message(error))
        return EXIT_BAD_INPUT
    except ReplayEvalError as error:
        if debug:
            raise
        complain(str(error))
        return error.exit_code
    except BrokenPipeError:
        # The reader of a pipe has left; without this the interpreter complains once more when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if debug:
            raise
        complain(_unexpected_message(error))
        return EXIT_FAILED


def _invoke(words: list[str], session: Session) -> int:
    result = typer.main.get_command(app).main(args=words, prog_name=PROGRAM, standalone_mode=False, obj=session)
    return result if isinstance(result, int) else 0


def _usage_message(error: typer.TyperException) -> str:
    near = getattr(error, "possibilities", None)
    message = (error.message if near else error.format_message()).rstrip(".")
    if near:
        message += f". Did you mean {near[0]}?"
    elif not message.endswith("?"):
        message += "."
    context = getattr(error, "ctx", None)
    path = PROGRAM if context is None else context.command_path
    return f"{message} See `{path} --help`."


def _unexpected_message(error: Exception) -> str:
    if type(error).__name__ in {"OutOfMemoryError", "MemoryError"}:
        return (
            "out of memory. Try a smaller --chunk, fewer arms per run, or a smaller --dtype. "
            f"The library said: {str(error)[:300]}"
        )
    if isinstance(error, OSError):
        return f"{error}. Run again with --debug for the traceback."
    return (
        f"unexpected {type(error).__name__}: {str(error)[:500]}\n"
        "This is a fault of replayeval. Run again with --debug for the traceback, and report it."
    )
