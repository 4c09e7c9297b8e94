"""Raw documents: texts read piece by piece, or token ids, from files and directories."""

import codecs
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from replayeval.errors import ConfigError
from replayeval.store._arrow import pa, pq

PIECE_BYTES = 1 << 16
TEXT_KEY = "text"
TOKEN_KEYS = ("input_ids", "tokens")


@dataclass(frozen=True, kw_only=True)
class RawDocument:
    """A document before tokenization: exactly one of `pieces` and `token_ids` is there."""

    name: str
    pieces: Iterator[str] | None = None
    token_ids: NDArray[np.int64] | None = None


def read_path(path: Path) -> Iterator[RawDocument]:
    """Yield the documents of a file, or of all files of a directory in the order of their paths.

    Raises:
        ConfigError: Something in there cannot be read as documents; the message names the file and the place in it.
    """
    if path.is_dir():
        files = [file for file in _walk(path) if file.suffix.lower() in READERS]
        if not files:
            raise ConfigError(f"expected {_kinds()} files in the directory {path}, found none")
        for file in files:
            yield from _read_file(file, name=file.relative_to(path).as_posix())
    else:
        yield from _read_file(path, name=path.name)


def checked_token_ids(values: Any, *, where: str) -> NDArray[np.int64]:
    """Return a sequence of whole numbers as int64.

    Raises:
        ConfigError: Another dtype, several dimensions, or no token at all.
    """
    try:
        ids = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{where}: expected a flat list of token ids, got {error}") from error
    if ids.ndim != 1:
        raise ConfigError(f"{where}: expected a flat list of token ids, got {ids.ndim} dimensions")
    if ids.shape[0] == 0:
        raise ConfigError(f"{where}: expected token ids, got none; leave the document out")
    if ids.dtype.kind not in "iu":
        raise ConfigError(f"{where}: expected token ids as integers, got {ids.dtype}; store them as int32 or int64")
    if ids.dtype.kind == "u" and int(ids.max()) > np.iinfo(np.int64).max:
        raise ConfigError(f"{where}: token id {int(ids.max())} does not fit 64 bits with sign")
    return ids.astype(np.int64)


def _walk(directory: Path) -> list[Path]:
    inside = (file for file in directory.rglob("*") if file.is_file())
    visible = [file for file in inside if not any(p.startswith(".") for p in file.relative_to(directory).parts)]
    return sorted(visible, key=lambda file: file.relative_to(directory).as_posix())


def _read_file(path: Path, *, name: str) -> Iterator[RawDocument]:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"expected a {_kinds()} file or a directory of these, got {path}")
    try:
        if path.stat().st_size == 0:
            raise ConfigError(f"expected a document in {path}, got an empty file")
        yield from reader(path, name)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error


def _read_text(path: Path, name: str) -> Iterator[RawDocument]:
    yield RawDocument(name=name, pieces=_text_pieces(path))


def _text_pieces(path: Path) -> Iterator[str]:
    # A byte order mark is no text; beyond that nothing is changed, line ends included.
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    offset = 0
    try:
        with path.open("rb") as stream:
            while True:
                block = stream.read(PIECE_BYTES)
                pending = len(decoder.getstate()[0])
                zero = block.find(b"\0")
                if zero >= 0:
                    raise ConfigError(f"expected text in {path}, got binary data: byte 0 at offset {offset + zero}")
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise ConfigError(
                        f"expected UTF-8 text in {path}, got byte {error.object[error.start]:#04x} at offset "
                        f"{offset - pending + error.start}; convert the file to UTF-8"
                    ) from error
                if text:
                    yield text
                if not block:
                    return
                offset += len(block)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error


def _read_jsonl(path: Path, name: str) -> Iterator[RawDocument]:
    documents = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                raise ConfigError(f"{where}: expected a JSON object in UTF-8, got {error}") from error
            documents += 1
            yield _from_mapping(value, name=f"{name}:{number}", where=where)
    if not documents:
        raise ConfigError(f"expected a document per line in {path}, got blank lines only")


def _from_mapping(value: Any, *, name: str, where: str) -> RawDocument:
    wanted = f"the key {TEXT_KEY!r} with a text, or {' or '.join(map(repr, TOKEN_KEYS))} with token ids"
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected an object with {wanted}, got {type(value).__name__}")
    entries = cast(dict[str, Any], value)
    for key in TOKEN_KEYS:
        if key in entries:
            return RawDocument(name=name, token_ids=checked_token_ids(entries[key], where=f"{where}, {key!r}"))
    text = entries.get(TEXT_KEY)
    if not isinstance(text, str):
        got = f"{TEXT_KEY!r} of type {type(text).__name__}" if TEXT_KEY in entries else f"the keys {sorted(entries)}"
        raise ConfigError(f"{where}: expected {wanted}, got {got}")
    return text_document(text, name=name, where=where)


def text_document(text: str, *, name: str, where: str) -> RawDocument:
    """Return a text in memory as a document.

    Raises:
        ConfigError: The text is empty or holds half of a surrogate pair.
    """
    if not text.strip():
        raise ConfigError(f"{where}: expected text, got nothing but white space; leave the document out")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: character {error.start} is a lone surrogate, which is no text") from error
    return RawDocument(name=name, pieces=(text[i : i + PIECE_BYTES] for i in range(0, len(text), PIECE_BYTES)))


def _read_json(path: Path, name: str) -> Iterator[RawDocument]:
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON in UTF-8, got {error}") from error
    if isinstance(value, list) and value and all(isinstance(entry, list) for entry in cast(list[Any], value)):
        for number, entry in enumerate(cast(list[Any], value)):
            yield RawDocument(name=f"{name}:{number}", token_ids=checked_token_ids(entry, where=f"{path}, [{number}]"))
    elif isinstance(value, list):
        yield RawDocument(name=name, token_ids=checked_token_ids(value, where=str(path)))
    else:
        yield _from_mapping(value, name=name, where=str(path))


def _read_npy(path: Path, name: str) -> Iterator[RawDocument]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ConfigError(f"{path}: expected an integer array in NumPy's format, got {error}") from error
    if array.ndim == 2:
        for number in range(array.shape[0]):
            yield RawDocument(
                name=f"{name}:{number}", token_ids=checked_token_ids(array[number], where=f"{path}, row {number}")
            )
    else:
        yield RawDocument(name=name, token_ids=checked_token_ids(array, where=str(path)))


def _read_parquet(path: Path, name: str) -> Iterator[RawDocument]:
    try:
        file = pq.ParquetFile(path)
        columns = [key for key in (*TOKEN_KEYS, TEXT_KEY) if key in file.schema_arrow.names]
        if not columns:
            raise ConfigError(
                f"{path}: expected a column {TEXT_KEY!r}, or {' or '.join(map(repr, TOKEN_KEYS))}, "
                f"got {file.schema_arrow.names}"
            )
        number = 0
        for batch in file.iter_batches(batch_size=8, columns=columns[:1]):
            for value in batch.column(0).to_pylist():
                where = f"{path}, row {number}"
                yield _from_mapping({columns[0]: value}, name=f"{name}:{number}", where=where)
                number += 1
        if not number:
            raise ConfigError(f"expected a document per row in {path}, got no rows")
    except pa.ArrowException as error:
        raise ConfigError(f"{path}: expected a Parquet file, got {error}") from error


Reader = Callable[[Path, str], Iterator[RawDocument]]
READERS: dict[str, Reader] = {
    ".txt": _read_text,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".npy": _read_npy,
    ".json": _read_json,
}


def _kinds() -> str:
    *first, last = READERS
    return f"{', '.join(first)} or {last}"
