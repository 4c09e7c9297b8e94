"""What one record is about, read from its fields and its provenance, and what a policy text says."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from replayeval.report.schema import ArmReport, KLReport
from replayeval.report.tasks_schema import TasksReport
from replayeval.report.text import printable

AnyReport: TypeAlias = KLReport | TasksReport

CONTROL = "shared:fp32"
_POLICY = re.compile(r"(?P<sharing>[a-z]+):(?P<formats>.*?)(?:@L=(?P<window>\d+))?")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A record and where it was read from.

    Attributes:
        report: The record.
        where: File or directory, as the user named it.
        drift: Mean KL by position where the numbers of every token are at hand; see `replayeval.report.drift`.
    """

    report: AnyReport
    where: str
    drift: "Mapping[str, Sequence[DriftPoint]] | None" = None


@dataclass(frozen=True, kw_only=True)
class DriftPoint:
    """Mean KL in nats over the generation lengths `start + 1 … stop` of the documents that reach `stop`."""

    start: int
    stop: int
    documents: int
    mean: float
    ci95: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class PolicyText:
    """A canonical policy text taken apart, without the numerical core that would load torch.

    Attributes:
        sharing: `conventional`, `shared` or `separate`.
        formats: What lies between the colon and the window, rounding included.
        read: Format that outputs read, granularity included, rounding left out.
        stochastic: Whether anything is rounded stochastically.
        window: Window that the policy names, or None.
    """

    sharing: str
    formats: str
    read: str
    stochastic: bool
    window: int | None

    @classmethod
    def parse(cls, policy: str) -> "PolicyText":
        """Take a policy apart; a text that is no policy, such as the name of an endpoint, is its own format."""
        match = _POLICY.fullmatch(policy)
        if match is None:
            return cls(sharing="other", formats=policy, read=policy, stochastic=False, window=None)
        formats, window = match["formats"], match["window"]
        return cls(
            sharing=match["sharing"],
            formats=formats,
            read=formats.partition("/")[0].replace("+sr", ""),
            stochastic="+sr" in formats,
            window=None if window is None else int(window),
        )

    @property
    def without_window(self) -> str:
        """The policy text without its window: what the arms of a sweep over windows share."""
        return self.formats if self.sharing == "other" else f"{self.sharing}:{self.formats}"


def is_control(policy: str) -> bool:
    """Whether a policy is the control arm: algebraically the reference."""
    return PolicyText.parse(policy).without_window == CONTROL


def argument(report: AnyReport, name: str) -> Any:
    """Return an argument of the measurement from its provenance, or None where it is not recorded."""
    arguments = report.provenance.get("arguments")
    if not isinstance(arguments, Mapping):
        return None
    for kind in ("given", "defaulted"):
        values = cast(Mapping[str, Any], arguments).get(kind)
        if isinstance(values, Mapping) and name in values:
            return cast(Mapping[str, Any], values)[name]
    return None


def data_label(report: AnyReport) -> str:
    """Return the source of the text of a KL measurement, or an empty text where it is not recorded."""
    data = report.provenance.get("data") or argument(report, "data")
    return printable(str(data)) if data else ""


def provenance_line(report: AnyReport) -> str:
    """Return what made the numbers, in one line: version, commit, device, dtype, seed, time."""
    found = report.provenance
    parts: list[str] = []
    versions = found.get("versions")
    if isinstance(versions, Mapping):
        parts += [f"{name} {versions[name]}" for name in ("replayeval", "torch", "transformers") if versions.get(name)]
    git = found.get("git")
    if isinstance(git, Mapping) and git.get("commit"):
        parts.append(f"commit {str(git['commit'])[:10]}{' with changes' if git.get('dirty') else ''}")
    model = found.get("model")
    if isinstance(model, Mapping) and model.get("dtype"):
        parts.append(str(model["dtype"]))
    if found.get("device"):
        parts.append(str(found["device"]))
    seed = found.get("seed") if found.get("seed") is not None else argument(report, "seed")
    if seed is not None:
        parts.append(f"seed {seed}")
    if found.get("started"):
        parts.append(str(found["started"]))
    return printable(", ".join(parts)) or "not recorded"


def lengths_of(report: KLReport) -> list[int]:
    """Return the generation lengths of a record, increasing."""
    return sorted({point.n for arm in report.arms for point in arm.by_length})


def bits_of(arm: ArmReport) -> float:
    """Return the stored bits of an arm for sorting; unknown ones come last."""
    return float("inf") if arm.bits_per_element is None else arm.bits_per_element
