"""What a plan will cost, before anything is loaded."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import cast

from replayeval.errors import StoreError
from replayeval.store.units import UnitStore
from replayeval.sweep.grid import Cell, KLCell
from replayeval.sweep.jobs import Job, KLJob, PreparedCell

_SAMPLE = 200
"""Units of a store that are looked at for the speed of its machines."""

_BYTES_PER_ARM = 17
_BYTES_PER_TOKEN = 12


@dataclass(frozen=True, kw_only=True)
class CellEstimate:
    """What is left of a cell.

    Attributes:
        label: What tables call it.
        arms: Its arms.
        units: Its units, or None where the documents of its task were not counted.
        done: Units that are in the store, or None where that is not known.
        tokens: Tokens that are still to be read, once for all arms; None for tasks.
        flop: Floating-point operations of that in the model's weights, two per parameter, token and row; None where
            the parameters are not known.
        result_bytes: Results on disk at most, before compression.
        seconds: Time of one worker at the speed of the store's units of this model, or None where it has none.
    """

    label: str
    arms: int
    units: int | None
    done: int | None
    tokens: int | None
    flop: float | None
    result_bytes: int
    seconds: float | None


def estimate_cells(cells: Sequence[Cell]) -> list[CellEstimate]:
    """Return what cells cost at most, when neither models nor texts nor a store can be looked at."""
    return [_of(cell, units=_units(cell), done=None, tokens=_tokens(cell), rate=None) for cell in cells]


def estimate(prepared: Sequence[PreparedCell], known: set[str], rates: Mapping[str, float]) -> list[CellEstimate]:
    """Return what is left of prepared cells.

    Args:
        prepared: The cells.
        known: Keys of the units that the store holds.
        rates: What `measured_rates` returns.
    """
    found: list[CellEstimate] = []
    for cell in prepared:
        left = [job for job in cell.jobs if job.key not in known]
        tokens = sum(job.read_tokens for job in left if isinstance(job, KLJob))
        found.append(
            _of(
                cell.cell,
                units=len(cell.jobs),
                done=len(cell.jobs) - len(left),
                tokens=tokens if isinstance(cell.cell, KLCell) else None,
                rate=rates.get(_weights(cell.jobs[0])),
            )
        )
    return found


def measured_rates(store: UnitStore, known: set[str]) -> dict[str, float]:
    """Return tokens times rows per second by model, from a sample of the units of a store."""
    seen: dict[str, list[float]] = {}
    for key in sorted(known)[:_SAMPLE]:
        try:
            unit = store.read(key, table=False)
        except StoreError:
            continue  # `runs verify` names it
        counters = cast(Mapping[str, float], unit.result.get("counters", {}))
        if counters.get("seconds"):
            rate = counters["tokens"] * counters["rows"] / counters["seconds"]
            seen.setdefault(json.dumps(unit.identity["model"], sort_keys=True), []).append(rate)
    return {model: median(values) for model, values in seen.items()}


def _of(cell: Cell, *, units: int | None, done: int | None, tokens: int | None, rate: float | None) -> CellEstimate:
    rows = 1 + len(cell.arms)
    parameters = cell.model.active_parameters
    seconds = None if rate is None or tokens is None else tokens * rows / rate
    return CellEstimate(
        label=cell.label,
        arms=len(cell.arms),
        units=units,
        done=done,
        tokens=tokens,
        flop=None if parameters is None or tokens is None else 2 * parameters * tokens * rows,
        result_bytes=(tokens or 0) * (_BYTES_PER_TOKEN + _BYTES_PER_ARM * len(cell.arms)),
        seconds=0.0 if units is not None and done == units else seconds,
    )


def _units(cell: Cell) -> int | None:
    return cell.docs if isinstance(cell, KLCell) else None


def _tokens(cell: Cell) -> int | None:
    return cell.docs * cell.tokens if isinstance(cell, KLCell) else None


def _weights(job: Job) -> str:
    return json.dumps(job.identity["model"], sort_keys=True)
