"""PG-19: whole books from Project Gutenberg, through the `datasets` library."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from replayeval.data.sources import RawDocument, text_document
from replayeval.errors import ConfigError

REPOSITORY = "emozilla/pg19"
REVISION = "c021754c8e01c5b1cc83a1f549c1f97fbbb756b8"
"""Commit of the data set's Parquet mirror; another one may be asked for."""

SPLIT = "test"


def read_pg19(*, revision: str = REVISION) -> Iterator[RawDocument]:
    """Yield the books of the test split, each as it is streamed.

    Raises:
        ConfigError: The data set cannot be reached.
    """
    try:
        # Asked first because it fails at once without a network, where `datasets` tries again for half a minute.
        import_module("huggingface_hub").HfApi().dataset_info(REPOSITORY, revision=revision, timeout=20)
        load_dataset: Any = import_module("datasets").load_dataset
        rows = iter(load_dataset(REPOSITORY, split=SPLIT, revision=revision, streaming=True))
    except Exception as error:
        raise _unreachable(revision, error) from error
    number = 0
    while True:
        try:
            row: dict[str, Any] | None = next(rows, None)
        except Exception as error:
            raise _unreachable(revision, error) from error
        if row is None:
            return
        title = row.get("short_book_title") or number
        yield text_document(row["text"], name=f"pg19:{title}", where=f"{REPOSITORY}, {SPLIT} split, row {number}")
        number += 1


def _unreachable(revision: str, error: Exception) -> ConfigError:
    # Whatever the network stack raises means the same to whoever reads the message.
    return ConfigError(
        f"cannot read the {SPLIT} split of {REPOSITORY} at revision {revision} from the Hugging Face hub: "
        f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no further word'}\n"
        f"Without a network, copy data/{SPLIT}-*.parquet of that data set here and give its path: --data FILE.parquet "
        "(or .txt, .jsonl, or a directory of these)."
    )
