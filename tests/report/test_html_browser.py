"""The page in a real browser: it draws, it asks for nothing, and foreign text stays text."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replayeval.report.cells import DriftPoint, Source
from replayeval.report.gate import Limits, gate
from replayeval.report.html import report_html
from replayeval.report.schema import RatioAtLength, RoundingRatio
from tests.nightly.nights import FP8, NVFP4, Weather, play
from tests.report.browser import Seen, browsing, opened
from tests.report.samples import arm
from tests.report.task_samples import two_tasks
from tests.report.test_gate import measured as with_documents

HOSTILE = (
    '<script>alert("model")</script><img src=x onerror=alert(1)>"\'><a href="javascript:alert(2)">\u202e</a>{{7*7}}'
)
PLOTS = ("kl", "pareto", "drift", "window", "ratio", "top1", "nll", "tasks", "quartiles")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as found:
        yield found


def full_record(model: str) -> Any:
    arms = [
        arm("shared:fp32@L=16", {512: 1e-12, 1024: 2e-12}, ratio_to_floor=1.0, bits_per_element=32.0),
        arm("shared:nvfp4@L=16", {512: 4e-3, 1024: 9e-3}, bits_per_element=4.5),
        arm("shared:nvfp4+sr@L=16", {512: 5e-3, 1024: 6e-3}, bits_per_element=4.5),
        arm("shared:nvfp4@L=64", {512: 1e-3, 1024: 2e-3}, bits_per_element=4.5),
        arm("separate:nvfp4/fp16+sr@L=16", {512: 1e-4, 1024: 2e-4}, bits_per_element=20.5),
        arm("conventional:int8", {512: 1e-3, 1024: None}, diverged_at=700, bits_per_element=8.3),
    ]
    ratio = RoundingRatio(
        nearest="shared:nvfp4@L=16",
        stochastic="shared:nvfp4+sr@L=16",
        by_length=tuple(
            RatioAtLength(n=n, documents=20, ratio=r, ci95=(0.8 * r, 1.2 * r), local_ratio=r, local_ci95=None)
            for n, r in ((512, 0.8), (1024, 1.5))
        ),
    )
    return with_documents(*arms, model=model, rounding_ratios=(ratio,), provenance={"data": "pg19", "seed": 3})


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bins = [(0, 16, 1e-9), (16, 19, 1e-3)]
    points = [DriftPoint(start=a, stop=b, documents=20, mean=kl, ci95=(kl / 2, 2 * kl)) for a, b, kl in bins]
    drift = {"shared:nvfp4@L=16": points}
    sources = [
        Source(report=full_record("builtin:gdn"), where="a.json", drift=drift),
        Source(report=two_tasks(), where="t.json"),
        Source(report=full_record(HOSTILE), where=f"{HOSTILE}.json"),
    ]
    limits = Limits(max_kl=1e-3, min_top1=0.9, max_nll_delta=0.01, max_drop=2.0)
    path = tmp_path_factory.mktemp("report") / "index.html"
    path.write_text(report_html(sources, gate(sources, limits), title=HOSTILE), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def wide(browser: Any, report: Path) -> Iterator[Seen]:
    """The page on a wide light screen; it takes seconds to load, and tests leave it as they found it."""
    with opened(browser, report) as seen:
        yield seen


def check_drawn(seen: Seen, *, width: int) -> None:
    drawn = {name: seen.page.locator(f"#plot-{name} .plot svg.main-svg").count() for name in PLOTS}
    assert all(drawn.values()), drawn
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    ticks = seen.page.locator("#plot-kl .xtick").all_text_contents()
    assert list(filter(None, ticks)) == ["512", "1K"]
    assert seen.complaints == []
    assert seen.requests == []
    assert seen.dialogs == []


def background(seen: Seen) -> str:
    return seen.page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_every_plot_is_drawn_without_a_complaint_and_without_a_request(wide: Seen) -> None:
    check_drawn(wide, width=1280)
    assert background(wide) == "rgb(255, 255, 255)"


def test_so_it_is_on_a_narrow_dark_screen_which_begins_with_the_verdict(browser: Any, report: Path) -> None:
    with opened(browser, report, width=390, height=844, scheme="dark") as seen:
        check_drawn(seen, width=390)
        assert background(seen) != "rgb(255, 255, 255)"
        answer = seen.page.locator(".answer", has_text="separate:nvfp4/fp16+sr").first
        assert answer.bounding_box()["y"] < 844


def test_the_verdict_is_sorted_by_cost(wide: Seen) -> None:
    rows = wide.page.locator("article.model").first.locator("table.verdict tbody tr")
    texts = rows.locator("td[data-name=bits]").all_text_contents()
    # Policies that only tasks measured have no bits; they come last.
    bits = [math.inf if text == "n/a" else float(text) for text in texts]
    assert len(bits) == 7
    assert bits == sorted(bits)
    assert rows.first.locator(".badge").text_content() == "fail"


def test_hostile_text_is_inert(wide: Seen) -> None:
    page = wide.page
    page.select_option("#model", index=1)
    page.wait_for_function("document.getElementById('model').value === '1'")
    assert page.locator("img").count() == 0
    assert page.locator("a[href^=javascript]").count() == 0
    # Plotly's own script, the data and the page's script are all there is.
    assert page.locator("script").count() == 3
    assert "<script>alert" in page.locator("h1").text_content()
    assert "49" not in page.title()
    page.select_option("#model", index=0)
    assert wide.dialogs == []
    assert wide.complaints == []


def test_hover_legend_length_and_theme_work(wide: Seen) -> None:
    page = wide.page
    lines = "document.querySelectorAll('#plot-kl .scatterlayer path.js-line').length"
    before = page.evaluate(lines)
    button = page.locator("#legend button", has_text="shared:nvfp4+sr")
    button.click()
    page.wait_for_function(f"{lines} < {before}")
    button.click()
    page.wait_for_function(f"{lines} === {before}")
    page.select_option("#length", label="512")
    page.wait_for_function("document.querySelector('#plot-pareto .ytitle').textContent.includes('512')")
    page.evaluate("Plotly.Fx.hover(document.querySelector('#plot-kl .plot'), [{curveNumber: 1, pointNumber: 0}])")
    text = page.locator("#plot-kl .hoverlayer").text_content()
    assert "20 documents" in text
    assert "nats" in text
    page.click("#theme")
    assert background(wide) != "rgb(255, 255, 255)"
    page.click("#theme")
    assert wide.complaints == []


def test_the_content_policy_stops_what_the_templates_do_not_expect(wide: Seen) -> None:
    # If escaping ever failed, a script that came with a name would still not run.
    wide.page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.hacked = 1';"
        " document.body.append(s); s.remove(); fetch('https://example.org/').catch(() => {}); }"
    )
    assert wide.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in text for text in wide.complaints)
    assert wide.requests == []
    wide.complaints.clear()


def test_the_page_of_a_night_has_its_changes_and_trends(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replayeval.report.write.figures", lambda sources: iter(()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replayeval.nightly.night.write_night", lambda history, nights, reports, limits=None: history)
        play(tmp_path, [Weather(drop=0.1 * (number % 3)) for number in range(8)])
    worse = Weather(factor={FP8: 1.6}, diverged=(NVFP4,), drop=0.2)
    (night,) = play(tmp_path, [worse], first=8)
    assert not night.passed
    with opened(browser, night.page) as seen:
        page = seen.page
        assert "new regressions" in page.locator("#changes .answer").text_content()
        rows = page.locator("#changes tbody tr")
        assert rows.count() == len(night.record.findings)
        assert "shared:fp8@L=16" in "".join(rows.all_text_contents())
        assert page.locator("#plot-trend svg.main-svg").count() > 0
        assert page.locator("#trend-group option").count() >= 2
        assert seen.complaints == []
        assert seen.requests == []
