"""The public benchmarks from local files of their formats, offline."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from replayeval.errors import ConfigError
from replayeval.models.builtin.tokenizer import encode
from replayeval.tasks.benchmarks import math_l5, same_expression
from replayeval.tasks.catalog import task_folder
from replayeval.tasks.documents import EvalTask, TaskList, load_tasks
from replayeval.tasks.ruler import KINDS, LENGTHS, ruler
from replayeval.tasks.scoring import score
from tests.tasks import files


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever asks for the network fails at once."""

    def refuse(*arguments: object, **options: object) -> None:
        raise ConnectionError("no network in tests")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    monkeypatch.setattr("nltk.download", refuse)


def one(listed: TaskList) -> EvalTask:
    assert len(listed.tasks) == 1
    return next(iter(listed.tasks.values()))


def scored(task: EvalTask, index: int, output: str) -> tuple[float, bool | None]:
    result = score(task, task.documents[index], [output])
    return result.value, result.unextracted


def test_mmlu_pro_from_a_snapshot(tmp_path: Path) -> None:
    task = one(load_tasks(["mmlu_pro"], task_data={"mmlu_pro": str(files.mmlu_pro(tmp_path))}))
    assert len(task.documents) == 12  # the test file, not the validation file beside it
    prompt = task.documents[3].instances[0].args[0]
    assert "What is 3 plus one?" in prompt
    assert "A. 3\nB. 4" in prompt
    assert "A to J" in prompt
    assert task.settings["generation"]["max_gen_toks"] == 32768
    assert task.settings["generation"]["do_sample"] is True
    assert scored(task, 0, "I think <b>. The answer is (B).") == (1.0, False)
    assert scored(task, 0, "The answer is (C).") == (0.0, False)
    assert scored(task, 0, "I do not know") == (0.0, True)
    assert task.source["files"] == str(tmp_path)


def test_gpqa_from_its_csv(tmp_path: Path) -> None:
    data = {"gpqa_diamond": str(files.gpqa(tmp_path / "gpqa_diamond.csv"))}
    task = one(load_tasks(["gpqa_diamond"], task_data=data))
    again = one(load_tasks(["gpqa_diamond"], task_data=data))
    assert [d.prompt_sha256 for d in task.documents] == [d.prompt_sha256 for d in again.documents]
    right = {document.doc["answer"] for document in task.documents}
    assert len(right) > 1  # the order of options differs between questions
    for index, document in enumerate(task.documents):
        assert document.doc["options"]["ABCD".index(document.doc["answer"])] == f"right {document.doc_id}"
        assert scored(task, index, f"\\boxed{{{document.doc['answer']}}}") == (1.0, False)


def test_the_order_of_options_depends_on_no_random_state(tmp_path: Path) -> None:
    data = {"gpqa_diamond": str(files.gpqa(tmp_path / "gpqa_diamond.csv"))}
    random.seed(1)
    first = one(load_tasks(["gpqa_diamond"], task_data=data))
    random.seed(2)
    second = one(load_tasks(["gpqa_diamond"], task_data=data))
    assert [d.doc["answer"] for d in first.documents] == [d.doc["answer"] for d in second.documents]


def test_math_takes_level_5_and_the_last_box(tmp_path: Path) -> None:
    task = one(load_tasks(["math_l5"], task_data={"math_l5": str(files.math(tmp_path))}))
    assert [document.doc["answer"] for document in task.documents] == [f"\\frac{{{i}}}{{2}}" for i in range(6)]
    assert scored(task, 3, "so \\boxed{\\dfrac{3}{2}}") == (1.0, False)
    assert scored(task, 3, "so \\boxed{1.5}") == (1.0, False)
    assert scored(task, 3, "so \\boxed{1.4}") == (0.0, False)
    assert scored(task, 3, "so it goes") == (0.0, True)


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [
        ("\\frac12", "\\frac{1}{2}", True),
        ("0.5", "\\frac{1}{2}", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("(1,2)", "(1, 2)", True),
        ("(2,1)", "(1,2)", False),
        ("\\text{even}", "\\text{even}", True),
        ("\\text{odd}", "\\text{even}", False),
        ("2\\sqrt{3}", "\\sqrt{12}", True),
        ("3", "-3", False),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})", True),
    ],
)
def test_expressions_are_compared_by_meaning(answer: str, expected: str, same: bool) -> None:
    assert same_expression(answer, expected) is same


def test_ruler_from_files_of_its_own_scripts(tmp_path: Path) -> None:
    data = {"ruler": str(files.ruler(tmp_path))}
    task = one(load_tasks(["ruler_4k_niah_single_1"], task_data=data))
    old, new = task.documents
    assert old.instances[0].args[0].rstrip().endswith("The number is")
    assert new.instances[0].args[0].rstrip().endswith("They are")
    assert scored(task, 1, "5 and 7") == (0.5, None)
    assert scored(task, 1, "6, 5") == (1.0, None)
    questions = one(load_tasks(["ruler_4k_qa_squad"], task_data=data))
    assert scored(questions, 1, "6") == (1.0, None)
    with pytest.raises(ConfigError, match="4096/data/cwe/validation.jsonl"):
        load_tasks(["ruler_4k_cwe"], task_data=data)


def test_ruler_is_generated_alike_each_time_and_leaves_the_random_states_alone() -> None:
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    before, numpy_before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]  # noqa: NPY002
    many = ruler(kind="vt", length=8192, tokenizer="builtin:gdn", samples=3)["test"]
    assert random.getstate() == before
    assert np.random.get_state()[1].tolist() == numpy_before  # type: ignore[union-attr]  # noqa: NPY002
    random.seed(6)
    few = ruler(kind="vt", length=8192, tokenizer="builtin:gdn", samples=2)["test"]
    assert many[:2] == few[:2]
    assert len(many) == 3
    longer = ruler(kind="vt", length=16384, tokenizer="builtin:gdn", samples=1)["test"]
    assert longer[0]["outputs"] != few[0]["outputs"]
    for row in many:
        # The answer's 30 tokens belong to the length.
        assert 8192 - 600 < len(encode(row["input"])) + len(encode(row["gen_prefix"])) + 30 <= 8192
        assert all(f"VAR {name} " in row["input"] for name in row["outputs"])


@pytest.mark.slow
def test_needles_are_in_their_haystacks() -> None:
    for kind in ("niah_single_1", "niah_multikey_3"):
        for row in ruler(kind=kind, length=2048, tokenizer="builtin:gdn", samples=3)["test"]:
            assert len(encode(row["input"])) + 128 <= 2048
            assert all(answer in row["input"] for answer in row["outputs"])


def test_ruler_refuses_what_its_generators_would_try_for_ever() -> None:
    with pytest.raises(ConfigError, match="cwe needs about"):
        ruler(kind="cwe", length=256, tokenizer="builtin:gdn", samples=1)
    with pytest.raises(ConfigError, match="expected a tokenizer"):
        ruler(kind="vt", length=4096)
    with pytest.raises(ConfigError, match="expected a task among"):
        ruler(kind="vtt", length=4096, tokenizer="builtin:gdn")


def test_task_files_of_ruler_are_those_that_its_script_writes() -> None:
    folder = task_folder() / "ruler"
    program: dict[str, object] = {"__file__": str(folder / "write.py"), "__name__": "write"}
    exec((folder / "write.py").read_text(encoding="utf-8"), program)
    written = program["contents"]()  # type: ignore[operator]
    assert {name: (folder / name).read_text(encoding="utf-8") for name in written} == written
    assert program["LENGTHS"] == LENGTHS
    assert set(program["OUTPUT_TOKENS"]) == set(KINDS)  # type: ignore[call-overload]


def test_a_smaller_limit_is_part_of_a_larger_one(tmp_path: Path) -> None:
    data = {"mmlu_pro": str(files.mmlu_pro(tmp_path, count=40))}

    def chosen(limit: int | None) -> list[int]:
        return [d.doc_id for d in one(load_tasks(["mmlu_pro"], task_data=data, limit=limit)).documents]

    assert set(chosen(5)) < set(chosen(12)) < set(chosen(None))
    assert len(chosen(5)) == 5
    # The file is sorted by subject, so its first documents are no sample of it.
    assert chosen(12) != list(range(12))
    assert chosen(12) == sorted(chosen(12))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", "Question,Correct Answer\nq,a\n", "rows without Incorrect Answer 1"),
        ("x.csv", "", "got no rows"),
        ("x.jsonl", "{]\n", "cannot read"),
        ("x.jsonl", "[1]\n", "expected objects"),
        ("x.parquet", "no parquet", "cannot read"),
        ("x.txt", "", "expected .parquet"),
    ],
)
def test_broken_files_are_refused_in_words(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_tasks(["gpqa_diamond"], task_data={"gpqa_diamond": str(tmp_path / name)})


def test_missing_places_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got nothing there"):
        load_tasks(["gpqa_diamond"], task_data={"gpqa_diamond": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match="got none"):
        load_tasks(["gpqa_diamond"], task_data={"gpqa_diamond": str(tmp_path)})
    with pytest.raises(ConfigError, match="expected a name among"):
        load_tasks(["gpqa_diamond"], task_data={"gpqa": str(tmp_path)})


def test_without_a_network_the_message_names_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"633f5ee8.*--task-data gpqa_diamond=PATH"):
        load_tasks(["gpqa_diamond"])


def test_solutions_without_a_box_are_refused(tmp_path: Path) -> None:
    row = {"problem": "p", "level": "Level 5", "solution": "no box"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row), encoding="utf-8")
    source = {"path": "x", "revision": "y", "split": "test"}
    with pytest.raises(ConfigError, match="boxed answer in every solution"):
        math_l5(dataset=source, data={"math_l5": str(tmp_path)})


@pytest.mark.parametrize(
    ("settings", "samples", "message"),
    [
        ({"do_sample": False}, 4, "would be copies"),
        ({"do_sample": False, "temperature": 0.7}, None, "would not sample"),
    ],
)
def test_settings_that_would_be_overridden_quietly_are_refused(
    settings: dict[str, object], samples: int | None, message: str, tmp_path: Path
) -> None:
    data = {"mmlu_pro": str(files.mmlu_pro(tmp_path))}
    base: dict[str, object] = {"temperature": 0.0}
    with pytest.raises(ConfigError, match=message):
        load_tasks(["mmlu_pro"], task_data=data, gen_kwargs=base | settings, samples=samples)


def test_every_revision_is_a_whole_commit() -> None:
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: node.value)
    for name in ("mmlu_pro", "gpqa_diamond", "math_l5"):
        text = (task_folder() / name / f"{name}.yaml").read_text(encoding="utf-8")
        revision = yaml.load(text, Loader)["metadata"]["dataset"]["revision"]  # noqa: S506
        assert len(revision) == 40
        assert int(revision, 16) > 0
