import json
from pathlib import Path

import numpy as np
import pytest

from replayeval.errors import ConfigError
from replayeval.report.result import KLResult
from replayeval.report.schema import KLReport
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
