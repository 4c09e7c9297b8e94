"""Published numbers: what is shipped, and what is put beside it."""

import pytest

from replayeval.errors import ConfigError
from replayeval.report.published import Comparison, PublishedNumber, citation, compare, published_numbers
from replayeval.report.schema import RatioAtLength, RoundingRatio
from tests.report.samples import two_arms
from tests.report.task_samples import task, task_arm, tasks_report

# Read off the published page by hand, a few of each table: (table, model, policy, quantity, at) -> value.
BY_HAND = {
    ("table2", "Nemotron-3-Nano-4B", "shared:fp16+sr", "delta_pp", "gpqa_diamond"): -2.2,
    ("table2", "Qwen3.5-122B-A10B-NVFP4", "shared:fp8+sr", "delta_pp", "math_l5"): 0.9,
    ("table2", "Nemotron-3-Super-120B-A12B-NVFP4", "conventional:fp32", "accuracy_percent", "gpqa_diamond"): 79.3,
    ("table11", "Nemotron-3-Nano-4B", "shared:fp8", "rtn_over_sr_kl", 32768): 6.6,
    ("table11", "Nemotron-3-Super-120B-A12B-NVFP4", "shared:nvfp4", "rtn_over_sr_kl", 131072): 0.95,
    ("table11", "Qwen3.5-4B", "shared:fp8", "rtn_over_sr_kl", 1024): 0.76,
    ("table11", "Qwen3.5-4B", "shared:fp8", "rtn_over_sr_kl", 131072): None,
    ("table12", "Nemotron-3-Nano-4B", "shared:nvfp4+sr", "delta_pp", "math_l5"): -41.7,
    ("table12", "Nemotron-3-Nano-4B", "shared:fp16+sr", "output_tokens_p90", "gpqa_diamond"): 29_900,
    ("table12", "Nemotron-3-Nano-4B", "conventional:fp32", "output_tokens_mean", "mmlu_pro"): 2_900,
    ("table13", "Qwen3.5-4B", "separate:fp8/fp16+sr", "delta_pp", "ruler_128k"): 0.2,
    ("table13", "Qwen3.5-122B-A10B-NVFP4", "conventional:fp32", "accuracy_percent", "ruler_128k"): 96.8,
}


def key(number: PublishedNumber) -> tuple[object, ...]:
    return number.table, number.model, number.policy, number.quantity, number.at


def test_the_shipped_numbers_are_those_of_the_page() -> None:
    numbers = published_numbers(["table2", "table11", "table12", "table13"])
    found = {key(number): number.value for number in numbers}
    assert len(found) == len(numbers)
    assert {name: found[name] for name in BY_HAND} == BY_HAND
    # 3 x 4 numbers for each of 3 rows; 4 models less what is cut off; 4 rows of 3 tasks with 3 numbers; 6 rows of 4.
    counts = {t: sum(n.table == t for n in numbers) for t in ("table2", "table11", "table12", "table13")}
    assert counts == {"table2": 36, "table11": 6 + 8 + 4, "table12": 36, "table13": 24}
    diverged = [n for n in numbers if n.value is None]
    assert [n.note for n in diverged] == ["div.: rounding to nearest diverged"]
    assert citation().startswith("ReplaySSM")


def test_the_means_of_the_published_changes_are_the_published_means() -> None:
    """A check of the transcription: the page also gives the mean over the models."""
    means = {
        ("shared:fp16+sr", "mmlu_pro"): -0.09,
        ("shared:fp16+sr", "gpqa_diamond"): -2.02,
        ("shared:fp16+sr", "math_l5"): 0.0,
        ("shared:fp8+sr", "mmlu_pro"): -0.24,
        ("shared:fp8+sr", "gpqa_diamond"): -1.05,
        ("shared:fp8+sr", "math_l5"): 0.01,
    }
    for (policy, name), mean in means.items():
        values = [n.value or 0.0 for n in published_numbers(["table2"]) if n.policy == policy and n.at == name]
        # Four numbers rounded to 0.1 each, and their mean to 0.01.
        assert len(values) == 4 and sum(values) / 4 == pytest.approx(mean, abs=0.05 + 0.005 + 1e-9)


def test_a_measured_ratio_stands_beside_the_published_one_with_the_difference() -> None:
    point = RatioAtLength(n=8192, documents=4, ratio=1.5, ci95=(1.25, 1.75), local_ratio=1.0, local_ci95=(1.0, 1.0))
    pair = RoundingRatio(nearest="shared:fp8@L=16", stochastic="shared:fp8+sr@L=16", by_length=(point,))
    report = two_arms().model_copy(update={"model": "org/x", "window": 16, "rounding_ratios": (pair,)})
    rows = compare([report], ["table11"], models={"org/x": "Nemotron-3-Nano-4B"})
    assert {row.published.model for row in rows} == {"Nemotron-3-Nano-4B"} and len(rows) == 6
    (row,) = [row for row in rows if row.measured is not None]
    assert (row.published.value, row.published.at, row.measured, row.ci95) == (1.3, 8192, 1.5, (1.25, 1.75))
    assert row.difference == pytest.approx(0.2) and row.inside is True
    assert {r.reason for r in rows if r is not row} == {"not measured"}
    assert all(r.difference is None and r.inside is None for r in rows if r is not row)
    # Another window, another model, or another pair is not what was published.
    for changes in ({"window": 8}, {"rounding_ratios": ()}):
        others = compare([report.model_copy(update=changes)], ["table11"], models={"org/x": "Nemotron-3-Nano-4B"})
        assert all(r.measured is None for r in others)
    assert compare([report], ["table11"], models={}) == []


def test_a_published_number_outside_the_interval_is_marked() -> None:
    number = PublishedNumber(table="table11", model="m", policy="p", quantity="rtn_over_sr_kl", at=1024, value=2.0)
    assert Comparison(published=number, measured=1.5, ci95=(1.25, 1.75)).inside is False
    assert Comparison(published=number, measured=1.5).inside is None


def test_a_table_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="table2, table11, table12, table13, got 'table99'"):
        published_numbers(["table99"])


def test_a_measured_accuracy_stands_beside_the_published_one() -> None:
    measured = task("mmlu_pro", task_arm("shared:fp8+sr@L=16", -1.0, half=0.5))
    report = tasks_report(measured).model_copy(update={"model": "org/x", "window": 16})
    rows = compare([report], ["table12"], models={"org/x": "Nemotron-3-Nano-4B"})
    found = {(r.published.policy, r.published.quantity): r for r in rows if r.measured is not None}
    assert set(found) == {
        (policy, quantity)
        for policy, first in (("conventional:fp32", "accuracy_percent"), ("shared:fp8+sr", "delta_pp"))
        for quantity in (first, "output_tokens_mean", "output_tokens_p90")
    }
    change = found["shared:fp8+sr", "delta_pp"]
    assert (change.published.value, change.measured, change.inside) == (-0.6, -1.0, True)
    assert change.difference == pytest.approx(-0.4)
    accuracy = found["conventional:fp32", "accuracy_percent"]
    assert (accuracy.published.value, accuracy.measured) == (67.2, pytest.approx(80.0))
    assert accuracy.inside is False
