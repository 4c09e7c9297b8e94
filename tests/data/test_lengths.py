"""How lengths are written and which ones documents reach."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayeval.data import Document, check_lengths, default_lengths, format_length, parse_lengths
from replayeval.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("1K,8K,32K", (1024, 8192, 32768)),
        ("1m", (1024**2,)),
        (" 2k , 512,2048", (512, 2048)),
        ("7", (7,)),
    ],
)
def test_parse(text: str, lengths: tuple[int, ...]) -> None:
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize("entry", ["0", "0K", "-1", "1.5K", "x", "", "1G", "1e3", "K", "1_000", "²", "9" * 40])
def test_what_is_no_length_is_named(entry: str) -> None:
    with pytest.raises(ConfigError, match="1K,8K,32K") as caught:
        parse_lengths(f"1K,{entry}")
    assert repr(entry) in str(caught.value)


def test_all_wrong_entries_are_named() -> None:
    with pytest.raises(ConfigError, match="got 'x', '-2' in"):
        parse_lengths("x,1K,-2")


@given(st.integers(1, 10**12 - 1))
def test_format_is_the_inverse_of_parse(length: int) -> None:
    assert parse_lengths(format_length(length)) == (length,)


def test_default_lengths() -> None:
    assert default_lengths() == (1024, 8192, 32768)
    assert default_lengths(8192) == (1024, 8192)
    assert default_lengths(700) == (700,)
    with pytest.raises(ConfigError):
        default_lengths(0)


def documents(*tokens: int) -> list[Document]:
    return [Document(name=f"d{i}", token_ids=np.zeros(n, dtype=np.int64)) for i, n in enumerate(tokens)]


def test_some_document_must_reach_each_length() -> None:
    check_lengths(documents(10, 2048), [1024, 2048])
    with pytest.raises(ConfigError, match=r"reaches the length 2K, 4K: .* of 2, d1, decodes 2047 tokens; "):
        check_lengths(documents(10, 2047), [1024, 2048, 4096])


def test_the_prompt_does_not_count() -> None:
    check_lengths(documents(1034), [1024], prefill_tokens=10)
    with pytest.raises(ConfigError, match="decodes 1023 tokens after a prompt of 10"):
        check_lengths(documents(1033), [1024], prefill_tokens=10)
    with pytest.raises(ConfigError, match=r"longer than the prompt of 10 tokens, got d0 \(10 tokens\)"):
        check_lengths(documents(10, 2000), [1024], prefill_tokens=10)
