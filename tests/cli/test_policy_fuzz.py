"""Random text where a policy or a format is expected: a value that prints back to itself, or a clean refusal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayeval.cli import options
from replayeval.errors import ConfigError
from replayssm.policy import Policy

PIECES = [
    *("conventional", "shared", "separate", "fp32", "bf16", "fp16", "fp8", "int8", "nvfp4", "mxfp4", "e5m2"),
    *(":", "/", "+sr", "+rtn", "@L=", "@", "[", "]", ",", "=", "tile=32", "block=16", "max=240", "ef=", "scale=fp16"),
    *("row", "head", "tensor", "0", "1", "16", "128", "129", " ", "\x1b[31m", "\u0661", "-1", "1e3", "nan"),
]
texts = st.text(max_size=40) | st.lists(st.sampled_from(PIECES), max_size=9).map("".join)


@given(texts)
def test_any_policy_text(text: str) -> None:
    try:
        (*_, last) = options.arms(None, [text], window=16)
    except ConfigError as error:
        assert str(error).startswith("--arm: ")
    else:
        assert Policy.parse(str(last)) == last


@given(texts)
def test_any_precision_text(text: str) -> None:
    try:
        arms = options.arms(text, [], window=16)
    except ConfigError as error:
        assert str(error).startswith("--precision: ")
    else:
        assert str(arms[0]) == "shared:fp32@L=16"


def test_the_pieces_can_form_a_policy() -> None:
    # Otherwise the tests above would only ever see refusals.
    assert [str(p) for p in options.arms(None, ["shared:fp8[tile=32,max=240]+sr@L=128"], window=16)] == [
        "shared:fp8[tile=32,max=240]+sr@L=128"
    ]
    with pytest.raises(ConfigError):
        options.arms(None, ["shared:fp8@L=129"], window=16)
