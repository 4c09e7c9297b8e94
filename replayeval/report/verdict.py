"""The verdict of the gate as tables: per model a sentence and one row per policy, cheapest first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replayeval.report.cells import PolicyText, is_control
from replayeval.report.gate import ArmVerdict, GateCheck, GateReport, Limits
from replayeval.report.gate_output import METRICS, advice, check_line, value_text
from replayeval.report.text import counted, printable, tokens_label
from replayeval.stats.gate import Outcome

_MARKS = {Outcome.PASS: "✓", Outcome.FAIL: "✗", Outcome.UNDECIDED: "?"}
_ORDER = (Outcome.PASS, Outcome.UNDECIDED, Outcome.FAIL)


@dataclass(frozen=True, kw_only=True)
class VerdictCell:
    """One policy under one limit: the worst of its checks."""

    value: str
    outcome: str
    mark: str
    detail: str
    title: str


@dataclass(frozen=True, kw_only=True)
class VerdictRow:
    """One policy."""

    policy: str
    control: bool
    bits: str
    outcome: str
    need: str
    cells: tuple[VerdictCell, ...]


@dataclass(frozen=True, kw_only=True)
class VerdictTable:
    """One model."""

    name: str
    answer: str
    answer_kind: str
    columns: tuple[str, ...]
    rows: tuple[VerdictRow, ...]
    left_out: str


def default_limits(*, kl: bool, tasks: bool) -> Limits:
    """Return the limits of a report that was asked for none.

    1e-3 nats and 99.5% are what the documentation uses as its example; one percentage point is about what paired
    benchmarks of some thousand questions can see.
    """
    return Limits(max_kl=1e-3 if kl else None, min_top1=0.995 if kl else None, max_drop=1.0 if tasks else None)


def limits_text(limits: Limits) -> str:
    """Return what is asked of a policy, in a sentence."""
    at = "at the longest length measured" if limits.at is None else f"at {tokens_label(limits.at)} tokens"
    asked: list[str] = []
    if limits.max_kl is not None:
        asked.append(f"KL ≤ {limits.max_kl:g} nats per token")
    if limits.min_top1 is not None:
        asked.append(f"top-1 agreement ≥ {100 * limits.min_top1:g}%")
    if limits.max_nll_delta is not None:
        asked.append(f"ΔNLL ≤ {limits.max_nll_delta:g} nats per token")
    drop = [] if limits.max_drop is None else [f"accuracy no more than {limits.max_drop:g} pp below the reference"]
    first = [f"{', '.join(asked)} {at}"] if asked else []
    return (
        f"A policy passes when it keeps to: {'; '.join([*first, *drop])}. "
        "The whole 95% interval decides, not the mean, and from no fewer than "
        f"{counted(limits.fewest_documents, 'document')}."
    )


def verdict_tables(verdict: GateReport, *, most_rows: int) -> list[VerdictTable]:
    """Return one table per model; rows beyond `most_rows` in all are left out and counted."""
    tables: list[VerdictTable] = []
    room = most_rows
    for model in dict.fromkeys(arm.model for arm in verdict.arms):
        arms = [arm for arm in verdict.arms if arm.model == model]
        columns = _columns(arms)
        shown = arms[:room]
        room -= len(shown)
        names = _names(arms)
        answer, kind = _answer(arms, names)
        if verdict.failed_self_checks:
            answer, kind = "A self-check failed, so that no policy can be called the cheapest.", "fail"
        missing = len(arms) - len(shown)
        tables.append(
            VerdictTable(
                name=printable(model),
                answer=answer,
                answer_kind=kind,
                columns=tuple(_column_title(metric, limit, verdict.limits) for metric, limit in columns),
                rows=tuple(_row(arm, columns, names) for arm in shown),
                left_out=f"{missing:,} more policies are in verdict.csv." if missing else "",
            )
        )
    return tables


def _columns(arms: Sequence[ArmVerdict]) -> list[tuple[str, float]]:
    found = {(check.metric, check.limit): None for arm in arms for check in arm.checks}
    return sorted(found, key=lambda column: list(METRICS).index(column[0]))


def _column_title(metric: str, limit: float, limits: Limits) -> str:
    name = {"kl": "KL", "top1": "top-1", "nll_delta": "ΔNLL", "accuracy_drop": "accuracy drop"}[metric]
    at = "" if metric == "accuracy_drop" or limits.at is None else f" to {tokens_label(limits.at)}"
    bound = f"≥ {100 * limit:g}%" if metric == "top1" else f"≤ {limit:g}{' pp' if metric == 'accuracy_drop' else ''}"
    return f"{name}{at} {bound}"


def _answer(arms: Sequence[ArmVerdict], names: Mapping[str, str]) -> tuple[str, str]:
    known = [arm for arm in arms if arm.bits_per_element is not None and not is_control(arm.policy)]
    passing = [arm for arm in known if arm.outcome is Outcome.PASS]
    undecided = [arm for arm in known if arm.outcome is Outcome.UNDECIDED]
    if passing:
        best = passing[0]
        bits = best.bits_per_element or 0.0
        saved = (
            f", {32 / bits:.2g} times less state than float32" if bits < 32 else ", no less than float32 itself stores"
        )
        cheaper = [arm for arm in undecided if (arm.bits_per_element or 0.0) < bits]
        hope = f" Cheaper ones are undecided: {', '.join(names[arm.policy] for arm in cheaper)}." if cheaper else ""
        return (
            f"Cheapest policy that passes: {names[best.policy]}, {bits:.3g} bits per state element{saved}.{hope}",
            "pass",
        )
    if undecided:
        return f"No policy passes yet; {', '.join(names[arm.policy] for arm in undecided[:4])} undecided.", "undecided"
    if known:
        return "No policy passes.", "fail"
    passed = [arm for arm in arms if arm.outcome is Outcome.PASS]
    if passed:
        listed = ", ".join(names[arm.policy] for arm in passed)
        return f"Passing: {listed}. Stored bits are not known, so that none can be called the cheapest.", "pass"
    return "No policy passes.", "undecided" if any(arm.outcome is Outcome.UNDECIDED for arm in arms) else "fail"


def _row(arm: ArmVerdict, columns: Sequence[tuple[str, float]], names: Mapping[str, str]) -> VerdictRow:
    waiting = [check for check in arm.checks if check.outcome is Outcome.UNDECIDED]
    need = ""
    if arm.outcome is Outcome.UNDECIDED:
        numbers = [check.more_documents for check in waiting]
        known = [number for number in numbers if number is not None]
        need = "see the reason"
        if known and len(known) == len(numbers):
            need = f"needs about {counted(max(known), 'more document')}"
    return VerdictRow(
        policy=names[arm.policy],
        control=is_control(arm.policy),
        bits="n/a" if arm.bits_per_element is None else f"{arm.bits_per_element:.3g}",
        outcome=str(arm.outcome),
        need=need,
        cells=tuple(_cell([c for c in arm.checks if (c.metric, c.limit) == column]) for column in columns),
    )


def _cell(checks: Sequence[GateCheck]) -> VerdictCell:
    if not checks:
        return VerdictCell(value="", outcome="", mark="", detail="", title="")
    worst = max(checks, key=_badness)
    if not worst.source:
        return VerdictCell(value="", outcome=str(worst.outcome), mark="?", detail="", title=advice(worst))
    documents = counted(worst.documents, "document")
    among = f", worst of {len(checks)}: {printable(worst.where)}" if len(checks) > 1 else f", {printable(worst.where)}"
    return VerdictCell(
        value=value_text(worst),
        outcome=str(worst.outcome),
        mark=_MARKS[worst.outcome],
        detail=documents + among,
        title=f"{check_line(worst)} ({printable(worst.source)})" if worst.value is not None else advice(worst),
    )


def _badness(check: GateCheck) -> tuple[int, float]:
    if check.value is None:
        return _ORDER.index(check.outcome), float("inf")
    return _ORDER.index(check.outcome), (-check.value if check.metric == "top1" else check.value)


def _names(arms: Sequence[ArmVerdict]) -> dict[str, str]:
    """Return how policies are called: without their window where it is the same for all that have one."""
    parsed = {arm.policy: PolicyText.parse(arm.policy) for arm in arms}
    same = len({policy.window for policy in parsed.values()} - {None}) == 1
    return {text: printable(policy.without_window if same else text) for text, policy in parsed.items()}
