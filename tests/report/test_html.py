"""A report's files, without a browser: what is in them, that nothing from outside is markup, and how they grow."""

import csv
import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from replayeval.errors import ConfigError
from replayeval.report.cells import PolicyText, Source, is_control
from replayeval.report.drift import drift_by_arm, drift_edges
from replayeval.report.gate import Limits, gate
from replayeval.report.html import MOST_ROWS, report_html
from replayeval.report.markdown import escaped
from replayeval.report.payload import pareto_front
from replayeval.report.rows import csv_text
from replayeval.report.write import write_report
from tests.report.browser import executable
from tests.report.samples import arm
from tests.report.task_samples import two_tasks
from tests.report.test_gate import measured, three_arms
from tests.stats.samples import scores_of

HOSTILE = "</script><script>alert(1)</script><!--"
LIMITS = Limits(max_kl=1e-3)


def embedded(html: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def page(*sources: Source, limits: Limits = LIMITS) -> str:
    return report_html(sources, gate(sources, limits))


def test_a_directory_has_page_markdown_tables_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [Source(report=three_arms(), where="a.json"), Source(report=two_tasks(), where="t.json")]
    made = write_report(tmp_path / "out", sources, gate(sources, Limits(max_kl=1e-3, max_drop=1.0)))
    assert made == tmp_path / "out" / "index.html"
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert names == {
        *("index.html", "report.md", "verdict.json", "verdict.csv", "kl.csv", "tasks.csv", "quartiles.csv"),
        "report-files.json",
        *(f"figures/{name}.{kind}" for name in ("kl", "cost", "tasks") for kind in ("png", "svg")),
    }
    text = (tmp_path / "out" / "report.md").read_text()
    assert "**Cheapest policy that passes:" not in text
    assert "**No policy passes yet; shared:fp8+sr, shared:int8 undecided.**" in text
    assert "needs about" in text
    monkeypatch.setattr("replayeval.report.write.figures", lambda sources: iter(()))
    # A report of less takes away the files of the one before.
    write_report(tmp_path / "out", sources[:1], gate(sources[:1], LIMITS))
    assert not (tmp_path / "out" / "tasks.csv").exists()
    assert not (tmp_path / "out" / "figures" / "tasks.svg").exists()


def test_files_that_no_report_wrote_are_neither_deleted_nor_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replayeval.report.write.figures", lambda sources: iter(()))
    sources = [Source(report=three_arms(), where="a.json")]

    def write() -> None:
        write_report(tmp_path, sources, gate(sources, LIMITS))

    mine = {name: tmp_path / name for name in ("tasks.csv", "figures/holiday.png", "figures/plot.svg", "notes.txt")}
    (tmp_path / "figures").mkdir()
    for name, path in mine.items():
        path.write_text(name)
    write()
    write()
    assert {name: path.read_text() for name, path in mine.items()} == {name: name for name in mine}
    # Tasks are reported for the first time, where a file of that name has been lying all along.
    sources.append(Source(report=two_tasks(), where="t.json"))
    with pytest.raises(ConfigError, match=r"holds tasks\.csv, which no report wrote there"):
        write()
    assert mine["tasks.csv"].read_text() == "tasks.csv"


@pytest.mark.parametrize("name", ["index.html", "kl.csv", "figures/kl.png", "report-files.json"])
def test_a_folder_that_is_no_report_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / name).write_text("{}")
    sources = [Source(report=three_arms(), where="a.json")]
    with pytest.raises(ConfigError, match="which no report wrote there"):
        write_report(tmp_path, sources, gate(sources, LIMITS))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]
    assert (tmp_path / name).read_text() == "{}"


def test_a_marker_names_no_file_outside_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replayeval.report.write.figures", lambda sources: iter(()))
    sources = [Source(report=three_arms(), where="a.json")]
    (tmp_path / "mine").write_text("")
    write_report(tmp_path / "out", sources, gate(sources, LIMITS))
    marker = tmp_path / "out" / "report-files.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"files": ["../mine", "figures/..", "kl.csv", 3]}))
    for name in ("index.html", "report.md", "verdict.json", "verdict.csv"):
        (tmp_path / "out" / name).unlink()
    write_report(tmp_path / "out", sources, gate(sources, LIMITS))
    assert (tmp_path / "mine").exists()


def test_the_csv_holds_full_precision_and_provenance() -> None:
    from replayeval.report.rows import kl_rows, verdict_rows

    source = Source(report=measured(arm("shared:fp8@L=16", {64: 1 / 3})), where="a.json")
    (row,) = csv.DictReader(io.StringIO(csv_text(kl_rows([source]))))
    assert float(row["kl_nats"]) == 1 / 3
    assert (row["documents"], row["tokens"], row["source"]) == ("20", str(20 * 64), "a.json")
    assert "torch 2.13.0" in row["provenance"]
    (judged,) = csv.DictReader(io.StringIO(csv_text(verdict_rows(gate([source], LIMITS)))))
    assert (judged["verdict"], judged["metric"], float(judged["limit"])) == ("fail", "kl", 1e-3)


@pytest.mark.parametrize("text", ["=HYPERLINK(1)", "+1", "-1", "@x", "\tx"])
def test_no_text_is_a_formula_to_a_spreadsheet(text: str) -> None:
    (row,) = csv.DictReader(io.StringIO(csv_text([{"name": text, "value": -1.5}])))
    assert row == {"name": "'" + text, "value": "-1.5"}


def test_nothing_from_outside_is_markup() -> None:
    html = page(Source(report=three_arms().model_copy(update={"model": HOSTILE}), where=HOSTILE))
    assert HOSTILE not in html
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in html
    assert embedded(html)["models"][0]["name"] == HOSTILE
    assert html.count("<script") == html.count("</script>") == 3


def test_the_policy_lets_only_the_scripts_of_the_page_run() -> None:
    html = page(Source(report=three_arms(), where="a"))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy.startswith("default-src &#39;none&#39;; script-src &#39;sha256-")
    assert "unsafe-eval" not in policy
    assert not re.search(r'(src|href)="http', html[: html.index('<script type="application/json"')])


def test_every_number_has_its_interval_documents_and_origin() -> None:
    html = page(Source(report=three_arms(), where="a.json"))
    for text in ("2.0e-02 [1.8, 2.2]", "20 documents, 1K", "a.json", "torch 2.13.0, seed 0"):
        assert text in html
    point = embedded(html)["fields"]["point"]
    first = embedded(html)["models"][0]["cells"][0]["arms"][0]["points"][0]
    assert dict(zip(point, first, strict=True))["documents"] == 20


def test_published_numbers_stand_beside_the_measured_ones(tmp_path: Path) -> None:
    from replayeval.report.published import compare
    from replayeval.report.schema import RatioAtLength, RoundingRatio

    at = RatioAtLength(n=1024, documents=20, ratio=0.7, ci95=(0.6, 0.8), local_ratio=None, local_ci95=None)
    pair = RoundingRatio(nearest="shared:fp8@L=16", stochastic="shared:fp8+sr@L=16", by_length=(at,))
    record = three_arms().model_copy(update={"model": "org/q", "rounding_ratios": (pair,)})
    found = compare([record], ["table11"], models={"org/q": "Qwen3.5-4B"})
    sources = [Source(report=record, where="a.json")]
    write_report(tmp_path, sources, gate(sources, LIMITS), published=found)
    html = (tmp_path / "index.html").read_text()
    # Published for this model at 1K: 0.76.
    for text in ('<td class="num">0.76</td>', "0.7 [0.6, 0.8]", "-0.06", '<td class="num">yes</td>', "not measured"):
        assert text in html
    with (tmp_path / "published.csv").open() as stream:
        rows = [row for row in csv.DictReader(stream) if row["measured"]]
    assert [(row["policy"], row["published"], row["measured"]) for row in rows] == [("shared:fp8", "0.76", "0.7")]


def test_a_failed_self_check_is_the_first_thing_said() -> None:
    from replayeval.report.schema import Check

    broken = three_arms().model_copy(update={"checks": (Check(name="control", passed=False, value=1.0, limit=0.1),)})
    html = page(Source(report=broken, where="a.json"))
    assert html.index("Self-check failed: control") < html.index("Verdict</h2>")


def test_ten_thousand_cells_are_reported_in_seconds_and_none_silently_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = three_arms()
    # Validated records are many times as slow to build as to report; sweeps build them from their units.
    sources = [
        Source(
            report=base.model_copy(update={"model": f"org/model-{number % 40}", "window": 1 + number % 128}),
            where=f"c{number}",
        )
        for number in range(10_000)
    ]
    # Figures are those of the first few records, however many there are.
    monkeypatch.setattr("replayeval.report.write.figures", lambda sources: iter(()))
    begun = time.process_time()
    write_report(tmp_path, sources, gate(sources, LIMITS))
    assert time.process_time() - begun < 30
    html = (tmp_path / "index.html").read_text()
    assert len(html) < 12_000_000
    assert f"Showing {MOST_ROWS} of 60,000 rows; kl.csv holds all." in html
    with (tmp_path / "kl.csv").open() as stream:
        assert sum(1 for _ in stream) == 1 + 10_000 * 3 * 2


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    sources = [Source(report=three_arms(), where="a.json")]
    with pytest.raises(ConfigError, match="cannot write the report to"):
        write_report(tmp_path / "out", sources, gate(sources, LIMITS))


def test_the_pareto_front_against_its_definition() -> None:
    import numpy as np

    generator = np.random.default_rng(0)
    for _ in range(50):
        points = [(i, float(c), float(v)) for i, (c, v) in enumerate(generator.integers(0, 6, (12, 2)))]
        front = pareto_front(points)
        worth = {
            (c, v) for i, c, v in points if not any((a <= c and b <= v) and (a, b) != (c, v) for _, a, b in points)
        }
        assert {points[i][1:] for i in front} == worth
        assert len(front) == len(worth)


@pytest.mark.parametrize(
    ("policy", "read", "stochastic", "window", "control"),
    [
        ("shared:fp32@L=16", "fp32", False, 16, True),
        ("shared:fp32+sr@L=16", "fp32", True, 16, False),
        ("separate:nvfp4/fp16+sr@L=32", "nvfp4", True, 32, False),
        ("conventional:fp8[tile=32,max=240]", "fp8[tile=32,max=240]", False, None, False),
        ("an endpoint", "an endpoint", False, None, False),
    ],
)
def test_policies_are_taken_apart(policy: str, read: str, stochastic: bool, window: int | None, control: bool) -> None:
    parsed = PolicyText.parse(policy)
    assert (parsed.read, parsed.stochastic, parsed.window, is_control(policy)) == (read, stochastic, window, control)


def test_policies_are_taken_apart_as_the_core_does() -> None:
    from replayssm.policy import Policy, precision_arms

    policies = [*precision_arms("nvfp4", window=16), Policy.parse("conventional:int8"), Policy.parse("shared:fp8@L=4")]
    for policy in policies:
        parsed = PolicyText.parse(str(policy))
        assert parsed.sharing == str(policy).partition(":")[0]
        assert parsed.window == (None if "@L=" not in str(policy) else policy.window_tokens)


def test_drift_bins_cover_every_token_once() -> None:
    assert drift_edges(10) == [0, 10]
    edges = drift_edges(4096)
    assert edges[0] == 0
    assert edges[-1] == 4096
    assert all(a < b for a, b in zip(edges, edges[1:], strict=False))
    scores = [scores_of([[1.0] * 16 + [3.0] * 16, [1.0] * 20 + [float("nan")] * 12], index=i) for i in range(3)]
    found = drift_by_arm(scores, longest=32, seed=0)
    calm, diverged = found.values()
    assert [(p.start, p.mean) for p in calm][:2] == [(0, 1.0), (16, 3.0)]
    assert [(p.stop, p.documents) for p in diverged] == [(16, 3), (19, 3)]


@pytest.mark.parametrize("text", ["a|b", "<b>x</b>", "![x](http://e.org/i.png)", "`code`", "# title", "$x$"])
def test_markdown_takes_names_for_text(text: str) -> None:
    assert not re.search(r"(?<!\\)[|`*_#\[\]!$]|<", escaped(text))


@pytest.mark.parametrize("variable", ["CI", "REPLAYEVAL_REQUIRE_BROWSER"])
def test_the_tests_in_a_browser_are_skipped_nowhere_but_on_a_machine_of_ones_own(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    for name in ("CI", "REPLAYEVAL_REQUIRE_BROWSER"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        executable()
    monkeypatch.setenv(variable, "1")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        executable()
