"""The first tokens of a text equal those of the whole text, at the cost of a prefix."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from replayeval.data import tokenizing
from replayeval.data.tokenizing import bos_ids, encode, first_tokens
from replayeval.errors import ConfigError
from tests.data.tokenizers import WORDS, Counting, LookingBack, bpe


def pieces(text: str, size: int = 1000) -> Iterator[str]:
    return (text[i : i + size] for i in range(0, len(text), size))


def book(characters: int, seed: int = 0) -> str:
    """Words in a random order, with runs of spaces and lines."""
    generator = random.Random(seed)
    words = WORDS.split()
    text: list[str] = []
    while sum(map(len, text[-1:])) + len(text) * 5 < characters:
        text.append(generator.choice(words) + generator.choice([" ", " ", " ", "  ", "\n", "\n\n", "\t"]))
    return "".join(text)


TEXT = book(120_000)


@pytest.mark.parametrize("regex", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 31, 1000, 5000])
def test_prefix_equals_whole(regex: bool, tokens: int) -> None:
    tokenizer = bpe(regex=regex)
    got = first_tokens(pieces(TEXT), tokenizer, tokens, name="x")
    assert got.dtype == np.int64
    assert got.tolist() == encode(tokenizer, TEXT)[:tokens]


def test_a_plain_cut_would_differ() -> None:
    """The margins matter: a text cut anywhere tokenizes differently at its end."""
    tokenizer = bpe()
    whole = encode(tokenizer, TEXT)
    assert any((cut := encode(tokenizer, TEXT[:end])) != whole[: len(cut)] for end in range(500, 540))


def test_short_text_is_kept_whole() -> None:
    tokenizer = bpe()
    assert first_tokens(pieces(WORDS), tokenizer, 10**6, name="x").tolist() == encode(tokenizer, WORDS)


@pytest.mark.parametrize("tokens", [10, 2000])
def test_only_as_much_as_needed_is_read_and_tokenized(tokens: int) -> None:
    tokenizer, read = Counting(bpe()), 0
    long = TEXT * 10

    def counted() -> Iterator[str]:
        nonlocal read
        for piece in pieces(long):
            read += len(piece)
            yield piece

    got = first_tokens(counted(), tokenizer, tokens, name="x")
    characters = len(bpe().decode(got.tolist()))
    # Two prefixes with their margins, and the sample that estimates characters per token.
    assert tokenizer.characters < 2.5 * characters + 20_000 < len(long) / 10
    assert read < 1.3 * characters + 10_000


def test_text_without_white_space_is_tokenized_whole() -> None:
    text = "x1y2z3" * 5000
    assert first_tokens(pieces(text), bpe(), 50, name="x").tolist() == encode(bpe(), text)[:50]


def test_a_tokenizer_without_stable_prefixes_gets_the_whole_text() -> None:
    tokenizer = LookingBack()
    assert first_tokens(pieces(TEXT), tokenizer, 50, name="x").tolist() == encode(tokenizer, TEXT)[:50]


def test_without_the_second_prefix_that_would_go_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of two prefixes is what saves the case above."""
    monkeypatch.setattr(tokenizing, "_MARGIN_CHARACTERS", 0)
    tokenizer = LookingBack()
    assert first_tokens(pieces(TEXT), tokenizer, 50, name="x").tolist() != encode(tokenizer, TEXT)[:50]


def test_bos_only_where_the_tokenizer_adds_it() -> None:
    assert bos_ids(bpe()) == []
    with_bos = bpe(bos=True)
    assert bos_ids(with_bos) == [0]
    got = first_tokens(pieces(TEXT), with_bos, 100, name="x").tolist()
    assert got == [0, *encode(bpe(), TEXT)[:99]]
    assert first_tokens(pieces(WORDS), with_bos, 10**6, name="x").tolist() == [0, *encode(bpe(), WORDS)]


@pytest.mark.parametrize("text", ["", " \n\t " * 5000])
def test_blank_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="book.txt"):
        first_tokens(pieces(text), bpe(), 10, name="book.txt")


def test_leading_white_space_is_kept() -> None:
    text = " " * 10_000 + TEXT
    assert first_tokens(pieces(text), bpe(), 6000, name="x").tolist() == encode(bpe(), text)[:6000]


def test_nothing_is_truncated_or_warned_about(caplog: Any) -> None:
    got = first_tokens(pieces(TEXT), bpe(), 500, name="x")
    assert len(got) == 500 > bpe().model_max_length
    assert not caplog.records
