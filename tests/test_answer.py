"""The first answer that a newcomer gets: the built-in models order the policies as theory demands."""

import pytest

from replayeval import measure_kl
from replayeval.report.result import KLResult

ARMS = (
    "shared:fp32",
    "shared:fp8",
    "shared:nvfp4",
    "shared:nvfp4+sr",
    "separate:nvfp4/fp32",
    "separate:nvfp4/fp16+sr",
    "shared:fp16+sr",
)


@pytest.fixture(scope="module", params=["builtin:gdn", "builtin:mamba2"])
def result(request: pytest.FixtureRequest) -> KLResult:
    return measure_kl(request.param, arms=ARMS, docs=4, lengths=(512,))


def mean_kl(result: KLResult) -> dict[str, float]:
    means = {arm.policy.removesuffix("@L=16"): arm.kl.mean for arm in result.report.arms}
    assert all(mean is not None for mean in means.values())
    return {policy: mean for policy, mean in means.items() if mean is not None}


def test_the_floor_is_that_of_float32(result: KLResult) -> None:
    assert 0 < mean_kl(result)["shared:fp32"] < 1e-10


def test_fewer_bits_cost_more(result: KLResult) -> None:
    kl = mean_kl(result)
    assert kl["shared:fp32"] < kl["shared:fp16+sr"] < kl["shared:fp8"] < kl["shared:nvfp4"]
    # Each step between these formats drops 3 to 13 bits, which is far more than the noise of four documents.
    assert kl["shared:fp8"] > 10 * kl["shared:fp16+sr"]
    assert kl["shared:nvfp4"] > 2 * kl["shared:fp8"]


def test_a_separate_copy_keeps_the_error_out_of_the_recurrence(result: KLResult) -> None:
    kl = mean_kl(result)
    assert kl["separate:nvfp4/fp32"] < kl["shared:nvfp4"]
    assert kl["separate:nvfp4/fp32"] < kl["shared:nvfp4+sr"]
    # What is left comes from the copy that outputs read, whatever carries the recurrence.
    assert kl["separate:nvfp4/fp16+sr"] == pytest.approx(kl["separate:nvfp4/fp32"], rel=0.5)


def test_every_document_and_token_is_counted(result: KLResult) -> None:
    assert (result.report.docs, result.report.tokens) == (4, 4 * 512)
    assert [check.passed for check in result.report.checks] == [True] * 4
