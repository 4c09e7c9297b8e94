from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayeval.cli import values
from replayeval.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "tokens"), [("1K", 1024), ("8k", 8192), ("1000", 1000), (" 2 K ", 2048), ("1M", 1 << 20)]
)
def test_tokens(text: str, tokens: int) -> None:
    assert values.tokens(text, option="--lengths") == tokens


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5K", "1KK", "1e3", "\u0663", "0", "9" * 40, "99999M"])
def test_no_tokens(text: str) -> None:
    with pytest.raises(ConfigError, match="--lengths"):
        values.tokens(text, option="--lengths")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("nvfp4", ("nvfp4",)),
        ("fp8[tile=32,max=240], nvfp4", ("fp8[tile=32,max=240]", "nvfp4")),
        ("int8[max=100,ef=int8[tile=32,max=64],row],fp8", ("int8[max=100,ef=int8[tile=32,max=64],row]", "fp8")),
    ],
)
def test_lists_split_outside_brackets(text: str, parts: tuple[str, ...]) -> None:
    assert values.split_list(text, option="--precision") == parts


@given(st.text(alphabet="ab[],= "))
def test_splitting_loses_nothing_but_blanks(text: str) -> None:
    try:
        parts = values.split_list(text, option="--x")
    except ConfigError:
        return
    assert ",".join(parts).replace(" ", "") == text.replace(" ", "")


@given(st.text())
def test_any_text_parses_or_is_refused_cleanly(text: str) -> None:
    for parse in (
        values.dtype,
        values.device,
        values.shape,
        lambda t: values.integer(t, option="--seed", least=0),  # pyright: ignore[reportUnknownLambdaType]
        lambda t: values.tokens(t, option="--chunk"),  # pyright: ignore[reportUnknownLambdaType]
        lambda t: values.split_list(t, option="--arm"),  # pyright: ignore[reportUnknownLambdaType]
    ):
        try:
            parse(text)
        except ConfigError as error:
            assert len(str(error)) < 400
            assert "\x1b" not in str(error)


def test_suggestions() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'bfloat16'"):
        values.dtype("bfloat")
    with pytest.raises(ConfigError, match="Did you mean 'cuda'"):
        values.device("cude")
    with pytest.raises(ConfigError, match="Did you mean 'step'"):
        values.one_of("stepp", values.ENGINES, option="--engine")


def test_dtype_and_device_have_canonical_names() -> None:
    assert [values.dtype(text) for text in ("auto", "bf16", "FP32", "float16")] == [
        "auto",
        "bfloat16",
        "float32",
        "float16",
    ]
    assert [values.device(text) for text in ("auto", "CPU", "cuda:1")] == ["auto", "cpu", "cuda:1"]


def test_shape() -> None:
    assert values.shape("32,128,64") == values.shape("32x128x64") == (32, 128, 64)


def test_output_file_is_checked_before_the_work(tmp_path: Path) -> None:
    assert values.output_file(tmp_path / "a.json", option="--json") == tmp_path / "a.json"
    with pytest.raises(ConfigError, match="does not exist"):
        values.output_file(tmp_path / "no" / "a.json", option="--json")
    with pytest.raises(ConfigError, match="got the folder"):
        values.output_file(tmp_path, option="--json")
