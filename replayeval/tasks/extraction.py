r"""What a model answered at the end of a long output: choice letters and mathematical expressions.

An answer counts only where the output states one: after the reasoning, boxed, or after "answer is". Nothing is guessed
from a letter in passing, because a wrong extraction looks like a wrong answer, and an arm that rambles more would be
charged for it. When several answers are stated, the last one counts.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

NOTHING = "[invalid]"
"""What lm-eval's own filters return where they find no answer."""

_THINK_ENDS = ("</think>", "</thinking>", "◁/think▷", "[/THINK]")
_THINK_STARTS = ("<think>", "<thinking>", "◁think▷", "[THINK]")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_WRAPPERS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathsf|textsf|mbox|bf|rm)\b\s*|[{}$*_`\s\\]")
_STATED = re.compile(
    r"\banswer(?:\s+choice)?\b[\s*_`]*(?:\s+(?:to\s+\w+(?:\s+\w+){0,3}\s+)?(?:is|would be|must be|should be)\b|[:=])"
    r"[\s*_`:]*(?:(?:option|choice|letter)\b[\s*_`:]*)?",
    re.IGNORECASE,
)
_LETTER = re.compile(
    r"(?P<open>(?:[(\[{$*_`\s]|\\(?:text|textbf|mathrm|mathbf|mathsf|textsf)\b)*)(?P<letter>[A-Za-z])(?P<rest>.{0,24})",
    re.DOTALL,
)
_ALONE = re.compile(r"[\s>#*_`($\[]*(?P<letter>[A-Z])[\s*_`)$\]]*[.:]?[\s*_`]*")
_SENTENCE = re.compile(r"(?P<answer>.+?)(?:\.(?=\s|$)|\n|$)", re.DOTALL)
_WORDS_THAT_ARE_LETTERS = "AI"


@dataclass(frozen=True, kw_only=True)
class _Stated:
    """An answer and where it was stated."""

    position: int
    answer: str


def after_reasoning(output: str) -> str | None:
    """Return what follows a model's reasoning: everything after the last mark that ends it.

    Returns:
        The text, or None where reasoning was begun in the output and never ended. Without any mark, the whole output.
    """
    ends = [(output.rfind(mark) + len(mark)) for mark in _THINK_ENDS if mark in output]
    start = max(ends, default=0)
    rest = output[start:]
    return None if any(mark in rest for mark in _THINK_STARTS) else rest


def choice_letter(output: str, *, choices: int) -> str | None:
    r"""Return the letter of the option that an output decides for.

    Understood are `\boxed{C}`, "the answer is (C)", "**Answer:** C", "answer: option C" and, where none of these
    occurs, a last line that holds a letter and nothing else. Letters beyond the options are no answer, and neither is
    an article or a pronoun ("the answer is a matter of").

    Args:
        output: What the model wrote.
        choices: Number of options, which are A, B, C and so on.
    """
    text = after_reasoning(output)
    if text is None:
        return None
    text = unicodedata.normalize("NFKC", text)
    known = {chr(ord("A") + index) for index in range(choices)}
    found = [stated for stated in (*_boxed_letters(text), *_stated_letters(text)) if stated.answer in known]
    if found:
        return max(found, key=lambda stated: stated.position).answer
    lines = [line for line in text.splitlines() if line.strip()]
    alone = _ALONE.fullmatch(lines[-1]) if lines else None
    return alone["letter"] if alone is not None and alone["letter"] in known else None


def final_expression(output: str) -> str | None:
    r"""Return the mathematical expression that an output ends with.

    The content of the last complete `\boxed{…}`; without one, what follows the last "answer is" or "answer:" up to the
    end of its sentence.
    """
    text = after_reasoning(output)
    if text is None:
        return None
    boxes = list(boxed(text))
    if boxes:
        return boxes[-1].answer.strip() or None
    stated = list(_STATED.finditer(text))
    if not stated:
        return None
    sentence = _SENTENCE.match(text, stated[-1].end())
    answer = "" if sentence is None else sentence["answer"].strip().strip("*_` ").rstrip(".").strip()
    return answer or None


def boxed(text: str) -> Iterator[_Stated]:
    r"""Yield the content of each complete `\boxed{…}`, `\boxed x` or `\fbox{…}` with its position, in order."""
    for match in _BOX.finditer(text):
        start = match.end()
        if start >= len(text):
            return
        if text[start] != "{":
            bare = re.match(r"\S[^\s$.,;]*", text[start:])
            if bare is not None and text[start - 1].isspace():
                yield _Stated(position=match.start(), answer=bare[0])
            continue
        end = _closing_brace(text, start)
        if end is not None:
            yield _Stated(position=match.start(), answer=text[start + 1 : end])


def _closing_brace(text: str, start: int) -> int | None:
    depth = 0
    escaped = False
    for index in range(start, len(text)):
        character = text[index]
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return index
    return None


def _boxed_letters(text: str) -> Iterator[_Stated]:
    for box in boxed(text):
        bare = _WRAPPERS.sub("", box.answer)
        match = re.match(r"\(?([A-Za-z])(?:$|[).:,])", bare)
        if match is not None:
            yield _Stated(position=box.position, answer=match[1].upper())


def _stated_letters(text: str) -> Iterator[_Stated]:
    for stated in _STATED.finditer(text):
        match = _LETTER.match(text, stated.end())
        if match is None or not _stands_alone(match):
            continue
        yield _Stated(position=stated.start(), answer=match["letter"].upper())


def _stands_alone(match: re.Match[str]) -> bool:
    """Whether a letter after "answer is" is the answer, not the start of a word, an article or a pronoun."""
    letter, rest = match["letter"], match["rest"]
    if rest[:1].isalnum() or rest[:1] in {"'", "’", "-", "_"} and rest[1:2].isalnum():
        return False
    enclosed = any(mark in match["open"] for mark in "([{$*_`")
    if enclosed:
        return True
    if letter.islower():
        return not rest.strip(" .")
    if letter in _WORDS_THAT_ARE_LETTERS:
        # "A." and "A, because" state an option; "A matter of" and "I think" do not.
        return not re.match(r"\s+[a-z]", rest)
    return True
