"""Generation lengths: how they are written, and which ones a set of documents reaches."""

import re
from collections.abc import Iterable, Sequence

from replayeval.data.document import Document
from replayeval.errors import ConfigError

DEFAULT_LENGTHS = (1024, 8192, 32768)
BUILTIN_LENGTHS = (512, 1024, 2048)
DEFAULT_DOCS = {"builtin": 4}
"""Documents scored when their number is left open; 8 of any other source."""

_UNITS = {"": 1, "K": 1024, "M": 1024**2}
_LENGTH = re.compile(r"(\d+)([KM]?)")
_EXAMPLE = "1K,8K,32K (K = 1024, M = 1024²)"


def parse_lengths(text: str) -> tuple[int, ...]:
    """Return the generation lengths that a comma-separated text names, increasing and without repetition.

    Raises:
        ConfigError: An entry is not a positive whole number with an optional K or M; all such entries are named.
    """
    lengths: set[int] = set()
    wrong: list[str] = []
    for entry in text.split(","):
        match = _LENGTH.fullmatch(entry.strip().upper()) if entry.isascii() else None
        length = int(match[1]) * _UNITS[match[2]] if match and len(match[1]) <= 12 else 0
        if length < 1:
            wrong.append(repr(entry.strip()))
        lengths.add(length)
    if wrong:
        raise ConfigError(f"expected lengths such as {_EXAMPLE}, each at least 1, got {', '.join(wrong)} in {text!r}")
    return tuple(sorted(lengths))


def default_lengths(longest: int | None = None) -> tuple[int, ...]:
    """Return 1K, 8K and 32K, without those beyond `longest`; `longest` alone when it is below all of them."""
    if longest is None:
        return DEFAULT_LENGTHS
    if longest < 1:
        raise ConfigError(f"expected at least one token to decode, got {longest}")
    return tuple(length for length in DEFAULT_LENGTHS if length <= longest) or (longest,)


def default_source(model: str) -> str:
    """Return the source of text for a model when none is named: the built-in documents for a built-in one, else PG-19.

    Args:
        model: Hub id, directory, or `builtin:NAME`.
    """
    return "builtin" if model.startswith("builtin:") else "pg19"


def default_lengths_of(source: str) -> tuple[int, ...]:
    """Return the lengths reported of a source when none are asked for."""
    return BUILTIN_LENGTHS if source == "builtin" else default_lengths()


def default_docs(source: str) -> int:
    """Return how many documents of a source are scored when their number is left open."""
    return DEFAULT_DOCS.get(source, 8)


def format_length(length: int) -> str:
    """Return a length as `parse_lengths` reads it, in the largest unit that divides it."""
    for unit, size in (("M", 1024**2), ("K", 1024)):
        if length % size == 0:
            return f"{length // size}{unit}"
    return str(length)


def check_lengths(documents: Sequence[Document], lengths: Iterable[int], *, prefill_tokens: int = 0) -> None:
    """Refuse lengths that no document reaches and documents that a prompt uses up.

    Raises:
        ConfigError: With the offending lengths and the longest document, or the offending documents.
    """
    used_up = [document for document in documents if len(document) <= prefill_tokens]
    if used_up:
        listed = ", ".join(f"{document.name} ({len(document)} tokens)" for document in used_up[:5])
        raise ConfigError(
            f"expected documents longer than the prompt of {prefill_tokens} tokens, got {listed}"
            f"{' …' if len(used_up) > 5 else ''}; shorten --prefill or leave these documents out"
        )
    longest = max(documents, key=len)
    reached = len(longest) - prefill_tokens
    missed = [length for length in lengths if length > reached]
    if missed:
        prompt = f" after a prompt of {prefill_tokens}" if prefill_tokens else ""
        raise ConfigError(
            f"no document reaches the length {', '.join(format_length(length) for length in missed)}: the longest of "
            f"{len(documents)}, {longest.name}, decodes {reached} tokens{prompt}; shorten --lengths, raise --docs, "
            "or give longer documents"
        )
