"""One writer per directory."""

import sys
from pathlib import Path
from typing import IO

from replayeval.errors import StoreError

LOCK = ".lock"


def lock_directory(path: Path) -> IO[str]:
    """Keep other processes from writing to a directory until the returned file is closed or the process ends.

    Raises:
        StoreError: Another process holds the directory.
    """
    stream = (path / LOCK).open("a", encoding="utf-8")
    if sys.platform == "win32":
        return stream
    import fcntl

    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        stream.close()
        raise StoreError(f"{path} is being written by another process; wait for it, or choose another") from error
    except OSError:
        # Some network file systems cannot lock. Two processes would then write the same bytes under the same names.
        pass
    return stream
