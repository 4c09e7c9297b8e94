"""What one invocation of the command line knows about itself."""

import os
import shlex
import sys
from dataclasses import dataclass

from replayeval.report.text import printable

PROGRAM = "replayeval"


@dataclass(frozen=True, kw_only=True)
class Session:
    """One invocation.

    Attributes:
        arguments: The words after the program's name.
        debug: Whether errors show their traceback.
    """

    arguments: tuple[str, ...]
    debug: bool = False

    def resume_command(self) -> str:
        """Return the command line that goes on where this one was interrupted."""
        words = [word for word in self.arguments if word != "--resume"]
        return shlex.join([PROGRAM, *words, "--resume"])


def complain(message: str) -> None:
    """Write one error message to stderr; whatever foreign text it quotes cannot steer the terminal."""
    lines = "\n".join(printable(line) for line in message.splitlines())
    print(f"{PROGRAM}: error: {lines}", file=sys.stderr, flush=True)


def say(message: str) -> None:
    """Write one line that is not a result to stderr."""
    print(f"{PROGRAM}: {message}", file=sys.stderr, flush=True)


def hush_libraries() -> None:
    """Keep libraries that are about to be imported from writing between our lines; errors still come through."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    for name in ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Many small parallel regions: threads that spin while they wait burn the cores that other processes need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
