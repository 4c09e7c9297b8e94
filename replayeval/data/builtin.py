"""The built-in documents, which need no file and no network."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from replayeval.data.sources import RawDocument, text_document
from replayeval.data.tokenizing import Tokenizer, encode
from replayeval.errors import ConfigError

# Tokens of the built-in tokenizer for one of another tokenizer at most, whose tokens may be longer.
_TOKENS_PER_TOKEN = 3


def builtin_documents(
    docs: int, tokens: int, seed: int, *, tokenizer: Tokenizer | None = None
) -> Iterator[RawDocument]:
    """Yield the built-in documents: token ids for the tokenizer of the built-in models, else text that is long enough.

    Args:
        docs: Number of documents.
        tokens: Tokens wanted of each.
        seed: Seed of the generator.
        tokenizer: Tokenizer of the model; without one the ids are those of the built-in tokenizer.

    Raises:
        ConfigError: The generator refuses the arguments.
    """
    corpus = _corpus(docs, tokens, seed)
    if tokenizer is not None and corpus and not _is_ours(tokenizer, corpus[0].ids):
        for document in _corpus(docs, tokens * _TOKENS_PER_TOKEN, seed):
            text = _decode(document.ids)
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


def _is_ours(tokenizer: Tokenizer, ids: Any) -> bool:
    # The last word may be half of one, and half a word has other tokens.
    sample = encode(tokenizer, _decode(ids[:256]).rpartition(" ")[0])
    return bool(sample) and sample == ids[: len(sample)].tolist()


def _decode(ids: Any) -> str:
    return import_module("replayeval.models.builtin.tokenizer").decode(ids)
