"""Files that appear whole or not at all, whenever the process or the machine stops."""

import os
from collections.abc import Callable
from pathlib import Path

TEMPORARY_SUFFIX = ".tmp"


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, force it to disk, then rename it to `path`."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    write(temporary)
    with temporary.open("rb") as stream:
        os.fsync(stream.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def write_text_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomically(path, write)


def sync_directory(path: Path) -> None:
    """Force the names in a directory to disk: without it a rename may be lost with the power."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
