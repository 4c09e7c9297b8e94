"""Sweeps on a terminal: the grid with its cost, and published numbers beside the measured ones."""

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from replayeval.data.lengths import format_length
from replayeval.report.published import QUANTITIES, Comparison, citation
from replayeval.report.text import printable
from replayeval.sweep.estimate import CellEstimate
from replayeval.sweep.plan import Plan

MAX_ROWS = 40


def grid_table(plan: Plan, estimates: Sequence[CellEstimate]) -> Table:
    """Return one row per cell; of long grids the first rows alone."""
    title = f"{plan.name}: {plan.title}" if plan.title else plan.name
    table = _table(f"{printable(title)}\n{total_line(estimates)}")
    table.add_column("cell")
    for name in ("arms", "units", "done", "tokens left", "time left"):
        table.add_column(name, justify="right")
    for cell in estimates[:MAX_ROWS]:
        table.add_row(
            Text(cell.label),
            str(cell.arms),
            "?" if cell.units is None else str(cell.units),
            "?" if cell.done is None else str(cell.done),
            "?" if cell.tokens is None else f"{cell.tokens:,}",
            "?" if cell.seconds is None else duration(cell.seconds),
        )
    if len(estimates) > MAX_ROWS:
        table.add_row(f"… and {len(estimates) - MAX_ROWS} more", *[""] * 5)
    return table


def total_line(estimates: Sequence[CellEstimate]) -> str:
    """Return what the whole plan costs, in one line."""
    # A task whose documents were not counted has at least one unit.
    units = sum(cell.units or 1 for cell in estimates)
    least = "at least " if any(cell.units is None for cell in estimates) else ""
    parts = [f"{least}{units:,} units in {len(estimates):,} cells"]
    if all(cell.done is not None for cell in estimates):
        parts.append(f"{sum(cell.done or 0 for cell in estimates):,} done")
    parts.append(f"{sum(cell.tokens or 0 for cell in estimates):,} tokens to read")
    flops = [cell.flop for cell in estimates if cell.tokens]
    known = [flop for flop in flops if flop is not None]
    if known and len(known) == len(flops):
        parts.append(f"{sum(known) / 1e15:,.3g} PFLOP in the weights")
    parts.append(f"at most {sum(cell.result_bytes for cell in estimates) / 1e6:,.3g} MB of results")
    seconds = [cell.seconds for cell in estimates]
    timed = [value for value in seconds if value is not None]
    if len(timed) == len(seconds):
        parts.append(f"about {duration(sum(timed))} for one worker, at the speed of the units in this store")
    else:
        parts.append("time unknown until units of each model lie in this store")
    return "; ".join(parts)


def published_table(comparisons: Sequence[Comparison]) -> Table:
    """Return published numbers beside measured ones, with the differences."""
    table = _table(f"Published and measured. Published: {citation()}")
    for name in ("model", "policy", "quantity", "at"):
        table.add_column(name)
    for name in ("published", "measured", "95% interval", "difference"):
        table.add_column(name, justify="right")
    for row in comparisons:
        number = row.published
        at = format_length(number.at) if isinstance(number.at, int) else number.at
        outside = "" if row.inside is not False else " *"
        table.add_row(
            Text(number.model),
            Text(number.policy),
            QUANTITIES[number.quantity],
            at,
            (number.note or "").partition(":")[0] if number.value is None else f"{number.value:g}",
            Text(row.reason or "n/a") if row.measured is None else f"{row.measured:.3g}",
            "" if row.ci95 is None else f"[{row.ci95[0]:.3g}, {row.ci95[1]:.3g}]".replace("[", r"\["),
            "" if row.difference is None else f"{row.difference:+.3g}{outside}",
        )
    table.caption = "* the published number lies outside the interval of the measured one"
    return table


def duration(seconds: float) -> str:
    """Return a time for people: 42 s, 5 min, 3.2 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _table(title: str) -> Table:
    return Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, caption_justify="left", pad_edge=False)
