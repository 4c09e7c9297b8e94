"""Built-in models and documents: two small checkpoints that use their recurrent state, and the text that shows it."""

from replayeval.models.builtin.catalog import BUILTIN_MODELS, builtin_path
from replayeval.models.builtin.documents import (
    DEFAULT_MIXTURE,
    BuiltinDocument,
    DocumentKind,
    builtin_corpus,
    builtin_documents,
)
from replayeval.models.builtin.recall import AnswerSpan, BookStyle, RecallBook, TaskKind, write_book

__all__ = [
    "BUILTIN_MODELS",
    "DEFAULT_MIXTURE",
    "AnswerSpan",
    "BookStyle",
    "BuiltinDocument",
    "DocumentKind",
    "RecallBook",
    "TaskKind",
    "builtin_corpus",
    "builtin_documents",
    "builtin_path",
    "write_book",
]
