"""Recall books: generated text whose answers are decided by facts stated up to thousands of tokens earlier.

A book is a stream of facts, questions about facts that are still alive, and filler. Each book depends on
(seed, index) alone, so books are independent of each other and any of them can be made by itself.
Keys come from fixed lists whose words are single tokens, so what a book asks for is memory, not spelling.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from replayeval.models.builtin import words
from replayeval.models.builtin.tokenizer import encode

_T = TypeVar("_T")

# A key is free again once so many newer facts of its kind were stated.
_KEYS_AT_REST = 32
MOST_LIVE_FACTS = 24


class TaskKind(StrEnum):
    """The kinds of recall that a book mixes."""

    NUMBER = "number"
    RECORD = "record"
    VARIABLE = "variable"
    NEEDLE = "needle"


@dataclass(frozen=True, kw_only=True)
class AnswerSpan:
    """Where an answer stands in a document; positions are token indices.

    Attributes:
        start: First token of the answer.
        stop: One past its last token.
        kind: The task that it belongs to.
        distance_tokens: Tokens back from `start` to the latest earlier place that spells the value out: the
            statement of the fact, or the last answer that repeated it.
        latest: Whether the fact is the one that was stated last among those of its kind: whoever answers with the
            newest value of a kind, without looking at the key, is right on these.
    """

    start: int
    stop: int
    kind: TaskKind
    distance_tokens: int
    latest: bool


@dataclass(frozen=True, kw_only=True)
class BookStyle:
    """How dense a book is.

    Attributes:
        tokens_per_fact: Mean tokens from one new fact to the next; the filler between them makes up the length.
        questions_per_fact: Mean number of questions after each new fact.
        opening_facts: Facts stated in one run at the start of the book.
        live_facts: Facts that can still be asked; a new one beyond that displaces the stalest.
        max_distance_tokens: A fact not mentioned for this long is never asked again.
        noise_share: Probability that a book's filler is the repeated noise sentences of RULER's needle task.
    """

    tokens_per_fact: int = 1200
    questions_per_fact: float = 6.0
    opening_facts: int = 4
    live_facts: int = 8
    max_distance_tokens: int = 8192
    noise_share: float = 0.1

    def __post_init__(self) -> None:
        """Refuse values that no book can follow."""
        if self.tokens_per_fact < 1 or self.live_facts < 1 or self.max_distance_tokens < 1 or self.opening_facts < 0:
            raise ValueError(f"a book style needs positive sizes, got {self}: give values of at least 1")
        if self.live_facts > MOST_LIVE_FACTS:
            raise ValueError(
                f"a book can keep at most {MOST_LIVE_FACTS} facts alive, got live_facts {self.live_facts}: its keys "
                f"come from lists of {len(words.NAMES)} words"
            )


@dataclass(frozen=True, kw_only=True)
class RecallBook:
    """One generated book.

    Attributes:
        ids: Token ids, `[tokens]`.
        answers: Answers that lie wholly inside the book, in order.
    """

    ids: NDArray[np.int64]
    answers: tuple[AnswerSpan, ...]


class Draws:
    """A stream of draws that depends on integers alone, the same on every platform.

    Args:
        *entropy: Non-negative integers, for instance a seed and a document index.
    """

    def __init__(self, *entropy: int) -> None:
        """Start the stream at its first draw."""
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(list(entropy))))
        blocks = (generator.random(512).tolist() for _ in itertools.count())
        self._next: Callable[[], float] = itertools.chain.from_iterable(blocks).__next__

    def uniform(self) -> float:
        """Return a number in [0, 1)."""
        return self._next()

    def below(self, limit: int) -> int:
        """Return an integer in [0, limit)."""
        return int(self._next() * limit)

    def pick(self, items: Sequence[_T]) -> _T:
        """Return one of the items."""
        return items[int(self._next() * len(items))]

    def shuffle(self, items: list[_T]) -> None:
        """Put the items into a drawn order, in place."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]


@dataclass(kw_only=True)
class _Fact:
    kind: TaskKind
    key: str
    value: str
    mentioned_at: int


def _digits(draws: Draws, count: int) -> str:
    return str(10 ** (count - 1) + draws.below(9 * 10 ** (count - 1)))


def _new_key(draws: Draws, kind: TaskKind) -> str:
    match kind:
        case TaskKind.NUMBER:
            return draws.pick(words.NAMES)
        case TaskKind.RECORD:
            return draws.pick(words.NOUNS)
        case TaskKind.VARIABLE:
            return draws.pick(words.VARIABLES)
        case TaskKind.NEEDLE:
            return f"{draws.pick(words.ADJECTIVES)}-{draws.pick(words.NOUNS)}"


def new_value(draws: Draws, kind: TaskKind) -> str:
    """Draw a value of the form that facts of this kind have."""
    match kind:
        case TaskKind.NUMBER:
            return _digits(draws, 4)
        case TaskKind.RECORD:
            return draws.pick(words.ADJECTIVES)
        case TaskKind.VARIABLE:
            return _digits(draws, 5)
        case TaskKind.NEEDLE:
            return _digits(draws, 7)


def _statement(kind: TaskKind, key: str) -> str:
    match kind:
        case TaskKind.NUMBER:
            return f"The number of {key} is"
        case TaskKind.RECORD:
            return f"Record {key} holds"
        case TaskKind.VARIABLE:
            return f"VAR {key} ="
        case TaskKind.NEEDLE:
            return f"One of the special magic numbers for {key} is:"


def _question(kind: TaskKind, key: str) -> str:
    match kind:
        case TaskKind.NUMBER:
            return f"Ask {key}:"
        case TaskKind.RECORD:
            return f"Look up record {key}:"
        case TaskKind.VARIABLE:
            return f"The value of VAR {key} is"
        case TaskKind.NEEDLE:
            return (
                f"What is the special magic number for {key} mentioned in the provided text? "
                f"The special magic number for {key} mentioned in the provided text is"
            )


def _head_and_value(head: str, value: str) -> tuple[Sequence[int], Sequence[int]]:
    # The space before a number is a token of its own and known beforehand; before a word it is part of the word.
    if value.isdigit():
        return encode(f"{head} "), encode(value)
    return encode(head), encode(f" {value}")


_SHARES = ((TaskKind.NUMBER, 0.4), (TaskKind.RECORD, 0.6), (TaskKind.VARIABLE, 0.8), (TaskKind.NEEDLE, 1.0))


def _draw_kind(draws: Draws) -> TaskKind:
    share = draws.uniform()
    return next(kind for kind, below in _SHARES if share < below)


class _Writer:
    """Appends pieces to one book and keeps the live facts and the answers."""

    def __init__(self, draws: Draws, style: BookStyle, limit: int) -> None:
        self.draws = draws
        self.style = style
        self.limit = limit
        self.separator = " " if draws.uniform() < 0.5 else "\n"
        self.buffer: list[int] = []
        self.facts: list[_Fact] = []
        self.newest: dict[TaskKind, _Fact] = {}
        self.used: dict[TaskKind, deque[str]] = {kind: deque(maxlen=_KEYS_AT_REST) for kind in TaskKind}
        self.answers: list[AnswerSpan] = []

    def write(self, piece: str) -> None:
        self.buffer += encode(self.separator + piece if self.buffer else piece)

    def _spell(self, head: str, value: str) -> tuple[int, int]:
        """Write a sentence that ends in a value and return where the value stands."""
        before, tokens = _head_and_value(self.separator + head if self.buffer else head, value)
        self.buffer += before
        start = len(self.buffer)
        self.buffer += tokens
        stop = len(self.buffer)
        self.buffer += encode(".")
        return start, stop

    def new_fact(self) -> None:
        """State a fact: mostly of a new key; sometimes a live variable is assigned anew."""
        kind = _draw_kind(self.draws)
        variables = [fact for fact in self.live() if fact.kind is TaskKind.VARIABLE]
        if kind is TaskKind.VARIABLE and variables and self.draws.uniform() < 0.2:
            fact = self.draws.pick(variables)
            self.facts.remove(fact)
            key = fact.key
        else:
            key = self._free_key(kind)
        if len(self.facts) >= self.style.live_facts:
            self.facts.remove(min(self.facts, key=lambda known: known.mentioned_at))
        value = new_value(self.draws, kind)
        start, _ = self._spell(_statement(kind, key), value)
        self.newest[kind] = _Fact(kind=kind, key=key, value=value, mentioned_at=start)
        self.facts.append(self.newest[kind])

    def _free_key(self, kind: TaskKind) -> str:
        taken = {fact.key for fact in self.facts if fact.kind is kind} | set(self.used[kind])
        key = _new_key(self.draws, kind)
        while key in taken:
            key = _new_key(self.draws, kind)
        self.used[kind].append(key)
        return key

    def live(self) -> list[_Fact]:
        oldest = len(self.buffer) - self.style.max_distance_tokens + 64
        self.facts = [fact for fact in self.facts if fact.mentioned_at >= oldest]
        return self.facts

    def ask(self) -> None:
        live = self.live()
        if not live:
            return
        # The stalest of three: an answer repeats its value, so asking at random would mostly test short memory.
        fact = min((self.draws.pick(live) for _ in range(3)), key=lambda drawn: drawn.mentioned_at)
        start, stop = self._spell(_question(fact.kind, fact.key), fact.value)
        if stop <= self.limit:
            distance = start - fact.mentioned_at
            latest = fact is self.newest[fact.kind]
            span = AnswerSpan(start=start, stop=stop, kind=fact.kind, distance_tokens=distance, latest=latest)
            self.answers.append(span)
        fact.mentioned_at = start


# The mean over the kinds, about.
_TOKENS_PER_QUESTION = 16


def _filler(draws: Draws, verses: Sequence[str], style: BookStyle) -> Iterator[str]:
    if draws.uniform() < style.noise_share:
        return itertools.cycle(words.NOISE)

    def passages() -> Iterator[str]:
        while True:
            start = draws.below(len(verses))
            for offset in range(4 + draws.below(28)):
                yield verses[(start + offset) % len(verses)]

    return passages()


def write_book(*, seed: int, index: int, tokens: int, verses: Sequence[str], style: BookStyle) -> RecallBook:
    """Write one recall book.

    Args:
        seed: Seed of the corpus, at least 0.
        index: Index of the book, at least 0.
        tokens: Exact length, at least 1.
        verses: Filler passages.
        style: How dense the book is.

    Returns:
        The book with its answers.

    Raises:
        ValueError: For a negative seed or index, no tokens, or no filler.
    """
    if seed < 0 or index < 0 or tokens < 1 or not verses:
        raise ValueError(
            f"a recall book needs seed >= 0, index >= 0, tokens >= 1 and at least one filler passage; "
            f"got seed {seed}, index {index}, tokens {tokens}, {len(verses)} passages"
        )
    draws = Draws(seed, index, 1)
    writer = _Writer(draws, style, tokens)
    filler = _filler(draws, verses, style)
    for _ in range(style.opening_facts):
        writer.new_fact()
    while len(writer.buffer) < tokens:
        _write_stretch(writer, filler)
    return RecallBook(ids=np.array(writer.buffer[:tokens], dtype=np.int64), answers=tuple(writer.answers))


def _write_stretch(writer: _Writer, filler: Iterator[str]) -> None:
    draws, style = writer.draws, writer.style
    end = len(writer.buffer) + style.tokens_per_fact * (0.5 + draws.uniform())
    questions = int(style.questions_per_fact * 2 * draws.uniform() + 0.5)
    writer.new_fact()
    # What is left of the stretch is cut at random places, where the questions fall between the filler.
    room = max(0.0, end - len(writer.buffer) - _TOKENS_PER_QUESTION * questions)
    gaps = sorted(draws.uniform() * room for _ in range(questions))
    filled = 0
    for gap in gaps:
        filled += _fill(writer, filler, gap - filled)
        writer.ask()
    _fill(writer, filler, room - filled)


def _fill(writer: _Writer, filler: Iterator[str], tokens: float) -> int:
    start = len(writer.buffer)
    while len(writer.buffer) - start < tokens:
        writer.write(next(filler))
    return len(writer.buffer) - start
