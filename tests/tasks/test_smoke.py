"""The offline tasks for the built-in checkpoints."""

from typing import Any

import pytest

from replayeval.errors import ConfigError
from replayeval.models.builtin.tokenizer import encode
from replayeval.tasks.catalog import load
from replayeval.tasks.smoke import recall_questions

SETTINGS: dict[str, Any] = {
    "kinds": ["number", "record", "variable", "needle"],
    "documents": 30,
    "tokens": 512,
    "least_distance": 64,
    "live_facts": 4,
}


def test_questions_can_be_answered_from_their_prompts_and_not_from_their_ends() -> None:
    for row in recall_questions(**SETTINGS)["test"]:
        prompt, answer = row["prompt"], row["answer"]
        assert answer in prompt
        before = prompt[: prompt.rindex(answer)]
        # A word brings its space along, so it begins one character earlier than it reads.
        before = before[:-1] if answer.isalpha() else before
        assert len(encode(prompt)) - len(encode(before)) == row["distance_tokens"] >= 64
        assert 256 < len(encode(prompt)) < 512
        assert row["choices"][row["gold"]].strip() == answer
        # A prompt and a choice together have the tokens of both.
        assert all(encode(prompt + choice) == encode(prompt) + encode(choice) for choice in row["choices"])
        assert len(set(row["choices"])) == 4
        assert {choice.strip().isdigit() for choice in row["choices"]} == {answer.isdigit()}


def test_they_depend_on_the_seed_alone_and_fewer_are_the_first_of_more() -> None:
    many = recall_questions(**SETTINGS)["test"]
    few = recall_questions(**SETTINGS, samples=7)["test"]
    assert len(few) == 7
    assert many[:7] == few[:]
    assert recall_questions(**{**SETTINGS, "book_seed": 1}, samples=7)["test"][:] != few[:]


def test_right_choices_stand_everywhere() -> None:
    places = recall_questions(**SETTINGS)["test"]["gold"]
    assert set(places) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"least_distance": 5000}, "take longer books or shorter distances"),
        ({"kinds": ["poem"]}, "poem"),
        ({"live_facts": 0}, "positive sizes"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recall_questions(**{**SETTINGS, "documents": 2, **change})


def test_lm_eval_finds_the_group_with_its_four_tasks() -> None:
    loaded = load(["smoke"], metadata={"samples": 2})
    names = {"smoke_recall", "smoke_needle", "smoke_variable", "smoke_choice"}
    assert set(loaded["tasks"]) == {f"replayeval_{name}" for name in names}
    kinds = {name: {doc["kind"] for doc in task.eval_docs} for name, task in loaded["tasks"].items()}
    assert kinds["replayeval_smoke_needle"] == {"needle"}
    assert kinds["replayeval_smoke_variable"] == {"variable"}
    assert kinds["replayeval_smoke_recall"] <= {"number", "record"}
