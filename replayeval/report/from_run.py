"""The record of a run directory, computed again from the numbers of every token."""

from pathlib import Path
from typing import Any, cast

from replayeval.errors import StoreError
from replayeval.report.cells import CONTROL, PolicyText, Source
from replayeval.report.drift import drift_by_arm
from replayeval.report.from_summary import arm_report, intervals_report, rounding_report, timing_report
from replayeval.report.schema import Check, KLReport
from replayeval.report.text import printable
from replayeval.stats import summarise_kl
from replayeval.store import RunDirectory


def kl_source(path: Path) -> Source:
    """Read a run directory of `replayeval kl --out`.

    A run that is not finished yields what it has: the documents written so far, with a note among the intervals.

    Raises:
        StoreError: There is no such run, it is damaged, or it holds no document yet.
    """
    run = RunDirectory.open(path)
    scores = run.read_all()
    identity = run.manifest.identity
    if identity.get("kind") != "kl":
        raise StoreError(f"{path}: expected a run of `replayeval kl`, got one of kind {identity.get('kind')!r}")
    if not scores:
        raise StoreError(f"{path} holds no document yet; finish the run with `replayeval kl … --resume`")
    arms = cast(list[str], identity["arms"])
    control = next((arm for arm in arms if PolicyText.parse(arm).without_window == CONTROL), None)
    lengths = cast(list[int], identity["lengths"])
    summary = summarise_kl(scores, lengths=lengths, floor_arm=control, seed=identity["seed"])
    results = run.manifest.results
    stored = cast(dict[str, float], results.get("bits_per_element", {}))
    intervals = intervals_report(summary)
    if not run.is_complete:
        note = f"the run is not finished: {len(scores)} of {run.manifest.documents} documents"
        caution = note if intervals.caution is None else f"{note}; {intervals.caution}"
        intervals = intervals.model_copy(update={"caution": caution})
    report = KLReport(
        model=identity["model"],
        reference=identity["reference"],
        window=identity["window_tokens"],
        docs=summary.documents,
        tokens=summary.tokens,
        arms=tuple(arm_report(arm, bits_per_element=stored.get(arm.policy)) for arm in summary.arms),
        rounding_ratios=tuple(rounding_report(ratio) for ratio in summary.rounding_ratios),
        intervals=intervals,
        checks=tuple(_check(values) for values in cast(list[dict[str, Any]], results.get("checks", []))),
        timing=timing_report(scores, rows=len(arms) + 1),
        provenance={
            **(dict(run.manifest.attempts[-1]) if run.manifest.attempts else {}),
            "data": identity["data"],
            "seed": identity["seed"],
            "fingerprint": run.manifest.fingerprint,
        },
    )
    drift = drift_by_arm(scores, longest=lengths[-1], seed=identity["seed"])
    return Source(report=report, where=printable(str(path)), drift=drift)


def _check(values: dict[str, Any]) -> Check:
    reason = values.get("reason")
    return Check(
        name=values["name"],
        passed=values["passed"],
        value=values["value"],
        limit=values["limit"],
        notes={} if reason is None else {"passed": reason},
    )
