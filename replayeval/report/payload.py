"""What the plots of an HTML report draw, as compact JSON values: five significant digits, lists instead of objects."""

from collections.abc import Iterable, Sequence
from typing import Any

from replayeval.report.cells import PolicyText, Source, bits_of, data_label, is_control, lengths_of, provenance_line
from replayeval.report.gate import Limits
from replayeval.report.schema import ArmReport, KLReport
from replayeval.report.table import short_policy
from replayeval.report.tasks_schema import TaskReport, TasksReport
from replayeval.report.text import printable, tokens_label

POINT = (
    "n documents tokens mean low high local local_low local_high top1 top1_low top1_high nll nll_low nll_high".split()
)
"""Meaning of the numbers of one arm at one length."""
RATIO = "n documents ratio low high".split()
DRIFT = "start stop documents mean low high".split()
TASK = "delta low high accuracy reference p_holm mde wrong right".split()
QUARTILE = "quartile n delta low high accuracy reference tokens_low tokens_high".split()


def payload(sources: Sequence[Source], limits: Limits) -> dict[str, Any]:
    """Return everything that the plots need, model by model."""
    models = dict.fromkeys(source.report.model for source in sources)
    return {
        "fields": {"point": POINT, "ratio": RATIO, "drift": DRIFT, "task": TASK, "quartile": QUARTILE},
        "limits": {"kl": limits.max_kl, "top1": limits.min_top1, "nll": limits.max_nll_delta, "drop": limits.max_drop},
        "models": [
            {
                "name": printable(model),
                "cells": [_cell(s, s.report) for s in sources if s.report.model == model and _is_kl(s)],
                "tasks": [
                    _task(task, source)
                    for source in sources
                    if isinstance(source.report, TasksReport) and source.report.model == model
                    for task in source.report.tasks
                ],
            }
            for model in models
        ],
    }


def pareto_front(points: Iterable[tuple[int, float, float]]) -> list[int]:
    """Return the keys of the points `(key, cost, loss)` that no other point beats in both, by increasing cost."""
    front: list[int] = []
    best = float("inf")
    for key, _, loss in sorted(points, key=lambda point: (point[1], point[2])):
        if loss < best:
            front.append(key)
            best = loss
    return front


def _is_kl(source: Source) -> bool:
    return isinstance(source.report, KLReport)


def _cell(source: Source, report: Any) -> dict[str, Any]:
    record: KLReport = report
    lengths = lengths_of(record)
    return {
        "where": printable(source.where),
        "data": data_label(record),
        "window": record.window,
        "reference": printable(record.reference),
        "docs": record.docs,
        "tokens": record.tokens,
        "lengths": [[n, tokens_label(n)] for n in lengths],
        "provenance": provenance_line(record),
        "caution": None if record.intervals is None else record.intervals.caution,
        "arms": [_arm(arm, source, window=record.window) for arm in record.arms],
        "front": {str(n): _front(record.arms, n) for n in lengths},
        "ratios": [
            {
                "nearest": printable(short_policy(pair.nearest, window=record.window)),
                "stochastic": printable(short_policy(pair.stochastic, window=record.window)),
                "points": [
                    [p.n, p.documents, *_numbers(p.ratio, p.ci95)] for p in pair.by_length if p.ratio is not None
                ],
            }
            for pair in record.rounding_ratios
        ],
    }


def _arm(arm: ArmReport, source: Source, *, window: int) -> dict[str, Any]:
    policy = PolicyText.parse(arm.policy)
    drift = (source.drift or {}).get(arm.policy)
    return {
        "policy": short_policy(arm.policy, window=window),
        "family": printable(policy.without_window),
        "window": 1 if policy.sharing == "conventional" else policy.window or window,
        **_style(policy, control=is_control(arm.policy)),
        "bits": _short(arm.bits_per_element),
        "diverged": arm.diverged_at,
        "points": [
            [
                p.n,
                p.documents,
                p.tokens,
                *_numbers(p.mean, p.ci95),
                *_numbers(p.local_mean, p.local_ci95),
                *_numbers(p.top1_agreement, p.top1_agreement_ci95),
                *_numbers(p.nll_delta, p.nll_delta_ci95),
            ]
            for p in arm.by_length
        ],
        "drift": None if drift is None else [[p.start, p.stop, p.documents, *_numbers(p.mean, p.ci95)] for p in drift],
    }


def _style(policy: PolicyText, *, control: bool) -> dict[str, Any]:
    # Colour is the format that outputs read, dashes rounding to nearest, the marker how copies are shared.
    return {
        "format": printable(policy.read),
        "sr": policy.stochastic,
        "sharing": policy.sharing,
        "control": control,
    }


def _front(arms: Sequence[ArmReport], n: int) -> list[int]:
    points = [
        (index, bits_of(arm), point.mean)
        for index, arm in enumerate(arms)
        for point in arm.by_length
        if point.n == n and point.mean is not None and arm.bits_per_element is not None
    ]
    return pareto_front(points)


def _task(task: TaskReport, source: Source) -> dict[str, Any]:
    window = source.report.window
    return {
        "name": printable(task.task),
        "where": printable(source.where),
        "metric": printable(task.metric),
        "n": task.n,
        "caution": task.caution,
        "provenance": provenance_line(source.report),
        "arms": [
            {
                "policy": printable(arm.policy) if window is None else short_policy(arm.policy, window=window),
                **_style(PolicyText.parse(arm.policy), control=is_control(arm.policy)),
                "values": [
                    *_numbers(arm.delta_pp, arm.ci95),
                    _short(arm.accuracy),
                    _short(task.reference.accuracy),
                    _short(arm.p_holm),
                    _short(arm.mde_pp),
                    arm.flips_to_wrong,
                    arm.flips_to_right,
                ],
                "quartiles": [
                    [
                        q.quartile,
                        q.n,
                        *_numbers(q.delta_pp, q.ci95),
                        _short(q.accuracy),
                        _short(q.accuracy_reference),
                        *(q.reference_tokens or (None, None)),
                    ]
                    for q in arm.by_quartile
                ],
            }
            for arm in task.arms
        ],
    }


def _numbers(value: float | None, interval: tuple[float, float] | None) -> list[float | None]:
    low, high = interval or (None, None)
    return [_short(value), _short(low), _short(high)]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
