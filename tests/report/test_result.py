import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from replayeval.errors import ConfigError
from replayeval.report.result import KLResult
from replayeval.report.schema import Check, KLReport, Timing
from replayeval.stats import summarise_kl
from replayeval.store import DocumentScores
from tests.report.samples import arm, report, two_arms


def document(index: int, tokens: int, arms: tuple[str, ...]) -> DocumentScores:
    kl = (np.arange(len(arms) * tokens, dtype=np.float64) + 1).reshape(len(arms), tokens) * 1e-3
    nll = 1.0 + kl
    nll[:, -1] = np.nan
    reference = np.ones(tokens)
    reference[-1] = np.nan
    return DocumentScores(
        doc_index=index,
        doc_id=f"doc{index}",
        prefill_tokens=0,
        arms=arms,
        kl_nats=kl,
        nll_nats=nll,
        nll_reference_nats=reference,
        top1_agrees=np.ones((len(arms), tokens), dtype=bool),
        diverged_at=(None,) * len(arms),
        counters={"seconds": 1.0},
    )


def result() -> KLResult:
    record = two_arms()
    arms = tuple(a.policy for a in record.arms)
    return KLResult(report=record, scores=(document(0, 3, arms), document(1, 5, arms)))


def test_long_frame_has_every_token_of_every_arm() -> None:
    frame = result().to_pandas()
    assert len(frame) == 2 * (3 + 5)
    row = frame[(frame["doc_index"] == 1) & (frame["arm"] == "separate:nvfp4/fp16+sr@L=16") & (frame["n"] == 2)]
    # Document 1, arm 1, token 2: the seventh number of a 2 x 5 array that counts from one thousandth.
    assert row["kl_nats"].item() == pytest.approx(7e-3)
    assert frame.groupby(["doc_id", "arm"])["nll_nats"].count().tolist() == [2, 2, 4, 4]


def test_summary_frame_has_one_row_per_arm_and_length() -> None:
    frame = result().summary_frame()
    assert frame[["policy", "n"]].drop_duplicates().shape[0] == len(frame) == 4
    last = frame.iloc[-1]
    assert (last["n"], last["mean"]) == (1024, 4.4e-3)
    assert last["low"] < last["mean"] < last["high"]


def test_divergence_is_nan_in_frames() -> None:
    record = report(arm("shared:fp16@L=16", {512: 1e-3, 1024: None}, diverged_at=700))
    frame = KLResult(report=record, scores=()).summary_frame()
    assert np.isnan(frame["mean"].iloc[-1])
    assert KLResult(report=record, scores=()).to_pandas().empty


def test_save_writes_what_load_reads(tmp_path: Path) -> None:
    result().save(tmp_path / "kl.json")
    assert KLReport.load(tmp_path / "kl.json") == result().report
    assert json.loads((tmp_path / "kl.json").read_text()) == json.loads(result().to_json())
    with pytest.raises(ConfigError, match="cannot write"):
        result().save(tmp_path / "missing" / "kl.json")


def test_passed_needs_every_check() -> None:
    record = two_arms()
    failed = record.model_copy(update={"checks": (record.checks[0].model_copy(update={"passed": False}),)})
    assert result().passed
    assert not KLResult(report=failed, scores=()).passed


def test_views_need_no_numbers_per_token() -> None:
    empty = KLResult(report=two_arms(), scores=())
    assert "<pre>" in empty._repr_html_()
    assert "builtin:gdn" in repr(empty)
    assert empty.plot().axes


def built(tokens: int = 64) -> KLResult:
    arms = ("shared:fp32@L=16", "shared:fp8@L=16", "shared:fp8+sr@L=16")
    scores = [document(index, tokens, arms) for index in range(3)]
    return KLResult.build(
        scores=scores,
        summary=summarise_kl(scores, lengths=(32, 64), floor_arm=arms[0], seed=0, resamples=200),
        model="builtin:gdn",
        reference="conventional:fp32",
        window=16,
        bits_per_element={"shared:fp32@L=16": 32.0, "shared:fp8@L=16": 8.25},
        checks=(Check(name="forcing", passed=None, value=None, limit=None, notes={"passed": "one token"}),),
        timing=Timing(seconds=1.0, tokens_per_s=None, tokens_per_s_per_arm=None, peak_memory_bytes=None),
        provenance={"seed": 0},
    )


def test_a_result_is_built_from_scores_and_statistics() -> None:
    result = built()
    record = result.report
    assert (record.docs, record.tokens) == (3, 3 * 64)
    first, second, third = record.arms
    assert (first.bits_per_element, second.bits_per_element, third.bits_per_element) == (32.0, 8.25, None)
    # `document` counts in thousandths: arm 1 holds 65 to 128 in every document.
    assert second.by_length[0].mean == pytest.approx(sum(range(65, 97)) / 32 * 1e-3)
    assert second.by_length[1].mean == pytest.approx(sum(range(65, 129)) / 64 * 1e-3)
    assert second.by_length[1].local_mean == pytest.approx(sum(range(97, 129)) / 32 * 1e-3)
    assert second.ratio_to_floor == pytest.approx(sum(range(65, 129)) / sum(range(1, 65)))
    (ratio,) = record.rounding_ratios
    assert (ratio.nearest, ratio.stochastic) == ("shared:fp8@L=16", "shared:fp8+sr@L=16")
    assert ratio.by_length[-1].ratio == pytest.approx(sum(range(65, 129)) / sum(range(129, 193)))
    assert record.intervals is not None
    assert record.intervals.caution is not None
    assert result.passed
    assert KLReport.from_json(result.to_json()) == record


def test_every_undefined_number_of_a_built_result_has_a_reason() -> None:
    arms = ("shared:fp32@L=16", "shared:fp16@L=16")
    scores = document(0, 8, arms)
    kl, nll, top1 = scores.kl_nats.copy(), scores.nll_nats.copy(), scores.top1_agrees.copy()
    kl[0], kl[1, 4:], nll[1, 4:], top1[1, 4:] = 0.0, np.nan, np.nan, False
    diverged = replace(scores, kl_nats=kl, nll_nats=nll, top1_agrees=top1, diverged_at=(None, 5))
    summary = summarise_kl([diverged], lengths=(4, 8, 16), floor_arm=arms[0], seed=0, resamples=50)
    record = KLResult.build(
        scores=[diverged],
        summary=summary,
        model="m",
        reference="conventional:fp32",
        window=16,
        bits_per_element={},
        checks=(),
        timing=Timing(seconds=1.0, tokens_per_s=None, tokens_per_s_per_arm=None, peak_memory_bytes=None),
        provenance={},
    ).report
    optional = {"diverged_at", "bits_per_element"}
    for arm_record in record.arms:
        for part in (arm_record, arm_record.kl, *arm_record.by_length):
            undefined = {name for name, value in part.model_dump().items() if value is None} - optional
            assert undefined <= set(part.notes), part
    text = "".join(segment.text for segment in Console(width=100).render(KLResult(report=record, scores=()).table()))
    assert "div." in text
    assert "the floor is exactly 0" in " ".join(text.split())
