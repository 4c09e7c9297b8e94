"""From what a model answered to scores, by the task's own filters and metrics."""

# lm-eval is untyped.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from replayeval.errors import ConfigError
from replayeval.tasks.documents import EvalTask, TaskDocument
from replayeval.tasks.extraction import NOTHING

PREFERRED = ("exact_match", "acc", "string_match")
"""Metrics taken before others where a task has several."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of one answer.

    Attributes:
        value: Between 0 and 1.
        metric: Name of the metric and, after a comma, of the filter.
        extracted: What was scored.
        unextracted: Whether nothing could be extracted; None where nothing is extracted.
    """

    value: float
    metric: str
    extracted: str | None
    unextracted: bool | None


def score(task: EvalTask, document: TaskDocument, responses: Sequence[Any]) -> Score:
    """Score one answer.

    Each answer is filtered and scored by itself, so that several samples of a document are all used. Where a task has
    several filters, the first counts; where it has several metrics, `exact_match`, `acc` or `string_match`, else the
    first that is between 0 and 1.

    Args:
        task: The task.
        document: The document.
        responses: The model's response to each of its requests: a text, or a log-likelihood with its greedy flag.

    Raises:
        ConfigError: The task has no such metric.
    """
    lm_task = task.task
    instances: list[Any] = []
    for instance, response in zip(document.instances, responses, strict=True):
        alone: Any = copy(instance)
        alone.resps, alone.filtered_resps = [response], {}
        instances.append(alone)
    first = lm_task._filters[0]
    first.apply(instances)
    filtered = [instance.filtered_resps[first.name] for instance in instances]
    values: Mapping[str, Any] = lm_task.process_results(document.doc, filtered)
    metric, value = _pick(task.name, values, lm_task.higher_is_better())
    if not task.generates:
        best = int(np.argmax([response[0] for response in responses]))
        return Score(value=value, metric=metric, extracted=str(best), unextracted=None)
    text = filtered[0] if isinstance(filtered[0], str) else str(filtered[0])
    extracts = _extracts(lm_task.config.filter_list)
    return Score(
        value=value,
        metric=metric if first.name == "none" else f"{metric},{first.name}",
        extracted=text,
        unextracted=text == NOTHING if extracts else None,
    )


def _pick(name: str, values: Mapping[str, Any], higher: Mapping[str, bool]) -> tuple[str, float]:
    found: dict[str, float] = {}
    for metric, value in values.items():
        if isinstance(value, bool | int | float | np.number) and higher.get(metric, True):
            number = float(cast(float, value))
            if math.isfinite(number) and 0 <= number <= 1:
                found[metric] = number
    for metric in (*PREFERRED, *found):
        if metric in found:
            # lm-eval's RULER names its metric after the length of the document.
            return ("string_match" if metric.isdigit() else metric), found[metric]
    raise ConfigError(
        f"--tasks: expected a score between 0 and 1 for each document of {name}, got {', '.join(values) or 'none'}; "
        "such a task cannot be compared document by document."
    )


def _extracts(filters: Any) -> bool:
    """Whether a task's first filter can find that there is no answer."""
    if not filters:
        return False
    functions = [step.get("function") for step in filters[0]["filter"]]
    return any(callable(f) or "regex" in str(f) for f in functions)
