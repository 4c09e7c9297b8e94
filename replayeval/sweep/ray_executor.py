"""Units on a Ray cluster: actors that hold models, and a driver that alone decides what runs where and what is done."""

import os
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from replayeval.errors import ConfigError
from replayeval.sweep.executors import Event, Skip
from replayeval.sweep.jobs import Answer, Failure, Job, KLJob, Measurer, attempt
from replayeval.sweep.plan import ModelEntry

ATTEMPTS = 3
"""Workers that one unit may lose before it counts as the cause."""

_POLL_SECONDS = 0.5


class UnitActor:
    """What runs on the cluster: a worker, and a counter that can be read while it works."""

    def __init__(self, measurer: Measurer) -> None:
        """Make the worker in the process where it works."""
        self._worker = measurer.worker()
        self._key, self._tokens = "", 0

    def ready(self) -> int:
        """Return the id of the process; shows that the actor was started."""
        return os.getpid()

    def run(self, job: Job) -> Answer | Failure:
        """Work on one unit."""
        if isinstance(job, KLJob):
            # What comes out of the object store cannot be written to, and torch does not take such arrays.
            job = replace(job, tokens=job.tokens.copy(), probe=job.probe.copy())
        self._key, self._tokens = job.key, 0
        return attempt(self._worker, job, self._advanced)

    def tokens(self) -> tuple[str, int]:
        """Return the unit that is being worked on, and the tokens read of it."""
        return self._key, self._tokens

    def _advanced(self, tokens: int) -> None:
        self._tokens += tokens


@dataclass(eq=False)
class _Seat:
    """An actor as the driver sees it."""

    handle: Any
    starting: Any
    model: str | None = None
    job: Job | None = None
    work: Any = None
    poll: Any = None
    seen: int = 0


@dataclass
class _Queues:
    """Units that wait, by model."""

    by_model: dict[str, deque[Job]]
    deaths: Counter[str] = field(default_factory=Counter[str])

    def __bool__(self) -> bool:
        return any(self.by_model.values())

    def take(self, model: str | None, busy: Counter[str | None]) -> Job:
        """The next unit for an actor: of the model that it holds, else of the one that has most left per actor."""
        queue = self.by_model.get(model or "")
        if not queue:
            waiting = {name: jobs for name, jobs in self.by_model.items() if jobs}
            queue = max(waiting.items(), key=lambda entry: len(entry[1]) / (1 + busy[entry[0]]))[1]
        return queue.popleft()

    def put_back(self, job: Job) -> None:
        self.by_model[job.cell.model.id].appendleft(job)

    def drain(self) -> list[Job]:
        jobs = [job for queue in self.by_model.values() for job in queue]
        self.by_model.clear()
        return jobs


class RayExecutor:
    """Actors of one GPU group each (or of CPU cores), over all nodes of a cluster.

    A unit is handed to one actor at a time. When an actor or its node dies, its unit is begun anew by another one, at
    most `ATTEMPTS` times. Results return to the driver, which alone writes them: no unit is lost, none written twice.
    """

    name = "ray"

    def __init__(self, *, address: str | None = None) -> None:
        """Choose a cluster; it is joined when work begins.

        Args:
            address: Address as `ray.init` takes it; None for that of RAY_ADDRESS, else a cluster on this machine that
                ends with the sweep.

        Raises:
            ConfigError: Ray is not installed.
        """
        self._address = address
        self._ray = _import_ray()

    def run(
        self, jobs: Sequence[Job], measurer: Measurer, *, skip: Skip, advanced: Callable[[Event], None]
    ) -> Iterator[Event]:
        """Work on the units; see `Executor`. Units that need other resources come one group after the other."""
        if not jobs:
            return
        groups: dict[tuple[int, int], list[Job]] = {}
        for job in jobs:
            groups.setdefault((job.cell.model.gpus, job.cell.model.cpus), []).append(job)
        with self._cluster():
            places = {need: self._places(need, group[0].cell.model) for need, group in groups.items()}
            for need, group in groups.items():
                team = _Team(self._ray, measurer, need=need, size=min(places[need], len(group)))
                try:
                    yield from team.work(group, skip=skip, advanced=advanced)
                finally:
                    team.dismiss()

    def _places(self, need: tuple[int, int], model: ModelEntry) -> int:
        """How many actors fit on the cluster; a model never spans nodes."""
        gpus, cpus = need
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        fits = [min(n.get("CPU", 0) // cpus, n.get("GPU", 0) // gpus if gpus else float("inf")) for n in nodes]
        places = int(sum(fits))
        if places < 1:
            largest = ", ".join(f"{int(n.get('GPU', 0))} GPUs and {int(n.get('CPU', 0))} CPU cores" for n in nodes)
            raise ConfigError(
                f"expected a node with {gpus} GPUs and {cpus} CPU cores for a worker with {model.id}, got {largest}; "
                "lower `gpus` or `cpus` of the model in the plan, or add a larger node"
            )
        return places

    @contextmanager
    def _cluster(self) -> Generator[None]:
        ray = self._ray
        if ray.is_initialized():
            yield
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self._address is None and not os.environ.get("RAY_ADDRESS"):
            # Without an address Ray would also join whatever cluster it finds on this machine.
            options |= {"address": "local", "include_dashboard": False}
        elif self._address is not None:
            options |= {"address": self._address}
        try:
            ray.init(**options)
        except Exception as error:
            where = self._address or os.environ.get("RAY_ADDRESS") or "on this machine"
            raise ConfigError(
                f"cannot join or start a Ray cluster ({where}): {' '.join(str(error).split())[:300]}; "
                "check the address, or use --executor local"
            ) from error
        try:
            yield
        finally:
            ray.shutdown()


class _Team:
    """Actors of equal needs, and their units."""

    def __init__(self, ray: Any, measurer: Measurer, *, need: tuple[int, int], size: int) -> None:
        self._ray = ray
        self._measurer = measurer
        gpus, cpus = need
        # Two calls at once: the work, and the reading of its counter.
        self._actor: Any = ray.remote(num_gpus=gpus, num_cpus=cpus, max_restarts=0, max_concurrency=2)(UnitActor)
        self._size = size
        self._seats: list[_Seat] = []
        self._failed_starts = 0

    def work(self, jobs: Sequence[Job], *, skip: Skip, advanced: Callable[[Event], None]) -> Iterator[Event]:
        queues = _Queues({})
        for job in jobs:
            queues.by_model.setdefault(job.cell.model.id, deque()).append(job)
        while queues or any(seat.job for seat in self._seats):
            self._hire(len([1 for q in queues.by_model.values() for _ in q]))
            for seat in self._seats:
                while seat.starting is None and seat.job is None and queues:
                    job = queues.take(seat.model, Counter(s.model for s in self._seats if s is not seat))
                    if skip(job):
                        yield Event(job=job, kind="skipped", workers=len(self._seats))
                        continue
                    seat.model, seat.job, seat.seen = job.cell.model.id, job, 0
                    seat.work = seat.handle.run.remote(job)
            for seat in self._ended():
                event = self._outcome(seat, queues)
                if event is None:
                    continue
                if event.kind == "retried":
                    advanced(event)
                else:
                    yield event
            self._read_counters(advanced)
            if self._failed_starts >= ATTEMPTS and not self._seats:
                failure = Failure(kind="lost", text=f"no worker could be started: {self._last_error}")
                for job in queues.drain():
                    yield Event(job=job, kind="failed", failure=failure, workers=0)

    def dismiss(self) -> None:
        """End all actors."""
        for seat in self._seats:
            self._ray.kill(seat.handle)
        self._seats.clear()

    def _hire(self, waiting: int) -> None:
        """Start actors until every unit that waits has one, or all places are taken."""
        idle = sum(seat.job is None for seat in self._seats)
        while len(self._seats) < self._size and idle < waiting and self._failed_starts < ATTEMPTS:
            handle = self._actor.remote(self._measurer)
            self._seats.append(_Seat(handle=handle, starting=handle.ready.remote()))
            idle += 1

    def _ended(self) -> list[_Seat]:
        """Wait a moment for the first actor that has started, finished or died."""
        waited = {seat.starting or seat.work: seat for seat in self._seats if seat.starting or seat.work}
        if not waited:
            return []
        ready, _ = self._ray.wait(list(waited), num_returns=1, timeout=_POLL_SECONDS)
        return [waited[ref] for ref in ready]

    def _outcome(self, seat: _Seat, queues: _Queues) -> Event | None:
        starting, job = seat.starting, seat.job
        try:
            outcome = self._ray.get(starting or seat.work)
        except self._ray.exceptions.RayError as error:
            self._seats.remove(seat)
            self._last_error = _short(error)
            if starting is not None or job is None:
                self._failed_starts += 1
                return None
            return self._lost(job, queues)
        if starting is not None or job is None:
            seat.starting, self._failed_starts = None, 0
            return None
        seat.job = seat.work = None
        if isinstance(outcome, Answer):
            return Event(job=job, kind="done", answer=outcome, workers=len(self._seats))
        return Event(job=job, kind="failed", failure=outcome, workers=len(self._seats))

    def _lost(self, job: Job, queues: _Queues) -> Event:
        queues.deaths[job.key] += 1
        deaths = queues.deaths[job.key]
        if deaths < ATTEMPTS:
            queues.put_back(job)
            text = f"a worker died at {job.cell.label}; its unit is begun anew ({deaths + 1} of {ATTEMPTS})"
            return Event(job=job, kind="retried", text=text, workers=len(self._seats))
        failure = Failure(kind="lost", text=f"{deaths} workers died at this unit; the last one: {self._last_error}")
        return Event(job=job, kind="failed", failure=failure, workers=len(self._seats))

    def _read_counters(self, advanced: Callable[[Event], None]) -> None:
        for seat in self._seats:
            if seat.job is None:
                seat.poll = None
                continue
            if seat.poll is None:
                seat.poll = seat.handle.tokens.remote()
                continue
            ready, _ = self._ray.wait([seat.poll], timeout=0)
            if not ready:
                continue
            try:
                key, tokens = self._ray.get(seat.poll)
            except self._ray.exceptions.RayError:
                continue  # its work will say so too
            finally:
                seat.poll = None
            if key == seat.job.key and tokens > seat.seen:
                more, seat.seen = tokens - seat.seen, tokens
                advanced(Event(job=seat.job, kind="advanced", tokens=more, workers=len(self._seats)))

    _last_error: str = ""


def _short(error: Exception) -> str:
    """What Ray says first, and how the traceback that it quotes ends."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0][:200] if len(lines) == 1 else f"{lines[0][:200]} … {lines[-1][:200]}"


def _import_ray() -> Any:
    try:
        return import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"--executor ray needs Ray, which cannot be imported ({error}); install it with "
            "`pip install 'replayeval[ray]'`, or use --executor local"
        ) from None
