"""Option values: from what people type to what the suite takes. Every refusal is a `ConfigError`."""

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from replayeval.errors import ConfigError
from replayeval.report.text import KIBI, printable

STDOUT = "-"
DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}
ENGINES = ("chunk", "step")
_MULTIPLES = {"": 1, "k": KIBI, "m": KIBI * KIBI}
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?", re.ASCII)
_LARGEST = 1 << 31


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'X'?` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def one_of(text: str, known: Sequence[str], *, option: str) -> str:
    """Return `text` in lower case if it is one of `known`.

    Raises:
        ConfigError: With the known values and the nearest.
    """
    word = text.strip().lower()
    if word not in known:
        raise ConfigError(f"{option}: expected one of {', '.join(known)}, got {shown(text)}.{suggestion(word, known)}")
    return word


def integer(text: str | int, *, option: str, least: int, most: int = _LARGEST) -> int:
    """Return a whole number within bounds.

    Raises:
        ConfigError: Not a whole number, or out of bounds.
    """
    match = re.fullmatch(r"[+-]?\d{1,20}", str(text).strip(), re.ASCII)
    if match is None or not least <= int(match.group()) <= most:
        raise ConfigError(f"{option}: expected a whole number from {least} to {most}, got {shown(text)}.")
    return int(match.group())


def tokens(text: str, *, option: str, least: int = 1) -> int:
    """Return a number of tokens; `K` stands for 1024 and `M` for 1024 K.

    Raises:
        ConfigError: No such number, or less than `least`.
    """
    match = re.fullmatch(r"(\d{1,12})\s*([kKmM]?)", text.strip(), re.ASCII)
    if match is None:
        raise ConfigError(f"{option}: expected a number of tokens such as 1000 or 8K (8 x 1024), got {shown(text)}.")
    count = int(match.group(1)) * _MULTIPLES[match.group(2).lower()]
    if not least <= count <= _LARGEST:
        raise ConfigError(f"{option}: expected at least {least} and at most {_LARGEST} tokens, got {shown(text)}.")
    return count


def split_list(text: str, *, option: str) -> tuple[str, ...]:
    """Split at commas outside brackets, so that `fp8[tile=32,max=240],nvfp4` is two.

    Raises:
        ConfigError: An item is empty.
    """
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    parts = [part.strip() for part in parts]
    if not all(parts):
        raise ConfigError(f"{option}: expected values separated by commas, got an empty one in {shown(text)}.")
    return tuple(parts)


def dtype(text: str) -> str:
    """Return the canonical name of a dtype, or `auto`.

    Raises:
        ConfigError: An unknown dtype.
    """
    return DTYPES[one_of(text, tuple(DTYPES), option="--dtype")]


def device(text: str) -> str:
    """Return the name of a device, or `auto`.

    Raises:
        ConfigError: An unknown device.
    """
    word = text.strip().lower()
    if _DEVICE.fullmatch(word) is None:
        raise ConfigError(
            f"--device: expected auto, cpu, cuda or cuda:N, got {shown(text)}."
            f"{suggestion(word, ('auto', 'cpu', 'cuda'))}"
        )
    return word


def shape(text: str) -> tuple[int, int, int]:
    """Return `(heads, d_v, d_k)` from `32,128,128`.

    Raises:
        ConfigError: Not three positive whole numbers.
    """
    parts = text.replace("x", ",").split(",")
    if len(parts) != 3:
        raise ConfigError(f"--shape: expected heads,d_v,d_k such as 32,128,128, got {shown(text)}.")
    heads, d_v, d_k = (integer(part, option="--shape", least=1, most=1 << 20) for part in parts)
    return heads, d_v, d_k


def output_file(path: Path, *, option: str) -> Path:
    """Return a path that can be written, so that a long run does not end in a failure to write.

    Raises:
        ConfigError: Its folder does not exist, or it is a folder itself.
    """
    if path.is_dir():
        raise ConfigError(f"{option}: expected a file to write, got the folder {shown(path)}.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option}: the folder {shown(path.absolute().parent)} does not exist. Create it first.")
    return path


def json_target(text: str | None) -> Path | str | None:
    """Return the file of `--json`, `STDOUT`, or None where it was not given.

    Raises:
        ConfigError: The file cannot be written.
    """
    return text if text in (None, STDOUT) else output_file(Path(text), option="--json")


def shown(value: object) -> str:
    """Return a foreign value in quotes, shortened, with nothing in it that could steer a terminal."""
    text = printable(str(value))
    return f"'{text if len(text) <= 120 else text[:117] + '...'}'"
