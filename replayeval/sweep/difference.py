"""Two runs beside each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replayeval.errors import StoreError
from replayeval.report.schema import KLReport
from replayeval.store.identity import differences
from replayeval.store.sweeps import SweepCell, SweepManifest, SweepStore
from replayeval.sweep.collect import cells


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    """What `runs diff` says.

    Attributes:
        lines: For people.
        differs: Whether numbers of units that both runs hold differ, or cells are in one of them alone.
    """

    lines: tuple[str, ...]
    differs: bool


def run_difference(first: tuple[SweepStore, SweepManifest], second: tuple[SweepStore, SweepManifest]) -> RunDifference:
    """Compare two runs: their cells, where they ran, and the numbers of every unit that both hold.

    Raises:
        StoreError: A unit is damaged.
    """
    lines: list[str] = []
    ours, theirs = _by_settings(first[1]), _by_settings(second[1])
    alone = [("first", ours, theirs), ("second", theirs, ours)]
    differs = False
    for name, mine, other in alone:
        for key in mine:
            if key not in other:
                lines.append(f"only in the {name} run: {mine[key].label}")
                differs = True
    lines += [f"provenance: {line}" for line in _provenance(first, second)]
    common = [key for key in ours if key in theirs]
    means = [_means(side) for side in (first, second)]
    same = different = missing = 0
    for key in common:
        counts = _compare(first[0], second[0], ours[key], theirs[key])
        same, different, missing = same + counts[0], different + counts[1], missing + counts[2]
        if counts[1]:
            differs = True
            lines.append(f"{ours[key].label}: {counts[1]} of {len(ours[key].units)} units differ")
            lines += _mean_lines(*(found.get(ours[key].label, {}) for found in means))
    lines.append(
        f"{len(common)} cells in both; {same} units equal bit by bit, {different} differ, {missing} not in both"
    )
    return RunDifference(lines=tuple(lines), differs=differs)


def _by_settings(manifest: SweepManifest) -> dict[str, SweepCell]:
    """Cells by what was asked, whatever weights the model's name stood for at the time."""
    return {repr({**cell.settings, "pin": None}): cell for cell in manifest.cells}


def _compare(first: SweepStore, second: SweepStore, ours: SweepCell, theirs: SweepCell) -> tuple[int, int, int]:
    same = different = missing = 0
    for a, b in zip(ours.units, theirs.units, strict=False):
        try:
            x, y = first.units.read(a, table=False), second.units.read(b, table=False)
        except StoreError:
            if first.units.has(a) and second.units.has(b):
                raise
            missing += 1
            continue
        equal = x.content_sha256 == y.content_sha256
        same, different = same + equal, different + (not equal)
    return same, different, missing + abs(len(ours.units) - len(theirs.units))


def _provenance(first: tuple[SweepStore, SweepManifest], second: tuple[SweepStore, SweepManifest]) -> list[str]:
    def shown(manifest: SweepManifest) -> Mapping[str, Any]:
        attempt: Mapping[str, Any] = manifest.attempts[-1] if manifest.attempts else {}
        return {name: attempt.get(name) for name in ("versions", "git", "python", "platform", "executor")}

    lines = differences(shown(first[1]), shown(second[1]))
    return [line.replace(" in the directory,", " in the first,").replace(" now", " in the second") for line in lines]


def _means(side: tuple[SweepStore, SweepManifest]) -> dict[str, dict[str, float | None]]:
    found: dict[str, dict[str, float | None]] = {}
    for cell in cells(side[0].run_path(side[1].run)):
        if isinstance(cell.report, KLReport):
            found[cell.cell.label] = {arm.policy: arm.kl.mean for arm in cell.report.arms}
        else:
            found[cell.cell.label] = {f"{t.task} {a.policy}": a.delta_pp for t in cell.report.tasks for a in t.arms}
    return found


def _mean_lines(first: Mapping[str, float | None], second: Mapping[str, float | None]) -> list[str]:
    return [
        f"  {name}: {'n/a' if value is None else f'{value:.6g}'} in the first, "
        f"{'n/a' if (other := second.get(name)) is None else f'{other:.6g}'} in the second"
        for name, value in first.items()
        if value != second.get(name)
    ]
