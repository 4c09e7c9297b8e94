"""Measure how far a low-precision recurrent state moves a hybrid SSM model's output distribution."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replayeval.measure import measure_kl

__all__ = ["measure_kl"]


def __getattr__(name: str) -> Any:
    """Load what needs torch on first use, so that `import replayeval` stays light."""
    if name == "measure_kl":
        from replayeval.measure import measure_kl

        return measure_kl
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
