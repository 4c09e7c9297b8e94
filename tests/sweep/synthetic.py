"""A measurer without a model: scores are drawn from the document's name, the same in every process."""

import hashlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from replayeval.data.document import Document
from replayeval.errors import ConfigError, NumericsError
from replayeval.store import DocumentScores
from replayeval.store.parquet import numbers_sha256, scores_to_parquet
from replayeval.sweep.grid import Cell, KLCell
from replayeval.sweep.jobs import Advanced, Answer, Job, KLJob, ModelPin, PreparedCell, Worker
from replayeval.sweep.live import kl_jobs
from replayeval.sweep.plan import Plan, parse_plan
from replayeval.sweep.runner import run


def plan(*, models: int = 2, windows: int = 2, docs: int = 5, tokens: int = 48, name: str = "synthetic") -> Plan:
    ids = ", ".join(f"org/model-{number}" for number in range(models))
    return parse_plan(
        f"""
        name: {name}
        models: [{ids}]
        grids:
          - kind: kl
            data: books
            lengths: [{tokens // 2}, {tokens}]
            docs: {docs}
            windows: {list(range(1, windows + 1))}
            arms: [shared:fp32, shared:fp8, shared:fp8+sr]
        """
    )


@dataclass(frozen=True, kw_only=True)
class SyntheticMeasurer:
    """See the module.

    Attributes:
        delay_seconds: What a unit takes.
        dies: Folder of marks; a worker kills itself at the first unit of each document index in `dies_at`, once for
            each mark that is not there yet.
        dies_at: Document indices.
        fails: Text of the failure of every unit of document 1, or None.
        log: File that gets a line for every unit that is computed.
    """

    delay_seconds: float = 0.0
    dies: str | None = None
    dies_at: tuple[int, ...] = ()
    always_dies: bool = False
    fails: Exception | None = None
    log: str | None = None

    def prepare(self, cells: Sequence[Cell]) -> list[PreparedCell]:
        prepared: list[PreparedCell] = []
        for cell in cells:
            assert isinstance(cell, KLCell)
            documents = [
                Document(name=str(index), token_ids=np.arange(cell.tokens + 1, dtype=np.int64) + index)
                for index in range(cell.docs)
            ]
            pin = ModelPin(revision=hashlib.sha256(cell.model.id.encode()).hexdigest()[:40], weights_sha256=None)
            prepared.append(PreparedCell(cell=cell, jobs=kl_jobs(cell, pin, documents)))
        return prepared

    def worker(self) -> Worker:
        return SyntheticWorker(self)


class SyntheticWorker:
    def __init__(self, settings: SyntheticMeasurer) -> None:
        self.settings = settings

    def run(self, job: Job, advanced: Advanced) -> Answer:
        assert isinstance(job, KLJob)
        settings = self.settings
        self._maybe_die(job)
        if settings.fails is not None and job.doc_index == 1:
            raise settings.fails
        time.sleep(settings.delay_seconds)
        if settings.log is not None:
            with open(settings.log, "a") as stream:
                stream.write(f"{job.key} {os.getpid()}\n")
        advanced(job.read_tokens // 2)
        scores = synthetic_scores(job)
        return Answer(
            content_sha256=numbers_sha256(scores),
            result={
                "checks": [
                    {"name": "live", "passed": True, "value": 0.0, "limit": 1.0, "reason": None},
                    {"name": "floor", "passed": True, "value": float(scores.kl_nats[0].mean()), "limit": 1.0},
                ],
                "bits_per_element": {arm: 8.0 for arm in job.cell.arms},
                "model": {"dtype": "float32"},
                "counters": dict(scores.counters),
                "chunk": job.cell.chunk,
            },
            provenance={"device": "none", "versions": {}, "git": None, "started": "2026-01-01T00:00:00+00:00"},
            seconds=1.0,
            table=scores_to_parquet(scores, extra_metadata={"unit": job.key}),
        )

    def _maybe_die(self, job: KLJob) -> None:
        settings = self.settings
        if settings.dies is None or job.doc_index not in settings.dies_at:
            return
        mark = os.path.join(settings.dies, job.key)
        if settings.always_dies or not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), 9)


def synthetic_scores(job: KLJob) -> DocumentScores:
    generator = np.random.default_rng(int(job.key[:12], 16))
    arms, time_ = len(job.cell.arms), job.read_tokens
    scale = np.array([1e-12, 1e-3, 5e-4])[:arms, None]
    kl = generator.exponential(size=(arms, time_)) * scale
    nll = generator.exponential(size=(arms, time_))
    return DocumentScores(
        doc_index=job.doc_index,
        doc_id=job.doc_id,
        prefill_tokens=0,
        arms=job.cell.arms,
        kl_nats=kl,
        nll_nats=nll,
        nll_reference_nats=nll[0] + 0.0,
        top1_agrees=generator.random((arms, time_)) < 0.99,
        diverged_at=(None,) * arms,
        counters={"seconds": 1.0, "tokens": float(time_), "rows": arms + 1.0, "peak_memory_bytes": 1e6},
    )


def numbers(report: Any) -> dict[str, Any]:
    """A record without what it cost and where it ran."""
    values: dict[str, Any] = report.model_dump(mode="json")
    return {name: value for name, value in values.items() if name not in ("timing", "provenance")}


FAILURES = {"input": ConfigError("no such thing"), "check": NumericsError("floor"), "error": RuntimeError("boom")}


if __name__ == "__main__":
    run(plan(docs=int(sys.argv[2])), sys.argv[1], resume=True, measurer=SyntheticMeasurer(delay_seconds=0.003))
