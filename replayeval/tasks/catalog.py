"""Which tasks there are: those of this project under short names, and all of lm-eval's."""

import difflib
import functools
import importlib.util
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
SHORT_NAMES = (
    "mmlu_pro",
    "gpqa_diamond",
    "math_l5",
    "ruler",
    *(f"ruler_{label}" for label in ("4k", "8k", "16k", "32k", "64k", "128k")),
    "smoke",
)
"""Names of this project's tasks on the command line; lm-eval knows them with a prefix."""
_OWN_PREFIX = "replayeval_"
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

    Short names mean this project's tasks and their members (`ruler_4k_vt`); `lm-eval:mmlu_pro` means lm-eval's own of
    that name, and a path that ends in `.yaml` a task file.
    """
    if name.startswith(LM_EVAL_PREFIX):
        return name.removeprefix(LM_EVAL_PREFIX)
    own = f"{_OWN_PREFIX}{name}"
    return own if own in _own_names() else name


def short_name(name: str) -> str:
    """Return the shortest name of a task that the command line takes."""
    return name.removeprefix(_OWN_PREFIX)


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
        if any(name not in manager.all_tasks and not _is_file(name) for name in wanted):
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
    own = _own_names()
    if any(lm_eval_name(name) not in own and not _is_file(name) for name in names):
        # Found without importing it, which takes seconds.
        package = importlib.util.find_spec("lm_eval")
        if package is None or package.origin is None:
            raise ConfigError("--tasks: lm-eval is not installed; install it with `pip install lm_eval`.")
        _refuse_unknown(names, own | _written_names(Path(package.origin).parent / "tasks"))


@contextmanager
def hushed() -> Generator[None]:
    """Keep lm-eval from logging and drawing bars between our lines."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    # What goes wrong is raised; its log would only repeat it.
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _refuse_unknown(names: Sequence[str], known: Iterable[str]) -> None:
    known = set(known)
    unknown = [name for name in names if lm_eval_name(name) not in known and not _is_file(name)]
    if not unknown:
        return
    hints: list[str] = []
    for name in unknown:
        near = difflib.get_close_matches(lm_eval_name(name).lower(), [*SHORT_NAMES, *sorted(known)], n=3, cutoff=0.6)
        hints.append(f"{printable(name)!r}" + (f" (did you mean {' or '.join(near)}?)" if near else ""))
    raise ConfigError(
        f"--tasks: unknown {', '.join(hints)}. Short names are {', '.join(SHORT_NAMES)}; any task of lm-eval works too."
    )


def _is_file(name: str) -> bool:
    return name.endswith(".yaml") and Path(name).is_file()


@functools.cache
def _own_names() -> frozenset[str]:
    return frozenset(_written_names(task_folder()))


def _written_names(folder: Path) -> set[str]:
    """Return every name in task files, and some words more: seconds sooner than lm-eval's own index."""
    return {(m[1] or m[2]).decode() for file in folder.rglob("*.yaml") for m in _NAMES.finditer(file.read_bytes())}
