"""Recall books: generated text whose answers are decided by facts stated up to thousands of tokens earlier.

A book is a stream of facts, questions about facts that are still alive, and filler. Each book depends on
(seed, index) alone, so books are independent of each other and any of them can be made by itself.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np

_T = TypeVar("_T")

_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_CAPITALS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
_ADJECTIVES = (
    "able ancient bitter bold brave bright calm careful cheerful clear clever cold common curious dark deep "
    "distant dry eager early empty faint fancy fierce firm flat fragile gentle giant glad golden grand grave "
    "hollow honest humble icy idle jolly keen kind large lazy light lively lonely loud lucky mellow mighty modest "
    "narrow noble odd open pale patient plain polite proud quick quiet rapid rare ready rough royal rustic sharp "
    "shiny silent simple slow smooth soft solemn steady steep stern strange strong subtle sunny sweet swift tall "
    "tame tender thick tidy tiny vast vivid warm weary wide wild wise young zealous"
).split()
_NOUNS = (
    "acorn anchor apple arrow badge barn basket beacon bell berry bird blanket boat bottle branch bread bridge "
    "broom bucket button cabin candle canyon carpet castle chain chair cherry circle clock cloud coin compass "
    "copper cradle crown curtain desert diamond door drum eagle engine feather fence field flame flute forest "
    "fountain garden gate glove grain hammer harbor harvest hill horse island jacket jewel kettle key kite ladder "
    "lantern leaf letter lion marble meadow mirror mountain needle nest ocean orchard oven paddle paper pepper "
    "pillow planet pocket quarry ribbon river rope saddle sail shadow shield silver spoon stone table temple "
    "thread tower tunnel valley village violin wagon wheel window winter"
).split()
_NOISE = (
    b"The grass is green.",
    b"The sky is blue.",
    b"The sun is yellow.",
    b"Here we go.",
    b"There and back again.",
)


class TaskKind(StrEnum):
    """The kinds of recall that a book mixes."""

    NUMBER = "number"
    RECORD = "record"
    VARIABLE = "variable"
    NEEDLE = "needle"


@dataclass(frozen=True, kw_only=True)
class AnswerSpan:
    """Where an answer stands in a document; positions are token indices, and one byte is one token.

    Attributes:
        start: First token of the answer.
        stop: One past its last token.
        kind: The task that it belongs to.
        distance_tokens: Tokens back from `start` to the latest earlier place that spells the value out: the
            statement of the fact, or the last answer that repeated it.
    """

    start: int
    stop: int
    kind: TaskKind
    distance_tokens: int


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


@dataclass(frozen=True, kw_only=True)
class RecallBook:
    """One generated book.

    Attributes:
        text: The bytes; one byte is one token.
        answers: Answers that lie wholly inside the text, in order.
    """

    text: bytes
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


def _syllables(draws: Draws, count: int) -> str:
    return "".join(draws.pick(_CONSONANTS) + draws.pick(_VOWELS) for _ in range(count))


def _new_key(draws: Draws, kind: TaskKind) -> str:
    match kind:
        case TaskKind.NUMBER:
            return _syllables(draws, 3).capitalize()
        case TaskKind.RECORD:
            return _syllables(draws, 2) + _digits(draws, 2)
        case TaskKind.VARIABLE:
            return "".join(draws.pick(_CAPITALS) for _ in range(5))
        case TaskKind.NEEDLE:
            if draws.uniform() < 0.3:
                return f"{_syllables(draws, 3)}-{_syllables(draws, 2)}"
            return f"{draws.pick(_ADJECTIVES)}-{draws.pick(_NOUNS)}"


def _new_value(draws: Draws, kind: TaskKind) -> str:
    match kind:
        case TaskKind.NUMBER:
            return _digits(draws, 4)
        case TaskKind.RECORD:
            return _syllables(draws, 2) + draws.pick(_CONSONANTS)
        case TaskKind.VARIABLE:
            return _digits(draws, 5)
        case TaskKind.NEEDLE:
            return _digits(draws, 7)


def _statement(kind: TaskKind, key: str) -> str:
    match kind:
        case TaskKind.NUMBER:
            return f"The number of {key} is "
        case TaskKind.RECORD:
            return f"Record {key} holds "
        case TaskKind.VARIABLE:
            return f"VAR {key} = "
        case TaskKind.NEEDLE:
            return f"One of the special magic numbers for {key} is: "


def _question(kind: TaskKind, key: str) -> str:
    match kind:
        case TaskKind.NUMBER:
            return f"Ask {key}: "
        case TaskKind.RECORD:
            return f"Look up record {key}: "
        case TaskKind.VARIABLE:
            return f"The value of VAR {key} is "
        case TaskKind.NEEDLE:
            return (
                f"What is the special magic number for {key} mentioned in the provided text? "
                f"The special magic number for {key} mentioned in the provided text is "
            )


def _draw_kind(draws: Draws) -> TaskKind:
    share = draws.uniform()
    if share < 0.5:
        return TaskKind.NUMBER
    if share < 0.7:
        return TaskKind.RECORD
    return TaskKind.VARIABLE if share < 0.88 else TaskKind.NEEDLE


class _Writer:
    """Appends pieces to one book and keeps the live facts and the answers."""

    def __init__(self, draws: Draws, style: BookStyle, limit: int) -> None:
        self.draws = draws
        self.style = style
        self.limit = limit
        self.separator = b" " if draws.uniform() < 0.5 else b"\n"
        self.buffer = bytearray()
        self.facts: list[_Fact] = []
        self.used: set[str] = set()
        self.answers: list[AnswerSpan] = []

    def write(self, piece: bytes) -> None:
        self.buffer += piece
        self.buffer += self.separator

    def new_fact(self) -> None:
        """State a fact: mostly of a new key; sometimes a live variable is assigned anew."""
        kind = _draw_kind(self.draws)
        variables = [fact for fact in self.live() if fact.kind is TaskKind.VARIABLE]
        if kind is TaskKind.VARIABLE and variables and self.draws.uniform() < 0.3:
            fact = self.draws.pick(variables)
            self.facts.remove(fact)
            key = fact.key
        else:
            key = _new_key(self.draws, kind)
            while key in self.used:
                key = _new_key(self.draws, kind)
            self.used.add(key)
        head, value = _statement(kind, key), _new_value(self.draws, kind)
        start = len(self.buffer) + len(head)
        if len(self.facts) >= self.style.live_facts:
            self.facts.remove(min(self.facts, key=lambda known: known.mentioned_at))
        self.facts.append(_Fact(kind=kind, key=key, value=value, mentioned_at=start))
        self.write(f"{head}{value}.".encode())

    def live(self) -> list[_Fact]:
        oldest = len(self.buffer) - self.style.max_distance_tokens + 256
        self.facts = [fact for fact in self.facts if fact.mentioned_at >= oldest]
        return self.facts

    def _answer(self, fact: _Fact, start: int) -> None:
        stop = start + len(fact.value)
        if stop <= self.limit:
            span = AnswerSpan(start=start, stop=stop, kind=fact.kind, distance_tokens=start - fact.mentioned_at)
            self.answers.append(span)
        fact.mentioned_at = start

    def ask(self) -> None:
        live = self.live()
        if not live:
            return
        # The stalest of three: an answer repeats its value, so asking at random would mostly test short memory.
        fact = min((self.draws.pick(live) for _ in range(3)), key=lambda drawn: drawn.mentioned_at)
        head = _question(fact.kind, fact.key)
        self._answer(fact, len(self.buffer) + len(head))
        self.write(f"{head}{fact.value}.".encode())


def _filler(draws: Draws, verses: Sequence[bytes], style: BookStyle) -> Iterator[bytes]:
    if draws.uniform() < style.noise_share:
        return itertools.cycle(_NOISE)

    def passages() -> Iterator[bytes]:
        while True:
            start = draws.below(len(verses))
            for offset in range(4 + draws.below(28)):
                yield verses[(start + offset) % len(verses)]

    return passages()


def write_book(*, seed: int, index: int, tokens: int, verses: Sequence[bytes], style: BookStyle) -> RecallBook:
    """Write one recall book.

    Args:
        seed: Seed of the corpus, at least 0.
        index: Index of the book, at least 0.
        tokens: Exact length in tokens (bytes), at least 1.
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
    return RecallBook(text=bytes(writer.buffer[:tokens]), answers=tuple(writer.answers))


def _write_stretch(writer: _Writer, filler: Iterator[bytes]) -> None:
    draws, style = writer.draws, writer.style
    goal = style.tokens_per_fact * (0.5 + draws.uniform())
    questions = int(style.questions_per_fact * 2 * draws.uniform() + 0.5)
    # A question is some 40 tokens on the mean of the kinds: what is left of the stretch is filler.
    room = goal - 40 * (questions + 1)
    pieces: list[bytes | None] = [None] * questions
    while room > 0:
        piece = next(filler)
        pieces.append(piece)
        room -= len(piece) + 1
    # Filler keeps its reading order; only where the questions fall between it is drawn.
    asks = [piece is None for piece in pieces]
    draws.shuffle(asks)
    passages = iter([piece for piece in pieces if piece is not None])
    writer.new_fact()
    for ask in asks:
        if ask:
            writer.ask()
        else:
            writer.write(next(passages))
