"""The text form of formats: round trips, what it refuses and how, and random text."""

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayssm.formats import NAMED_FORMATS, ElementType, Format, Granularity, Rounding, ScaleType

NAMES = [alias for name, entry in NAMED_FORMATS.items() for alias in (name, *entry.aliases)]


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("FP8", "fp8"),
        ("e4m3", "fp8"),
        ("fp8_e4m3+SR", "fp8+sr"),
        (" fp8 [ Tile = 32 , max = 240 ] + sr ", "fp8[tile=32,max=240]+sr"),
        ("fp8[max=240,tile=32]+sr", "fp8[tile=32,max=240]+sr"),
        ("nvfp4+rtn", "nvfp4"),
        ("nvfp4[block=16,max=6,scale=e4m3]", "nvfp4"),
        ("nvfp4[block=32]", "nvfp4[block=32]"),
        ("mxfp4[block=16]", "mxfp4[block=16]"),
        ("fp8[scale=e8m0,block=32]", "mxfp8"),
        ("mxfp8[scale=fp32,row]", "fp8"),
        ("nvfp4[scale=e8m0,block=32]", "mxfp4"),
        ("int8[ef=int8]", "int8[ef=int8]"),
        ("int8[ef=int8[row],scale=fp16]", "int8[scale=fp16,ef=int8]"),
        ("nvfp4[ef=fp8[tile=32,max=240]]+sr", "nvfp4[ef=fp8[tile=32,max=240]]+sr"),
        ("fp8[scale=none]", "fp8[scale=none]"),
        ("mxfp8[scale=none]", "fp8[scale=none]"),
        ("fp8[max=4.48e2]", "fp8"),
        ("fp8[max=439.04]", "fp8[max=439.04]"),
        ("e5m2[head]", "fp8_e5m2[head]"),
        ("float16", "fp16"),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    fmt = Format.parse(text)
    assert str(fmt) == canonical
    assert Format.parse(canonical) == fmt


def test_parts() -> None:
    fmt = Format.parse("fp8[tile=32,max=240,ef=int8]+sr")
    assert fmt == Format(
        element=ElementType.E4M3,
        granularity=Granularity.TILE,
        group=32,
        scale=ScaleType.FP32,
        divisor=240.0,
        rounding=Rounding.STOCHASTIC,
        error_feedback=Format.parse("int8"),
    )
    assert Format.parse("fp32").is_identity and not Format.parse("bf16").is_identity


@pytest.mark.parametrize("name", NAMED_FORMATS)
def test_names_are_canonical_and_aliases_mean_the_same(name: str) -> None:
    entry = NAMED_FORMATS[name]
    assert str(entry.format) == name
    assert entry.summary
    assert all(Format.parse(alias.upper()) == entry.format for alias in entry.aliases)


def test_names_are_distinct() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert len({entry.format for entry in NAMED_FORMATS.values()}) == len(NAMED_FORMATS)


def test_formats_are_frozen_hashable_values() -> None:
    fmt = Format.parse("nvfp4[ef=int8]+sr")
    assert hash(fmt) == hash(Format.parse("NVFP4[ef=INT8]+sr")) and pickle.loads(pickle.dumps(fmt)) == fmt
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.group = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("fp9", "did you mean 'fp8'"),
        ("nvfp5+sr", "did you mean 'nvfp4'"),
        ("", "expected one of fp32"),
        ("nvfp4+st", "did you mean|expects one of rtn, sr"),
        ("nvfp4+", "expects one of rtn, sr"),
        ("fp8[til=32]", "did you mean 'tile'"),
        ("fp8[tile]", "takes a value"),
        ("fp8[row=3]", "takes no value"),
        ("fp8[tile=0]", "must be in 1"),
        ("fp8[tile=-1]", "whole number"),
        ("fp8[tile=3.5]", "whole number"),
        ("fp8[block=99999999999999999999]", "whole number"),
        ("fp8[row,head]", "a second granularity"),
        ("fp8[max=240,max=240]", "a second max"),
        ("fp8[max=0]", r"must lie in \[1, 896\]"),
        ("fp8[max=1e9]", r"must lie in \[1, 896\]"),
        ("fp8[max=nan]", "positive number"),
        ("fp8[max=-1]", "positive number"),
        ("fp8[scale=fp64]", "did you mean 'fp16'|expects one of none, fp32"),
        ("fp8[]", "expected options among"),
        ("fp8[row", "expected NAME"),
        ("fp8row]", "expected NAME"),
        ("fp8[row]]", "expected"),
        ("fp8[row]x", "expected NAME"),
        ("fp8+sr[row]", "expected NAME"),
        ("fp8[ef=int8[row]", "balanced brackets"),
        ("fp32+sr", "nothing to round stochastically"),
        ("fp32[row]", "without scales"),
        ("bf16[scale=fp32]", "stored as it is"),
        ("fp16[max=3]", "without scales"),
        ("int8[scale=none]", "need a scale"),
        ("nvfp4[scale=none]", "need a scale"),
        ("fp8[scale=none,row]", "without scales"),
        ("nvfp4[tensor]", "may not span heads"),
        ("fp32[ef=int8]", "no error to feed back"),
        ("int8[ef=int8[ef=int8]]", "cannot have one of its own"),
        ("int8[ef=int8+sr]", "rounded to nearest"),
        ("int8[ef=]", "expected one of fp32"),
        ("x" * 500, "at most 200 characters, got 500"),
    ],
)
def test_refusals_name_the_text_and_what_was_expected(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint) as caught:
        Format.parse(text)
    assert str(caught.value).startswith(f"format {text[:200]!r}"[:150])


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"element": ElementType.E4M3, "scale": ScaleType.FP32, "divisor": 448.0}, "granularity none with scales"),
        ({"element": ElementType.BF16, "granularity": Granularity.ROW}, "granularity row without scales"),
        ({"element": ElementType.INT8}, "need a scale"),
        (
            {
                "element": ElementType.INT8,
                "scale": ScaleType.FP32,
                "divisor": float("nan"),
                "granularity": Granularity.ROW,
            },
            "must lie in",
        ),
    ],
)
def test_constructed_formats_are_checked_too(fields: dict[str, object], hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        Format(**fields)  # pyright: ignore[reportArgumentType]


_WORDS = [
    *NAMES,
    "tensor",
    "head",
    "row",
    "tile=",
    "block=",
    "max=",
    "scale=",
    "ef=",
    "[",
    "]",
    "+",
    ",",
    "sr",
    "rtn",
    "=",
]
_WORDS += ["fp16", "e8m0", "none", "16", "32", "0", "1e3", "240", "-", ".", " ", "ﬁ", "٣", "\x00"]


def _round_trips_or_refuses(text: str) -> None:
    try:
        fmt = Format.parse(text)
    except ValueError:
        return
    assert Format.parse(str(fmt)) == fmt
    assert str(Format.parse(str(fmt))) == str(fmt)


@given(st.text(max_size=40))
def test_random_text_raises_nothing_but_value_errors(text: str) -> None:
    _round_trips_or_refuses(text)


@given(st.lists(st.sampled_from(_WORDS), max_size=14).map("".join))
def test_random_words_of_the_grammar_raise_nothing_but_value_errors(text: str) -> None:
    _round_trips_or_refuses(text)


@given(
    st.sampled_from(NAMES),
    st.lists(
        st.sampled_from(
            ["tensor", "head", "row", "tile=4", "block=8", "max=5", "max=1.5", "scale=fp32", "scale=fp16", "scale=e4m3"]
            + ["scale=e8m0", "scale=none", "ef=int8", "ef=nvfp4[row]", "ef=fp16", "ef=fp8[max=240,tile=2]"]
        ),
        max_size=4,
    ),
    st.sampled_from(["", "+sr", "+rtn"]),
)
def test_random_formats_round_trip(name: str, options: list[str], rounding: str) -> None:
    _round_trips_or_refuses(f"{name}[{','.join(options)}]{rounding}" if options else name + rounding)
