"""The gate over records: which limits concern what, how arms add up, and the three forms of its verdict."""

import json
from typing import Any
from xml.etree import ElementTree

import pytest

from replayeval.errors import ConfigError
from replayeval.report.cells import Source
from replayeval.report.gate import GateReport, Limits, SelfCheck, gate
from replayeval.report.gate_output import gate_badge, gate_junit, gate_lines, summary
from replayeval.report.schema import ArmReport, Check, KLReport
from replayeval.report.verdict import limits_text, verdict_tables
from replayeval.stats.gate import Outcome
from tests.report.samples import arm, report
from tests.report.task_samples import task, task_arm, tasks_report, two_tasks

GOOD, BAD, UNSURE = "shared:fp8+sr@L=16", "shared:nvfp4@L=16", "shared:int8@L=16"
LIMITS = Limits(max_kl=1e-3, at=1024)


def measured(*arms: ArmReport, documents: int = 20, **changes: Any) -> KLReport:
    """A record whose points rest on as many documents as a gate wants."""
    grown = [
        one.model_copy(
            update={
                "by_length": tuple(
                    point.model_copy(update={"documents": documents, "tokens": documents * point.n})
                    for point in one.by_length
                )
            }
        )
        for one in arms
    ]
    return report(*grown, docs=documents, **changes)


def three_arms() -> KLReport:
    return measured(
        arm(GOOD, {512: 1e-4, 1024: 2e-4}, bits_per_element=8.25),
        arm(BAD, {512: 1e-2, 1024: 2e-2}, bits_per_element=4.5),
        arm(UNSURE, {512: 9e-4, 1024: 9.5e-4}, bits_per_element=8.25),
    )


def judged(limits: Limits = LIMITS, **options: Any) -> GateReport:
    return gate([Source(report=three_arms(), where="run.json")], limits, **options)


def outcomes(verdict: GateReport) -> dict[str, Outcome]:
    return {one.policy: one.outcome for one in verdict.arms}


def test_each_outcome_and_cheapest_first() -> None:
    verdict = judged()
    assert outcomes(verdict) == {BAD: Outcome.FAIL, GOOD: Outcome.PASS, UNSURE: Outcome.UNDECIDED}
    assert [one.bits_per_element for one in verdict.arms] == [4.5, 8.25, 8.25]
    assert not verdict.passed
    cheapest = verdict.cheapest()["builtin:gdn"]
    assert cheapest is not None
    assert cheapest.policy == GOOD
    assert summary(verdict) == "1 passed, 1 failed, 1 undecided"


def test_judging_the_passing_arm_alone_passes_with_and_without_its_window() -> None:
    assert judged(policies=[GOOD]).passed
    assert judged(policies=["shared:fp8+sr"]).passed
    assert not judged(policies=["shared:fp8+sr", "shared:nvfp4"]).passed


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no record holds the policy shared:fp9; there are shared:fp8\+sr@L=16"):
        judged(policies=["shared:fp9"])


def test_the_length_decides() -> None:
    assert outcomes(judged(Limits(max_kl=1.5e-4, at=512)))[GOOD] is Outcome.PASS
    assert outcomes(judged(Limits(max_kl=1.5e-4, at=1024)))[GOOD] is Outcome.FAIL
    # The longest is the default.
    assert outcomes(judged(Limits(max_kl=1.5e-4)))[GOOD] is Outcome.FAIL
    with pytest.raises(ConfigError, match="no result at generation length 8K; it has 512, 1K"):
        judged(Limits(max_kl=1e-3, at=8192))


def test_every_limit_counts() -> None:
    # Agreement is 0.99 [0.98, 0.995], and the NLL is 1e-3 [0, 2e-3] above the reference, in every arm.
    assert outcomes(judged(Limits(min_top1=0.97)))[BAD] is Outcome.PASS
    assert outcomes(judged(Limits(min_top1=0.999)))[GOOD] is Outcome.FAIL
    assert outcomes(judged(Limits(min_top1=0.99)))[GOOD] is Outcome.UNDECIDED
    assert outcomes(judged(Limits(max_kl=1e-3, max_nll_delta=1e-3)))[GOOD] is Outcome.UNDECIDED
    assert outcomes(judged(Limits(max_kl=1e-3, max_nll_delta=3e-3)))[GOOD] is Outcome.PASS


def test_agreement_of_every_token_proves_no_more_than_the_number_of_tokens_can() -> None:
    def perfect(tokens: int) -> KLReport:
        base = measured(arm(GOOD, {64: 1e-4}))
        point = (
            base.arms[0]
            .by_length[0]
            .model_copy(update={"top1_agreement": 1.0, "top1_agreement_ci95": (1.0, 1.0), "tokens": tokens})
        )
        return base.model_copy(update={"arms": (base.arms[0].model_copy(update={"by_length": (point,)}),)})

    def outcome(tokens: int) -> Outcome:
        return gate([Source(report=perfect(tokens), where="x")], Limits(min_top1=0.995)).arms[0].outcome

    # The low end of the binomial interval is 0.025 ** (1 / tokens), and ln 0.025 / ln 0.995 = 735.9.
    assert outcome(735) is Outcome.UNDECIDED
    assert outcome(736) is Outcome.PASS


def agreeing(share: float, *, documents: int, tokens: int, interval: tuple[float, float] | None = None) -> Source:
    """A record of one arm that ranks a share of all tokens as the reference does."""
    one = arm(GOOD, {16: 1e-4})
    point = one.by_length[0].model_copy(
        update={
            "documents": documents,
            "tokens": tokens,
            "top1_agreement": share,
            "top1_agreement_ci95": interval or (share, share),
        }
    )
    return Source(report=report(one.model_copy(update={"by_length": (point,)})), where="x")


def test_documents_still_needed_without_a_flip_follow_the_binomial_bound() -> None:
    (check,) = gate([agreeing(1.0, documents=10, tokens=160)], Limits(min_top1=0.995)).arms[0].checks
    # Agreement at all of 736 tokens shows 99.5%, and a document has 16.
    assert (check.outcome, check.more_documents) == (Outcome.UNDECIDED, 46 - 10)
    assert outcomes(gate([agreeing(1.0, documents=46, tokens=736)], Limits(min_top1=0.995)))[GOOD] is Outcome.PASS
    # Where documents differ, resampling rules and needs more than the binomial bound.
    (spread,) = (
        gate([agreeing(0.999, documents=10, tokens=160_000, interval=(0.99, 1.0))], Limits(min_top1=0.995))
        .arms[0]
        .checks
    )
    assert (spread.more_documents or 0) > 30
    unseen = task_arm(GOOD, 0.0, n=100).model_copy(
        update={"ci95": None, "flips_to_wrong": 0, "flips_to_right": 0, "discordant": 0}
    )
    record = Source(report=tasks_report(task("recall", unseen, n=100)), where="t")
    # 1 - 0.025 ** (1 / n) is at most 0.5% from 736 answers on.
    assert gate([record], Limits(max_drop=0.5)).arms[0].checks[0].more_documents == 736 - 100


@pytest.mark.parametrize(
    ("share", "interval", "outcome", "said"),
    [
        (159 / 160, (0.98, 1.0), Outcome.FAIL, "a token flipped, so that the limit can never be met"),
        (1.0, (1.0, 1.0), Outcome.UNDECIDED, "no number of documents can prove that nothing ever flips"),
    ],
)
def test_full_agreement_is_never_a_matter_of_more_documents(
    share: float, interval: tuple[float, float], outcome: Outcome, said: str
) -> None:
    verdict = gate([agreeing(share, documents=2, tokens=160, interval=interval)], Limits(min_top1=1.0))
    assert outcomes(verdict)[GOOD] is outcome
    text = "\n".join(gate_lines(verdict))
    assert said in text
    assert "more document" not in text


def test_divergence_fails_whatever_the_documents() -> None:
    broken = measured(arm(BAD, {512: 1e-4, 1024: None}, diverged_at=700, kl=arm(BAD, {512: 1e-4}).kl), documents=1)
    verdict = gate([Source(report=broken, where="x")], LIMITS)
    assert outcomes(verdict)[BAD] is Outcome.FAIL
    assert "diverged at generation length 700" in verdict.arms[0].checks[0].reason
    # Before that length there is a number, of one document only.
    assert outcomes(gate([Source(report=broken, where="x")], Limits(max_kl=1e-3, at=512)))[BAD] is Outcome.UNDECIDED


def test_a_failed_self_check_fails_the_gate() -> None:
    broken = measured(arm(GOOD, {1024: 1e-4}), checks=(Check(name="control arm", passed=False, value=1.0, limit=1e-6),))
    verdict = gate([Source(report=broken, where="x.json")], LIMITS)
    assert outcomes(verdict) == {GOOD: Outcome.PASS}
    assert not verdict.passed
    text = "\n".join(gate_lines(verdict))
    assert "FAILED SELF-CHECK  x.json: control arm" in text
    # Its numbers mean nothing, so that none of them makes a policy the cheapest.
    assert verdict.cheapest() == {"builtin:gdn": None}
    assert "Cheapest policy that passes on builtin:gdn: cannot be told, since a self-check failed" in text
    assert verdict_tables(verdict, most_rows=9)[0].answer.startswith("A self-check failed")


def test_without_stored_bits_the_cheapest_cannot_be_told() -> None:
    tasks = Source(report=two_tasks(), where="t")
    text = "\n".join(gate_lines(gate([tasks], Limits(max_drop=1.5))))
    assert "PASS       shared:fp8+sr@L=16\n" in text
    assert "Cheapest policy that passes on builtin:gdn: cannot be told, since the records hold no stored bits" in text
    strict = "\n".join(gate_lines(gate([tasks], Limits(max_drop=0.1))))
    assert "Cheapest policy that passes on builtin:gdn: none" in strict
    known = Source(report=measured(arm("shared:fp16@L=16", {1024: 1e-4}, bits_per_element=16.0)), where="a")
    unknown = Source(report=measured(arm(GOOD, {1024: 1e-4}, bits_per_element=None)), where="b")
    mixed = "\n".join(gate_lines(gate([known, unknown], LIMITS)))
    assert "shared:fp16@L=16 (16 bits), of those whose stored bits are known" in mixed


def test_a_policy_has_to_pass_in_every_record_and_every_task() -> None:
    worse = measured(arm(GOOD, {1024: 5e-3}))
    sources = [Source(report=three_arms(), where="a"), Source(report=worse, where="b")]
    assert outcomes(gate(sources, LIMITS))[GOOD] is Outcome.FAIL
    tasks = Source(report=two_tasks(), where="t")
    both = gate([sources[0], tasks], Limits(max_kl=1e-3, max_drop=1.5))
    metrics = {one.policy: [check.metric for check in one.checks] for one in both.arms}
    assert metrics[GOOD] == ["kl", "accuracy_drop", "accuracy_drop"]
    # A drop of 0.2 [-0.8, 1.2] keeps to 1.5 and not surely to 1.
    assert outcomes(both)[GOOD] is Outcome.PASS
    assert outcomes(gate([tasks], Limits(max_drop=1.0)))[GOOD] is Outcome.UNDECIDED
    assert outcomes(gate([tasks], Limits(max_drop=1.0)))[BAD] is Outcome.FAIL


def test_a_limit_that_nothing_was_measured_for_is_not_kept() -> None:
    sources = [Source(report=measured(arm(GOOD, {1024: 1e-4}), arm("shared:fp16@L=16", {1024: 1e-5})), where="a"),
               Source(report=two_tasks(), where="t")]  # fmt: skip
    verdict = gate(sources, Limits(max_kl=1e-3, max_drop=1.5))
    assert outcomes(verdict) == {
        GOOD: Outcome.PASS,
        BAD: Outcome.FAIL,
        "shared:fp16@L=16": Outcome.UNDECIDED,
    }
    text = "\n".join(gate_lines(verdict))
    assert "accuracy drop <= 1.5 pp: undecided, not measured; measure this policy with `replayeval tasks`" in text
    assert "KL <= 0.001: undecided, not measured; measure this policy with `replayeval kl`" in text


def test_no_flip_in_few_documents_proves_no_accuracy() -> None:
    def outcome(documents: int, limit: float, **changes: Any) -> Outcome:
        one = task_arm(GOOD, 0.0, n=documents).model_copy(
            update={"ci95": None, "flips_to_wrong": 0, "flips_to_right": 0, "discordant": 0} | changes
        )
        record = tasks_report(task("recall", one, n=documents))
        return gate([Source(report=record, where="t")], Limits(max_drop=limit)).arms[0].outcome

    # 1 - 0.025 ** (1 / 100) is 3.62%.
    assert outcome(100, 3.7) is Outcome.PASS
    assert outcome(100, 3.6) is Outcome.UNDECIDED
    # A gain alone bounds no loss; with flips both ways the interval of the record stands.
    gained = {"delta_pp": 1.0, "ci95": (0.0, 3.0), "flips_to_right": 1, "discordant": 1}
    assert outcome(100, 2.0, **gained) is Outcome.UNDECIDED
    assert outcome(100, 2.0, **gained | {"flips_to_wrong": 1}) is Outcome.PASS
    # Without an interval although documents differ there is nothing to decide on.
    assert outcome(100, 50.0, discordant=1) is Outcome.UNDECIDED


def test_the_members_of_a_group_are_judged_as_the_group() -> None:
    good, bad = task_arm(GOOD, -0.2), task_arm(GOOD, -9.0, half=8.9)
    grouped = tasks_report(task("group", good, members=("a", "b")), task("a", bad, n=12), task("b", good, n=88))
    (one,) = gate([Source(report=grouped, where="t")], Limits(max_drop=1.5)).arms
    assert ([check.where for check in one.checks], one.outcome) == (["group"], Outcome.PASS)


def test_the_control_arm_is_never_the_cheapest() -> None:
    control = measured(arm("shared:fp32@L=16", {1024: 1e-9}, bits_per_element=32.0), arm(BAD, {1024: 1e-2}))
    verdict = gate([Source(report=control, where="a")], LIMITS)
    assert outcomes(verdict)["shared:fp32@L=16"] is Outcome.PASS
    assert verdict.cheapest() == {"builtin:gdn": None}


def test_limits_without_a_record_that_they_concern() -> None:
    with pytest.raises(ConfigError, match="at least one limit"):
        judged(Limits())
    with pytest.raises(ConfigError, match="record of `replayeval tasks`"):
        judged(Limits(max_drop=1.0))
    with pytest.raises(ConfigError, match="only records of tasks"):
        gate([Source(report=two_tasks(), where="t")], LIMITS)


def test_an_arm_without_the_length_is_named() -> None:
    record = Source(report=measured(arm(GOOD, {512: 1e-4, 1024: 2e-4}), arm(BAD, {512: 1e-2})), where="run.json")
    with pytest.raises(ConfigError, match=rf"length 1K for the arm {BAD}; all arms have 512\. Choose one"):
        gate([record], LIMITS)
    with pytest.raises(ConfigError, match=r"length 64; it has 512, 1K\. Choose one"):
        gate([record], Limits(max_kl=1e-3, at=64))


def test_one_is_no_plural() -> None:
    one = gate([Source(report=measured(arm(GOOD, {1024: 1e-4}), documents=9), where="x")], LIMITS)
    assert "9 documents: undecided" in "\n".join(gate_lines(one))
    (table,) = verdict_tables(one, most_rows=9)
    assert table.rows[0].need == "needs about 1 more document"
    assert "from no fewer than 1 document." in limits_text(Limits(max_kl=1.0, fewest_documents=1))
    broken = one.model_copy(update={"failed_self_checks": (SelfCheck(source="x", name="control"),)})
    assert summary(broken) == "1 undecided, 1 failed self-check"


def test_lines_say_why() -> None:
    text = "\n".join(gate_lines(judged()))
    assert "FAIL       shared:nvfp4@L=16 (4.5 bits)" in text
    assert "KL to 1K: 2.0e-02 [1.8, 2.2] <= 0.001, 20 documents: fail, the whole interval breaks the limit" in text
    assert "undecided, the interval contains the limit: needs about 1" in text
    assert "Cheapest policy that passes on builtin:gdn: shared:fp8+sr@L=16 (8.25 bits)" in text


def test_junit_has_one_case_per_arm_and_keeps_hostile_text_as_text() -> None:
    hostile = three_arms().model_copy(update={"model": '<script>alert("x")</script>\x1b[31m'})
    verdict = gate([Source(report=hostile, where="run.json")], LIMITS)
    root = ElementTree.fromstring(gate_junit(verdict))
    suite = root.find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("3", "2")
    cases = {case.get("name"): case for case in suite.findall("testcase")}
    kinds = {name: None if (f := case.find("failure")) is None else f.get("type") for name, case in cases.items()}
    assert kinds == {BAD: "fail", GOOD: None, UNSURE: "undecided"}
    assert cases[BAD].get("classname") == '<script>alert("x")</script>\\x1b[31m'


def test_the_badge_follows_the_schema_of_endpoint_badges() -> None:
    badge = json.loads(gate_badge(judged()))
    assert badge == {
        "schemaVersion": 1,
        "label": "state accuracy",
        "message": "1 of 3 pass, 1 undecided",
        "color": "red",
    }
    assert json.loads(gate_badge(judged(policies=[GOOD])))["color"] == "brightgreen"
    assert json.loads(gate_badge(judged(policies=[UNSURE])))["color"] == "yellow"


def test_the_verdict_reads_back() -> None:
    verdict = judged()
    assert GateReport.from_json(verdict.to_json()) == verdict
