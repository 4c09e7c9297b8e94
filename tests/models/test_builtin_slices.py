"""The built-in models still give the numbers that are on record."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import t as student

from replayeval import measure_kl
from replayeval.models.builtin import BUILTIN_MODELS

SLICES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "builtin_slices.json").read_text(encoding="utf-8")
)
# Chance that a sound repetition is refused, per mean.
_REFUSED = 1e-5


def _within(slice_: dict[str, Any], policy: str, kl: float) -> bool:
    runs = len(slice_["chunks"])
    # A new draw against the mean of the recorded ones, whose spread is estimated from as many.
    limit = student.isf(_REFUSED / 2, runs - 1) * slice_["log_spread"][policy] * math.sqrt(1 + 1 / runs)
    return abs(math.log(kl / slice_["kl_nats"][policy])) <= limit


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_a_slice_gives_the_means_on_record(name: str) -> None:
    slice_ = SLICES[name]
    policies = list(slice_["kl_nats"])
    result = measure_kl(f"builtin:{name}", arms=policies, lengths=(slice_["tokens"],), docs=1)
    scores = result.scores[0]
    # The reference rounds nothing: its mean likelihood moves by float32 sums alone, 256 terms long in a product.
    assert float(scores.nll_reference_nats.mean()) == pytest.approx(slice_["nll_reference_nats"], rel=256 * 2**-24)
    means = {policy: float(row.mean()) for policy, row in zip(policies, scores.kl_nats, strict=True)}
    assert {policy: _within(slice_, policy, kl) for policy, kl in means.items()} == dict.fromkeys(policies, True)
    # The bound tells the arms apart: none passes for another.
    assert not any(
        _within(slice_, other, means[policy]) for policy in policies for other in policies if other != policy
    )
