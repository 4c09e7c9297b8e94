"""The built-in evaluation documents: recall books beside held-out English."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from replayeval.models.builtin.recall import AnswerSpan, BookStyle, Draws, write_book
from replayeval.models.builtin.text import held_out_english
from replayeval.models.builtin.tokenizer import encode


class DocumentKind(StrEnum):
    """What a built-in document is made of."""

    RECALL = "recall"
    ENGLISH = "english"


DEFAULT_MIXTURE: tuple[DocumentKind, ...] = (DocumentKind.RECALL, DocumentKind.ENGLISH)


@dataclass(frozen=True, kw_only=True)
class BuiltinDocument:
    """One evaluation document.

    Attributes:
        doc_id: Name that says how to make the document again.
        kind: What it is made of.
        ids: Token ids of the built-in tokenizer.
        answers: Answers inside the document; none in English.
    """

    doc_id: str
    kind: DocumentKind
    ids: NDArray[np.int64]
    answers: tuple[AnswerSpan, ...]


@functools.lru_cache(maxsize=8)
def _shuffled_english(seed: int) -> NDArray[np.int64]:
    chapters = list(held_out_english().chapter_texts)
    Draws(seed, 2).shuffle(chapters)
    return np.array([i for chapter in chapters for i in encode(chapter)], dtype=np.int64)


def english_document(*, seed: int, index: int, tokens: int) -> NDArray[np.int64]:
    """Return held-out English of an exact length: whole chapters in an order drawn once per seed.

    Documents of one seed and length share no text as long as they fit into the excerpt together; past
    that the text starts again from its beginning.

    Args:
        seed: Seed of the corpus.
        index: Index among the English documents.
        tokens: Exact length.

    Returns:
        The token ids.
    """
    text = _shuffled_english(seed)
    return text.take(np.arange(index * tokens, (index + 1) * tokens), mode="wrap")


def builtin_corpus(
    docs: int,
    tokens: int,
    seed: int = 0,
    *,
    mixture: Sequence[DocumentKind] = DEFAULT_MIXTURE,
    style: BookStyle | None = None,
) -> list[BuiltinDocument]:
    """Make the built-in documents with everything known about them.

    Args:
        docs: Number of documents.
        tokens: Exact length of each, in tokens.
        seed: Seed of the corpus; document `i` depends on (seed, i) and the length alone.
        mixture: Kinds to cycle through.
        style: Density of the recall books; the default when None.

    Returns:
        The documents in order.

    Raises:
        ValueError: For a count, length or seed out of range, or an empty or unknown mixture.
    """
    mixture = tuple(DocumentKind(kind) for kind in mixture)
    if docs < 0 or tokens < 1 or seed < 0 or not mixture:
        raise ValueError(
            f"expected docs >= 0, tokens >= 1, seed >= 0 and a non-empty mixture; "
            f"got docs {docs}, tokens {tokens}, seed {seed}, mixture {tuple(mixture)}"
        )
    counts = dict.fromkeys(mixture, 0)
    documents: list[BuiltinDocument] = []
    for position in range(docs):
        kind = mixture[position % len(mixture)]
        index = counts[kind]
        counts[kind] += 1
        doc_id = f"builtin/{kind}/seed{seed}/{index}"
        if kind is DocumentKind.ENGLISH:
            ids = english_document(seed=seed, index=index, tokens=tokens)
            documents.append(BuiltinDocument(doc_id=doc_id, kind=kind, ids=ids, answers=()))
            continue
        verses = held_out_english().verses
        book = write_book(seed=seed, index=index, tokens=tokens, verses=verses, style=style or BookStyle())
        documents.append(BuiltinDocument(doc_id=doc_id, kind=kind, ids=book.ids, answers=book.answers))
    return documents


def builtin_documents(
    docs: int, tokens: int, seed: int = 0, *, mixture: Sequence[DocumentKind] = DEFAULT_MIXTURE
) -> list[NDArray[np.int64]]:
    """Return the token ids of the built-in documents; see `builtin_corpus` for their answers.

    Args:
        docs: Number of documents.
        tokens: Exact length of each, in tokens.
        seed: Seed of the corpus.
        mixture: Kinds to cycle through.

    Returns:
        One array of ids per document.
    """
    return [document.ids for document in builtin_corpus(docs, tokens, seed, mixture=mixture)]
