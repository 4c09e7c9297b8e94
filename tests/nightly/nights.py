"""Nights that are played: a runner that draws what a sweep would measure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from replayeval.nightly.night import Night, run_night
from replayeval.report.schema import ArmReport, KLReport
from replayeval.report.tasks_schema import TasksReport
from replayeval.store import DocumentScores
from replayeval.store.sweeps import SweepCell
from tests.report.samples import arm, report
from tests.report.task_samples import task, task_arm, tasks_report

CONTROL, FP8, NVFP4 = "shared:fp32@L=16", "shared:fp8@L=16", "shared:nvfp4+sr@L=16"
ARMS = (CONTROL, FP8, NVFP4)
BITS = {CONTROL: 32.0, FP8: 8.25, NVFP4: 4.5}
LEVELS = {CONTROL: 1e-12, FP8: 3e-4, NVFP4: 5e-3}
LENGTHS = (32, 64)
START = datetime(2026, 11, 1, 2, 0, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `replayeval.sweep.collect.CellResult` is to a night."""

    cell: SweepCell
    report: Any
    scores: tuple[DocumentScores, ...]


@dataclass(frozen=True, kw_only=True)
class Weather:
    """How a night differs from others.

    Attributes:
        factor: What KL of an arm is multiplied by.
        shock: Standard deviation of the logarithm of what multiplies KL of all documents of an arm together.
        noise: The same for each document.
        diverged: Arms that diverge at token 40 of their second document.
        settings: Changes of the cell's settings.
        documents: Documents measured.
        drop: Drop in accuracy of the nvfp4 arm, in points, or None where no task is measured.
    """

    factor: dict[str, float] = field(default_factory=dict[str, float])
    shock: float = 0.02
    noise: float = 0.05
    diverged: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    documents: Sequence[int] = tuple(range(8))
    drop: float | None = None


def measured(weather: Weather, *, seed: int) -> list[Result]:
    """What a sweep would have measured in a night."""
    generator = np.random.default_rng([7, seed])
    levels = np.random.default_rng(1).normal(0, 0.7, 100)
    shocks = dict(zip(ARMS, generator.normal(0, weather.shock, len(ARMS)), strict=True))
    scores: list[DocumentScores] = []
    for place, document in enumerate(weather.documents):
        # The text is the same every night, and so are the places where it is hard.
        shape = np.random.default_rng([2, document]).gamma(2, 0.5, LENGTHS[-1])
        base = np.random.default_rng([3, document]).gamma(2, 1, LENGTHS[-1])
        kl = np.array(
            [
                shape * LEVELS[arm] * np.exp(levels[document] + shocks[arm] + generator.normal(0, weather.noise))
                * weather.factor.get(arm, 1.0)
                for arm in ARMS
            ]
        )  # fmt: skip
        nll = base + kl * generator.normal(1, 0.2, kl.shape)
        agrees = generator.random(kl.shape) > np.sqrt(kl) / 4
        diverged = [40 if arm in weather.diverged and place == 1 else None for arm in ARMS]
        for row, at in enumerate(diverged):
            if at is not None:
                kl[row, at - 1 :] = nll[row, at - 1 :] = np.nan
                agrees[row, at - 1 :] = False
        scores.append(
            DocumentScores(
                doc_index=place,
                doc_id=f"book-{document}",
                prefill_tokens=0,
                arms=ARMS,
                kl_nats=kl,
                nll_nats=nll,
                nll_reference_nats=base,
                top1_agrees=agrees,
                diverged_at=tuple(diverged),
                counters={"seconds": 1.0, "tokens": 64.0, "peak_memory_bytes": 1.0},
            )
        )
    settings = {"model": "builtin:gdn", "data": "builtin", "window": 16, "seed": 0, "pin": {"revision": "abc"}}
    settings |= {"arms": list(ARMS), "lengths": list(LENGTHS), "docs": len(scores)} | weather.settings
    cell = SweepCell(kind="kl", label="builtin:gdn, builtin to 64, L=16", settings=settings, units=())
    record = kl_report(scores)
    results = [Result(cell=cell, report=record, scores=tuple(scores))]
    if weather.drop is not None:
        answered = task_arm(NVFP4, -weather.drop).model_copy(update={"output_tokens_mean": 400 + generator.normal()})
        tasks: TasksReport = tasks_report(task("recall", answered))
        results.append(
            Result(
                cell=SweepCell(
                    kind="tasks", label="builtin:gdn, recall", settings=settings | {"task": "recall"}, units=()
                ),
                report=tasks,
                scores=(),
            )
        )
    return results


def kl_report(scores: Sequence[DocumentScores]) -> KLReport:
    """The record of a night, its intervals a tenth of the means: a bootstrap takes longer than all else together."""
    arms: list[ArmReport] = []
    for row, policy in enumerate(ARMS):
        at = min((s.diverged_at[row] or LENGTHS[-1] + 1 for s in scores), default=LENGTHS[-1] + 1)
        means = {n: None if at <= n else float(np.mean([s.kl_nats[row, :n].mean() for s in scores])) for n in LENGTHS}
        diverged = at if at <= LENGTHS[-1] else None
        arms.append(arm(policy, means, bits_per_element=BITS[policy], diverged_at=diverged))
    return report(*arms, docs=len(scores))


def play(
    history: Path,
    weathers: Iterable[Weather],
    *,
    first: int = 0,
    seed: int | None = None,
    runner: Callable[..., Iterable[Result]] | None = None,
    **options: Any,
) -> list[Night]:
    """Run one night after the other; `seed` makes all nights the same."""
    nights: list[Night] = []
    for number, weather in enumerate(weathers, start=first):

        def run(
            plan: Any, out: Path, *, resume: bool, weather: Weather = weather, number: int = number
        ) -> list[Result]:
            del plan, out, resume
            return measured(weather, seed=number if seed is None else seed)

        now = START + timedelta(days=number)
        nights.append(run_night(None, history, name="nightly", runner=runner or run, now=now, **options))
    return nights


def name(number: int) -> str:
    """Name of a night."""
    return (START + timedelta(days=number)).strftime("%Y-%m-%dT%H-%M-%SZ")
