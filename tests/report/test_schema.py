import copy
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from replayeval.errors import ConfigError
from replayeval.report.schema import KLReport
from replayeval.report.tasks_schema import TasksReport
from tests.report.samples import arm, point, report, two_arms
from tests.report.task_samples import two_tasks

TOP_FIELDS = {"schema", "model", "reference", "window", "docs", "tokens", "arms", "checks", "timing", "provenance"}
ARM_FIELDS = {
    "policy",
    "kl",
    "by_length",
    "top1_agreement",
    "nll_delta",
    "ppl",
    "ppl_reference",
    "diverged_at",
    "ratio_to_floor",
}


def test_json_has_the_promised_fields_and_reads_back() -> None:
    written = two_arms().to_json()
    data = json.loads(written)
    assert data["schema"] == "replayeval.kl/1"
    assert set(data) >= TOP_FIELDS
    assert next(iter(data)) == "schema"
    assert "notes" not in data["arms"][0]
    assert set(data["arms"][0]) >= ARM_FIELDS
    assert set(data["arms"][0]["kl"]) >= {"mean", "ci95", "p50", "p90", "p99", "p999", "max"}
    assert set(data["arms"][0]["by_length"][0]) >= {"n", "mean", "ci95", "local_mean"}
    assert set(data["checks"][0]) >= {"name", "passed", "value", "limit"}
    assert set(data["timing"]) >= {"seconds", "tokens_per_s", "tokens_per_s_per_arm", "peak_memory_bytes"}
    assert KLReport.from_json(written) == two_arms()


def test_undefined_values_are_null_with_a_reason() -> None:
    diverged = report(arm("shared:fp16@L=16", {512: 1e-3, 1024: None}, diverged_at=700))
    last = json.loads(diverged.to_json())["arms"][0]["by_length"][-1]
    assert last["mean"] is None
    assert "diverged" in last["notes"]["mean"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_nan_or_infinity_gets_into_a_record(bad: float) -> None:
    with pytest.raises(ValidationError):
        point(512, bad)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[1, 2]", "`schema` field"),
        ('{"schema": "replayeval.kl/2"}', "`schema` field"),
        ('{"schema": "replayeval.kl/1"}', "Field required"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_broken_record_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        KLReport.from_json(text, where="r.json")
    assert "r.json" in str(caught.value)


def test_unknown_fields_are_refused() -> None:
    data = json.loads(two_arms().to_json())
    data["arms"][1]["klx"] = 1
    with pytest.raises(ConfigError, match="arms.1.klx"):
        KLReport.from_json(json.dumps(data))


def test_a_missing_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        KLReport.load(tmp_path / "missing.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        KLReport.load(tmp_path / "binary.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.text() | json_values.map(json.dumps))
def test_any_text_reads_or_is_refused_cleanly(text: str) -> None:
    with pytest.raises(ConfigError):
        KLReport.from_json(text)


@given(st.data())
def test_a_record_with_one_field_replaced_reads_or_is_refused_cleanly(data: st.DataObject) -> None:
    record = json.loads(two_arms().to_json())
    field = data.draw(st.sampled_from(sorted(record)))
    record[field] = data.draw(json_values)
    try:
        KLReport.from_json(json.dumps(record))
    except ConfigError as error:
        assert "\x1b" not in str(error)


def test_reversed_intervals_are_refused() -> None:
    data = json.loads(two_arms().to_json())
    data["arms"][1]["by_length"][0]["ci95"].reverse()
    with pytest.raises(ConfigError, match=r"a\.json .*arms\.1\.by_length\.0\.ci95: .*low end of an interval first"):
        KLReport.from_json(json.dumps(data), where="a.json")
    tasks = json.loads(two_tasks().to_json())
    for name in ("ci95", "accuracy_ci95"):
        broken = copy.deepcopy(tasks)
        broken["tasks"][0]["arms"][0][name].reverse()
        with pytest.raises(ConfigError, match=rf"{name}: .*low end of an interval first"):
            TasksReport.from_json(json.dumps(broken))


def test_two_arms_of_one_policy_are_refused() -> None:
    data = json.loads(two_arms().to_json())
    data["arms"][1]["policy"] = data["arms"][0]["policy"]
    with pytest.raises(ConfigError, match=r"each policy once, got two arms of shared:fp32@L=16"):
        KLReport.from_json(json.dumps(data))
    tasks = json.loads(two_tasks().to_json())
    tasks["tasks"][1]["arms"] *= 2
    with pytest.raises(ConfigError, match=r"tasks\.1: .*each policy once"):
        TasksReport.from_json(json.dumps(tasks))
