"""How the scripts of the built-in models end on bad input: one message and the exit code, no traceback."""

import sys
from collections.abc import Callable

from replayeval.errors import ConfigError


def run_script(name: str, main: Callable[[], None]) -> None:
    """Run the command line of a script.

    Args:
        name: What the message begins with.
        main: The command line.
    """
    try:
        main()
    except ConfigError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
