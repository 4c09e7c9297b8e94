"""From a source to documents of token ids."""

import difflib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from replayeval.data import pg19
from replayeval.data.builtin import builtin_documents
from replayeval.data.document import Document
from replayeval.data.lengths import check_lengths
from replayeval.data.sources import RawDocument, checked_token_ids, read_path, text_document
from replayeval.data.tokenizing import Tokenizer, first_tokens
from replayeval.errors import ConfigError

NAMED_SOURCES = ("pg19", "builtin")


def load_documents(
    source: str | Path,
    tokenizer: Tokenizer | None,
    *,
    docs: int | None,
    tokens: int,
    lengths: Sequence[int] = (),
    prefill_tokens: int = 0,
    vocab_size: int | None = None,
    seed: int = 0,
    revision: str = pg19.REVISION,
) -> list[Document]:
    """Return the first documents of a source, each with its first tokens.

    Documents keep their boundaries. One that is shorter than `tokens` is kept for the lengths it reaches. No special
    token is added but the BOS that the tokenizer itself puts before a text.

    Args:
        source: "pg19", "builtin", or the path of a `.txt` (one document), `.jsonl` (key `text`, `input_ids` or
            `tokens`), `.parquet` (such a column), `.npy` or `.json` file (token ids), or a directory of these.
        tokenizer: Tokenizer of the model; texts need one.
        docs: At most this many documents; None for all (of "builtin": 4).
        tokens: At most this many tokens of each, prompt included.
        lengths: Generation lengths of which each must be reached by some document.
        prefill_tokens: Tokens of the prompt, which do not count towards a generation length.
        vocab_size: Ids at or above it are refused; the size of the tokenizer's vocabulary where left out.
        seed: Seed of the built-in documents.
        revision: Commit of PG-19 on its hub.

    Raises:
        ConfigError: The source is missing, empty or malformed, token ids are outside the vocabulary, or no document
            reaches one of the lengths.
    """
    _check_counts(docs, tokens)
    if str(source) == "pg19":
        raw = pg19.read_pg19(revision=revision)
    elif str(source) == "builtin":
        raw = builtin_documents(4 if docs is None else docs, tokens, seed, tokenizer=tokenizer)
    else:
        path = Path(source).expanduser()
        if not path.exists():
            raise _missing(path)
        raw = read_path(path)
    documents = [
        _tokenize(document, tokenizer, tokens, vocab_size=vocab_size, source=str(source))
        for document in islice(raw, docs)
    ]
    check_lengths(documents, lengths, prefill_tokens=prefill_tokens)
    return documents


def make_documents(
    items: Sequence[str | Sequence[int] | Any],
    tokenizer: Tokenizer | None = None,
    *,
    tokens: int,
    lengths: Sequence[int] = (),
    prefill_tokens: int = 0,
    vocab_size: int | None = None,
) -> list[Document]:
    """Return documents made of what is in memory: texts, or sequences of token ids.

    Raises:
        ConfigError: As `load_documents`.
    """
    _check_counts(None, tokens)
    if isinstance(items, str) or not len(items):
        got = "a single text" if isinstance(items, str) else "none"
        raise ConfigError(f"expected a list of documents, got {got}")
    documents: list[Document] = []
    for number, item in enumerate(items):
        where = f"documents[{number}]"
        if isinstance(item, Document):
            raw = RawDocument(name=item.name, token_ids=item.token_ids)
        elif isinstance(item, str):
            raw = text_document(item, name=where, where=where)
        else:
            raw = RawDocument(name=where, token_ids=checked_token_ids(item, where=where))
        documents.append(_tokenize(raw, tokenizer, tokens, vocab_size=vocab_size, source="documents"))
    check_lengths(documents, lengths, prefill_tokens=prefill_tokens)
    return documents


def _tokenize(
    raw: RawDocument, tokenizer: Tokenizer | None, tokens: int, *, vocab_size: int | None, source: str
) -> Document:
    where = source if source.endswith(raw.name) else f"{raw.name} of {source}"
    if raw.token_ids is not None:
        ids = raw.token_ids[:tokens].copy()
    elif tokenizer is None:
        raise ConfigError(
            f"{where} is text, but the model has no tokenizer; give token ids (.npy, .json, or the "
            "key or column 'input_ids')"
        )
    else:
        ids = first_tokens(raw.pieces or iter(()), tokenizer, tokens, name=where)
    size = vocab_size if vocab_size is not None else len(tokenizer) if tokenizer is not None else None
    outside = (ids < 0) | (ids >= (np.iinfo(np.int64).max if size is None else size))
    if outside.any():
        place = int(np.argmax(outside))
        raise ConfigError(
            f"{where}: token {place} has the id {int(ids[place])}, outside the vocabulary of "
            f"{'unknown size' if size is None else f'{size} ids (0 to {size - 1})'}; use ids of this model's tokenizer"
        )
    return Document(name=raw.name, token_ids=ids)


def _check_counts(docs: int | None, tokens: int) -> None:
    if docs is not None and docs < 1:
        raise ConfigError(f"expected at least 1 document, got --docs {docs}")
    if tokens < 1:
        raise ConfigError(f"expected at least 1 token per document, got {tokens}")


def _missing(path: Path) -> ConfigError:
    beside: Iterator[str] = iter(())
    if path.parent.is_dir():
        beside = (str(path.parent / entry.name) for entry in path.parent.iterdir())
    near = difflib.get_close_matches(str(path), [*NAMED_SOURCES, *beside], n=1)
    hint = f"did you mean {near[0]}?" if near else "check the path."
    return ConfigError(f"expected {', '.join(NAMED_SOURCES)} or the path of a file or directory, got {path}; {hint}")
