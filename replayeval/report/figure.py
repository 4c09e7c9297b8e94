"""A measurement as a figure."""

from collections.abc import Iterable
from typing import Any, cast

from matplotlib.figure import Figure

from replayeval.report.schema import ArmReport, KLReport
from replayeval.report.table import short_policy
from replayeval.report.text import printable, tokens_label


def kl_figure(report: KLReport) -> Figure:
    """Return mean KL by generation length on logarithmic axes, with 95% bands and the floor of the control arm.

    A mean of exactly zero has no place on a logarithmic axis; such an arm is named in the legend with its zero.
    """
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = cast(Any, figure).subplots()
    lengths = sorted({point.n for arm in report.arms for point in arm.by_length})
    drawn = [_draw(axes, arm, color=f"C{index % 10}", window=report.window) for index, arm in enumerate(report.arms)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [tokens_label(n) for n in lengths])
    axes.minorticks_off()
    if any(drawn):
        axes.set_yscale("log")
    axes.set_xlabel("generation length N (tokens)")
    axes.set_ylabel("mean KL up to N (nats per token)")
    axes.set_title(_literal(f"{report.model}, window {report.window}, reference {report.reference}"), fontsize="medium")
    axes.grid(visible=True, which="major", alpha=0.3)
    if report.arms:
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _draw(axes: Any, arm: ArmReport, *, color: str, window: int) -> bool:
    """Draw one arm; return whether any of its points can be shown on a logarithmic axis."""
    label = _literal(short_policy(arm.policy, window=window))
    points = [(point.n, point.mean, point.ci95) for point in arm.by_length if point.mean is not None]
    shown = [(n, mean, ci95) for n, mean, ci95 in points if mean > 0]
    if arm.diverged_at is not None:
        label += f" (diverged at {arm.diverged_at})"
    elif points and not shown:
        label += " (exactly 0)"
    control = arm.ratio_to_floor == 1 or arm.policy.startswith("shared:fp32")
    axes.plot(
        _floats(n for n, _, _ in shown),
        _floats(mean for _, mean, _ in shown),
        label=label,
        color="0.4" if control else color,
        linestyle="--" if control else "-",
        marker="o",
        markersize=4,
    )
    bands = [(n, ci95) for n, _, ci95 in shown if ci95 is not None and ci95[0] > 0]
    if bands:
        lows, highs = _floats(low for _, (low, _) in bands), _floats(high for _, (_, high) in bands)
        axes.fill_between(_floats(n for n, _ in bands), lows, highs, color="0.4" if control else color, alpha=0.15)
    return bool(shown)


def _floats(values: Iterable[float]) -> list[float]:
    return [float(value) for value in values]


def _literal(text: str) -> str:
    # A dollar sign would start mathematical typesetting.
    return printable(text).replace("$", r"\$")
