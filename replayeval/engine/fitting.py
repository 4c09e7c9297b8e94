"""Out of memory: halve what is done at a time, say so, and do the document again."""

import gc
import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from replayeval.engine.forcing import ChunkDone, DocumentTokens, Engine, Forcing, score_document
from replayeval.models.head import OutputHead
from replayeval.store.scores import DocumentScores

SMALL_CHUNK = 256
"""Down to here a chunk is halved first: shorter ones cost time and save little beside the caches of the rows."""

_log = logging.getLogger("replayeval")


class Fitting:
    """Scores documents, and lowers the chunk or the number of arms per pass when the device runs out of memory.

    Neither changes what is computed: a document that ran out of memory is scored again from its start, and comes out as
    if it had been begun that way. (As for `--chunk`, numbers of different cuts agree to float32 rounding.) What was
    lowered stays so for the documents that follow.

    Args:
        say: Told in words what was lowered; a warning of the logger `replayeval` by default.
    """

    def __init__(self, say: Callable[[str], None] = _log.warning) -> None:
        self._say = say
        self._chunk: int | None = None
        self._arms: int | None = None

    def score(
        self, head: OutputHead, document: DocumentTokens, forcing: Forcing, *, progress: ChunkDone | None = None
    ) -> DocumentScores:
        """Measure one document; as `score_document`.

        Args:
            head: The model.
            document: Token ids.
            forcing: Policies and engine; its chunk is an upper limit here.
            progress: Called with tokens that were finished; with a negative number where work has to be done again.

        Raises:
            torch.OutOfMemoryError: When one token of one arm does not fit.
        """
        while True:
            if self._chunk is not None and self._chunk < forcing.chunk_tokens:
                forcing = replace(forcing, chunk_tokens=self._chunk)
            arms = min(self._arms or len(forcing.arms), len(forcing.arms))
            done = 0

            def advanced(tokens: int) -> None:
                nonlocal done
                done += tokens
                if progress is not None:
                    progress(tokens)

            try:
                return self._passes(head, document, forcing, arms, advanced)
            except torch.OutOfMemoryError as error:
                lowered = self._lower(forcing, arms)
                if lowered is None:
                    raise
                # The traceback keeps every tensor of the failed pass alive.
                error.__traceback__ = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if progress is not None and done:
                progress(-done)
            self._say(f"out of memory in document {document.index}: {lowered}; the document begins again")

    def _lower(self, forcing: Forcing, arms: int) -> str | None:
        """Halve the chunk or the arms per pass; None when nothing is left to halve."""
        chunk = forcing.chunk_tokens
        if forcing.engine is Engine.CHUNK and (chunk > SMALL_CHUNK or (arms == 1 and chunk > 1)):
            self._chunk = chunk // 2
            return f"{self._chunk} tokens per pass instead of {chunk}"
        if arms > 1:
            self._arms = arms // 2
            return f"{self._arms} of {len(forcing.arms)} arms per pass instead of {arms}"
        return None

    @staticmethod
    def _passes(
        head: OutputHead, document: DocumentTokens, forcing: Forcing, arms: int, advanced: ChunkDone
    ) -> DocumentScores:
        count = -(-len(forcing.arms) // arms)
        parts: list[DocumentScores] = []
        worked = told = 0

        def share(tokens: int) -> None:
            # Each pass reads the whole document, which is to be counted once.
            nonlocal worked, told
            worked += tokens
            if worked // count > told:
                advanced(worked // count - told)
                told = worked // count

        for start in range(0, len(forcing.arms), arms):
            part = replace(forcing, arms=forcing.arms[start : start + arms])
            parts.append(score_document(head, document, part, progress=share))
        return parts[0] if count == 1 else _join(parts)


def _join(parts: list[DocumentScores]) -> DocumentScores:
    """The arms of several passes side by side; the reference of the first, which the others have computed again."""
    counters = {
        **parts[0].counters,
        "seconds": sum(p.counters["seconds"] for p in parts),
        "rows": sum(p.counters["rows"] for p in parts),
        "peak_memory_bytes": max(p.counters["peak_memory_bytes"] for p in parts),
        "passes": float(len(parts)),
    }
    return replace(
        parts[0],
        arms=tuple(a for p in parts for a in p.arms),
        kl_nats=np.concatenate([p.kl_nats for p in parts]),
        nll_nats=np.concatenate([p.nll_nats for p in parts]),
        top1_agrees=np.concatenate([p.top1_agrees for p in parts]),
        diverged_at=tuple(d for p in parts for d in p.diverged_at),
        counters=counters,
    )
