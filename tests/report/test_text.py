import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayeval.report.text import factor, percent, printable, scientific, tokens_label, with_interval


@pytest.mark.parametrize(
    ("value", "interval", "expected"),
    [
        (3.2e-3, (2.9e-3, 3.6e-3), "3.2e-03 [2.9, 3.6]"),
        (9.96e-4, (9.0e-4, 1.1e-3), "1.0e-03 [0.9, 1.1]"),
        (3.2e-3, (0.0, 3.2e-2), "3.2e-03 [0.0, 32]"),
        (3.2e-3, (1e-4, 0.9), "3.2e-03 [1.0e-04, 9.0e-01]"),
        (-2.0e-5, (-3.0e-5, 1.0e-5), "-2.0e-05 [-3.0, 1.0]"),
        (0.0, (0.0, 0.0), "0 [0, 0]"),
        (3.2e-3, None, "3.2e-03"),
    ],
)
def test_interval_shares_the_exponent_of_the_value(
    value: float, interval: tuple[float, float] | None, expected: str
) -> None:
    assert with_interval(value, interval) == expected


@given(st.floats(1e-300, 1e300), st.floats(0.01, 1), st.floats(1, 50))
def test_interval_reads_back_to_the_numbers_within_its_digits(value: float, down: float, up: float) -> None:
    low, high = value * down, min(value * up, 1e300)
    text = with_interval(value, (low, high))
    mean, bounds = text.removesuffix("]").split(" [")
    unit = 1.0 if "e" in bounds else float("1e" + mean.partition("e")[2])
    read = [float(bound) * unit for bound in bounds.split(", ")]
    # Two digits: at most half a unit of the second digit of the mean, or of the bound itself; a tie adds one rounding.
    assert float(mean) == pytest.approx(value, rel=0.05)
    for got, wanted in zip(read, (low, high), strict=True):
        assert got == pytest.approx(wanted, rel=0.05, abs=(0.05 + 1e-15) * max(unit, value if unit == 1.0 else unit))


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(1.0, "100%"), (0.9931, "99.31%"), (0.999999, "99.999%"), (0.9999, "99.99%"), (0.0, "0.00%")],
)
def test_only_perfect_agreement_reads_100_percent(fraction: float, text: str) -> None:
    assert percent(fraction) == text


@pytest.mark.parametrize(
    ("tokens", "label"), [(1024, "1K"), (8192, "8K"), (1000, "1000"), (1536, "1536"), (1 << 20, "1M"), (1, "1")]
)
def test_lengths_read_as_options_take_them(tokens: int, label: str) -> None:
    assert tokens_label(tokens) == label


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.0, "1x"), (1.26, "1.3x"), (12.4, "12x"), (312.4, "312x"), (3.1e5, "3e+05x"), (0.0, "0x")]
)
def test_factor_is_short(ratio: float, text: str) -> None:
    assert factor(ratio) == text


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert printable("a\x1b[31mb\r\nc\u202ed") == r"a\x1b[31mb\r\nc\u202ed"
    assert printable("Qwen/Qwen3.5-4B é 漢") == "Qwen/Qwen3.5-4B é 漢"


@given(st.text())
def test_whatever_comes_in_no_control_character_goes_out(text: str) -> None:
    assert all(character.isprintable() or character.isspace() for character in printable(text))
    assert not set("\x1b\r\n\x07\u202e\u200f") & set(printable(text))
    printable(text).encode("utf-8")


def test_scientific_has_two_digits() -> None:
    assert scientific(math.pi * 1e-7) == "3.1e-07"
    assert scientific(0.0) == "0"
