"""The built-in documents, which need no file and no network."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from replayeval.data.sources import RawDocument, text_document
from replayeval.data.tokenizing import Tokenizer, encode
from replayeval.errors import ConfigError

_SAMPLE_TOKENS = 4096


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
    if tokenizer is not None:
        samples = _corpus(2, _SAMPLE_TOKENS, seed)
        if not _is_ours(tokenizer, samples[0].ids):
            theirs = min(len(encode(tokenizer, _decode(sample.ids))) for sample in samples)
            for name, text in _long_enough(
                tokenizer, docs, tokens, seed, ours=tokens * _SAMPLE_TOKENS // max(1, theirs)
            ):
                yield text_document(text, name=name, where=name)
            return
    for document in _corpus(docs, tokens, seed):
        yield RawDocument(name=document.doc_id, token_ids=document.ids)


def _long_enough(tokenizer: Tokenizer, docs: int, tokens: int, seed: int, *, ours: int) -> list[tuple[str, str]]:
    # Documents follow each other in one excerpt of English: text beyond what is read would be wasted, and documents
    # would share text before the excerpt is used up.
    length = ours + 16
    while True:
        texts = [(document.doc_id, _decode(document.ids)) for document in _corpus(docs, length, seed)]
        if all(len(encode(tokenizer, text)) >= tokens for _, text in texts):
            return texts
        length += length // 16 + 1


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
