"""`summarise_kl` against numbers computed by hand."""

import json
import math
from typing import Any

import numpy as np
import pytest

from replayeval.errors import ConfigError
from replayeval.stats import summarise_kl
from replayeval.stats.kl import rounding_pairs
from tests.stats.samples import scores_of

NAN = math.nan


def test_means_by_hand() -> None:
    # Two documents; lengths 2 and 5, so that length 4 has one document and length 2 has both.
    documents = [scores_of([1.0, 3.0]), scores_of([5.0, 7.0, 2.0, 4.0, 100.0], index=1)]
    summary = summarise_kl(documents, lengths=[2, 4])
    two, four = summary.arms[0].by_length
    assert (two.n, two.documents, two.tokens) == (2, 2, 4)
    assert two.mean == (1 + 3 + 5 + 7) / 4
    assert two.local_mean == (3 + 7) / 2
    assert (four.n, four.documents, four.tokens) == (4, 1, 4)
    assert four.mean == (5 + 7 + 2 + 4) / 4
    assert four.local_mean == (2 + 4) / 2
    # Over everything up to the longest length, documents weigh by their tokens.
    assert summary.documents == 2 and summary.tokens == 6
    assert summary.arms[0].kl.mean == pytest.approx((1 + 3 + 5 + 7 + 2 + 4) / 6, rel=1e-15)
    assert summary.arms[0].kl.max == 7.0
    assert two.ci_method == "documents_bca" and four.ci_method == "token_blocks_percentile"


@pytest.mark.parametrize(("n", "octave"), [(1, [1]), (2, [2]), (3, [2, 3]), (5, [3, 4, 5]), (8, [5, 6, 7, 8])])
def test_octave_holds_lengths_above_half(n: int, octave: list[int]) -> None:
    kl = np.arange(1.0, 9.0)
    entry = summarise_kl([scores_of(kl)], lengths=[n]).arms[0].by_length[0]
    assert entry.local_mean == np.mean(octave)


def test_percentiles() -> None:
    # 1001 values 0, 1, ..., 1000 in another order: the quantile q lies at 1000 q.
    kl = np.random.default_rng(0).permutation(1001).astype(np.float64)
    half = [scores_of(kl[:500]), scores_of(kl[500:], index=1)]
    values = summarise_kl(half, lengths=[501]).arms[0].kl
    assert (values.p50, values.p90, values.p99, values.max) == (500, 900, 990, 1000)
    assert values.p999 == pytest.approx(999, rel=1e-12)


def test_nll_ppl_and_agreement_by_hand() -> None:
    # The next token of the last position is unknown, so that NLLs have one token fewer than KL.
    document = scores_of(
        [0.0, 0.0, 0.0, 0.0],
        nll_nats=np.array([[1.0, 2.0, 4.5, NAN]]),
        nll_reference_nats=np.array([1.0, 1.5, 3.5, NAN]),
        top1_agrees=np.array([[True, False, True, True]]),
    )
    arm = summarise_kl([document], lengths=[4]).arms[0]
    assert arm.nll_delta == pytest.approx(0.5, rel=1e-15)
    assert arm.ppl == pytest.approx(math.exp(7.5 / 3), rel=1e-15)
    assert arm.ppl_reference == pytest.approx(math.exp(2.0), rel=1e-15)
    assert (arm.top1_agreement, arm.flip_rate) == (0.75, 0.25)
    assert arm.by_length[0].top1_agreement == 0.75
    assert arm.by_length[0].nll_delta == pytest.approx(0.5, rel=1e-15)


def test_unknown_next_token_leaves_numbers_undefined_with_a_reason() -> None:
    document = scores_of([1.0], nll_nats=np.array([[NAN]]), nll_reference_nats=np.array([NAN]))
    arm = summarise_kl([document], lengths=[1]).arms[0]
    assert arm.nll_delta is arm.nll_delta_ci95 is arm.ppl is arm.ppl_reference is None
    assert {"nll_delta", "nll_delta_ci95", "ppl", "ppl_reference"} <= set(arm.undefined)
    assert arm.kl.mean == 1.0


def test_perplexity_that_overflows_is_undefined_with_a_reason() -> None:
    document = scores_of([0.0, 0.0], nll_nats=np.full((1, 2), 1000.0))
    arm = summarise_kl([document], lengths=[2]).arms[0]
    assert arm.ppl is None and "overflows" in arm.undefined["ppl"]
    assert arm.ppl_reference == 1.0


def test_divergence_hides_no_document() -> None:
    # Arm 1 diverges at length 4 of document 1; survivors alone would have given it a mean of 2 at every length.
    sound = scores_of(np.full((2, 8), 2.0))
    broken = np.full((2, 8), 2.0)
    broken[1, 3:] = NAN
    summary = summarise_kl([sound, scores_of(broken, index=1)], lengths=[2, 3, 4, 8])
    healthy, diverged = summary.arms
    assert [entry.mean for entry in healthy.by_length] == [2.0] * 4
    assert [entry.mean for entry in diverged.by_length] == [2.0, 2.0, None, None]
    assert [entry.diverged for entry in diverged.by_length] == [False, False, True, True]
    assert [entry.documents for entry in diverged.by_length] == [2] * 4
    assert (diverged.diverged_at, diverged.diverged_documents) == (4, ("document-1",))
    assert healthy.diverged_at is None
    reason = "diverged: shared:f1@L=16 gave a non-finite output at generation length 4 of document 1"
    for holder in (diverged.kl, diverged.by_length[2], diverged):
        assert reason in holder.undefined.values()
    assert diverged.kl.mean is diverged.kl.max is diverged.ppl is diverged.top1_agreement is diverged.nll_delta is None
    assert diverged.ppl_reference == 1.0


def test_divergence_in_a_document_too_short_for_the_length_counts() -> None:
    short = np.ones((1, 4))
    short[0, 2:] = NAN
    entries = summarise_kl([scores_of(short), scores_of(np.ones((1, 8)), index=1)], lengths=[2, 8]).arms[0].by_length
    assert [entry.mean for entry in entries] == [1.0, None]


def test_divergence_beyond_the_longest_length_leaves_all_numbers() -> None:
    kl = np.ones((1, 8))
    kl[0, 5:] = NAN
    arm = summarise_kl([scores_of(kl)], lengths=[4]).arms[0]
    assert arm.kl.mean == 1.0 and arm.diverged_at == 6 and not arm.by_length[0].diverged


@pytest.mark.parametrize(
    ("floor_kl", "floor_arm", "ratio", "reason"),
    [
        (0.5, "shared:f1@L=16", 4.0, None),
        (0.0, "shared:f1@L=16", None, "the floor is exactly 0"),
        (-0.5, "shared:f1@L=16", None, "the floor is not positive"),
        (0.5, None, None, "no floor arm was measured"),
    ],
)
def test_ratio_to_floor(floor_kl: float, floor_arm: str | None, ratio: float | None, reason: str | None) -> None:
    kl = np.array([[2.0] * 4, [floor_kl] * 4])
    arm = summarise_kl([scores_of(kl), scores_of(kl, index=1)], lengths=[4], floor_arm=floor_arm).arms[0]
    assert arm.ratio_to_floor == arm.by_length[0].ratio_to_floor == ratio
    assert arm.ratio_to_floor_ci95 == (None if ratio is None else (ratio, ratio))
    assert arm.undefined.get("ratio_to_floor") == arm.by_length[0].undefined.get("ratio_to_floor") == reason


def test_ratio_to_a_floor_that_diverged() -> None:
    kl = np.array([[2.0] * 4, [1.0, 1.0, NAN, NAN]])
    arm = summarise_kl([scores_of(kl)], lengths=[2, 4], floor_arm="shared:f1@L=16").arms[0]
    assert [entry.ratio_to_floor for entry in arm.by_length] == [2.0, None]
    assert "the floor is missing: diverged" in arm.undefined["ratio_to_floor"]


def test_rounding_pairs() -> None:
    arms = ["a:fp8", "a:fp8+sr", "b:fp8[tile=32]+sr@L=16", "s:nvfp4/fp16@L=8", "s:nvfp4/fp16+sr@L=8",
            "s:nvfp4+sr/fp16+sr@L=8", "b:fp8[tile=32]@L=16", "c:fp8+sr"]  # fmt: skip
    assert rounding_pairs(arms) == [(0, 1), (6, 2), (3, 4), (3, 5)]


def test_rounding_ratio_by_hand() -> None:
    arms = ("shared:fp8@L=16", "shared:fp8+sr@L=16")
    kl = [
        np.array([[1.0, 1.0, 6.0, 6.0], [2.0, 2.0, 2.0, 2.0]]),
        np.array([[3.0, 3.0, 8.0, 4.0], [2.0, 2.0, 4.0, 4.0]]),
    ]
    summary = summarise_kl([scores_of(k, index=i, arms=arms) for i, k in enumerate(kl)], lengths=[2, 4])
    (pair,) = summary.rounding_ratios
    assert (pair.nearest, pair.stochastic) == arms
    assert [entry.ratio for entry in pair.by_length] == [8 / 8, 32 / 20]
    assert [entry.local_ratio for entry in pair.by_length] == [4 / 4, 24 / 12]
    # With two documents the interval runs from one document's ratio to the other's.
    assert pair.by_length[0].ci95 == (0.5, 1.5)


def test_rounding_ratio_is_undefined_with_a_reason() -> None:
    arms = ("shared:fp8@L=16", "shared:fp8+sr@L=16")
    (pair,) = summarise_kl([scores_of([[1.0], [0.0]], arms=arms)], lengths=[1, 2]).rounding_ratios
    assert pair.by_length[0].ratio is None and "exactly 0" in pair.by_length[0].undefined["ratio"]
    assert "no document decodes 2 tokens; the longest decodes 1" in pair.by_length[1].undefined["ratio"]


def test_zero_in_some_resamples_leaves_the_ratio_but_no_interval() -> None:
    arms = ("shared:fp8@L=16", "shared:fp8+sr@L=16")
    documents = [scores_of([[1.0], [float(index)]], index=index, arms=arms) for index in range(2)]
    (pair,) = summarise_kl(documents, lengths=[1]).rounding_ratios
    assert pair.by_length[0].ratio == 2.0 and pair.by_length[0].ci95 is None
    assert "in some resample" in pair.by_length[0].undefined["ci95"]


def test_same_resamples_for_all_arms() -> None:
    """Proportional arms have a ratio without spread, which only shared resamples can show."""
    generator = np.random.default_rng(0)
    arms = ("shared:fp8@L=16", "shared:fp8+sr@L=16")
    for documents in (1, 12):
        rows = generator.lognormal(0, 1, (documents, 400))
        scores = [scores_of(np.array([3 * row, row]), index=i, arms=arms) for i, row in enumerate(rows)]
        summary = summarise_kl(scores, lengths=[400])
        entry = summary.rounding_ratios[0].by_length[0]
        assert entry.ci95 == pytest.approx((3.0, 3.0), rel=1e-12)
        low, high = summary.arms[0].by_length[0].ci95 or (NAN, NAN)
        assert high - low > 0.1


def test_exact_agreement_has_exact_intervals() -> None:
    zeros = [scores_of(np.zeros((1, 50)), index=index) for index in range(3)]
    for documents in (zeros, zeros[:1]):
        arm = summarise_kl(documents, lengths=[50]).arms[0]
        assert arm.kl.ci95 == arm.nll_delta_ci95 == (0.0, 0.0)
        assert arm.top1_ci95 == (1.0, 1.0)


def test_seed_decides_the_intervals_and_lengths_do_not() -> None:
    generator = np.random.default_rng(1)
    documents = [scores_of(generator.lognormal(0, 1, (1, 64)), index=index) for index in range(12)]
    first, again, other = (summarise_kl(documents, lengths=[32, 64], seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.arms[0].kl.mean == other.arms[0].kl.mean and first.arms[0].kl.ci95 != other.arms[0].kl.ci95
    alone = summarise_kl(documents, lengths=[64], seed=0)
    assert alone.arms[0].by_length[0] == first.arms[0].by_length[1]


def test_caution_about_few_documents() -> None:
    notes = [
        summarise_kl([scores_of(np.ones((1, 4)), index=i) for i in range(count)], lengths=[4]).ci_note
        for count in (1, 3, 10)
    ]
    assert notes[0] is not None and "one document" in notes[0]
    assert notes[1] is not None and "only 3 documents" in notes[1]
    assert notes[2] is None


def test_summary_is_json() -> None:
    kl = np.array([[1.0, 2.0, 3.0], [1.0, NAN, NAN]])
    text = json.dumps(summarise_kl([scores_of(kl)], lengths=[1, 3, 9]).to_json(), allow_nan=False)
    values = json.loads(text)
    assert values["arms"][1]["by_length"][1]["diverged"] is True
    assert values["arms"][0]["by_length"][2]["mean"] is None


def test_order_of_documents_does_not_change_means() -> None:
    documents = [scores_of([[float(index), 1.0]], index=index) for index in range(4)]
    forward, backward = (summarise_kl(d, lengths=[2]).arms[0].kl for d in (documents, documents[::-1]))
    assert forward.mean == backward.mean


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scores": []}, "at least one document"),
        ({"scores": [scores_of([1.0]), scores_of([1.0], index=1, arms=("x",))]}, "document 1 has .'x'."),
        ({"scores": [scores_of([1.0])] * 2}, "each document once"),
        ({"lengths": []}, "positive increasing"),
        ({"lengths": [0, 1]}, "positive increasing"),
        ({"lengths": [2, 2]}, "positive increasing"),
        ({"floor_arm": "x"}, "floor arm among"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        summarise_kl(**({"scores": [scores_of([1.0])], "lengths": [1]} | arguments))
