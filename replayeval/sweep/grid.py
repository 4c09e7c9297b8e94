"""From a plan to the cells of its grids: one cell for each model, text or task, window and seed."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias

from pydantic import JsonValue

from replayeval.data.lengths import default_docs, default_lengths_of, default_source, format_length
from replayeval.errors import ConfigError
from replayeval.policies import parse_policies
from replayeval.report.text import printable
from replayeval.sweep.plan import KLGrid, ModelEntry, Plan, TaskGrid
from replayssm.backend import Execution
from replayssm.policy import Policy, precision_arms

MAX_CELLS = 100_000


@dataclass(frozen=True, kw_only=True)
class KLCell:
    """Documents of one source under a set of arms on one model: the scope of one `replayeval.kl/1` record.

    Attributes:
        model: The model and what it needs.
        data: Source of the text.
        window: Replay window in tokens of policies that name none.
        seed: Seed of stochastic rounding and of the bootstrap.
        arms: Canonical policy texts.
        floor_arm: The arm whose KL is the floor, or None.
        lengths: Generation lengths reported, in tokens.
        docs: Documents.
        prefill: Prompt tokens.
        engine: "chunk" or "step".
        chunk: Tokens per forward pass.
        backend: What advances the states, in its canonical text.
    """

    model: ModelEntry
    data: str
    window: int
    seed: int
    arms: tuple[str, ...]
    floor_arm: str | None
    lengths: tuple[int, ...]
    docs: int
    prefill: int
    engine: str
    chunk: int
    backend: str

    @property
    def label(self) -> str:
        """What tables and messages call it."""
        seed = f", seed {self.seed}" if self.seed else ""
        reach = format_length(self.lengths[-1])
        return printable(f"{self.model.id}, {self.data} to {reach}, L={self.window}, {_formats(self.arms)}{seed}")

    @property
    def tokens(self) -> int:
        """Tokens read per document at most, prompt included."""
        return self.prefill + self.lengths[-1]


@dataclass(frozen=True, kw_only=True)
class TaskCell:
    """One task under a set of arms on one model: the scope of one `replayeval.tasks/1` record.

    Attributes:
        model: The model and what it needs.
        task: Name of the task.
        window: Replay window in tokens of policies that name none.
        seed: Seed of stochastic rounding, of sampling and of the bootstrap.
        arms: Canonical policy texts.
        limit: Documents of the task at most, or None.
        shard: Documents of one unit.
        options: Further arguments of `measure_tasks`.
    """

    model: ModelEntry
    task: str
    window: int
    seed: int
    arms: tuple[str, ...]
    limit: int | None
    shard: int
    options: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])

    @property
    def label(self) -> str:
        """What tables and messages call it."""
        seed = f", seed {self.seed}" if self.seed else ""
        return printable(f"{self.model.id}, {self.task}, L={self.window}, {_formats(self.arms)}{seed}")


Cell: TypeAlias = KLCell | TaskCell


def expand(plan: Plan) -> list[Cell]:
    """Return the cells of a plan, each once, grid by grid and model by model.

    Raises:
        ConfigError: A policy or format does not exist, a cell would have no arm or no length, or there are too many.
    """
    size = sum(_size(plan, grid) for grid in plan.grids)
    if size > MAX_CELLS:
        raise ConfigError(f"expected a plan of at most {MAX_CELLS:,} cells, got {size:,}; shorten its axes")
    cells: dict[str, Cell] = {}
    for number, grid in enumerate(plan.grids):
        made = _kl_cells(plan, grid, number) if isinstance(grid, KLGrid) else _task_cells(plan, grid, number)
        for cell in made:
            cells.setdefault(repr(cell), cell)
    return list(cells.values())


def _formats(arms: Sequence[str]) -> str:
    """The formats of some arms in a few words; the control arm goes without saying."""
    names = [re.split(r"[+/@\[]", arm.partition(":")[2])[0] for arm in arms]
    known = list(dict.fromkeys(name for name in names if name != "fp32")) or ["fp32"]
    return " ".join(known) if len(known) <= 3 else f"{len(arms)} arms"


def _size(plan: Plan, grid: KLGrid | TaskGrid) -> int:
    axis = grid.data or ("",) if isinstance(grid, KLGrid) else grid.tasks
    return len(plan.entries(grid)) * len(axis) * len(grid.windows) * len(grid.seeds)


def _kl_cells(plan: Plan, grid: KLGrid, number: int) -> Iterable[KLCell]:
    for model in plan.entries(grid):
        sources = grid.data or (default_source(model.id),)
        for data, window, seed in product(sources, grid.windows, grid.seeds):
            policies = _policies(grid, window, where=f"grids[{number}]")
            control = next((p for p in policies if p.is_lossless), None)
            yield KLCell(
                model=model,
                data=data,
                window=window,
                seed=seed,
                arms=tuple(map(str, policies)),
                floor_arm=None if control is None else str(control),
                lengths=_lengths(grid, model, data, where=f"grids[{number}]"),
                docs=default_docs(data) if grid.docs is None else grid.docs,
                prefill=grid.prefill,
                engine=grid.engine,
                chunk=grid.chunk,
                backend=_backend(grid.backend, where=f"grids[{number}]"),
            )


def _task_cells(plan: Plan, grid: TaskGrid, number: int) -> Iterable[TaskCell]:
    for model in plan.entries(grid):
        for task, window, seed in product(grid.tasks, grid.windows, grid.seeds):
            policies = _policies(grid, window, where=f"grids[{number}]")
            yield TaskCell(
                model=model,
                task=task,
                window=window,
                seed=seed,
                arms=tuple(map(str, policies)),
                limit=grid.limit,
                shard=grid.shard,
                options=grid.options.model_dump(mode="json", exclude_unset=True),
            )


def _policies(grid: KLGrid | TaskGrid, window: int, *, where: str) -> Sequence[Policy]:
    try:
        named = [p for name in grid.precision for p in precision_arms(name, window=window)]
        return parse_policies([*named, *grid.arms], None, window)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None


def _backend(text: str, *, where: str) -> str:
    try:
        return str(Execution.parse(text))
    except ValueError as error:
        raise ConfigError(f"{where}.backend: {error}") from None


def _lengths(grid: KLGrid, model: ModelEntry, data: str, *, where: str) -> tuple[int, ...]:
    wanted = grid.lengths or default_lengths_of(data)
    kept = tuple(sorted({n for n in wanted if model.max_length is None or n <= model.max_length}))
    if not kept:
        raise ConfigError(
            f"{where}.lengths: expected a length of at most {model.max_length} for {printable(model.id)}, which is "
            f"read no further, got {', '.join(map(str, wanted))}"
        )
    return kept
