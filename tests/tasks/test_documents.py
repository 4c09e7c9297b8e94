"""Tasks of lm-eval, from task files on disk, as requests and as scores."""

import json
from pathlib import Path
from typing import Any

import pytest

from replayeval.errors import ConfigError
from replayeval.tasks import measure_tasks
from replayeval.tasks.answering import Response
from replayeval.tasks.documents import EvalTask, load_tasks
from replayeval.tasks.scoring import score
from tests.tasks.fakes import FakeArm, use

QUESTIONS = [{"question": f"What is {i}?", "choices": ["no", "yes", "maybe"], "label": i % 3} for i in range(6)]


def task_file(folder: Path, **fields: Any) -> str:
    """A task in lm-eval's own form over local files."""
    import yaml

    (folder / "q.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS), encoding="utf-8")
    data = {"data_files": {"test": str(folder / "q.jsonl")}}
    values = {"task": "mine", "dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
    values |= {"doc_to_text": "Q: {{question}}\nA:", "doc_to_target": "{{label}}", **fields}
    (folder / "mine.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(folder / "mine.yaml")


CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc_norm", "acc")],
}
STRICT_AND_LOOSE = [
    {"name": "strict", "filter": [{"function": "regex", "regex_pattern": "#### (\\w+)"}, {"function": "take_first"}]},
    {"name": "loose", "filter": [{"function": "regex", "regex_pattern": "(\\w+)"}, {"function": "take_first"}]},
]
EXACT = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]


def loaded(path: str, **options: Any) -> EvalTask:
    return load_tasks([path], **options).tasks["mine"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_choices_are_asked_together_and_the_likeliest_counts(tmp_path: Path) -> None:
    task = loaded(task_file(tmp_path, **CHOICE))
    assert [len(document.instances) for document in task.documents] == [3] * 6
    assert task.documents[4].instances[2].args == ("Q: What is 4?\nA:", " maybe")
    result = score(task, task.documents[4], [(-3.0, False), (-1.0, True), (-2.0, False)])
    # `acc` before `acc_norm`, although the task names it last.
    assert (result.value, result.metric, result.extracted, result.unextracted) == (1.0, "acc", "1", None)
    assert score(task, task.documents[5], [(-3.0, False), (-1.0, True), (-2.0, False)]).value == 0.0


def test_the_first_filter_counts_and_says_when_it_found_nothing(tmp_path: Path) -> None:
    fields = {"filter_list": STRICT_AND_LOOSE, "metric_list": EXACT, "doc_to_target": "{{choices[label]}}"}
    task = loaded(task_file(tmp_path, output_type="generate_until", **fields))
    good = score(task, task.documents[1], ["I say #### yes"])
    assert (good.value, good.metric, good.extracted, good.unextracted) == (1.0, "exact_match,strict", "yes", False)
    assert score(task, task.documents[1], ["yes"]).unextracted is True
    assert score(task, task.documents[1], ["#### no"]).value == 0.0


def test_without_a_filter_nothing_is_called_unextracted(tmp_path: Path) -> None:
    task = loaded(task_file(tmp_path, output_type="generate_until", metric_list=EXACT))
    assert score(task, task.documents[0], ["0"]).unextracted is None


def test_prompts_are_those_of_lm_eval_itself(tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    path = task_file(tmp_path, **CHOICE, num_fewshot=2, fewshot_split="test")
    theirs: Any = TaskManager(include_defaults=False).load([path])["tasks"]["mine"]
    theirs.set_fewshot_seed(seed=1234)
    theirs.build_all_requests()
    expected = [instance.args for instance in theirs.instances]
    task = loaded(path)
    assert [instance.args for document in task.documents for instance in document.instances] == expected
    # Taking part of the documents changes no example in a prompt.
    part = loaded(path, limit=2)
    whole = {document.doc_id: document.prompt_sha256 for document in task.documents}
    assert all(document.prompt_sha256 == whole[document.doc_id] for document in part.documents)


def test_a_chat_template_wraps_prompts_only_where_asked(tmp_path: Path) -> None:
    def template(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>" * add_generation_prompt

    path = task_file(tmp_path, output_type="generate_until", metric_list=EXACT)
    plain = loaded(path, chat_template=template)
    chat = loaded(path, chat_template=template, chat=True)
    assert plain.documents[0].instances[0].args[0] == "Q: What is 0?\nA:"
    assert chat.documents[0].instances[0].args[0] == "<user>Q: What is 0?\nA:<assistant>"
    assert (plain.chat, chat.chat) == (False, True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output_type": "loglikelihood_rolling"}, "neither right nor wrong"),
        ({"output_type": "generate_until", "metric_list": EXACT, "unsafe_code": True}, "runs code"),
    ],
)
def test_tasks_that_cannot_be_compared_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(task_file(tmp_path, **fields))


def test_a_score_that_is_no_fraction_is_refused(tmp_path: Path) -> None:
    metrics = [{"metric": "brier_score", "aggregation": "brier_score", "higher_is_better": False}]
    task = loaded(task_file(tmp_path, **{**CHOICE, "metric_list": metrics}))
    with pytest.raises(ConfigError, match="score between 0 and 1"):
        score(task, task.documents[0], [(-1.0, True), (-2.0, False), (-3.0, False)])


def test_a_broken_task_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("task: x\ndataset_path: json\noutput_type: generate_until\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"x\.yaml cannot be loaded"):
        load_tasks([str(tmp_path / "x.yaml")])


def test_likelihoods_through_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Likely(FakeArm):
        def __init__(self, name: str, wrong: int) -> None:
            super().__init__(name, lambda doc, _: "")
            self.wrong = wrong

        def answer(self, task: Any, documents: Any, finished: Any) -> None:
            def values(document: Any) -> list[Response]:
                best = (document.doc["label"] + (document.doc_id < self.wrong)) % 3
                return [Response(value=(-1.0 if i == best else -2.0, i == best)) for i in range(3)]

            for index, document in enumerate(documents):
                finished(index, [values(document)])

    use(monkeypatch, Likely("conventional:fp32", 1), Likely("shared:fp8@L=16", 3))
    report = measure_tasks("fake", [task_file(tmp_path, **CHOICE)])
    task = report.tasks[0]
    assert (task.task, task.metric) == ("mine", "acc")
    assert (task.reference.accuracy, task.arms[0].accuracy) == (pytest.approx(5 / 6), 0.5)
    assert (task.arms[0].flips_to_wrong, task.arms[0].flips_to_right) == (2, 0)
    assert task.arms[0].output_tokens_mean is None
    assert "unknown" in task.arms[0].notes["output_tokens_mean"]
    assert task.arms[0].by_quartile == ()
