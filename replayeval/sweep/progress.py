"""How far a sweep is."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from replayeval.sweep.jobs import Job


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A moment of a sweep.

    Attributes:
        units: Units done, those of earlier processes included.
        units_total: Units of the plan.
        reused: Units that were there before.
        failed: Units that could not be finished.
        tokens: Tokens read by this process and its workers.
        tokens_left: Tokens that are still to be read; those of tasks are not known.
        seconds: Time since the first unit was begun.
        eta_seconds: Estimate of the time left, or None where nothing can be said yet.
        workers: Workers that are alive.
        retries: Times that a unit was begun anew because its worker died.
        note: What happened last, for people.
    """

    units: int
    units_total: int
    reused: int
    failed: int = 0
    tokens: int = 0
    tokens_left: int = 0
    seconds: float = 0.0
    eta_seconds: float | None = None
    workers: int = 0
    retries: int = 0
    note: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens read per second, over all workers."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None


class Meter:
    """Keeps the account of a sweep.

    The time left is estimated from work, not from units: a unit weighs as its tokens times its rows times the
    parameters of its model, where those are known for all models.
    """

    def __init__(
        self,
        jobs: list[Job],
        *,
        reused: int,
        report: Callable[[Progress], None] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the account.

        Args:
            jobs: Units that are to be done.
            reused: Units that were there before.
            report: Called with every change.
            clock: Seconds that only go forward.
        """
        known = all(job.cell.model.active_parameters for job in jobs)
        self._weights = {
            job.key: (1 + len(job.cell.arms)) * ((job.cell.model.active_parameters or 1.0) if known else 1.0)
            for job in jobs
        }
        self._left = {job.key: float(job.cost_tokens) for job in jobs}
        self._work_left = sum(self._left[key] * weight for key, weight in self._weights.items())
        self._tokens_left = sum(self._left.values())
        self._work_done = 0.0
        self._report = report
        self._clock = clock
        self._started: float | None = None
        self.now = Progress(
            units=reused, units_total=reused + len(jobs), reused=reused, tokens_left=int(self._tokens_left)
        )

    def advanced(self, job: Job, tokens: int, *, workers: int) -> None:
        """Count tokens of a unit that is being worked on."""
        tokens = min(tokens, int(self._left[job.key]))
        self._take(job.key, tokens)
        self._work_done += tokens * self._weights[job.key]
        self._change(tokens=self.now.tokens + tokens, workers=workers)

    def ended(self, job: Job, kind: str, *, workers: int, note: str = "") -> None:
        """Count a unit that is done, failed or skipped."""
        rest = int(self._left[job.key])
        self._take(job.key, rest)
        if kind == "done":
            self._work_done += rest * self._weights[job.key]
        read = rest if kind == "done" else 0
        failed = self.now.failed + (kind == "failed")
        units = self.now.units + (kind != "failed")
        self._change(units=units, failed=failed, tokens=self.now.tokens + read, workers=workers, note=note)

    def retried(self, job: Job, *, workers: int, note: str) -> None:
        """Count a unit that is begun anew: what was read of it is read again."""
        whole = float(job.cost_tokens)
        self._take(job.key, self._left[job.key] - whole)
        self._change(retries=self.now.retries + 1, workers=workers, note=note)

    def _take(self, key: str, tokens: float) -> None:
        self._left[key] -= tokens
        self._tokens_left -= tokens
        self._work_left -= tokens * self._weights[key]

    def _change(self, **changes: object) -> None:
        now = self._clock()
        if self._started is None:
            self._started = now
        seconds = now - self._started
        eta = self._work_left * seconds / self._work_done if self._work_done > 0 and seconds > 0 else None
        fixed: dict[str, object] = {"tokens_left": int(self._tokens_left), "seconds": seconds, "eta_seconds": eta}
        self.now = replace(self.now, **(fixed | changes))  # pyright: ignore[reportArgumentType]
        if self._report is not None:
            self._report(self.now)
