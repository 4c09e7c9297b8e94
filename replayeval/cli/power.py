"""`replayeval power`: what a benchmark can see, before it is run."""

import json as json_module
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from replayeval.cli import options, values
from replayeval.errors import ConfigError

EXAMPLES = """\b
Examples:
  replayeval power --n 198 --discordant 0.1
  replayeval power --n 12032 --discordant 0.1 --arms 5
  replayeval power --detect 1 --discordant 0.1
"""

_LEVEL = 0.05
_SHOWN_POWERS = (0.5, 0.8, 0.9)
_SHOWN_POINTS = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0)


def run(
    n: Annotated[
        str | None, typer.Option("--n", metavar="N", help="Documents that both arms answer, once each.")
    ] = None,
    discordant: Annotated[
        str,
        typer.Option(
            metavar="FRACTION",
            help="Fraction of documents on which one arm is right and the other wrong, without a true difference.",
        ),
    ] = "0.1",
    detect: Annotated[
        str | None, typer.Option(metavar="POINTS", help="How many documents does a change of so many points take?")
    ] = None,
    arms: Annotated[
        str,
        typer.Option(metavar="N", help="Arms compared with the reference: the strictest step of Holm's correction."),
    ] = "1",
    json: options.Json = None,
) -> None:
    """Tell which differences of accuracy a paired comparison can find."""
    if (n is None) == (detect is None):
        raise ConfigError("expected either --n N (what can be seen?) or --detect POINTS (what does it take?).")
    psi = _fraction(discordant, option="--discordant", least=0.0, most=1.0)
    level = _LEVEL / values.integer(arms, option="--arms", least=1, most=1000)
    target = values.json_target(json)
    if detect is not None:
        points = _fraction(detect, option="--detect", least=0.0, most=100.0)
        if points == 0:
            raise ConfigError("--detect: expected more than 0 points, because no number of documents shows none.")
        record = _needed(points, psi, level)
    else:
        record = _seen(values.integer(str(n), option="--n", least=1, most=10_000_000), psi, level)
    text = json_module.dumps(record, indent=2)
    if target == values.STDOUT:
        print(text)
        return
    if target is not None:
        Path(target).write_text(text + "\n", encoding="utf-8")
    for line in _lines(record):
        print(line)


def _seen(n: int, psi: float, level: float) -> dict[str, Any]:
    from replayeval.stats.power import mcnemar_power, minimum_detectable

    detectable: list[dict[str, Any]] = []
    for power in _SHOWN_POWERS:
        found = minimum_detectable(n=n, discordant=psi, alpha=level, power=power)
        entry: dict[str, Any] = {
            "power": power,
            "points": None if found.difference is None else 100 * found.difference,
        }
        detectable.append(entry if found.reason is None else entry | {"notes": {"points": found.reason}})
    powers = [
        {
            "points": points,
            "power": mcnemar_power(n=n, discordant=psi, difference=points / 100, alpha=level),
        }
        for points in _SHOWN_POINTS
    ]
    return {
        "schema": "replayeval.power/1",
        "n": n,
        "discordant": psi,
        "level": level,
        "detectable": detectable,
        "power": powers,
    }


def _needed(points: float, psi: float, level: float) -> dict[str, Any]:
    from replayeval.stats.power import documents_needed

    needed = [
        {"power": power, "n": documents_needed(discordant=psi, difference=points / 100, alpha=level, power=power)}
        for power in _SHOWN_POWERS
    ]
    return {
        "schema": "replayeval.power/1",
        "detect_points": points,
        "discordant": psi,
        "level": level,
        "needed": needed,
    }


def _lines(record: Mapping[str, Any]) -> list[str]:
    head = f"McNemar's exact test at level {record['level']:g}, {100 * record['discordant']:g}% discordant documents"
    if "needed" in record:
        lines = [f"{head}, a change of {record['detect_points']:g} points:"]
        for entry in record["needed"]:
            count = "more than ten million" if entry["n"] is None else f"{entry['n']:,}"
            lines.append(f"  found {100 * entry['power']:.0f}% of the time with {count} documents")
        return lines
    lines = [f"{head}, {record['n']:,} documents:"]
    for entry in record["detectable"]:
        if entry["points"] is None:
            lines.append(
                f"  found {100 * entry['power']:.0f}% of the time: nothing, because {entry['notes']['points']}"
            )
        else:
            lines.append(f"  found {100 * entry['power']:.0f}% of the time: a change of {entry['points']:.1f} points")
    lines.append("chance to find a change of")
    lines += [f"  {entry['points']:>4g} points: {100 * entry['power']:5.1f}%" for entry in record["power"]]
    return lines


def _fraction(text: str, *, option: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise ConfigError(f"{option}: expected a number from {least:g} to {most:g}, got {values.shown(text)}.")
    return value
