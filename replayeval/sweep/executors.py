"""Where units are worked on: in this process, or by workers of a Ray cluster."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from replayeval.errors import ConfigError
from replayeval.sweep.jobs import Answer, Failure, Job, Measurer, attempt

Skip = Callable[[Job], bool]
"""Tells, right before a unit is begun, that it is not needed any more."""

EXECUTORS = ("local", "ray")


@dataclass(frozen=True, kw_only=True)
class Event:
    """What an executor reports.

    Attributes:
        job: The unit it is about.
        kind: "advanced" (`tokens` more were read), "done" (`answer` holds it), "failed" (`failure` says why),
            "skipped", or "retried" (its worker died and it will be begun anew; `text` says how).
        tokens: Tokens read since the last event of the unit.
        answer: What the worker returned.
        failure: Why it was not finished.
        text: For people.
        workers: Workers that are alive.
    """

    job: Job
    kind: str
    tokens: int = 0
    answer: Answer | None = None
    failure: Failure | None = None
    text: str = ""
    workers: int = 1


class Executor(Protocol):
    """Works on units in any order; each ends in exactly one event "done", "failed" or "skipped"."""

    @property
    def name(self) -> str:
        """What the provenance calls it."""
        ...

    def run(
        self, jobs: Sequence[Job], measurer: Measurer, *, skip: Skip, advanced: Callable[[Event], None]
    ) -> Iterator[Event]:
        """Work on the units.

        Args:
            jobs: The units, those of one model next to each other.
            measurer: Makes the workers.
            skip: Asked before each unit is begun.
            advanced: Called with events "advanced" and "retried" while the caller waits for the next one.

        Yields:
            One event "done", "failed" or "skipped" per unit.
        """
        ...


class LocalExecutor:
    """One worker, in this process."""

    name = "local"

    def run(
        self, jobs: Sequence[Job], measurer: Measurer, *, skip: Skip, advanced: Callable[[Event], None]
    ) -> Iterator[Event]:
        """Work on the units one after the other; see `Executor`."""
        worker = measurer.worker() if jobs else None
        for job in jobs:
            if worker is None or skip(job):
                yield Event(job=job, kind="skipped")
                continue

            def report(tokens: int, *, job: Job = job) -> None:
                advanced(Event(job=job, kind="advanced", tokens=tokens))

            outcome = attempt(worker, job, report)
            if isinstance(outcome, Answer):
                yield Event(job=job, kind="done", answer=outcome)
            else:
                yield Event(job=job, kind="failed", failure=outcome)


def make_executor(name: str) -> Executor:
    """Return the executor of that name: `local`, `ray`, or `ray:ADDRESS`.

    Raises:
        ConfigError: There is none of that name, or its package is not installed.
    """
    kind, _, address = name.partition(":")
    if kind == "local" and not address:
        return LocalExecutor()
    if kind == "ray":
        from replayeval.sweep.ray_executor import RayExecutor

        return RayExecutor(address=address or None)
    raise ConfigError(
        f"expected the executor to be one of {', '.join(EXECUTORS)} or ray:ADDRESS, got {name!r}; "
        "`ray` uses the cluster of RAY_ADDRESS, or one of its own on this machine"
    )
