"""Files under one root, on this machine or on any file system that fsspec knows, written whole or not at all."""

import json
import os
import secrets
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from replayeval.errors import StoreError
from replayeval.store._atomic import TEMPORARY_SUFFIX, sync_directory
from replayeval.store._lock import lock_directory

_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "hf", "memory"})
"""Protocols under which an object appears whole when its upload ends, and nothing can be renamed in one step."""


class Folder:
    """A folder of a file system.

    Names are relative paths with forward slashes. A file that `write` made is whole whenever it can be seen: on this
    machine it is forced to disk under another name and renamed; an object store shows an object when it is complete;
    elsewhere it is moved into place.
    """

    def __init__(self, path: str | Path) -> None:
        """Name the folder; nothing is touched.

        Raises:
            StoreError: The path names a protocol that fsspec does not know, or whose package is not installed.
        """
        url_to_fs: Any = import_module("fsspec.core").url_to_fs  # fsspec ships no types
        self.url = str(path)
        try:
            found: Any = url_to_fs(os.path.expanduser(self.url))
        except (ImportError, ValueError, OSError) as error:
            raise StoreError(
                f"cannot open {self.url}: {error}; give a folder, or a URL of an installed fsspec"
            ) from error
        self._fs, self._root = cast(tuple[Any, str], found)
        protocols: Any = self._fs.protocol
        self._protocols = {protocols} if isinstance(protocols, str) else set(cast(tuple[str, ...], protocols))

    @property
    def local(self) -> Path | None:
        """The folder on this machine, or None where it is elsewhere."""
        return Path(self._root) if self._protocols & {"file", "local"} else None

    def show(self, name: str = "") -> str:
        """Return how messages call a file."""
        return f"{self.url.rstrip('/')}/{name}" if name else self.url

    def exists(self, name: str) -> bool:
        """Tell whether there is a file of that name."""
        if self.local is not None:
            return (self.local / name).is_file()
        return bool(self._fs.isfile(self._full(name)))

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: There is none.
            StoreError: It cannot be read.
        """
        try:
            if self.local is not None:
                return (self.local / name).read_bytes()
            return cast(bytes, self._fs.cat_file(self._full(name)))
        except NotADirectoryError as error:
            raise FileNotFoundError(*error.args) from error
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreError(f"cannot read {self.show(name)}: {error.strerror or error}") from error

    def write(self, name: str, content: bytes) -> None:
        """Replace a file in one step; it is on disk when this returns.

        Raises:
            StoreError: The file system refuses.
        """
        try:
            if self.local is not None:
                _write_local(self.local / name, content)
            elif self._protocols & _OBJECT_STORES:
                self._fs.pipe_file(self._full(name), content)
            else:
                self._write_and_move(name, content)
        except OSError as error:
            raise StoreError(
                f"cannot write {self.show(name)}: {error.strerror or error}; make room or choose another place"
            ) from error

    def names(self, below: str = "") -> list[str]:
        """Return the names of all files below a folder, in order; none where there is no such folder."""
        if self.local is not None:
            found: list[str] = []
            _walk(self.local / below if below else self.local, f"{below}/" if below else "", found)
            return sorted(found)
        root = self._full(below)
        paths = cast(list[str], self._fs.find(root))
        base = PurePosixPath(self._fs._strip_protocol(self._root))
        return sorted(str(PurePosixPath(p).relative_to(base)) for p in paths)

    def top(self) -> list[str]:
        """Return the names of the files and folders that lie directly in it, in order.

        Raises:
            StoreError: It is a file, or cannot be read.
        """
        try:
            if self.local is not None:
                return sorted(entry.name for entry in self.local.iterdir())
            paths = cast(list[str], self._fs.ls(self._root, detail=False))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"cannot read {self.show()}: {error.strerror or error}; choose another place") from error
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def lock(self, below: str) -> IO[str] | None:
        """Keep other processes from writing to a folder until the returned file is closed.

        Returns:
            None where the file system is not this machine's: nothing there can be locked.

        Raises:
            StoreError: Another process holds it.
        """
        if self.local is None:
            return None
        path = self.local / below
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
        return lock_directory(path)

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object that a file holds.

        Raises:
            FileNotFoundError: There is no such file.
            StoreError: It is damaged.
        """
        content = self.read(name)
        try:
            values: object = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{self.show(name)} is damaged: {error}") from error
        if not isinstance(values, dict):
            raise StoreError(f"{self.show(name)} is damaged: expected a JSON object, got {type(values).__name__}")
        return cast(dict[str, Any], values)

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Replace a file by a JSON object.

        Raises:
            StoreError: The file system refuses.
        """
        self.write(name, (json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n").encode())

    def _full(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def _write_and_move(self, name: str, content: bytes) -> None:
        full = self._full(name)
        self._fs.makedirs(full.rpartition("/")[0], exist_ok=True)
        temporary = f"{full}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
        self._fs.pipe_file(temporary, content)
        self._fs.mv(temporary, full)


def is_temporary(name: str) -> bool:
    """Tell whether a name is that of a file which was being written."""
    return name.endswith(TEMPORARY_SUFFIX)


def _write_local(path: Path, content: bytes) -> None:
    # Two processes may write the same name: neither may rename what the other has only half written.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        stream = temporary.open("wb")
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        sync_directory(path.parent.parent)
        stream = temporary.open("wb")
    try:
        with stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _walk(path: Path, prefix: str, found: list[str]) -> None:
    try:
        entries = list(os.scandir(path))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            _walk(Path(entry.path), f"{prefix}{entry.name}/", found)
        else:
            found.append(prefix + entry.name)
