"""Rows of a benchmark: from the hub at a pinned revision, or from local files of the same format."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from replayeval.errors import ConfigError
from replayeval.report.text import printable

Row = dict[str, Any]

_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")


def benchmark_rows(
    name: str, *, dataset: Mapping[str, Any], data: Mapping[str, str] | None, columns: Sequence[str]
) -> list[Row]:
    """Return the rows of a benchmark.

    Args:
        name: Short name of the benchmark, such as `mmlu_pro`.
        dataset: Where it is on the hub: `path`, `revision`, `split` and, where it has several, `names`.
        data: Files or folders that take the place of the hub, by short name.
        columns: Columns that every row must have.

    Raises:
        ConfigError: The rows cannot be read, or lack a column.
    """
    local = None if data is None else data.get(name)
    rows = (
        _hub_rows(name, dataset) if local is None else local_rows(Path(local), split=str(dataset["split"]), name=name)
    )
    where = str(dataset["path"]) if local is None else local
    missing = sorted({column for row in rows for column in columns if row.get(column) is None})
    if missing or not rows:
        raise ConfigError(
            f"{printable(name)}: expected rows with {', '.join(columns)} in {printable(where)}, "
            + (f"got rows without {', '.join(missing)}" if rows else "got no rows")
            + ". Give files in the format of the dataset on the hub."
        )
    return rows


def local_rows(path: Path, *, split: str, name: str) -> list[Row]:
    """Return the rows of a file, or of all files below a folder, in order of their names.

    In a folder, files that name the split in their path (`data/test-00000-of-00001.parquet`, `test/algebra/1.json`) are
    taken if there are any, else all of them.

    Args:
        path: A `.parquet`, `.jsonl`, `.json` or `.csv` file, or a folder of them.
        split: Name of the split.
        name: What is looked for, for messages.

    Raises:
        ConfigError: There is nothing to read, or a file is broken.
    """
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        of_split = [file for file in files if split in file.relative_to(path).as_posix()]
        files = of_split or files
    else:
        raise ConfigError(f"{printable(name)}: expected a file or folder at {printable(str(path))}, got nothing there.")
    if not files or any(file.suffix not in _SUFFIXES for file in files):
        raise ConfigError(
            f"{printable(name)}: expected {', '.join(_SUFFIXES)} files at {printable(str(path))}, got "
            f"{'none' if path.is_dir() else printable(path.suffix or 'a file without a suffix')}."
        )
    return [row for file in files for row in _file_rows(file, name)]


def _file_rows(file: Path, name: str) -> Iterator[Row]:
    try:
        values = list(_read(file))
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{printable(name)}: cannot read {printable(str(file))}: {error}.") from None
    for value in values:
        if not isinstance(value, dict):
            raise ConfigError(
                f"{printable(name)}: expected objects in {printable(str(file))}, got {type(value).__name__}."
            )
        yield cast(Row, value)


def _read(file: Path) -> Iterator[Any]:
    if file.suffix == ".parquet":
        from pyarrow import parquet  # pyright: ignore[reportMissingTypeStubs]

        # An unreadable Parquet file raises pyarrow.ArrowInvalid, which is a ValueError.
        yield from cast(Any, parquet).read_table(file).to_pylist()
    elif file.suffix == ".csv":
        with file.open(encoding="utf-8", newline="") as stream:
            yield from csv.DictReader(stream)
    elif file.suffix == ".jsonl":
        with file.open(encoding="utf-8") as stream:
            yield from (json.loads(line) for line in stream if line.strip())
    else:
        content = json.loads(file.read_text(encoding="utf-8"))
        yield from cast(list[Any], content) if isinstance(content, list) else [content]


def _hub_rows(name: str, dataset: Mapping[str, Any]) -> list[Row]:
    import datasets  # pyright: ignore[reportMissingTypeStubs]

    path, revision, split = str(dataset["path"]), str(dataset["revision"]), str(dataset["split"])
    names: Sequence[str | None] = dataset.get("names") or [None]
    rows: list[Row] = []
    for part in names:
        try:
            found = cast(Any, datasets).load_dataset(path, part, revision=revision, split=split)
        except Exception as error:  # the hub, its client and the network each have error types of their own
            raise ConfigError(
                f"{name}: the dataset {path} at revision {revision} cannot be loaded "
                f"({type(error).__name__}: {str(error)[:200]}). Log in with `hf auth login` if it is gated, or give "
                f"local files in its format: --task-data {name}=PATH."
            ) from None
        rows.extend(found.to_list())
    return rows
