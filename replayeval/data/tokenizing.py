"""The first tokens of a long text without tokenizing all of it."""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int64

from replayeval.arrays import Array
from replayeval.errors import ConfigError

_SAMPLE_CHARACTERS = 4096
_MARGIN_CHARACTERS = 2048
_MARGIN_TOKENS = 32


class Tokenizer(Protocol):
    """What is used of a `PreTrainedTokenizerBase`."""

    def __call__(self, text: str, **options: Any) -> Any:
        """Return a mapping with the key `input_ids`."""
        ...

    def __len__(self) -> int:
        """Size of the vocabulary, added tokens included."""
        ...


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text without any special token around it."""
    # `verbose` only silences a warning about long inputs, which are the point here; nothing is truncated.
    return list(tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])


def bos_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the BOS token in a list if the tokenizer puts one before a text, else an empty list."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return []
    decorated = list(tokenizer("a", add_special_tokens=True, truncation=False, verbose=False)["input_ids"])
    return [int(bos)] if decorated[:1] == [bos] and encode(tokenizer, "a")[:1] != [bos] else []


def first_tokens(
    pieces: Iterator[str], tokenizer: Tokenizer, tokens: int, *, name: str
) -> Int64[Array[np.int64], " time"]:
    """Return the first `tokens` token ids of a text, fewer if it has fewer.

    The ids equal those of the whole text. Only a prefix is tokenized: it ends before white space, goes beyond the last
    token wanted, and a shorter such prefix must give the same ids; otherwise more text is taken, in the end all of it.

    Args:
        pieces: The text in pieces, read only as far as needed.
        tokenizer: Tokenizer of the model.
        tokens: Number of ids, BOS included where the tokenizer adds one.
        name: Name of the text in messages.

    Raises:
        ConfigError: The text is empty.
    """
    prefix = bos_ids(tokenizer)
    wanted = tokens - len(prefix)
    text, exhausted = _fill("", pieces, _SAMPLE_CHARACTERS)
    if not text.strip():
        text, exhausted = _fill(text, pieces, None)
        if not text.strip():
            raise ConfigError(f"expected text in {name}, got nothing but white space; leave it out")
    sample = text[:_SAMPLE_CHARACTERS]
    per_token = len(sample) / max(1, len(encode(tokenizer, sample)))
    budget = int(per_token * (wanted + _MARGIN_TOKENS) * 1.1) + 2 * _MARGIN_CHARACTERS
    while True:
        if not exhausted:
            text, exhausted = _fill(text, pieces, budget)
        if exhausted and len(text) <= budget:
            ids = encode(tokenizer, text)
            break
        long, short = _cut(text, budget), _cut(text, budget - _MARGIN_CHARACTERS)
        if short > 0:
            ids = encode(tokenizer, text[:long])
            check = encode(tokenizer, text[:short])
            enough = min(len(ids), len(check)) >= wanted + _MARGIN_TOKENS
            if enough and ids[:wanted] == check[:wanted]:
                break
        budget += budget // 2
    return np.array((prefix + ids)[:tokens], dtype=np.int64)


def _fill(text: str, pieces: Iterator[str], characters: int | None) -> tuple[str, bool]:
    taken, count = [text], len(text)
    while characters is None or count < characters:
        piece = next(pieces, None)
        if piece is None:
            return "".join(taken), True
        taken.append(piece)
        count += len(piece)
    return "".join(taken), False


def _cut(text: str, end: int) -> int:
    """Return the last position up to `end` where white space follows a word, or 0."""
    for position in range(min(end, len(text) - 1), 0, -1):
        if text[position].isspace() and not text[position - 1].isspace():
            return position
    return 0
