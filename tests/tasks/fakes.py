"""Arms that answer by rule, and a task that needs no model."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from replayeval.tasks import measure
from replayeval.tasks.answering import Finished, Response
from replayeval.tasks.documents import EvalTask, TaskDocument

Rule = Callable[[Mapping[str, Any], int], str]


class FakeArm:
    """Answers by a rule on document and sample, and counts what it is asked."""

    def __init__(self, name: str, rule: Rule, *, rows: int = 4, stop_after: int | None = None) -> None:
        self.name = name
        self.rows = rows
        self.rule = rule
        self.asked: list[int] = []
        self.portions: list[list[str]] = []
        self.stop_after = stop_after

    def portion(self, task: EvalTask) -> int:
        return 2 * self.rows

    def answer(self, task: EvalTask, documents: Sequence[TaskDocument], finished: Finished) -> None:
        self.portions.append([document.prompt_sha256 for document in documents])
        for index, document in enumerate(documents):
            if self.stop_after is not None and len(self.asked) >= self.stop_after:
                raise KeyboardInterrupt
            self.asked.append(document.doc_id)
            texts = [self.rule(document.doc, sample) for sample in range(task.samples)]
            finished(
                index,
                [
                    [Response(value=t, output_tokens=tuple(range(len(t))), length=len(t), truncated="cut" in t, seed=s)]
                    for s, t in enumerate(texts)
                ],
            )


def use(monkeypatch: pytest.MonkeyPatch, *arms: FakeArm, weights: str = "w") -> None:
    """Let `measure_tasks` ask these arms instead of a model."""

    class NoModel:
        tokenizer = None
        layers = ()

    def local(*_: object, **__: object) -> measure._Answerers:
        return measure._Answerers(
            arms=arms, model="fake", window=16, conditions={"weights": weights}, device="none", details={}
        )

    monkeypatch.setattr(measure, "load_subject", lambda *_, **__: NoModel())
    monkeypatch.setattr(measure, "_tokenizer_source", lambda *_: None)
    monkeypatch.setattr(measure, "_local", local)


def questions(folder: Path, count: int, *, twice: bool = False) -> dict[str, str]:
    """Write MMLU-Pro questions whose right answer is always B; `twice` repeats the first one at the end."""
    rows = [{"question": f"Question {i}?", "options": ["x", "y", "z"], "answer": "B"} for i in range(count)]
    if twice:
        rows.append(rows[0])
    folder.mkdir(exist_ok=True)
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"mmlu_pro": str(folder / "q.jsonl")}


def number(doc: Mapping[str, Any]) -> int:
    """Number of a question."""
    return int(str(doc["question"]).split()[1].rstrip("?"))
