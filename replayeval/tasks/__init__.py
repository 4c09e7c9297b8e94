"""Downstream tasks: lm-eval's tasks under state policies, compared answer by answer with the reference."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replayeval.tasks.measure import measure_tasks

__all__ = ["measure_tasks"]


def __getattr__(name: str) -> Any:
    """Load what needs torch on first use."""
    if name == "measure_tasks":
        from replayeval.tasks.measure import measure_tasks

        return measure_tasks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
