"""The accuracy gate: every arm of some records against limits, decided on intervals. Schema `replayeval.gate/1`."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from replayeval.errors import ConfigError
from replayeval.report.cells import PolicyText, Source, data_label, is_control, lengths_of, provenance_line
from replayeval.report.gate_bounds import agreement_interval, drop_interval, mirrored, sampled_drop, unseen_flips
from replayeval.report.schema import ArmReport, Count, Interval, KLAtLength, KLReport, Positive, Record, Report
from replayeval.report.tasks_schema import TaskArm, TaskReport, TasksReport
from replayeval.report.text import printable, tokens_label
from replayeval.stats.bootstrap import FEW_DOCUMENTS
from replayeval.stats.gate import NO_NUMBER, Decision, Outcome, binomial_outlook, decide

GATE_SCHEMA = "replayeval.gate/1"


class Limits(Record):
    """What an arm has to keep to. A limit that is null is not asked for."""

    max_kl: Annotated[float, Field(gt=0)] | None = None
    """Mean KL up to `at` in nats per token, at most."""
    min_top1: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of tokens up to `at` ranked first by both, at least."""
    max_nll_delta: float | None = None
    """Mean NLL above the reference up to `at` in nats per token, at most."""
    max_drop: Annotated[float, Field(ge=0)] | None = None
    """Accuracy below the reference in percentage points, at most, in every task."""
    at: Positive | None = None
    """Generation length in tokens; null stands for the longest of each record."""
    fewest_documents: Positive = FEW_DOCUMENTS
    """Documents below which nothing passes."""

    @property
    def of_distributions(self) -> bool:
        """Whether a limit concerns records of `replayeval kl`."""
        return any(limit is not None for limit in (self.max_kl, self.min_top1, self.max_nll_delta))


class GateCheck(Record):
    """One number of one arm against one limit."""

    metric: Literal["kl", "top1", "nll_delta", "accuracy_drop"]
    """KL and NLL in nats per token, agreement as a fraction, the drop in percentage points."""
    where: str
    """Generation length, or task."""
    source: str
    """File or directory of the record."""
    value: float | None
    """The estimate."""
    ci95: Interval | None
    """Interval that decides: the record's, but never shorter than a binomial one allows where hardly anything flips."""
    limit: float
    """What it was held against."""
    documents: Count
    """Documents that it rests on."""
    outcome: Outcome
    """Pass, fail or undecided."""
    reason: str
    """Why."""
    more_documents: Positive | None = None
    """Where undecided: about how many more documents decide, with a chance of 80%; null where that cannot be told."""


class ArmVerdict(Record):
    """One policy on one model: it passes when all of its checks do."""

    model: str
    """Where the weights came from."""
    policy: str
    """State policy."""
    bits_per_element: float | None
    """Stored bits per state element."""
    outcome: Outcome
    """Fail when a check fails, else undecided when one is, else pass."""
    checks: tuple[GateCheck, ...]
    """Every limit in every record that has this policy."""


class SelfCheck(Record):
    """A check of the apparatus on itself that failed: numbers of that record mean nothing."""

    source: str
    """File or directory of the record."""
    name: str
    """Which check."""


class GateReport(Report):
    """The verdict on some records."""

    schema_name: Literal["replayeval.gate/1"] = Field(default=GATE_SCHEMA, alias="schema")
    """Name and version of this schema."""
    limits: Limits
    """What was asked."""
    arms: tuple[ArmVerdict, ...]
    """Model by model, cheapest first."""
    failed_self_checks: tuple[SelfCheck, ...] = ()
    """Checks of the apparatus that failed."""
    provenance: dict[str, str]
    """What made the numbers, by source."""

    @property
    def passed(self) -> bool:
        """Whether every arm passes and the apparatus is sound."""
        return not self.failed_self_checks and all(arm.outcome is Outcome.PASS for arm in self.arms)

    def counts(self) -> dict[Outcome, int]:
        """Return how many arms have each outcome."""
        return {outcome: sum(arm.outcome is outcome for arm in self.arms) for outcome in Outcome}

    def cheapest(self) -> dict[str, ArmVerdict | None]:
        """Return for each model the arm of fewest bits that passes, the control arm apart, or None.

        None for every model where a check of the apparatus failed, since no number means anything then.
        """
        found: dict[str, ArmVerdict | None] = {}
        for arm in self.arms:
            if arm.model not in found:
                known = (a for a in self.passing(arm.model) if a.bits_per_element is not None)
                found[arm.model] = next(known, None)
        return found

    def passing(self, model: str) -> list[ArmVerdict]:
        """Return the arms of a model that pass, the control arm apart; none where a check of the apparatus failed."""
        if self.failed_self_checks:
            return []
        return [a for a in self.arms if a.model == model and a.outcome is Outcome.PASS and not is_control(a.policy)]


def gate(sources: Sequence[Source], limits: Limits, *, policies: Sequence[str] = ()) -> GateReport:
    """Hold every arm of some records against limits.

    A policy is judged once per model: it has to keep every limit in every record that holds it, and a limit that no
    record can judge it by leaves it undecided.

    Args:
        sources: Records with the places they came from.
        limits: What is asked; limits on KL, agreement and NLL concern KL records, the drop concerns task records.
        policies: Judge these only, with or without their window; all where empty.

    Raises:
        ConfigError: A limit has no record that it concerns, a record has no result at the length asked for, or a
            policy is nowhere.
    """
    _check(sources, limits)
    checks: dict[tuple[str, str], list[GateCheck]] = {}
    bits: dict[tuple[str, str], float] = {}
    for source in sources:
        for policy, stored, found in _checks_of(source, limits):
            if not policies or _named(policy, policies):
                checks.setdefault((source.report.model, policy), []).extend(found)
                if stored is not None:
                    bits[source.report.model, policy] = stored
    _check_found(policies, sources, {policy for _, policy in checks})
    for found in checks.values():
        found += _not_measured(limits, {check.metric for check in found})
    models = list(dict.fromkeys(model for model, _ in checks))
    order = sorted(checks, key=lambda key: (models.index(key[0]), bits.get(key, float("inf"))))
    return GateReport(
        limits=limits,
        arms=tuple(
            ArmVerdict(
                model=model,
                policy=policy,
                bits_per_element=bits.get((model, policy)),
                outcome=worst(check.outcome for check in checks[model, policy]),
                checks=tuple(checks[model, policy]),
            )
            for model, policy in order
        ),
        failed_self_checks=tuple(
            SelfCheck(source=source.where, name=check.name)
            for source in sources
            for check in source.report.checks
            if check.passed is False
        ),
        provenance={source.where: provenance_line(source.report) for source in sources},
    )


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return fail before undecided before pass."""
    found = set(outcomes)
    return next(outcome for outcome in (Outcome.FAIL, Outcome.UNDECIDED, Outcome.PASS) if outcome in found)


def _checks_of(source: Source, limits: Limits) -> Iterator[tuple[str, float | None, list[GateCheck]]]:
    report = source.report
    if isinstance(report, KLReport):
        if limits.of_distributions:
            at = lengths_of(report)[-1] if limits.at is None else limits.at
            for arm in report.arms:
                yield arm.policy, arm.bits_per_element, list(_kl_checks(arm, at, source, limits))
    elif limits.max_drop is not None:
        # The members of a group are judged together, as the group: each by itself is small.
        members = {member for task in report.tasks for member in task.members}
        tasks = [task for task in report.tasks if task.task not in members]
        for policy in dict.fromkeys(arm.policy for task in tasks for arm in task.arms):
            found = [
                _drop_check(arm, task, source.where, limits.max_drop, limits.fewest_documents)
                for task in tasks
                for arm in task.arms
                if arm.policy == policy
            ]
            yield policy, None, found


def _kl_checks(arm: ArmReport, at: int, source: Source, limits: Limits) -> Iterator[GateCheck]:
    point = next(point for point in arm.by_length if point.n == at)
    data = data_label(source.report)
    where = f"{tokens_label(at)}{' of ' + data if data else ''}"
    common: dict[str, Any] = {"where": where, "source": source.where, "documents": point.documents}
    fewest = limits.fewest_documents
    if limits.max_kl is not None:
        decision = _decide(arm, point, "mean", point.mean, point.ci95, limits.max_kl, fewest)
        yield GateCheck(metric="kl", value=point.mean, ci95=point.ci95, limit=limits.max_kl, **common, **_of(decision))
    if limits.min_top1 is not None:
        interval = agreement_interval(point)
        flips = None if point.top1_agreement is None else 1 - point.top1_agreement
        decision = _agreement_decision(arm, point, flips, interval, 1 - limits.min_top1, fewest)
        yield GateCheck(
            metric="top1",
            value=point.top1_agreement,
            ci95=interval,
            limit=limits.min_top1,
            **common,
            **_of(decision),
        )
    if limits.max_nll_delta is not None:
        value, interval = point.nll_delta, point.nll_delta_ci95
        decision = _decide(arm, point, "nll_delta", value, interval, limits.max_nll_delta, fewest)
        yield GateCheck(
            metric="nll_delta", value=value, ci95=interval, limit=limits.max_nll_delta, **common, **_of(decision)
        )


def _decide(
    arm: ArmReport,
    point: KLAtLength,
    name: str,
    value: float | None,
    interval: Interval | None,
    limit: float,
    fewest: int,
    **bounds: Any,
) -> Decision:
    if arm.diverged_at is not None and arm.diverged_at <= point.n:
        reason = f"the arm diverged at generation length {arm.diverged_at}"
        return Decision(outcome=Outcome.FAIL, reason=reason)
    if value is None:
        return Decision(outcome=Outcome.UNDECIDED, reason=point.notes.get(name, "the record has no such number"))
    return decide(value, interval, limit, documents=point.documents, fewest_to_pass=fewest, **bounds)


def _agreement_decision(
    arm: ArmReport, point: KLAtLength, flips: float | None, interval: Interval | None, limit: float, fewest: int
) -> Decision:
    def bound(documents: int) -> tuple[float, float]:
        return binomial_outlook(flips or 0.0, round(point.tokens / point.documents * documents))

    sampled = None if interval is None else mirrored(point.top1_agreement_ci95)
    decision = _decide(
        arm, point, "top1_agreement", flips, mirrored(interval), limit, fewest, sampled=sampled, bound=bound
    )
    if limit > 0 or flips is None or interval is None or decision.outcome is not Outcome.UNDECIDED:
        return decision
    if round(flips * point.tokens):
        return Decision(outcome=Outcome.FAIL, reason="a token flipped, so that the limit can never be met")
    return Decision(outcome=Outcome.UNDECIDED, reason=NO_NUMBER)


def _drop_check(arm: TaskArm, task: TaskReport, where: str, limit: float, fewest: int) -> GateCheck:
    drop = None if arm.delta_pp is None else -arm.delta_pp
    interval = drop_interval(arm, task.n)
    if drop is None:
        reason = arm.notes.get("delta_pp", "the record has no such number")
        decision = Decision(outcome=Outcome.UNDECIDED, reason=reason)
    else:
        sampled = None if interval is None else sampled_drop(arm, drop)
        bound = unseen_flips(arm, drop)
        decision = decide(drop, interval, limit, documents=task.n, fewest_to_pass=fewest, sampled=sampled, bound=bound)
    return GateCheck(
        metric="accuracy_drop",
        where=printable(task.task),
        source=where,
        value=drop,
        ci95=interval,
        limit=limit,
        documents=task.n,
        **_of(decision),
    )


def _not_measured(limits: Limits, judged: set[str]) -> Iterator[GateCheck]:
    asked = {
        "kl": limits.max_kl,
        "top1": limits.min_top1,
        "nll_delta": limits.max_nll_delta,
        "accuracy_drop": limits.max_drop,
    }
    for metric, limit in asked.items():
        if limit is not None and metric not in judged:
            kind = "tasks" if metric == "accuracy_drop" else "kl"
            yield GateCheck.model_validate(
                {
                    "metric": metric,
                    "where": "no record",
                    "source": "",
                    "value": None,
                    "ci95": None,
                    "limit": limit,
                    "documents": 0,
                    "outcome": Outcome.UNDECIDED,
                    "reason": f"not measured; measure this policy with `replayeval {kind}`",
                }
            )


def _of(decision: Decision) -> dict[str, Any]:
    return {
        "outcome": decision.outcome,
        "reason": decision.reason,
        "more_documents": decision.more_documents,
    }


def _check(sources: Sequence[Source], limits: Limits) -> None:
    if not limits.of_distributions and limits.max_drop is None:
        raise ConfigError("expected at least one limit (max KL, min top-1, max NLL delta, max drop), got none.")
    kl = [(source.where, source.report) for source in sources if isinstance(source.report, KLReport)]
    if limits.of_distributions and not kl:
        raise ConfigError(
            "the limits on KL, top-1 and NLL need records of `replayeval kl`; there are only records of tasks."
        )
    if limits.max_drop is not None and not any(isinstance(source.report, TasksReport) for source in sources):
        raise ConfigError("the limit on the drop in accuracy needs a record of `replayeval tasks`; there is none.")
    for where, report in kl if limits.of_distributions else ():
        known = lengths_of(report)
        if not known:
            raise ConfigError(f"{printable(where)} has no arm with a generation length, so nothing can be judged.")
        at = known[-1] if limits.at is None else limits.at
        lacking = [arm for arm in report.arms if at not in {point.n for point in arm.by_length}]
        if lacking:
            whose, lengths = "", known
            if at in known:
                whose = f" for the arm {printable(lacking[0].policy)}"
                # What all arms have can be asked for.
                lengths = [n for n in known if all(n in {point.n for point in arm.by_length} for arm in report.arms)]
            raise ConfigError(
                f"{printable(where)} has no result at generation length {tokens_label(at)}{whose}; "
                f"{'all arms have' if whose else 'it has'} {', '.join(map(tokens_label, lengths)) or 'none'}. "
                f"Choose one of these with --at, or measure with --lengths {tokens_label(at)}."
            )


def _named(policy: str, wanted: Sequence[str]) -> bool:
    return any(text in (policy, PolicyText.parse(policy).without_window) for text in wanted)


def _check_found(policies: Sequence[str], sources: Sequence[Source], found: set[str]) -> None:
    missing = [text for text in policies if not any(_named(policy, [text]) for policy in found)]
    if missing:
        known = dict.fromkeys(policy for source in sources for policy in _policies(source))
        raise ConfigError(
            f"no record holds the policy {', '.join(printable(text) for text in missing)}; "
            f"there are {', '.join(printable(policy) for policy in known)}."
        )


def _policies(source: Source) -> Iterator[str]:
    report = source.report
    if isinstance(report, KLReport):
        yield from (arm.policy for arm in report.arms)
    else:
        yield from (arm.policy for task in report.tasks for arm in task.arms)
