"""Numbers and foreign strings as people read them."""

import math
import unicodedata

KIBI = 1024
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def printable(text: str) -> str:
    r"""Return `text` with every character that could steer a terminal written out as an escape like `\x1b`.

    Model names and document ids come from other people's files, so control characters, text-direction marks and
    line breaks are shown and never obeyed.
    """
    return "".join(_escaped(character) for character in text)


def _escaped(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN_CATEGORIES:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def tokens_label(tokens: int) -> str:
    """Return a length in tokens the way options take it: 8192 as `8K`, 1000 as `1000`."""
    if tokens >= KIBI * KIBI and tokens % (KIBI * KIBI) == 0:
        return f"{tokens // (KIBI * KIBI)}M"
    if tokens >= KIBI and tokens % KIBI == 0:
        return f"{tokens // KIBI}K"
    return str(tokens)


def scientific(value: float) -> str:
    """Return `value` with two significant digits and an exponent; an exact zero as `0`."""
    return "0" if value == 0 else f"{value:.1e}"


def with_interval(value: float, interval: tuple[float, float] | None) -> str:
    """Return `3.2e-03 [2.9, 3.6]`: the bounds share the exponent of the value.

    Bounds more than two orders of magnitude away from the value are written out in full.
    """
    if interval is None:
        return scientific(value)
    low, high = interval
    exponent = math.floor(math.log10(abs(value))) if value != 0 else None
    # Rounding to two digits can carry into the next power of ten: 9.96e-4 prints as 1.0e-03.
    if exponent is not None:
        exponent = int(f"{value:.1e}".partition("e")[2])
    if exponent is None or max(abs(low), abs(high)) >= 100 * 10.0**exponent:
        return f"{scientific(value)} [{scientific(low)}, {scientific(high)}]"
    unit = 10.0**exponent
    return f"{value:.1e} [{_two_digits(low / unit)}, {_two_digits(high / unit)}]"


def _two_digits(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 9.95 else f"{value:.0f}"


def percent(fraction: float) -> str:
    """Return a fraction as a percentage; only an exact 1 reads `100%`."""
    if fraction == 1:
        return "100%"
    # Three decimals where two would round an imperfect agreement up to 100.
    return f"{100 * fraction:.2f}%" if fraction < 0.99995 else f"{math.floor(1e5 * fraction) / 1e3:.3f}%"


def factor(ratio: float) -> str:
    """Return a ratio as a short multiple: `1.3x`, `240x`, `3e+05x`."""
    if ratio >= 10_000 or 0 < ratio < 0.1:
        return f"{ratio:.0e}x"
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.2g}x" if ratio < 10 else f"{ratio:.0f}x"


def counted(number: int, noun: str) -> str:
    """Return a number with a noun that takes an s in the plural, such as `1 document` or `2,000 documents`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
