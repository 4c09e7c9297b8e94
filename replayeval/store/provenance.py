"""Where numbers come from: versions, commit, machine, device, arguments, time."""

import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "replayeval",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "numpy",
    "scipy",
    "pyarrow",
)


def provenance(
    *,
    device: str,
    given: Mapping[str, Any] | None = None,
    defaulted: Mapping[str, Any] | None = None,
    started: datetime | None = None,
    packages: Sequence[str] = PACKAGES,
) -> dict[str, Any]:
    """Return, as JSON values, what made the numbers of this process.

    Args:
        device: Name of the device that computes, as its library calls it.
        given: Arguments that the user passed.
        defaulted: Arguments that took their default.
        started: When the work began; now where left out.
        packages: Distributions whose versions are recorded; None stands for one that is not installed.
    """
    return {
        "started": utc_text(started or datetime.now(UTC)),
        "device": device,
        "versions": {name: _version(name) for name in packages},
        "git": git_state(Path(__file__).parent),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": platform.machine(),
        "arguments": {"given": dict(given or {}), "defaulted": dict(defaulted or {})},
    }


def utc_text(moment: datetime) -> str:
    """Return a moment as ISO 8601 text in UTC, to the second."""
    return moment.astimezone(UTC).isoformat(timespec="seconds")


def git_state(directory: Path) -> dict[str, Any] | None:
    """Return the commit of the git tree that tracks this package and whether files differ from it.

    Returns:
        `{"commit": ..., "dirty": ...}`, or None when the package is installed outside a git tree or git is not there.
    """
    # An installed copy inside somebody else's repository must not report that repository's commit.
    if _git(directory, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _git(directory, "rev-parse", "HEAD")
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no", ":/")
    if commit is None or changes is None:
        return None
    return {"commit": commit.strip(), "dirty": bool(changes.strip())}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
