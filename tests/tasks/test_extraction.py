"""Answers found in tricky outputs, and none invented."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayeval.tasks.extraction import after_reasoning, boxed, choice_letter, final_expression

LETTERS: list[tuple[str, str | None]] = [
    ("The answer is (C).", "C"),
    ("the answer is C", "C"),
    ("**Answer: (B)**", "B"),
    ("**Answer:** B", "B"),
    ("**Final Answer**: **D**", "D"),
    ("Answer: $\\boxed{D}$", "D"),
    ("Answer: \\text{D}", "D"),
    ("The answer is $\\mathbf{(D)}$", "D"),
    ("so \\boxed{\\text{(D)}} holds", "D"),
    ("\\boxed{\\mathbf{A}}", "A"),
    ("$\\boxed{C}$.", "C"),
    ("\\boxed{C. 14 m/s}", "C"),
    ("\\boxed{Carbon}", None),
    ("\\fbox{B}", "B"),
    ("The correct answer is option E because", "E"),
    ("The correct answer choice is: J.", "J"),
    ("The best answer would be **B**.", "B"),
    ("The answer to the question is B.", "B"),
    ("Answer = C", "C"),
    ("ANSWER: F", "F"),
    ("answer: c", "C"),
    ("The answer is (c)", "C"),
    # Changes of mind: the last one counts, whichever way it is written.
    ("The answer is A. Wait, I made a mistake. The answer is B.", "B"),
    ("\\boxed{A} ... no, actually the answer is (D)", "D"),
    ("The answer is (A). Therefore \\boxed{D}", "D"),
    # Articles, pronouns and words.
    ("The answer is a matter of taste.", None),
    ("The answer is A matter of taste.", None),
    ("The answer is I think unclear", None),
    ("The answer is A, because of friction.", "A"),
    ("The answer is A.", "A"),
    ("The answer is I.", "I"),
    ("The answer is Both of them", None),
    ("The answer is B-type", None),
    ("The answer is B's", None),
    ("The answer is 42.", None),
    ("Option B looks right, but also C.", None),
    ("(A) first (B) second (C) third", None),
    # Beyond the options.
    ("The answer is K", None),
    ("The answer is (Z). The answer is (C).", "C"),
    ("The answer is (C). The answer is (Z).", "C"),
    # Reasoning.
    ("<think>the answer is A</think>The answer is B", "B"),
    ("maybe the answer is A</think>\n\nThe answer is (B).", "B"),
    ("<think>the answer is A, no, the answer is", None),
    ("<think>first</think> text <think>the answer is A", None),
    ("<think>the answer is A</think>", None),
    # A last line alone.
    ("Let us see.\n\nC", "C"),
    ("Let us see.\n\n**(C)**\n", "C"),
    ("Let us see.\nC) because", None),
    ("C\nis not the end", None),
    ("Answer:\n\n(H)", "H"),
    ("答案:Ｂ\nThe answer is （Ｂ）", "B"),
    ("", None),
    ("   \n ", None),
]


@pytest.mark.parametrize(("output", "letter"), LETTERS)
def test_choice_letters(output: str, letter: str | None) -> None:
    assert choice_letter(output, choices=10) == letter


def test_letters_depend_on_the_number_of_options() -> None:
    assert choice_letter("The answer is (E)", choices=4) is None
    assert choice_letter("The answer is (E)", choices=5) == "E"


EXPRESSIONS: list[tuple[str, str | None]] = [
    ("Thus \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
    ("\\boxed{\\left\\{ x : x > \\frac{1}{2} \\right\\}}", "\\left\\{ x : x > \\frac{1}{2} \\right\\}"),
    ("\\boxed{1} and then \\boxed{2}", "2"),
    ("\\boxed{1} and then \\boxed{2", "1"),
    ("\\boxed{2", None),
    ("\\boxed 7$", "7"),
    ("\\boxed", None),
    ("\\boxed{}", None),
    ("\\boxed{\\boxed{5}}", "5"),
    ("The final answer is $x = 3$. I hope it is correct.", "$x = 3$"),
    ("The answer is 3.5 meters.\nDone", "3.5 meters"),
    ("**Answer:** $12$", "$12$"),
    ("First 3, later 4.", None),
    ("<think>\\boxed{1}</think> The result: \\boxed{2}", "2"),
    ("<think>\\boxed{1}", None),
    ("answer is", None),
]


@pytest.mark.parametrize(("output", "expression"), EXPRESSIONS)
def test_expressions(output: str, expression: str | None) -> None:
    assert final_expression(output) == expression


def test_an_escaped_brace_does_not_close_a_box() -> None:
    assert [found.answer for found in boxed("\\boxed{\\{a\\}}")] == ["\\{a\\}"]


def test_reasoning_is_left_out_only_where_it_ended() -> None:
    assert after_reasoning("plain") == "plain"
    assert after_reasoning("a</think>b</think>c") == "c"
    assert after_reasoning("<think>a") is None


@given(st.text(alphabet="ABCDabcd answer is:()[]{}\\boxed$*\n.<think>/", max_size=80), st.integers(1, 10))
def test_whatever_is_found_is_one_of_the_options(output: str, choices: int) -> None:
    letter = choice_letter(output, choices=choices)
    assert letter is None or letter in "ABCDEFGHIJ"[:choices]
    expression = final_expression(output)
    assert expression is None or expression.strip()


@given(st.text(max_size=200))
def test_a_stated_answer_is_found_after_any_text(text: str) -> None:
    if not any(mark in text for mark in ("think", "THINK")):
        assert choice_letter(text + "\nThe answer is (B).", choices=4) == "B"
        if "boxed" not in text and "fbox" not in text:
            assert final_expression(text + "\n\\boxed{17}") == "17"
