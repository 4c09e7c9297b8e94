"""Statistics of per-token scores; NumPy and SciPy only."""

from replayeval.stats.kl import summarise_kl
from replayeval.stats.summary import (
    ArmSummary,
    KLDistribution,
    KLSummary,
    LengthSummary,
    RatioAtLength,
    RoundingRatio,
)

__all__ = [
    "ArmSummary",
    "KLDistribution",
    "KLSummary",
    "LengthSummary",
    "RatioAtLength",
    "RoundingRatio",
    "summarise_kl",
]
