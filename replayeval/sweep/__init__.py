"""Sweeps: plans of many measurements, run unit by unit on one machine or many."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replayeval.sweep.collect import results
    from replayeval.sweep.plan import Plan, load_plan
    from replayeval.sweep.runner import SweepRun, run

__all__ = ["Plan", "SweepRun", "load_plan", "results", "run"]

_PLACES = {"Plan": "plan", "load_plan": "plan", "SweepRun": "runner", "run": "runner", "results": "collect"}


def __getattr__(name: str) -> Any:
    """Load a part on first use, so that reading results needs no numerical core."""
    if name in _PLACES:
        from importlib import import_module

        return getattr(import_module(f"replayeval.sweep.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
