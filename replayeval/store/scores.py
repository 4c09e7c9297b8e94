"""The numbers measured on one document under every arm, and the Parquet table that holds them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from jaxtyping import Bool, Float64
from numpy.typing import NDArray

from replayeval.arrays import Array
from replayeval.errors import NumericsError, StoreError
from replayeval.store._arrow import pa

SCHEMA = "replayeval.scores/1"
_METADATA_KEY = b"replayeval"


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentScores:
    """One document under all arms, token by token.

    Position `t` counts decoded tokens from 0, prompt excluded; generation length `t + 1` has been decoded there. The
    reference is not among the arms: every number of an arm is relative to it or stands beside it.

    Attributes:
        doc_index: Place of the document in the run, from 0.
        doc_id: Identity of the document's token ids.
        prefill_tokens: Tokens of the prompt, which precede position 0 and are not scored.
        arms: Canonical policy texts, all different.
        kl_nats: KL(reference || arm) in nats; NaN from the position where the arm diverged.
        nll_nats: Negative log-likelihood of the true next token under the arm, in nats; NaN from the position where the
            arm diverged, and at the last position when the token after it is unknown.
        nll_reference_nats: The same under the reference.
        top1_agrees: Whether arm and reference rank the same token first; False from the position of divergence.
        diverged_at: Per arm the generation length (from 1) of its first non-finite output, or None.
        counters: Costs of this document: seconds, rows, tokens, peak_memory_bytes and the like.

    Raises:
        NumericsError: At construction, when shapes, dtypes or the place of NaNs break the rules above. All offences are
            named at once.
    """

    doc_index: int
    doc_id: str
    prefill_tokens: int
    arms: tuple[str, ...]
    kl_nats: Float64[Array[np.float64], "arms time"]
    nll_nats: Float64[Array[np.float64], "arms time"]
    nll_reference_nats: Float64[Array[np.float64], " time"]
    top1_agrees: Bool[Array[np.bool_], "arms time"]
    diverged_at: tuple[int | None, ...]
    counters: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        """Refuse numbers that no correct measurement produces."""
        offences = _shape_offences(self) or _value_offences(self)
        if offences:
            listed = "\n  - ".join(offences)
            raise NumericsError(
                f"the scores of document {self.doc_index} ({self.doc_id}) are malformed:\n  - {listed}\n"
                "This is a fault of the measurement, not of its input."
            )

    @property
    def tokens(self) -> int:
        """Decoded tokens: the largest generation length that this document reaches."""
        return int(self.nll_reference_nats.shape[0])

    def to_table(self, *, extra_metadata: Mapping[str, str] | None = None) -> Any:
        """Return a `pyarrow.Table` of one row per position.

        Columns are `position`, `nll_reference`, and for each arm `kl/ARM`, `nll/ARM` and `top1/ARM`. What is not per
        token lies in the schema metadata as JSON under the key `replayeval`.

        Args:
            extra_metadata: Further entries for that JSON, under the key `extra`.
        """
        arrays: list[Any] = [
            pa.array(np.arange(self.tokens, dtype=np.int32)),
            pa.array(self.nll_reference_nats, from_pandas=False),
        ]
        names = ["position", "nll_reference"]
        for row, arm in enumerate(self.arms):
            arrays += [pa.array(values[row], from_pandas=False) for values in self._per_arm()]
            names += [f"kl/{arm}", f"nll/{arm}", f"top1/{arm}"]
        header = {
            "schema": SCHEMA,
            "doc_index": self.doc_index,
            "doc_id": self.doc_id,
            "prefill_tokens": self.prefill_tokens,
            "arms": list(self.arms),
            "diverged_at": list(self.diverged_at),
            "counters": dict(self.counters),
            "extra": dict(extra_metadata or {}),
        }
        metadata = {_METADATA_KEY: json.dumps(header, sort_keys=True).encode()}
        return pa.Table.from_arrays(arrays, names=names).replace_schema_metadata(metadata)

    @classmethod
    def from_table(cls, table: Any) -> "DocumentScores":
        """Return the scores that `to_table` wrote.

        Raises:
            StoreError: The table was not written by `to_table`, or lacks columns.
        """
        header = table_header(table)
        arms = cast(list[str], header["arms"])
        wanted = ["position", "nll_reference"] + [f"{kind}/{arm}" for arm in arms for kind in ("kl", "nll", "top1")]
        missing = [name for name in wanted if name not in table.column_names]
        if missing:
            raise StoreError(f"expected the columns {wanted}, missing are {missing}; measure the document again")

        def stack(kind: str, dtype: type[np.generic]) -> NDArray[Any]:
            rows = [table.column(f"{kind}/{arm}").to_numpy() for arm in arms]
            return np.array(rows, dtype=dtype).reshape(len(arms), table.num_rows)

        try:
            return cls(
                doc_index=header["doc_index"],
                doc_id=header["doc_id"],
                prefill_tokens=header["prefill_tokens"],
                arms=tuple(arms),
                kl_nats=stack("kl", np.float64),
                nll_nats=stack("nll", np.float64),
                nll_reference_nats=np.array(table.column("nll_reference").to_numpy(), dtype=np.float64),
                top1_agrees=stack("top1", np.bool_),
                diverged_at=tuple(header["diverged_at"]),
                counters=header["counters"],
            )
        except (KeyError, TypeError, ValueError, NumericsError) as error:
            raise StoreError(f"the table does not hold the scores of a document: {error}") from error

    def _per_arm(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        return self.kl_nats, self.nll_nats, self.top1_agrees


def table_header(table: Any) -> dict[str, Any]:
    """Return what `DocumentScores.to_table` put into the schema metadata.

    Raises:
        StoreError: The table carries no such metadata, or metadata of another schema.
    """
    raw = cast(Mapping[bytes, bytes], table.schema.metadata or {}).get(_METADATA_KEY)
    if raw is None:
        raise StoreError("expected a table of document scores, got one without the metadata key 'replayeval'")
    header = cast(dict[str, Any], json.loads(raw))
    if header.get("schema") != SCHEMA:
        raise StoreError(f"expected a table of schema {SCHEMA}, got {header.get('schema')!r}; use the same version")
    return header


def _shape_offences(scores: DocumentScores) -> list[str]:
    arms, offences = len(scores.arms), list[str]()
    reference = scores.nll_reference_nats
    if reference.dtype != np.float64 or reference.ndim != 1:
        offences.append(f"nll_reference_nats: expected float64 [time], got {reference.dtype} {list(reference.shape)}")
    time = reference.shape[-1] if reference.ndim else 0
    expected_dtypes: Sequence[tuple[str, NDArray[Any], Any]] = (
        ("kl_nats", scores.kl_nats, np.float64),
        ("nll_nats", scores.nll_nats, np.float64),
        ("top1_agrees", scores.top1_agrees, np.bool_),
    )
    for name, values, dtype in expected_dtypes:
        if values.dtype != dtype or values.shape != (arms, time):
            offences.append(
                f"{name}: expected {np.dtype(dtype).name} [{arms}, {time}], got {values.dtype} {list(values.shape)}"
            )
    if len(set(scores.arms)) != arms:
        offences.append(f"arms: expected all different, got {list(scores.arms)}")
    if len(scores.diverged_at) != arms:
        offences.append(f"diverged_at: expected {arms} entries, one per arm, got {len(scores.diverged_at)}")
    for name, count in (("doc_index", scores.doc_index), ("prefill_tokens", scores.prefill_tokens)):
        if count < 0:
            offences.append(f"{name}: expected at least 0, got {count}")
    if time < 1:
        offences.append("expected at least one decoded token, got none")
    return offences


def _value_offences(scores: DocumentScores) -> list[str]:
    time, offences = scores.tokens, list[str]()
    unknown = ~np.isfinite(scores.nll_reference_nats)
    if unknown[:-1].any():
        offences.append(
            f"nll_reference_nats: non-finite at position {int(np.argmax(unknown))} of {time}; "
            "only the last position may be NaN, where the next token is unknown"
        )
    for row, (arm, diverged) in enumerate(zip(scores.arms, scores.diverged_at, strict=True)):
        if diverged is not None and not 1 <= diverged <= time:
            offences.append(f"arm {arm}: diverged_at is a generation length in 1..{time}, got {diverged}")
            continue
        sound = time if diverged is None else diverged - 1
        said = "which never diverged" if diverged is None else f"which diverged at length {diverged}"
        for name, values, known in (
            ("kl_nats", scores.kl_nats[row], np.full(time, True)),
            ("nll_nats", scores.nll_nats[row], ~unknown),
        ):
            wrong = np.isfinite(values) != known
            wrong[sound:] = ~np.isnan(values[sound:])
            if wrong.any():
                first = int(np.argmax(wrong))
                offences.append(f"arm {arm}, {said}: {name} is {values[first]} at position {first} of {time}")
        if scores.top1_agrees[row, sound:].any():
            offences.append(f"arm {arm}, {said}: top1_agrees is True after that")
    return offences
