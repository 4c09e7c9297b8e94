"""The figures of a report directory, drawn with matplotlib for papers and slides."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

from matplotlib.figure import Figure

from replayeval.report.cells import PolicyText, Source, is_control, lengths_of
from replayeval.report.figure import kl_figure
from replayeval.report.payload import pareto_front
from replayeval.report.schema import KLReport
from replayeval.report.table import short_policy
from replayeval.report.tasks_schema import TasksReport
from replayeval.report.text import printable, tokens_label

MOST_FIGURES = 4
"""Records of each kind that get figures; the page draws all others on demand."""
_MARKERS = {"shared": "o", "separate": "D", "conventional": "s"}


def figures(sources: Sequence[Source]) -> Iterator[tuple[str, Figure]]:
    """Return figures with the names of their files: KL, cost and drift per KL record, one per tasks record."""
    kl = [source for source in sources if isinstance(source.report, KLReport)]
    tasks = [source for source in sources if isinstance(source.report, TasksReport)]
    for index, source in enumerate(kl[:MOST_FIGURES]):
        report = cast(KLReport, source.report)
        suffix = f"-{index + 1}" if len(kl) > 1 else ""
        if not lengths_of(report):
            continue
        yield f"kl{suffix}", kl_figure(report)
        if any(arm.bits_per_element is not None for arm in report.arms):
            yield f"cost{suffix}", cost_figure(report)
        if source.drift:
            yield f"drift{suffix}", drift_figure(source, report)
    for index, source in enumerate(tasks[:MOST_FIGURES]):
        suffix = f"-{index + 1}" if len(tasks) > 1 else ""
        yield f"tasks{suffix}", tasks_figure(cast(TasksReport, source.report))


def cost_figure(report: KLReport) -> Figure:
    """Return stored bits against mean KL at the longest length, with the Pareto front."""
    figure, axes = _figure()
    n = lengths_of(report)[-1]
    points: list[tuple[int, float, float]] = []
    for index, arm in enumerate(report.arms):
        point = next((p for p in arm.by_length if p.n == n), None)
        if point is None or point.mean is None or point.mean <= 0 or arm.bits_per_element is None:
            continue
        points.append((index, arm.bits_per_element, point.mean))
        policy = PolicyText.parse(arm.policy)
        error = None if point.ci95 is None else [[point.mean - max(point.ci95[0], 0)], [point.ci95[1] - point.mean]]
        axes.errorbar(
            [arm.bits_per_element],
            [point.mean],
            yerr=None if error is None else [[max(low, 0.0) for low in row] for row in error],
            color="0.4" if is_control(arm.policy) else f"C{index % 10}",
            marker=_MARKERS.get(policy.sharing, "^"),
            markerfacecolor=None if policy.stochastic else "none",
            linestyle="none",
            capsize=2,
            label=_literal(short_policy(arm.policy, window=report.window)),
        )
    front = [(bits, kl) for key in pareto_front(points) for index, bits, kl in points if index == key]
    if len(front) > 1:
        axes.step(*zip(*front, strict=True), where="post", color="0.5", linestyle=":", linewidth=1.2)
    axes.set_xscale("log", base=2)
    if points:
        axes.set_yscale("log")
        lowest, highest = min(bits for _, bits, _ in points), max(bits for _, bits, _ in points)
        ticks = [tick for tick in (1, 2, 4, 8, 16, 32, 64, 128) if lowest / 2 < tick < highest * 2]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_xlabel("stored bits per state element")
    axes.set_ylabel(f"mean KL up to {tokens_label(n)} (nats per token)")
    axes.set_title(_literal(report.model), fontsize="medium")
    return figure


def drift_figure(source: Source, report: KLReport) -> Figure:
    """Return mean KL by position for a record with the numbers of every token."""
    figure, axes = _figure()
    for index, (policy, points) in enumerate((source.drift or {}).items()):
        shown = [point for point in points if point.mean > 0]
        control = is_control(policy)
        colour = "0.4" if control else f"C{index % 10}"
        middles = [float(max(point.start, 1) * point.stop) ** 0.5 for point in shown]
        axes.plot(
            middles,
            [point.mean for point in shown],
            color=colour,
            linestyle="--" if control else "-",
            label=_literal(short_policy(policy, window=report.window)),
        )
        bands = [(m, p.ci95) for m, p in zip(middles, shown, strict=True) if p.ci95 is not None and p.ci95[0] > 0]
        if bands:
            lows, highs = [low for _, (low, _) in bands], [high for _, (_, high) in bands]
            axes.fill_between([middle for middle, _ in bands], lows, highs, color=colour, alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("position in the generation (tokens)")
    axes.set_ylabel("KL at that position (nats per token)")
    axes.set_title(_literal(report.model), fontsize="medium")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def tasks_figure(report: TasksReport) -> Figure:
    """Return the change of accuracy by task and arm, with 95% intervals."""
    figure, axes = _figure()
    policies = list(dict.fromkeys(arm.policy for task in report.tasks for arm in task.arms))
    for index, policy in enumerate(policies):
        offset = 0.0 if len(policies) == 1 else 0.6 * (index / (len(policies) - 1) - 0.5)
        found = [
            (row + offset, arm.delta_pp, arm.ci95)
            for row, task in enumerate(report.tasks)
            for arm in task.arms
            if arm.policy == policy and arm.delta_pp is not None
        ]
        bars = [(0.0, 0.0) if ci is None else (max(d - ci[0], 0.0), max(ci[1] - d, 0.0)) for _, d, ci in found]
        label = printable(policy) if report.window is None else short_policy(policy, window=report.window)
        axes.errorbar(
            [delta for _, delta, _ in found],
            [row for row, _, _ in found],
            xerr=[list(side) for side in zip(*bars, strict=True)] if bars else None,
            color=f"C{index % 10}",
            marker=_MARKERS.get(PolicyText.parse(policy).sharing, "^"),
            linestyle="none",
            capsize=2,
            label=_literal(label),
        )
    axes.axvline(0, color="0.6", linewidth=1)
    axes.set_yticks(range(len(report.tasks)), [_literal(task.task) for task in report.tasks])
    axes.invert_yaxis()
    axes.set_xlabel("accuracy minus reference (percentage points)")
    axes.set_title(_literal(f"{report.model}, reference {report.reference}"), fontsize="medium")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _figure() -> tuple[Figure, Any]:
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = cast(Any, figure).subplots()
    axes.grid(visible=True, which="major", alpha=0.3)
    return figure, axes


def _literal(text: str) -> str:
    # A dollar sign would start mathematical typesetting.
    return printable(text).replace("$", r"\$")
