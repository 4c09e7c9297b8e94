"""Plans: what is refused and how it is said, and what a plan expands to."""

from itertools import product
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from replayeval.errors import ConfigError
from replayeval.report.published import published_numbers
from replayeval.sweep.grid import KLCell, TaskCell, expand
from replayeval.sweep.plan import find_plan, load_plan, parse_plan, shipped_plans

GOOD = """
name: tiny
models: [org/a, {id: org/b, max_length: 2K, gpus: 2}]
grids:
  - kind: kl
    data: [books, papers]
    lengths: [1K, 8192]
    docs: 3
    windows: [8, 16]
    seeds: [0, 1]
    arms: [shared:fp32, 'shared:fp8[tile=32]+sr', 'separate:nvfp4/fp16+sr@L=32']
  - kind: tasks
    models: org/b
    tasks: [smoke, ruler_128k]
    precision: fp8
    limit: 10
"""


def test_a_plan_is_the_product_of_its_axes() -> None:
    cells = expand(parse_plan(GOOD))
    kl = [cell for cell in cells if isinstance(cell, KLCell)]
    wanted = product(("org/a", "org/b"), ("books", "papers"), (8, 16), (0, 1))
    assert [(c.model.id, c.data, c.window, c.seed) for c in kl] == list(wanted)
    assert {c.model.id: c.lengths for c in kl} == {"org/a": (1024, 8192), "org/b": (1024,)}
    first = kl[0]
    assert first.arms == ("shared:fp32@L=8", "shared:fp8[tile=32]+sr@L=8", "separate:nvfp4/fp16+sr@L=32")
    assert (first.floor_arm, first.docs, first.tokens) == ("shared:fp32@L=8", 3, 8192)
    tasks = [cell for cell in cells if isinstance(cell, TaskCell)]
    assert [(c.model.id, c.task, c.limit) for c in tasks] == [("org/b", "smoke", 10), ("org/b", "ruler_128k", 10)]
    assert tasks[0].arms[1:3] == ("shared:fp8@L=16", "shared:fp8+sr@L=16")
    assert len({cell.label for cell in cells}) == len(cells)


def test_options_of_tasks_are_those_that_are_written() -> None:
    (cell,) = expand(
        parse_plan(
            "{name: x, models: [a], grids: [{kind: tasks, tasks: t, arms: 'shared:fp8', "
            "options: {samples: 2, chat_template: off, gen_kwargs: {top_p: 0.5}}}]}"
        )
    )
    assert isinstance(cell, TaskCell)
    assert cell.options == {"samples": 2, "chat_template": "off", "gen_kwargs": {"top_p": 0.5}}


def test_a_cell_that_two_grids_name_is_measured_once() -> None:
    text = GOOD + "  - kind: tasks\n    models: org/b\n    tasks: smoke\n    precision: fp8\n    limit: 10\n"
    assert len(expand(parse_plan(text))) == len(expand(parse_plan(GOOD)))


BAD = {
    "unknown key": ("docs: 3", "dosc: 3", r"unknown key grids\[0\].dosc; did you mean docs\?"),
    "unknown key of a model": ("gpus: 2", "gpu: 2", r"unknown key models\[1\].gpu; did you mean gpus\?"),
    "unknown key of the plan": ("name: tiny", "name: tiny\nmodel: x", r"unknown key model; did you mean models\?"),
    "kind": ("kind: kl", "kind: lk", r"grids\[0\].kind: expected kl or tasks, got 'lk'; did you mean kl\?"),
    "text for a number": ("docs: 3", "docs: three", r"grids\[0\].docs: .*got 'three'"),
    "truth for a number": ("docs: 3", "docs: true", r"grids\[0\].docs: .*got True"),
    "no documents": ("docs: 3", "docs: 0", r"grids\[0\].docs: .*greater than or equal to 1, got 0"),
    "no documents in a shard": ("limit: 10", "shard: 0", r"grids\[1\].shard: .*greater than or equal to 1, got 0"),
    "text for a shard": ("limit: 10", "shard: '8'", r"grids\[1\].shard: .*got '8'"),
    "shards": ("limit: 10", "shards: 8", r"unknown key grids\[1\].shards; did you mean shard\?"),
    "shard of texts": ("docs: 3", "shard: 8", r"unknown key grids\[0\].shard"),
    "option": (
        "limit: 10",
        "options: {sample: 4}",
        r"options.sample; did you mean samples\?; known are samples, ",
    ),
    "options of texts": ("docs: 3", "options: {}", r"unknown key grids\[0\].options; .*known are models, windows"),
    "text for samples": ("limit: 10", "options: {samples: four}", r"grids\[1\].options.samples: .*got 'four'"),
    "context": (
        "limit: 10",
        "options: {context: all}",
        r"options.context: .*'prompt' or 'decoded', got 'all'",
    ),
    "length": ("1K, 8192", "1Q", r"grids\[0\].lengths\[0\]: expected lengths such as"),
    "no tasks": ("[smoke, ruler_128k]", "[]", r"grids\[1\].tasks: .*at least 1"),
    "no texts": ("[books, papers]", "[]", r"grids\[0\].data: .*at least 1"),
    "no length": ("[1K, 8192]", "[]", r"grids\[0\].lengths"),
    "window": ("[8, 16]", "[8, 129]", r"grids\[0\].windows\[1\]: .*128, got 129"),
    "no arm": ("    precision: fp8\n", "", r"grids\[1\]: expected `arms` or `precision`, got neither"),
    "schema": ("name: tiny", "name: tiny\nschema: replayeval.plan/2", r"schema: .*replayeval.plan/1"),
    "name": ("name: tiny", "name: ../x", "lower-case letters"),
    "models twice": ("[org/a,", "[org/a, org/a,", "org/a more than once"),
    "model of a grid": ("models: org/b", "models: org/c", r"grids\[1\].models: expected ids out of org/a, org/b"),
    "key twice": ("    docs: 3", "    docs: 3\n    docs: 4", "the key 'docs' stands twice"),
    "python": ("name: tiny", "name: !!python/object/apply:os.getcwd []", "is not YAML"),
    "tab": ("name: tiny", "\tname: tiny", "is not YAML"),
    "list": (GOOD, "- 1", "expected a plan with the keys"),
    "empty": (GOOD, "", "got nothing"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_a_bad_plan_is_refused_in_words(case: str) -> None:
    old, new, message = BAD[case]
    assert old in GOOD
    with pytest.raises(ConfigError, match=message):
        parse_plan(GOOD.replace(old, new, 1))


def test_aliases_of_aliases_are_not_spelled_out() -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    for new, old in zip("bcdefghi", "abcdefgh", strict=True):
        bomb += f"{new}: &{new} [" + ", ".join([f"*{old}"] * 9) + "]\n"
    # Nine to the ninth values: repr would take hours and all memory.
    with pytest.raises(ConfigError, match="unknown key"):
        parse_plan(bomb + GOOD)


def test_merge_keys_are_understood() -> None:
    text = GOOD.replace("    docs: 3\n", "    <<: {docs: 3}\n")
    assert text != GOOD
    assert parse_plan(text) == parse_plan(GOOD)


def test_all_offences_are_named_at_once() -> None:
    text = GOOD.replace("docs: 3", "dosc: 3").replace("gpus: 2", "gpu: 2").replace("limit: 10", "limit: no")
    with pytest.raises(ConfigError) as caught:
        parse_plan(text, where="plan.yaml")
    message = str(caught.value)
    assert message.startswith("plan.yaml is not a plan")
    assert [word in message for word in ("dosc", "models[1].gpu", "grids[1].limit")] == [True] * 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("precision: fp8", "precision: fp9", r"grids\[1\]: .*fp9.*fp8"),
        ("shared:fp32", "shraed:fp32", r"grids\[0\]: .*did you mean `shared`"),
        ("shared:fp32", "conventional:fp32", r"grids\[0\]: expected arms that differ from the reference"),
        ("docs: 3", "backend: tritton", r"grids\[0\].backend: expected a backend, one of torch, triton"),
        ("lengths: [1K, 8192]", "lengths: [4K]", r"grids\[0\].lengths: expected a length of at most 2048 for org/b"),
        ("seeds: [0, 1]", f"seeds: {list(range(20_000))}", "at most 100,000 cells, got"),
    ],
)
def test_what_only_the_grid_can_tell(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expand(parse_plan(GOOD.replace(old, new, 1)))


def test_a_plan_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one of .*nightly.*did you mean smoke"):
        load_plan("smok")
    (tmp_path / "mine.yaml").write_text(GOOD)
    with pytest.raises(ConfigError, match=r"did you mean .*mine\.yaml"):
        load_plan(tmp_path / "mime.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe4")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_plan(tmp_path / "latin.yaml")
    (tmp_path / "large.yaml").write_text("#" * (1 << 20) + GOOD)
    with pytest.raises(ConfigError, match="at most 1 MiB"):
        load_plan(tmp_path / "large.yaml")


def test_the_shipped_plans_can_all_be_run_and_cover_the_published_results() -> None:
    wanted = {"fig6", "fig13", "fig14", "table2", "table11", "table12", "table13", "smoke", "nightly"}
    assert set(shipped_plans()) == wanted
    for name in wanted:
        plan = load_plan(name)
        assert plan.name == name and find_plan(name) == shipped_plans()[name]
        cells = expand(plan)
        if name in ("smoke", "nightly"):
            assert {cell.model.id for cell in cells} == {"builtin:gdn", "builtin:mamba2"}
            continue
        assert len({cell.model.id for cell in cells}) == 4
        entries = {model.published_as: model for model in plan.models}
        for number in published_numbers(plan.published):
            mine = [c for c in cells if c.model is entries[number.model] and c.window == 16]
            if isinstance(number.at, int):
                arms = {number.policy + "@L=16", number.policy + "+sr@L=16"}
                hits = [c for c in mine if isinstance(c, KLCell) and number.at in c.lengths and arms <= set(c.arms)]
            else:
                arms = set() if number.policy == "conventional:fp32" else {number.policy + "@L=16"}
                hits = [c for c in mine if isinstance(c, TaskCell) and c.task == number.at and arms <= set(c.arms)]
            assert hits, number


def test_every_plan_of_downstream_tasks_shares_its_units() -> None:
    arms = {cell.arms for name in ("table2", "table12", "fig14", "table13") for cell in expand(load_plan(name))}
    assert len(arms) == 1


def test_shipped_plans_use_no_key_that_a_plain_loader_reads_otherwise() -> None:
    for path in shipped_plans().values():
        assert yaml.safe_load(path.read_text())["schema"] == "replayeval.plan/1"


@pytest.mark.parametrize(
    "text",
    [
        "name: a\nmodels: &m [*m]\ngrids: []",
        "name: a\nmodels: x\ngrids: &g {kind: kl, arms: *g}",
        "name: a\nmodels: x\ngrids: " + "[" * 3000 + "]" * 3000,
        "name: a\nmodels: {id: 3}\ngrids: 3",
        "name: [a]\nmodels: [[[x]]]\ngrids: {kind: {kind: kl}}",
        "? [a, b]\n: c",
        "1: a\nname: x",
        "name: a\nmodels: x\ngrids: {kind: kl, arms: .nan, docs: .inf, lengths: 1e400}",
        "name: 'a\\0'\nmodels: x\ngrids: []",
        'name: "\\e[31mred"\nmodels: x\ngrids: []',
        "name: a\nmodels: x\ngrids: {kind: kl, arms: shared:fp8, lengths: [99999999999K]}",
        "name: a\nmodels: x\ngrids: {kind: kl, arms: shared:fp8, docs: 99999999999999999999}",
        "a: &a [x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\n"
        "c: &c [*b, *b, *b, *b, *b, *b, *b, *b]\nd: &d [*c, *c, *c, *c, *c, *c, *c, *c]\n"
        "e: [*d, *d, *d, *d, *d, *d, *d, *d]\nname: a\nmodels: x\ngrids: []",
    ],
)
def test_strange_yaml_is_refused_in_words(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(parse_plan(text))
    message = str(caught.value)
    assert "\x1b" not in message and "\0" not in message and len(message) < 2000


_KEYS = st.sampled_from(["id", "kind", "arms", "docs", "lengths", "windows", "gpus", "name"]) | st.text(max_size=3)
_LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["kl", "tasks"])
)
_VALUES = st.recursive(_LEAVES, lambda x: st.lists(x, max_size=3) | st.dictionaries(_KEYS, x, max_size=4), max_leaves=8)


@settings(max_examples=60)
@given(_VALUES)
def test_no_plan_breaks_the_loader(value: object) -> None:
    base = yaml.safe_load(GOOD)
    for place in ("models", "grids", "name"):
        try:
            expand(parse_plan(yaml.safe_dump(base | {place: value})))
        except ConfigError as error:
            assert str(error)
