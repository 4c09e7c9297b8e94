"""A verdict as lines of text, as JUnit XML and as a badge."""

import json
from collections.abc import Iterator
from xml.etree import ElementTree

from replayeval.report.gate import ArmVerdict, GateCheck, GateReport
from replayeval.report.text import counted, percent, printable, with_interval
from replayeval.stats.gate import NO_NUMBER, Outcome

METRICS = {"kl": "KL", "top1": "top-1", "nll_delta": "dNLL", "accuracy_drop": "accuracy drop"}
_RESULTS = {Outcome.PASS: "passed", Outcome.FAIL: "failed", Outcome.UNDECIDED: "undecided"}
_COLOURS = {Outcome.PASS: "brightgreen", Outcome.FAIL: "red", Outcome.UNDECIDED: "yellow"}


def gate_lines(report: GateReport) -> Iterator[str]:
    """Return the verdict line by line: per model the arms, cheapest first, each with its checks and reasons."""
    model = None
    for arm in report.arms:
        if arm.model != model:
            model = arm.model
            yield printable(model)
        yield f"  {arm.outcome.upper():<9}  {printable(arm.policy)}{bits_text(arm)}"
        yield from (f"             {check_line(check)}" for check in arm.checks)
    for check in report.failed_self_checks:
        yield f"FAILED SELF-CHECK  {printable(check.source)}: {printable(check.name)}; its numbers mean nothing"
    for name, arm in report.cheapest().items():
        unknown = [passing for passing in report.passing(name) if passing.bits_per_element is None]
        if report.failed_self_checks:
            found = "cannot be told, since a self-check failed"
        elif arm is not None:
            among = ", of those whose stored bits are known" if unknown else ""
            found = f"{printable(arm.policy)}{bits_text(arm)}{among}"
        else:
            found = "cannot be told, since the records hold no stored bits" if unknown else "none"
        yield f"Cheapest policy that passes on {printable(name)}: {found}"
    yield summary(report)


def summary(report: GateReport) -> str:
    """Return how many arms have which outcome, in one line."""
    counts = [f"{count} {_RESULTS[outcome]}" for outcome, count in report.counts().items() if count]
    broken = len(report.failed_self_checks)
    return ", ".join([*counts, *([counted(broken, "failed self-check")] if broken else [])]) or "no arms"


def bits_text(arm: ArmVerdict) -> str:
    """Return ` (4.51 bits)`, or nothing where the bits are unknown."""
    return "" if arm.bits_per_element is None else f" ({arm.bits_per_element:.3g} bits)"


def check_line(check: GateCheck) -> str:
    """Return one check with its number, interval, limit, documents, outcome and reason."""
    where = printable(check.where)
    if not check.source:
        return f"{METRICS[check.metric]} {limit_text(check)}: {check.outcome}, {advice(check)}"
    name = f"{METRICS[check.metric]} {'in' if check.metric == 'accuracy_drop' else 'to'} {where}"
    documents = counted(check.documents, "document")
    return f"{name}: {value_text(check)} {limit_text(check)}, {documents}: {check.outcome}, {advice(check)}"


def value_text(check: GateCheck) -> str:
    """Return the number and its interval in the form of its metric."""
    if check.value is None:
        return "n/a"
    if check.metric == "top1":
        bounds = "" if check.ci95 is None else f" [{', '.join(percent(bound).rstrip('%') for bound in check.ci95)}]"
        return percent(check.value) + bounds
    if check.metric == "accuracy_drop":
        bounds = "" if check.ci95 is None else f" [{check.ci95[0]:+z.1f}, {check.ci95[1]:+z.1f}]"
        return f"{check.value:+z.1f}{bounds} pp"
    return with_interval(check.value, check.ci95)


def limit_text(check: GateCheck) -> str:
    """Return the limit with its direction."""
    if check.metric == "top1":
        return f">= {100 * check.limit:g}%"
    return f"<= {check.limit:g}{' pp' if check.metric == 'accuracy_drop' else ''}"


def advice(check: GateCheck) -> str:
    """Return why a check came out as it did, and what would decide it."""
    reason = printable(check.reason)
    if check.outcome is not Outcome.UNDECIDED or not check.documents or check.reason == NO_NUMBER:
        return reason
    if check.more_documents is None:
        return f"{reason}; how many more documents would decide cannot be told"
    return f"{reason}: needs about {counted(check.more_documents, 'more document')}"


def gate_junit(report: GateReport) -> str:
    """Return the verdict as JUnit XML: one test case per model and arm; undecided counts as a failure of that type."""
    suite = ElementTree.Element("testsuite", name="replayeval gate")
    failures = 0
    for arm in report.arms:
        case = ElementTree.SubElement(
            suite, "testcase", classname=printable(arm.model), name=printable(arm.policy), time="0"
        )
        if arm.outcome is not Outcome.PASS:
            failures += 1
            missed = [check for check in arm.checks if check.outcome is not Outcome.PASS]
            failure = ElementTree.SubElement(case, "failure", type=str(arm.outcome), message=check_line(missed[0]))
            failure.text = "\n".join(check_line(check) for check in missed)
        output = ElementTree.SubElement(case, "system-out")
        output.text = "\n".join(check_line(check) for check in arm.checks)
    for check in report.failed_self_checks:
        failures += 1
        case = ElementTree.SubElement(
            suite, "testcase", classname=printable(check.source), name=printable(check.name), time="0"
        )
        ElementTree.SubElement(case, "failure", type="self-check", message="a check of the apparatus on itself failed")
    suite.set("tests", str(len(report.arms) + len(report.failed_self_checks)))
    suite.set("failures", str(failures))
    suite.set("errors", "0")
    suite.set("skipped", "0")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def gate_badge(report: GateReport, *, label: str = "state accuracy") -> str:
    """Return the verdict in the format of a shields.io endpoint badge."""
    counts = report.counts()
    worst = next((outcome for outcome in (Outcome.FAIL, Outcome.UNDECIDED) if counts[outcome]), Outcome.PASS)
    if report.failed_self_checks:
        message, colour = "self-check failed", "red"
    else:
        message, colour = f"{counts[Outcome.PASS]} of {len(report.arms)} pass", _COLOURS[worst]
        if counts[Outcome.UNDECIDED]:
            message += f", {counts[Outcome.UNDECIDED]} undecided"
    return json.dumps({"schemaVersion": 1, "label": label, "message": message, "color": colour}) + "\n"
