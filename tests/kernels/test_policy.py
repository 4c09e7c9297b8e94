"""State policies: their text, their rules, and the words with which a mistake is refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayssm.formats import NAMED_FORMATS, Format
from replayssm.policy import (
    DEFAULT_WINDOW,
    MAX_WINDOW,
    REFERENCE,
    CheckpointSharing,
    Policy,
    nearest_rounding_twin,
    precision_arms,
)

FORMATS = st.sampled_from(
    [*NAMED_FORMATS, *(f"{n}+sr" for n in NAMED_FORMATS if n != "fp32"), "fp8[tile=32,max=240]+sr", "int8[ef=int8]"]
)
TEXTS = st.one_of(
    st.builds("conventional:{}".format, FORMATS),
    st.builds("shared:{}@L={}".format, FORMATS, st.integers(1, MAX_WINDOW)),
    st.builds("separate:{}/{}@L={}".format, FORMATS, FORMATS, st.integers(1, MAX_WINDOW)),
)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("conventional:bf16", "conventional:bf16"),
        ("conventional:bf16@L=1", "conventional:bf16"),
        ("shared:nvfp4+sr", "shared:nvfp4+sr@L=16"),
        ("  Shared : NVFP4 + SR @ l = 8 ", "shared:nvfp4+sr@L=8"),
        ("shared:e4m3@L=016", "shared:fp8@L=16"),
        ("shared:fp8[row,max=448]", "shared:fp8@L=16"),
        ("separate:nvfp4/fp16+sr@L=32", "separate:nvfp4/fp16+sr@L=32"),
        ("SEPARATE:FP8[TILE=32]/FP32", "separate:fp8[tile=32]/fp32@L=16"),
        ("separate:fp8/fp8", "separate:fp8/fp8@L=16"),
        ("shared:int8[ef=int8]@L=128", "shared:int8[ef=int8]@L=128"),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    policy = Policy.parse(text)
    assert str(policy) == canonical
    assert Policy.parse(canonical) == policy


@given(TEXTS)
def test_text_goes_there_and_back(text: str) -> None:
    policy = Policy.parse(text, default_window=99)
    assert Policy.parse(str(policy), default_window=3) == policy
    assert str(Policy.parse(str(policy))) == str(policy)


def test_parts_of_a_policy() -> None:
    policy = Policy.parse("separate:nvfp4/fp16+sr@L=32")
    assert policy.sharing is CheckpointSharing.SEPARATE
    assert (policy.read_format, policy.recurrence_format) == (Format.parse("nvfp4"), Format.parse("fp16+sr"))
    assert policy.window_tokens == 32
    # The copy that carries the recurrence comes first, as in the addresses of random bits.
    assert policy.copies == (Format.parse("fp16+sr"), Format.parse("nvfp4"))
    assert Policy.parse("shared:nvfp4").copies == (Format.parse("nvfp4"),)


def test_default_window() -> None:
    assert Policy.parse("shared:fp8").window_tokens == DEFAULT_WINDOW == 16
    assert Policy.parse("shared:fp8", default_window=5).window_tokens == 5
    assert Policy.parse("shared:fp8@L=7", default_window=5).window_tokens == 7
    assert Policy.parse("conventional:fp8", default_window=5).window_tokens == 1


@pytest.mark.parametrize(
    ("text", "stochastic", "lossless"),
    [
        ("conventional:fp32", False, True),
        ("shared:fp32", False, True),
        ("separate:fp32/fp32", False, True),
        ("separate:fp8/fp32", False, False),
        ("separate:fp32/fp16+sr", True, False),
        ("separate:nvfp4+sr/fp32", True, False),
        ("shared:fp8", False, False),
        ("shared:fp8+sr", True, False),
    ],
)
def test_what_is_stochastic_and_what_loses_nothing(text: str, stochastic: bool, lossless: bool) -> None:
    policy = Policy.parse(text)
    assert (policy.is_stochastic, policy.is_lossless) == (stochastic, lossless)


def test_the_reference_stores_float32_after_every_token() -> None:
    assert str(REFERENCE) == "conventional:fp32"
    assert REFERENCE == Policy.parse("conventional:fp32")


def test_bits_count_every_copy() -> None:
    sizes = {"heads": 2, "d_v": 8, "d_k": 16}
    assert Policy.parse("shared:bf16").bits_per_element(**sizes) == 16
    assert Policy.parse("separate:bf16/fp32").bits_per_element(**sizes) == 48
    assert Policy.parse("shared:fp8").bits_per_element(**sizes) == 8 + 32 / 16
    assert Policy.parse("separate:fp8/fp16+sr").bits_per_element(**sizes) == 8 + 32 / 16 + 16
    with pytest.raises(ValueError, match="blocks of 16 keys"):
        Policy.parse("separate:nvfp4/fp32").bits_per_element(heads=2, d_v=8, d_k=24)


# Each mistake, and what the message has to say about it.
MISTAKES: list[tuple[str, list[str]]] = [
    ("", ["expected one of conventional, shared, separate before the colon, got ''"]),
    ("fp8", ["expected one of conventional, shared, separate", "got 'fp8'", "such as `shared:nvfp4+sr`"]),
    ("shard:fp8", ["'shard:fp8'", "did you mean `shared`?"]),
    ("seperate:fp8/fp32", ["did you mean `separate`?"]),
    ("convential:fp8", ["did you mean `conventional`?"]),
    ("shared", ["expected a format after `shared:`", "such as"]),
    ("shared:", ["expected a format after `shared:`"]),
    ("shared:  @L=8", ["expected a format after `shared:`"]),
    ("shared:fp9", ["policy 'shared:fp9'", "format 'fp9'", "did you mean"]),
    ("shared:nvpf4+sr", ["did you mean", "nvfp4"]),
    ("shared:fp8+rs", ["policy 'shared:fp8+rs'", "rs"]),
    ("shared:fp8[tile]", ["tile"]),
    ("shared:fp32+sr", ["policy 'shared:fp32+sr'", "fp32"]),
    ("shared:fp8/fp32", ["shared takes one format, got 2"]),
    ("conventional:fp8/fp32", ["conventional takes one format, got 2"]),
    ("separate:fp8", ["separate takes two formats, read/recurrence, got 1", "`separate:nvfp4/fp16+sr@L=32`"]),
    ("separate:fp8/fp16/fp32", ["separate takes two formats, read/recurrence, got 3"]),
    ("separate:fp8/", ["format ''"]),
    ("shared:fp8@", ["expected `@L=N` with a window of 1 to 128, got '@'"]),
    ("shared:fp8@8", ["expected `@L=N`", "got '@8'"]),
    ("shared:fp8@L=", ["expected `@L=N`"]),
    ("shared:fp8@L=-4", ["expected `@L=N`", "got '@L=-4'"]),
    ("shared:fp8@L=4@L=8", ["expected `@L=N`", "got '@L=4@L=8'"]),
    ("shared:fp8@L=²", ["expected `@L=N`"]),
    ("shared:fp8@W=4", ["expected `@L=N`", "got '@W=4'"]),
    ("shared:fp8@L=0", ["policy 'shared:fp8@L=0'", "a window of 1 to 128 tokens, got 0"]),
    ("shared:fp8@L=129", ["a window of 1 to 128 tokens, got 129"]),
    ("shared:fp8@L=1000000000000", ["expected `@L=N`"]),
    ("conventional:fp8@L=8", ["stores after every token (window 1), got window 8", "`shared:fp8@L=8`"]),
]


@pytest.mark.parametrize(("text", "words"), MISTAKES)
def test_a_mistake_is_refused_with_words_that_help(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        Policy.parse(text)
    for part in words:
        assert part in str(caught.value)


@pytest.mark.parametrize("window", [0, -1, 129])
def test_the_default_window_is_checked_as_well(window: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 128 tokens, got {window}"):
        Policy.parse("shared:fp8", default_window=window)


def test_a_policy_made_of_contradictory_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="a shared policy has one format, got fp8 and fp32; .*`separate:fp8/fp32`"):
        replace(Policy.parse("separate:fp8/fp32"), sharing=CheckpointSharing.SHARED)
    with pytest.raises(ValueError, match="a conventional policy has one format"):
        replace(REFERENCE, read_format=Format.parse("fp8"))
    with pytest.raises(ValueError, match="window 1"):
        replace(REFERENCE, window_tokens=2)
    with pytest.raises(ValueError, match="1 to 128"):
        replace(REFERENCE, window_tokens=0)


def parsed_or_refused(text: str) -> None:
    try:
        policy = Policy.parse(text)
    except ValueError as error:
        assert str(error)
    else:
        assert Policy.parse(str(policy)) == policy


@given(st.text())
def test_any_text_is_a_policy_or_refused(text: str) -> None:
    parsed_or_refused(text)


@given(st.text(alphabet="sharedconventionalseparate:/@L=+[],.0123456789fpnvintbesrmaxil ", max_size=40))
def test_any_text_of_the_grammar_is_a_policy_or_refused(text: str) -> None:
    parsed_or_refused(text)


@given(TEXTS, st.integers(0, 60), st.characters(), st.integers(0, 3))
def test_a_policy_with_a_slip_is_a_policy_or_refused(text: str, place: int, character: str, drop: int) -> None:
    parsed_or_refused(text[:place] + character + text[place + drop :])


def test_the_arms_of_a_precision() -> None:
    assert [str(p) for p in precision_arms("nvfp4", window=8)] == [
        "shared:fp32@L=8",
        "shared:nvfp4@L=8",
        "shared:nvfp4+sr@L=8",
        "separate:nvfp4/fp32@L=8",
        "separate:nvfp4/fp16+sr@L=8",
    ]
    assert [str(p) for p in precision_arms(" FP8[max=240] ")][1:3] == [
        "shared:fp8[max=240]@L=16",
        "shared:fp8[max=240]+sr@L=16",
    ]


def test_arms_that_coincide_appear_once() -> None:
    assert [str(p) for p in precision_arms("fp32")] == [
        "shared:fp32@L=16",
        "separate:fp32/fp32@L=16",
        "separate:fp32/fp16+sr@L=16",
    ]
    for name in NAMED_FORMATS:
        arms = precision_arms(name)
        assert len(set(arms)) == len(arms)
        assert arms[0].is_lossless


def test_a_precision_names_a_format_without_its_rounding() -> None:
    with pytest.raises(ValueError, match=r"'nvfp4\+sr': expected a format without `\+sr`.*'nvfp4'"):
        precision_arms("nvfp4+sr")
    with pytest.raises(ValueError, match="did you mean"):
        precision_arms("nvpf4")
    with pytest.raises(ValueError, match="1 to 128 tokens, got 0"):
        precision_arms("nvfp4", window=0)


@pytest.mark.parametrize(
    ("text", "twin"),
    [
        ("shared:fp8+sr@L=4", "shared:fp8@L=4"),
        ("conventional:bf16+sr", "conventional:bf16"),
        ("shared:fp8@L=4", None),
        ("separate:fp8+sr/fp32", None),
        ("separate:fp8/fp16+sr", None),
    ],
)
def test_the_twin_that_rounds_to_nearest(text: str, twin: str | None) -> None:
    found = nearest_rounding_twin(Policy.parse(text))
    assert found == (None if twin is None else Policy.parse(twin))


def test_a_text_of_any_length_gets_a_message_that_can_be_read() -> None:
    with pytest.raises(
        ValueError, match="at most 200 characters, got 10016 that begin with 'shared:fp8@L=99"
    ) as caught:
        Policy.parse("shared:fp8@L=" + "9" * 10_003)
    assert len(str(caught.value)) < 200
