r"""MMLU-Pro, GPQA-Diamond and MATH level 5 as reasoning tasks: documents, prompts, extraction and scores.

The task files under `tasks/` name these functions. All three ask without examples and let the model reason at
length; an answer is what it states at the end (see `replayeval.tasks.extraction`).
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

import datasets  # pyright: ignore[reportMissingTypeStubs]
from lm_eval.api.filter import Filter  # pyright: ignore[reportMissingTypeStubs]

from replayeval.errors import ConfigError
from replayeval.tasks.extraction import NOTHING, boxed, choice_letter, final_expression
from replayeval.tasks.sources import Row, benchmark_rows

LETTERS = "ABCDEFGHIJ"
_MATH_SECONDS = 5


def mmlu_pro(*, dataset: Mapping[str, Any], data: Mapping[str, str] | None = None, **_: Any) -> dict[str, Any]:
    """Return MMLU-Pro's test questions with `question`, `options` and `answer`.

    Raises:
        ConfigError: The rows cannot be read.

    Source: Wang et al. 2024, MMLU-Pro.
    """
    rows = benchmark_rows("mmlu_pro", dataset=dataset, data=data, columns=("question", "options", "answer"))
    return _test(
        [_choice_document(row["question"], row["options"], row["answer"], row.get("category")) for row in rows]
    )


def gpqa_diamond(*, dataset: Mapping[str, Any], data: Mapping[str, str] | None = None, **_: Any) -> dict[str, Any]:
    """Return GPQA-Diamond's questions; the order of the options depends on the question alone.

    Raises:
        ConfigError: The rows cannot be read.

    Source: Rein et al. 2023, GPQA.
    """
    wrong = [f"Incorrect Answer {index}" for index in (1, 2, 3)]
    rows = benchmark_rows("gpqa_diamond", dataset=dataset, data=data, columns=("Question", "Correct Answer", *wrong))
    documents: list[Row] = []
    for row in rows:
        question = str(row["Question"]).strip()
        options = [str(row[column]).strip() for column in ("Correct Answer", *wrong)]
        order = sorted(range(4), key=lambda index: hashlib.sha256(f"{question}\0{index}".encode()).digest())
        shuffled = [options[index] for index in order]
        documents.append(_choice_document(question, shuffled, LETTERS[order.index(0)], row.get("High-level domain")))
    return _test(documents)


def math_l5(*, dataset: Mapping[str, Any], data: Mapping[str, str] | None = None, **_: Any) -> dict[str, Any]:
    """Return the problems of level 5 of MATH's test split, with `problem` and `answer`.

    Raises:
        ConfigError: The rows cannot be read, or a solution has no boxed answer.

    Source: Hendrycks et al. 2021, MATH.
    """
    rows = benchmark_rows("math_l5", dataset=dataset, data=data, columns=("problem", "level", "solution"))
    documents: list[Row] = []
    for row in rows:
        if str(row["level"]).strip() != "Level 5":
            continue
        answers = list(boxed(str(row["solution"])))
        if not answers:
            raise ConfigError(
                f"math_l5: expected a boxed answer in every solution, got {str(row['solution'])[-80:]!r}."
            )
        documents.append({"problem": row["problem"], "answer": answers[-1].answer, "subject": str(row.get("type", ""))})
    if not documents:
        raise ConfigError("math_l5: expected problems of 'Level 5', got none.")
    return _test(documents)


def choice_prompt(doc: Mapping[str, Any]) -> str:
    """Return a multiple-choice question that asks for reasoning and a letter."""
    options: Sequence[str] = doc["options"]
    listed = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
    return (
        "Answer the following multiple-choice question. Think step by step first. The last line of your response must "
        f'be of the form "Answer: X", where X is one of the letters A to {LETTERS[len(options) - 1]}.\n\n'
        f"{doc['question']}\n\n{listed}"
    )


def math_prompt(doc: Mapping[str, Any]) -> str:
    r"""Return a problem that asks for reasoning and a boxed answer."""
    return (
        "Solve the following problem. Think step by step first, then put the final answer within \\boxed{}.\n\n"
        f"{doc['problem']}"
    )


class ChoiceFilter(Filter):
    """lm-eval filter: from outputs to the letters that they decide for, or `[invalid]`."""

    def apply(self, resps: Any, docs: Any) -> list[list[str]]:
        """Extract the letter of every output of every document."""
        return [
            [choice_letter(output, choices=len(doc["options"])) or NOTHING for output in outputs]
            for outputs, doc in zip(resps, docs, strict=True)
        ]


class ExpressionFilter(Filter):
    """lm-eval filter: from outputs to the expressions that they end with, or `[invalid]`."""

    def apply(self, resps: Any, docs: Any) -> list[list[str]]:
        """Extract the expression of every output of every document."""
        del docs
        return [[final_expression(output) or NOTHING for output in outputs] for outputs in resps]


def choice_score(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return 1 for the right letter, else 0."""
    return {"exact_match": float(results[0] == doc["answer"])}


def math_score(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return 1 for an expression that equals the answer, else 0."""
    return {"exact_match": float(results[0] != NOTHING and same_expression(results[0], str(doc["answer"])))}


def same_expression(answer: str, expected: str) -> bool:
    r"""Tell whether two LaTeX expressions stand for the same: by text, else as math-verify understands them.

    Raises:
        ConfigError: math-verify is not installed.
    """
    if _plain(answer) == _plain(expected):
        return True
    try:
        from math_verify import parse, verify  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise ConfigError(
            "math_l5: scoring needs the package math-verify; install it with `pip install math-verify`."
        ) from None
    # Its time limits are signals, which only the main thread can take.
    seconds = _MATH_SECONDS if threading.current_thread() is threading.main_thread() else None
    read: Any = cast(Any, parse)
    gold = read(f"${expected}$", parsing_timeout=seconds)
    stated = read(answer if "$" in answer else f"${answer}$", parsing_timeout=seconds)
    return bool(cast(Any, verify)(gold, stated, timeout_seconds=seconds))


def _plain(expression: str) -> str:
    """Return an expression without what never changes its meaning."""
    for mark in ("\\left", "\\right", "\\!", "\\,", "\\;", "\\ ", "$", " "):
        expression = expression.replace(mark, "")
    return expression.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")


def _choice_document(question: Any, options: Sequence[Any], answer: Any, subject: Any) -> Row:
    letter = str(answer).strip()
    if not 2 <= len(options) <= len(LETTERS) or letter not in LETTERS[: len(options)]:
        raise ConfigError(
            f"expected 2 to {len(LETTERS)} options and the letter of one of them, got {len(options)} options and the "
            f"answer {letter!r} for the question {str(question)[:60]!r}."
        )
    return {
        "question": str(question).strip(),
        "options": [str(option).strip() for option in options],
        "answer": letter,
        "subject": str(subject or ""),
    }


def _test(documents: list[Row]) -> dict[str, Any]:
    return {"test": cast(Any, datasets).Dataset.from_list(documents)}
