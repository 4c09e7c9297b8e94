"""The text form of formats: `NAME[OPTION,…]+ROUNDING`."""

import difflib
import re
from collections.abc import Sequence
from typing import TypedDict, TypeVar

from replayssm.formats.elements import ElementType
from replayssm.formats.format import NAMED_FORMATS, Format, Granularity, Rounding, ScaleType


class FormatFields(TypedDict, total=False):
    """Constructor arguments of `Format`."""

    element: ElementType
    granularity: Granularity
    group: int
    scale: ScaleType
    divisor: float
    rounding: Rounding
    error_feedback: Format | None


_Choice = TypeVar("_Choice", Rounding, ScaleType)
_SHAPE = re.compile(r"(?P<name>[^\[\]+]*)(?:\[(?P<options>.*)\])?(?:\+(?P<rounding>[^\[\]+]*))?", re.DOTALL)
_COUNT = re.compile(r"[0-9]{1,9}")
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,17})?(e[+-]?[0-9]{1,3})?")
_WORDS = ("tensor", "head", "row")
_KEYS = ("tile", "block", "max", "scale", "ef")
_LONGEST = 200


def names() -> dict[str, str]:
    """Every accepted name, aliases included, and the table entry it stands for."""
    return {alias: name for name, entry in NAMED_FORMATS.items() for alias in (name, *entry.aliases)}


def parse_fields(text: str) -> FormatFields:
    """Read the text form into the fields of a `Format`.

    Args:
        text: The text form.

    Returns:
        Constructor arguments.

    Raises:
        ValueError: With what was expected, what came and, for a mistyped name, the nearest one that exists.
    """
    shown = repr(text if len(text) <= _LONGEST else text[:_LONGEST] + "…")
    try:
        fields = _parse("".join(text.lower().split()))
        # Built here too, so that contradictions between options are reported with the text that they came from.
        Format(**fields)
    except ValueError as error:
        raise ValueError(f"format {shown}: {error}") from None
    return fields


def render(fmt: Format) -> str:
    """The shortest text that names a format: the closest table entry and the options that differ from it."""
    candidates = [
        (_distance(fmt, entry.format), name)
        for name, entry in NAMED_FORMATS.items()
        if entry.format.element is fmt.element
    ]
    name = min(candidates, key=lambda candidate: candidate[0])[1]
    base = NAMED_FORMATS[name].format
    options: list[str] = []
    if fmt.is_scaled:
        if (fmt.granularity, fmt.group) != (base.granularity, base.group):
            options.append(f"{fmt.granularity.value}={fmt.group}" if fmt.group else fmt.granularity.value)
        if fmt.divisor != fmt.spec.largest:
            options.append(f"max={int(fmt.divisor) if fmt.divisor.is_integer() else fmt.divisor!r}")
    if fmt.scale is not base.scale:
        options.append(f"scale={fmt.scale.value}")
    if fmt.error_feedback is not None:
        options.append(f"ef={fmt.error_feedback}")
    rounding = "" if fmt.rounding is Rounding.NEAREST_EVEN else f"+{fmt.rounding.value}"
    return name + (f"[{','.join(options)}]" if options else "") + rounding


def _distance(fmt: Format, base: Format) -> tuple[bool, bool]:
    return fmt.scale is not base.scale, (fmt.granularity, fmt.group) != (base.granularity, base.group)


def _parse(text: str) -> FormatFields:
    if len(text) > _LONGEST:
        raise ValueError(f"expected at most {_LONGEST} characters, got {len(text)}")
    shape = _SHAPE.fullmatch(text)
    if shape is None:
        raise ValueError("expected NAME, NAME[OPTION,…] or either followed by +sr, such as fp8[tile=32,max=240]+sr")
    known = names()
    name = shape["name"]
    if name not in known:
        raise ValueError(f"expected one of {', '.join(NAMED_FORMATS)}, got {name!r}{_nearest(name, list(known))}")
    base = NAMED_FORMATS[known[name]].format
    fields: FormatFields = {
        "element": base.element,
        "granularity": base.granularity,
        "group": base.group,
        "scale": base.scale,
        "divisor": base.divisor,
        "rounding": base.rounding,
        "error_feedback": base.error_feedback,
    }
    if shape["rounding"] is not None:
        fields["rounding"] = _choice("rounding after +", shape["rounding"], Rounding)
    if shape["options"] is not None:
        _apply_options(fields, _split(shape["options"]))
    return fields


def _apply_options(fields: FormatFields, options: Sequence[str]) -> None:
    seen: set[str] = set()
    for option in options:
        key, equals, value = option.partition("=")
        if key not in _WORDS and key not in _KEYS:
            raise ValueError(
                f"expected options among {', '.join(_WORDS)}, {', '.join(f'{k}=…' for k in _KEYS)}, got {option!r}"
                f"{_nearest(key, [*_WORDS, *_KEYS])}"
            )
        if (key in _KEYS) != bool(equals):
            raise ValueError(f"option {key!r} takes {'a' if key in _KEYS else 'no'} value, got {option!r}")
        kind = "granularity" if key in (*_WORDS, "tile", "block") else key
        if kind in seen:
            raise ValueError(f"expected each option once, got a second {kind} {option!r}")
        seen.add(kind)
        if kind == "granularity":
            fields["granularity"] = Granularity(key)
            fields["group"] = _count(option, value) if equals else 0
        elif kind == "max":
            fields["divisor"] = _number(option, value)
        elif kind == "scale":
            fields["scale"] = _choice("scale=", value, ScaleType)
        else:
            fields["error_feedback"] = Format(**_parse(value))
    if fields.get("scale") is ScaleType.NONE and "scale" in seen:
        # Bare elements: what the name says about scales no longer holds, what the text says about them is an error.
        if "granularity" not in seen:
            fields["granularity"], fields["group"] = Granularity.NONE, 0
        if "max" not in seen:
            fields["divisor"] = 0.0


def _split(options: str) -> list[str]:
    """Split at the commas outside inner brackets."""
    parts, depth = [""], 0
    for character in options:
        depth += (character == "[") - (character == "]")
        if depth < 0:
            break
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if depth:
        raise ValueError(f"expected balanced brackets, got [{options}]")
    return parts


def _count(option: str, value: str) -> int:
    if not _COUNT.fullmatch(value):
        raise ValueError(f"expected a whole number, got {option!r}")
    return int(value)


def _number(option: str, value: str) -> float:
    if not _NUMBER.fullmatch(value):
        raise ValueError(f"expected a positive number, got {option!r}")
    return float(value)


def _choice(what: str, value: str, kind: type[_Choice]) -> _Choice:
    options = [member.value for member in kind]
    if value not in options:
        raise ValueError(f"{what} expects one of {', '.join(options)}, got {value!r}{_nearest(value, options)}")
    return kind(value)


def _nearest(word: str, options: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, options, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
