"""Scores: what is refused at construction, and the way through Parquet."""

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replayeval.errors import NumericsError, StoreError
from replayeval.store import DocumentScores
from tests.store.samples import ARMS, DIVERGED_AT, TOKENS, sample_scores


def assert_same(left: DocumentScores, right: DocumentScores) -> None:
    """Equal in every field, NaNs in the same places."""
    for name in ("kl_nats", "nll_nats", "nll_reference_nats", "top1_agrees"):
        a, b = getattr(left, name), getattr(right, name)
        assert a.dtype == b.dtype, name
        np.testing.assert_array_equal(a, b, err_msg=name)
    for name in ("doc_index", "doc_id", "prefill_tokens", "arms", "diverged_at", "counters"):
        assert getattr(left, name) == getattr(right, name), name


def test_parquet_keeps_every_bit(tmp_path: Any) -> None:
    scores = sample_scores(0)
    pq.write_table(scores.to_table(), tmp_path / "x.parquet")
    assert_same(DocumentScores.from_table(pq.read_table(tmp_path / "x.parquet")), scores)


def test_pandas_reads_the_columns(tmp_path: Any) -> None:
    scores = sample_scores(0)
    pq.write_table(scores.to_table(), tmp_path / "x.parquet")
    frame = pd.read_parquet(tmp_path / "x.parquet")
    per_arm = [f"{kind}/{arm}" for arm in ARMS for kind in ("kl", "nll", "top1")]
    assert list(frame.columns) == ["position", "nll_reference", *per_arm]
    assert frame["position"].tolist() == list(range(TOKENS))
    assert frame[f"kl/{ARMS[1]}"].first_valid_index() == 0
    assert frame[f"kl/{ARMS[1]}"].last_valid_index() == DIVERGED_AT - 2
    assert frame[f"top1/{ARMS[0]}"].dtype == bool


def test_no_arms_is_allowed() -> None:
    empty = np.zeros((0, TOKENS))
    scores = sample_scores(
        0, arms=(), kl_nats=empty, nll_nats=empty, top1_agrees=empty.astype(bool), diverged_at=(), counters={}
    )
    assert_same(DocumentScores.from_table(scores.to_table()), scores)


def changed(name: str, index: Any, value: float | bool) -> dict[str, Any]:
    """One array of the sample scores with one entry replaced."""
    array = getattr(sample_scores(0), name).copy()
    array[index] = value
    return {name: array}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kl_nats": np.zeros((2, TOKENS), np.float32)}, "kl_nats: expected float64 .2, 50., got float32"),
        ({"nll_nats": np.zeros((2, TOKENS - 1))}, r"nll_nats: expected float64 \[2, 50\], got float64 \[2, 49\]"),
        ({"top1_agrees": np.zeros((2, TOKENS))}, "top1_agrees: expected bool"),
        ({"nll_reference_nats": np.zeros((1, TOKENS))}, "nll_reference_nats: expected float64 .time."),
        ({"arms": (ARMS[0], ARMS[0])}, "all different"),
        ({"diverged_at": (None,)}, "diverged_at: expected 2 entries"),
        ({"diverged_at": (None, 0)}, "generation length in 1..50, got 0"),
        ({"diverged_at": (None, TOKENS + 1)}, "generation length in 1..50, got 51"),
        ({"diverged_at": (None, None)}, "never diverged: kl_nats is nan at position 20"),
        ({"diverged_at": (None, DIVERGED_AT + 1)}, "at length 22: kl_nats is nan at position 20"),
        ({"diverged_at": (None, DIVERGED_AT - 1)}, "at length 20: kl_nats is .* at position 19"),
        (changed("kl_nats", (0, 3), np.inf), "kl_nats is inf at position 3"),
        (changed("nll_nats", (0, 3), np.nan), "nll_nats is nan at position 3"),
        (changed("nll_nats", (0, TOKENS - 1), 1.0), "nll_nats is 1.0 at position 49"),
        (changed("nll_reference_nats", 0, np.nan), "non-finite at position 0"),
        (changed("top1_agrees", (1, TOKENS - 1), True), "top1_agrees is True after that"),
        ({"doc_index": -1}, "doc_index: expected at least 0"),
    ],
)
def test_malformed_scores_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(NumericsError, match=words):
        sample_scores(0, **changes)


def test_all_offences_are_named_at_once() -> None:
    with pytest.raises(NumericsError, match=r"(?s)position 3 of 50.*position 20 of 50"):
        sample_scores(0, **changed("kl_nats", (0, 3), np.inf), diverged_at=(None, None))


def test_foreign_tables_are_refused() -> None:
    with pytest.raises(StoreError, match="without the metadata key"):
        DocumentScores.from_table(pa.table({"position": [0]}))
    with pytest.raises(StoreError, match="missing are .*kl/"):
        DocumentScores.from_table(sample_scores(0).to_table().drop_columns([f"kl/{ARMS[0]}"]))
    table = sample_scores(0).to_table()
    other = {b"replayeval": table.schema.metadata[b"replayeval"].replace(b"scores/1", b"scores/9")}
    with pytest.raises(StoreError, match="replayeval.scores/9"):
        DocumentScores.from_table(table.replace_schema_metadata(other))
