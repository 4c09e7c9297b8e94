import io

import pytest
from rich.console import Console

from replayeval.report.page import kl_html
from replayeval.report.schema import KLReport
from replayeval.report.table import KLTable
from tests.report.samples import arm, point, report, two_arms


def rendered(record: KLReport, *, width: int = 100, color: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=color, color_system="truecolor" if color else None)
    console.print(KLTable(record))
    return stream.getvalue()


def test_two_lengths_make_one_table_of_100_columns() -> None:
    text = rendered(two_arms())
    assert max(map(len, text.splitlines())) <= 100
    header, row = (next(line for line in text.splitlines() if word in line) for word in ("policy", "separate:"))
    assert all(name in header for name in ("bits", "KL to 512", "KL to 1K", "top-1", "dNLL", "/floor"))
    assert "separate:nvfp4/fp16+sr " in row
    assert "3.2e-03 [2.9, 3.5]" in row
    assert "4.4e-03 [4.0, 4.8]" in row
    assert "99.31%" in row
    assert "+1.3e-03" in row
    assert "312x" in row
    assert text.count("policy") == 1
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


def test_many_lengths_fold_and_every_one_stays() -> None:
    means: dict[int, float | None] = {1024 * 2**i: 1e-3 * 1.5**i for i in range(8)}
    text = rendered(report(arm("shared:fp32@L=16", means), arm("separate:nvfp4/fp16+sr@L=16", means)))
    assert max(map(len, text.splitlines())) <= 100
    for label in ("1K", "2K", "4K", "8K", "16K", "32K", "64K", "128K"):
        assert f"KL to {label}" in text
    assert text.count("separate:nvfp4/fp16+sr") > 1
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_digit_is_cut_at_any_width(width: int) -> None:
    text = rendered(two_arms(), width=width)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert "4.4e-03 [4.0, 4.8]" in text or width < 80


def test_divergence_and_undefined_values_are_named() -> None:
    record = report(
        arm("shared:fp16@L=16", {512: 1e-3, 1024: None}, diverged_at=700, nll_delta=None),
        arm("shared:fp32@L=16", {512: 0.0, 1024: 0.0}, ratio_to_floor=None),
    )
    text = rendered(record)
    row = next(line for line in text.splitlines() if "shared:fp16" in line)
    assert "1.0e-03" in row
    assert "div." in row
    assert "n/a" in row
    assert "stopped being finite" in text


def test_documents_per_length_are_told_when_they_differ() -> None:
    odd = arm("shared:fp8@L=16", {512: 1e-3, 1024: 1e-3}, by_length=(point(512, 1e-3), point(1024, 1e-3, documents=2)))
    assert "512: 4, 1K: 2" in " ".join(rendered(report(odd)).split())


@pytest.mark.parametrize("name", ["[red]model[/red]", "[/]", "evil\x1b[2Jname", "<script>alert(1)</script>", "a$b$c"])
def test_foreign_names_are_shown_as_they_are(name: str) -> None:
    record = report(arm("shared:fp8@L=16", {512: 1e-3, 1024: 1e-3}), model=name)
    text = rendered(record, color=True)
    assert "\x1b[2J" not in text
    if "\x1b" not in name:
        assert name in text
    page = kl_html(record)
    assert "<script>" not in page
    assert "\x1b" not in page


def test_a_window_of_its_own_stays_in_the_policy() -> None:
    text = rendered(report(arm("shared:fp8@L=32", {512: 1e-3}), arm("shared:fp8@L=16", {512: 1e-3})))
    assert "shared:fp8@L=32" in text
    assert "shared:fp8@L=16" not in text


def test_failed_checks_are_in_the_notebook_view() -> None:
    record = two_arms()
    failed = record.model_copy(update={"checks": (record.checks[0].model_copy(update={"passed": False}),)})
    assert "Failed checks: control arm" in kl_html(failed)
    assert "Failed checks" not in kl_html(record)
