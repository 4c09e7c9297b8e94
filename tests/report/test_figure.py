from pathlib import Path

import numpy as np

from replayeval.report.figure import kl_figure
from replayeval.report.schema import KLReport
from tests.report.samples import arm, report, two_arms


def legend_texts(record: KLReport) -> list[str]:
    (axes,) = kl_figure(record).axes
    legend = axes.get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def test_lines_carry_the_numbers_of_the_record() -> None:
    (axes,) = kl_figure(two_arms()).axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    line = lines["separate:nvfp4/fp16+sr"]
    assert np.asarray(line.get_xdata()).tolist() == [512.0, 1024.0]
    assert np.asarray(line.get_ydata()).tolist() == [3.2e-3, 4.4e-3]
    assert axes.get_xscale() == "log"
    assert axes.get_yscale() == "log"
    assert len(axes.collections) == 2
    assert lines["shared:fp32"].get_linestyle() == "--"


def test_zero_and_divergence_are_told_in_the_legend() -> None:
    record = report(
        arm("shared:fp32@L=16", {512: 0.0, 1024: 0.0}),
        arm("shared:fp16@L=16", {512: 1e-3, 1024: None}, diverged_at=700),
    )
    assert legend_texts(record) == ["shared:fp32 (exactly 0)", "shared:fp16 (diverged at 700)"]


def test_a_figure_of_nothing_but_zeros_and_odd_names_can_be_saved(tmp_path: Path) -> None:
    record = report(arm("shared:fp32@L=16", {512: 0.0}), model="$x_{$ [b]\x1b[31m")
    kl_figure(record).savefig(tmp_path / "kl.png")
    assert (tmp_path / "kl.png").stat().st_size > 1000
