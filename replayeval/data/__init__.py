"""Long texts as documents of token ids."""

from replayeval.data.document import Document
from replayeval.data.lengths import (
    DEFAULT_LENGTHS,
    check_lengths,
    default_docs,
    default_lengths,
    default_lengths_of,
    default_source,
    format_length,
    parse_lengths,
)
from replayeval.data.loading import NAMED_SOURCES, load_documents, make_documents

__all__ = [
    "DEFAULT_LENGTHS",
    "NAMED_SOURCES",
    "Document",
    "check_lengths",
    "default_docs",
    "default_lengths",
    "default_lengths_of",
    "default_source",
    "format_length",
    "load_documents",
    "make_documents",
    "parse_lengths",
]
