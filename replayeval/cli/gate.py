"""`replayeval gate`: does a policy keep to limits, decided on intervals?"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from replayeval.cli import options, run_inputs, values
from replayeval.errors import ConfigError

if TYPE_CHECKING:
    from replayeval.report.gate import GateReport, Limits

EXAMPLES = """\b
Examples:
  replayeval gate runs/a --max-kl 1e-3 --min-top1 0.995 --at 8K
  replayeval gate kl.json tasks.json --arm shared:fp8+sr --max-kl 1e-3 --max-drop 1 \\
      --junit gate.xml --badge badge.json
Exit codes: 0 every policy passes; 1 one fails or is undecided; 2 bad input.
"""

MaxKL: TypeAlias = Annotated[str | None, typer.Option(metavar="NATS", help="Mean KL per token, at most, such as 1e-3.")]
MinTop1: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FRACTION", help="Share of tokens with the same top-1, at least, such as 0.995.")
]
MaxNllDelta: TypeAlias = Annotated[
    str | None, typer.Option(metavar="NATS", help="NLL above the reference per token, at most, such as 1e-3.")
]
MaxDrop: TypeAlias = Annotated[
    str | None, typer.Option(metavar="POINTS", help="Accuracy below the reference in percentage points, at most.")
]
At: TypeAlias = Annotated[
    str | None, typer.Option(metavar="N", help="Generation length to judge, such as 8K. Default: the longest.")
]
MinDocs: TypeAlias = Annotated[
    str,
    typer.Option(metavar="N", help="Documents below which nothing passes: intervals from few are too short."),
]
DEFAULT_MIN_DOCS = "10"


def run(
    runs: run_inputs.Runs,
    max_kl: MaxKL = None,
    min_top1: MinTop1 = None,
    max_nll_delta: MaxNllDelta = None,
    max_drop: MaxDrop = None,
    at: At = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(metavar="POLICY", help="Judge this policy only, with or without its @L; repeatable."),
    ] = None,
    min_docs: MinDocs = DEFAULT_MIN_DOCS,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the verdict as JUnit XML.")] = None,
    badge: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the verdict as a shields.io endpoint badge.")
    ] = None,
    json: options.Json = None,
) -> None:
    """Decide whether state policies keep to limits: pass, fail, or undecided with the documents still needed."""
    asked = limits(
        max_kl=max_kl, min_top1=min_top1, max_nll_delta=max_nll_delta, max_drop=max_drop, at=at, min_docs=min_docs
    )
    junit = None if junit is None else values.output_file(junit, option="--junit")
    badge = None if badge is None else values.output_file(badge, option="--badge")
    json_target = values.json_target(json)
    _check_outputs({"--junit": junit, "--badge": badge, "--json": json_target}, runs)

    from replayeval.report.gate import gate

    verdict = gate(run_inputs.load_sources(runs), asked, policies=arm or ())
    _write(verdict, junit=junit, badge=badge, json_target=json_target)
    if not verdict.passed:
        raise typer.Exit(1)


def limits(
    *,
    max_kl: str | None,
    min_top1: str | None,
    max_nll_delta: str | None,
    max_drop: str | None,
    at: str | None,
    min_docs: str,
    required: bool = True,
) -> "Limits":
    """Return the limits that options name.

    Raises:
        ConfigError: One of them is no number within its bounds, or there is none although one is required.
    """
    numbers: dict[str, Any] = {
        "max_kl": number(max_kl, option="--max-kl", above=0.0),
        "min_top1": number(min_top1, option="--min-top1", above=0.0, most=1.0),
        "max_nll_delta": number(max_nll_delta, option="--max-nll-delta"),
        "max_drop": number(max_drop, option="--max-drop", least=0.0, most=100.0),
    }
    length = None if at is None else values.tokens(at, option="--at")
    fewest = values.integer(min_docs, option="--min-docs", least=1)
    if required and all(value is None for value in numbers.values()):
        raise ConfigError("expected a limit: --max-kl, --min-top1, --max-nll-delta or --max-drop; got none.")

    from replayeval.report.gate import Limits

    return Limits(**numbers, at=length, fewest_documents=fewest)


def number(
    text: str | None,
    *,
    option: str,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
) -> float | None:
    """Return a finite number within bounds, or None for None.

    Raises:
        ConfigError: No such number.
    """
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and above < value and least <= value <= most):
        bounds = [f"above {above:g}"] if above > -math.inf else [f"of at least {least:g}"] if least > -math.inf else []
        bounds += [f"of at most {most:g}"] if most < math.inf else []
        wanted = f"a number {' and '.join(bounds)}".rstrip()
        raise ConfigError(f"{option}: expected {wanted}, got {values.shown(text)}.")
    return value


def _check_outputs(outputs: Mapping[str, Path | str | None], runs: Sequence[Path]) -> None:
    """Refuse to overwrite what is judged, and one output by another."""
    seen: dict[Path, str] = {}
    inputs = [run.resolve() for run in runs]
    for option, path in outputs.items():
        if not isinstance(path, Path):
            continue
        place = path.resolve()
        for run in inputs:
            # A run directory is damaged by a replaced file, and only by that.
            if place == run or _same(place, run) or (run in place.parents and place.exists()):
                raise ConfigError(
                    f"{option}: {values.shown(path)} is {'part of ' if run.is_dir() else ''}what is judged, and would "
                    "be overwritten. Choose another file."
                )
        other = next((name for there, name in seen.items() if there == place or _same(there, place)), None)
        if other is not None:
            raise ConfigError(f"{other} and {option}: expected two files, got {values.shown(path)} for both.")
        seen[place] = option


def _same(first: Path, second: Path) -> bool:
    """Whether two paths are one file, hard links included."""
    try:
        return first.samefile(second)
    except OSError:
        return False


def _write(verdict: "GateReport", *, junit: Path | None, badge: Path | None, json_target: Path | str | None) -> None:
    from replayeval.report.gate_output import gate_badge, gate_junit, gate_lines

    for path, text in ((junit, gate_junit), (badge, gate_badge), (json_target, _json)):
        if isinstance(path, Path):
            try:
                path.write_text(text(verdict), encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"cannot write {values.shown(path)}: {error.strerror}.") from None
    if json_target == values.STDOUT:
        print(verdict.to_json())
    else:
        print("\n".join(gate_lines(verdict)))


def _json(verdict: "GateReport") -> str:
    return verdict.to_json() + "\n"
