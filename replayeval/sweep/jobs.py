"""Units of work: what a worker is asked, and what it answers."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from jaxtyping import Int64

from replayeval.arrays import Array
from replayeval.errors import NumericsError, ReplayEvalError
from replayeval.sweep.grid import Cell, KLCell, TaskCell
from replayeval.tasks.shards import ShardDocument

Advanced = Callable[[int], None]
"""Called with the tokens that were read since the last call."""


@dataclass(frozen=True, kw_only=True)
class ModelPin:
    """Which weights a model's name stood for when the sweep was planned.

    Attributes:
        revision: Commit of the hub repository, or None for local weights.
        weights_sha256: Digest of local weights, or None where `revision` pins them.
    """

    revision: str | None
    weights_sha256: str | None

    def identity(self, source: str) -> dict[str, Any]:
        """Return what identifies the weights: of local ones the digest, wherever they lie."""
        if self.revision is not None:
            return {"source": source, "revision": self.revision}
        return {"weights_sha256": self.weights_sha256}


@dataclass(frozen=True, kw_only=True, eq=False)
class KLJob:
    """One document under the arms of a cell.

    Attributes:
        key: Digest of the unit's identity.
        identity: Everything that changes its numbers, as JSON values.
        cell: The cell it belongs to.
        pin: The weights.
        doc_index: Place of the document; also the sequence number of its random bits.
        doc_id: Digest of its tokens.
        tokens: Its token ids.
        read_tokens: Tokens that are fed to the model, prompt included.
        probe: First tokens of the cell's first document, on which the apparatus checks itself.
        probe_read: Tokens of it that may be fed.
    """

    key: str
    identity: Mapping[str, Any]
    cell: KLCell
    pin: ModelPin
    doc_index: int
    doc_id: str
    tokens: Int64[Array[np.int64], " time"]
    read_tokens: int
    probe: Int64[Array[np.int64], " time"]
    probe_read: int

    @property
    def cost_tokens(self) -> int:
        """Tokens that the unit reads, once for all arms."""
        return self.read_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskJob:
    """Some documents of a task under the arms of a cell.

    Attributes:
        key: Digest of the unit's identity.
        identity: Everything that changes its numbers, as JSON values.
        cell: The cell it belongs to.
        pin: The weights.
        documents: The documents.
        answers: Folder of a store on this machine that keeps every answer until the unit is done, or None.
    """

    key: str
    identity: Mapping[str, Any]
    cell: TaskCell
    pin: ModelPin
    documents: tuple[ShardDocument, ...]
    answers: str | None = None

    @property
    def cost_tokens(self) -> int:
        """Tokens that the unit reads; not known beforehand."""
        return 0


Job: TypeAlias = KLJob | TaskJob


@dataclass(frozen=True, kw_only=True)
class PreparedCell:
    """A cell whose model and text are pinned.

    Attributes:
        cell: The cell.
        jobs: Its units, in order.
    """

    cell: Cell
    jobs: tuple[Job, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a worker returns for a unit that it finished.

    Attributes:
        content_sha256: Digest over the numbers alone.
        result: What is not in the table, as JSON values.
        provenance: Versions, device, commit.
        seconds: What it took, without loading the model.
        table: Content of its Parquet file, or None.
    """

    content_sha256: str
    result: Mapping[str, Any]
    provenance: Mapping[str, Any]
    seconds: float
    table: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a unit was not finished.

    Attributes:
        kind: "input" (cannot work on any unit of the cell), "check" (a self-check failed), "error" (anything else), or
            "lost" (its workers died).
        text: What happened, for people.
        trace: The traceback, for whoever repairs it.
    """

    kind: str
    text: str
    trace: str = field(default="", repr=False)


class Worker(Protocol):
    """Something that holds a model and works on units."""

    def run(self, job: Job, advanced: Advanced) -> Answer:
        """Work on one unit.

        Raises:
            ReplayEvalError: It cannot be done; so with the other units of its cell.
        """
        ...


class Measurer(Protocol):
    """What turns cells into units, and makes the workers that work on them."""

    def prepare(self, cells: Sequence[Cell]) -> list[PreparedCell]:
        """Pin models and texts.

        Raises:
            ConfigError: Naming every cell that cannot be measured.
        """
        ...

    def worker(self) -> Worker:
        """Return a worker; called in the process where it works."""
        ...


def attempt(worker: Worker, job: Job, advanced: Advanced) -> Answer | Failure:
    """Work on a unit; whatever goes wrong becomes a `Failure`, so that it can travel between machines."""
    try:
        return worker.run(job, advanced)
    except NumericsError as error:
        return Failure(kind="check", text=str(error), trace=traceback.format_exc())
    except ReplayEvalError as error:
        return Failure(kind="input", text=str(error), trace=traceback.format_exc())
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        return Failure(kind="error", text=text, trace=traceback.format_exc())
