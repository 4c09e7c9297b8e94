"""`replayeval nightly`: run a plan, compare with the nights before, report, and fail on a regression."""

from pathlib import Path
from typing import Annotated, cast

import typer

from replayeval.cli import gate, values
from replayeval.cli.session import say
from replayeval.cli.sweep import SweepProgress
from replayeval.errors import ConfigError

EXAMPLES = """\b
Examples:
  replayeval nightly nightly --history /var/lib/replayeval
  replayeval nightly plan.yaml --history nights --executor ray --max-kl 1e-3 --at 8K
  replayeval nightly --history nights --accept
Exit codes: 0 no regression; 1 a regression, new or still open; 2 bad input.
"""


def run(
    plan: Annotated[
        str | None, typer.Argument(metavar="PLAN", help="A plan's file, or the name of a shipped one.")
    ] = None,
    history: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of all nights; made where missing.")
    ] = None,
    executor: Annotated[str, typer.Option(metavar="local|ray|ray:ADDRESS", help="Where the plan runs.")] = "local",
    alpha: Annotated[
        str, typer.Option(metavar="P", help="Chance of any false finding in a night without a change.")
    ] = "0.01",
    tolerance: Annotated[
        str, typer.Option(metavar="FRACTION", help="Relative change of KL that is of no interest.")
    ] = "0.05",
    accept: Annotated[
        bool, typer.Option("--accept", help="Run nothing; take the last night's regressions as the new level.")
    ] = False,
    max_kl: gate.MaxKL = None,
    min_top1: gate.MinTop1 = None,
    max_nll_delta: gate.MaxNllDelta = None,
    max_drop: gate.MaxDrop = None,
    at: gate.At = None,
    min_docs: gate.MinDocs = gate.DEFAULT_MIN_DOCS,
) -> None:
    """Run a plan as tonight's measurement and compare it with the nights before, document by document.

    Limits decide the verdict of the report only; the exit code speaks of changes.
    """
    if history is None:
        raise ConfigError("--history: expected the directory of the nights, got none.")
    if accept:
        _accept(plan, history)
        return
    if plan is None:
        raise ConfigError("expected a plan, such as `nightly` or the file of one, got none.")
    chance = gate.number(alpha, option="--alpha", above=0.0, most=0.5)
    ignored = gate.number(tolerance, option="--tolerance", least=0.0, most=10.0)
    limits = gate.limits(
        max_kl=max_kl,
        min_top1=min_top1,
        max_nll_delta=max_nll_delta,
        max_drop=max_drop,
        at=at,
        min_docs=min_docs,
        required=False,
    )

    from replayeval.nightly.night import run_night, sweep_runner
    from replayeval.nightly.page import finding_line, headline_of, untested_text
    from replayeval.sweep.plan import load_plan

    chosen = load_plan(plan)
    with SweepProgress() as progress:
        night = run_night(
            chosen,
            history,
            name=chosen.name,
            runner=sweep_runner(executor, progress),
            alpha=cast(float, chance),
            tolerance=cast(float, ignored),
            limits=limits if limits.of_distributions or limits.max_drop is not None else None,
        )
    for finding in night.record.findings:
        print(finding_line(finding))
    print(headline_of(night.record)[0])
    if night.record.untested:
        print(untested_text(night.record))
    print(night.page)
    if not night.passed:
        raise typer.Exit(1)


def _accept(plan: str | None, history: Path) -> None:
    if plan is not None:
        raise ConfigError(f"--accept runs nothing; expected no plan beside it, got {values.shown(plan)}.")

    from datetime import UTC, datetime

    from replayeval.nightly.night import accept
    from replayeval.nightly.record import History

    record = accept(history)
    # The last night is the one of the latest name, whenever it really ran.
    for name in History(history).future(datetime.now(UTC)):
        say(
            f"warning: night {name} is dated in the future and counts as the last one until then; "
            f"if its clock was wrong, move {History(history).night(name)} elsewhere."
        )
    say(f"night {record.night}: {len(record.accepted)} series accepted at their new level")
