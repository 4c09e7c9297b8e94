"""The Parquet form of a document's scores, and a digest over its numbers alone."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from replayeval.errors import StoreError
from replayeval.store._arrow import pa, pq
from replayeval.store.scores import DocumentScores, table_header


def scores_to_parquet(scores: DocumentScores, *, extra_metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the content of a Parquet file; see `DocumentScores.to_table` for its columns."""
    table = scores.to_table(extra_metadata=extra_metadata)
    float_columns = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    sink: Any = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", use_dictionary=False, use_byte_stream_split=float_columns)
    return bytes(sink.getvalue())


def scores_from_parquet(content: bytes) -> tuple[DocumentScores, Mapping[str, str]]:
    """Return the scores that `scores_to_parquet` wrote, and the extra metadata beside them.

    Raises:
        StoreError: The content is no Parquet file, or none of this program.
    """
    try:
        # One reader per file: small files gain nothing from threads, and many of them lose the time to start them.
        table = pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)
        header = table_header(table)
        return DocumentScores.from_table(table), header["extra"]
    except pa.ArrowException as error:
        raise StoreError(str(error)) from error


def numbers_sha256(scores: DocumentScores) -> str:
    """Return a digest over what was measured, without what it cost: equal where two runs agree bit by bit."""
    total = hashlib.sha256()
    header = [scores.doc_index, scores.doc_id, scores.prefill_tokens, list(scores.arms), list(scores.diverged_at)]
    total.update(json.dumps(header).encode())
    for values in (scores.kl_nats, scores.nll_nats, scores.nll_reference_nats):
        total.update(values.astype("<f8").tobytes())
    total.update(scores.top1_agrees.tobytes())
    return total.hexdigest()
