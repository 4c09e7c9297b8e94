"""Which tasks there are: those of this project under short names, and all of lm-eval's."""

import difflib
import logging
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import replayeval
from replayeval.errors import ConfigError
from replayeval.report.text import printable

LM_EVAL_PREFIX = "lm-eval:"
OWN = {
    "mmlu_pro": "replayeval_mmlu_pro",
    "gpqa_diamond": "replayeval_gpqa_diamond",
    "math_l5": "replayeval_math_l5",
    "ruler": "replayeval_ruler",
    **{f"ruler_{label}": f"replayeval_ruler_{label}" for label in ("4k", "8k", "16k", "32k", "64k", "128k")},
    "smoke": "replayeval_smoke",
}
"""Short names on the command line, with the names under which lm-eval knows the tasks."""
_NAMES = re.compile(rb"^(?:task|group|tag):[ \t]*[\"']?([^\s\"'#]+)|^\s*- [\"']?([\w.+-]+)[\"']?\s*$", re.MULTILINE)


def task_folder() -> Path:
    """Return the folder of task files, in a source tree or in an installed package.

    Raises:
        ConfigError: The installation lacks it.
    """
    package = Path(replayeval.__file__).parent
    for folder in (package / "task_files", package.parent / "tasks"):
        if (folder / "ruler").is_dir():
            return folder
    raise ConfigError(f"expected task files in {package / 'task_files'}, found none; install replayeval again.")


def lm_eval_name(name: str) -> str:
    """Return the name under which lm-eval knows a task of the command line.

    Short names mean this project's tasks; `lm-eval:mmlu_pro` means lm-eval's own of that name.
    """
    if name.startswith(LM_EVAL_PREFIX):
        return name.removeprefix(LM_EVAL_PREFIX)
    return OWN.get(name, name)


def short_name(name: str) -> str:
    """Return the shortest name of a task that the command line takes."""
    return name.removeprefix("replayeval_")


def load(names: Sequence[str], *, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Load tasks and groups through lm-eval.

    Args:
        names: Names as the command line takes them.
        metadata: Handed to tasks that make their documents themselves.

    Returns:
        lm-eval's `tasks`, `groups` and `group_map`, by lm-eval's names.

    Raises:
        ConfigError: An unknown name, with the nearest ones; or documents that cannot be had.
    """
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingTypeStubs]

    check_names(names)
    wanted = [lm_eval_name(name) for name in names]
    with hushed():
        # Indexing all of lm-eval's tasks takes many seconds, which nobody needs for ours.
        manager = TaskManager(include_path=str(task_folder()), include_defaults=False, metadata=dict(metadata))
        if any(name not in manager.all_tasks for name in wanted):
            manager = TaskManager(include_path=str(task_folder()), metadata=dict(metadata))
            _refuse_unknown(names, manager.all_tasks)
        try:
            loaded: dict[str, Any] = dict(manager.load(list(dict.fromkeys(wanted))))
        except ConfigError:
            raise
        except ValueError as error:  # a task that is named twice, alone and in a group
            raise ConfigError(f"--tasks: {error}") from None
        except Exception as error:  # of datasets, the network, or a package that a task needs
            raise ConfigError(
                f"--tasks: {', '.join(map(printable, names))} cannot be loaded ({type(error).__name__}: "
                f"{str(error)[:300]})."
            ) from error
    return loaded


def check_names(names: Sequence[str]) -> None:
    """Check that tasks are known, without loading any.

    Raises:
        ConfigError: An unknown name, with the nearest ones.
    """
    if not names:
        raise ConfigError("--tasks: expected at least one task, got none.")
    own = _written_names(task_folder())
    if any(lm_eval_name(name) not in own for name in names):
        import lm_eval.tasks  # pyright: ignore[reportMissingTypeStubs]

        _refuse_unknown(names, own | _written_names(Path(str(lm_eval.tasks.__file__)).parent))


@contextmanager
def hushed() -> Generator[None]:
    """Keep lm-eval from logging and drawing bars between our lines."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _refuse_unknown(names: Sequence[str], known: Iterable[str]) -> None:
    known = set(known)
    unknown = [name for name in names if lm_eval_name(name) not in known]
    if not unknown:
        return
    hints: list[str] = []
    for name in unknown:
        near = difflib.get_close_matches(lm_eval_name(name).lower(), [*OWN, *sorted(known)], n=3, cutoff=0.6)
        hints.append(f"{printable(name)!r}" + (f" (did you mean {' or '.join(near)}?)" if near else ""))
    raise ConfigError(
        f"--tasks: unknown {', '.join(hints)}. Short names are {', '.join(OWN)}; any task of lm-eval works too."
    )


def _written_names(folder: Path) -> set[str]:
    """Return every name in task files, and some words more: seconds sooner than lm-eval's own index."""
    return {(m[1] or m[2]).decode() for file in folder.rglob("*.yaml") for m in _NAMES.finditer(file.read_bytes())}
