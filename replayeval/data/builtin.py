"""The built-in documents, which need no file and no network."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from replayeval.data.sources import RawDocument, text_document
from replayeval.data.tokenizing import Tokenizer, encode
from replayeval.errors import ConfigError

_CHARACTERS_PER_TOKEN = 6


def builtin_documents(
    docs: int, tokens: int, seed: int, *, tokenizer: Tokenizer | None = None
) -> Iterator[RawDocument]:
    """Yield the built-in documents: token ids for a tokenizer of bytes, else text that is long enough.

    Args:
        docs: Number of documents.
        tokens: Tokens wanted of each.
        seed: Seed of the generator.
        tokenizer: Tokenizer of the model; without one a token is a byte.

    Raises:
        ConfigError: The generator refuses the arguments.
    """
    corpus = _corpus(docs, tokens, seed)
    if tokenizer is not None and corpus and not _is_bytes(tokenizer, corpus[0].ids):
        for document in _corpus(docs, tokens * _CHARACTERS_PER_TOKEN, seed):
            text = bytes(document.ids.tolist()).decode("utf-8", errors="ignore")
            yield text_document(text, name=document.doc_id, where=document.doc_id)
        return
    for document in corpus:
        yield RawDocument(name=document.doc_id, token_ids=document.ids)


def _corpus(docs: int, tokens: int, seed: int) -> list[Any]:
    # Loaded on demand: the package that owns it also holds models.
    try:
        return import_module("replayeval.models.builtin.documents").builtin_corpus(docs, tokens, seed)
    except ValueError as error:
        raise ConfigError(f"the built-in documents cannot be made: {error}") from error


def _is_bytes(tokenizer: Tokenizer, ids: Any) -> bool:
    sample = bytes(ids[:256].tolist())
    return sample.isascii() and encode(tokenizer, sample.decode("ascii")) == list(sample)
