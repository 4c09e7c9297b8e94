"""Tables and figure of the evidence on the built-in models, from its records."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from matplotlib.figure import Figure

from replayeval.report.schema import ArmReport, KLReport, RoundingRatio
from replayeval.report.text import tokens_label, with_interval
from replayeval.stats.bootstrap import DocumentResampler, ratio_interval
from replayssm.policy import Policy

Records = Mapping[str, Mapping[str, Any]]
CONTROL = "shared:fp32"


def _short(policy: str) -> str:
    return policy.removesuffix("@L=16")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_row(head), _row(["---"] * len(head)), *(_row(row) for row in rows)]


def _points(arm: ArmReport, lengths: Sequence[int]) -> list[str]:
    by_length = {point.n: point for point in arm.by_length}
    cells: list[str] = []
    for n in lengths:
        point = by_length[n]
        cells.append("—" if point.mean is None else with_interval(point.mean, point.ci95))
    return cells


def _recall(record: Mapping[str, Any]) -> dict[str, str]:
    reference = record["reference"]
    cells = {"reference": f"{100 * reference['accuracy']:.1f}%"}
    for arm in record["arms"]:
        cell = f"{100 * arm['delta']:+.1f}"
        if arm["ci95"] is not None:
            low, high = arm["ci95"]
            cell += f" [{100 * low:.1f}, {100 * high:.1f}]"
        cells[arm["answers"]["policy"]] = cell
    return cells


def readme_block(records: Records) -> str:
    """Return the README's tables: KL by length and recall, one table per model."""
    lines = ["## What state policies do to the built-in models", ""]
    for name, record in records.items():
        report = cast(KLReport, record["kl"])
        lengths = [n for n in (1024, 4096, 8192, 32768) if any(p.n == n for p in report.arms[0].by_length)]
        recall = _recall(record["recall"])
        rows = [
            [f"`{_short(arm.policy)}`", f"{arm.bits_per_element:.3g}", *_points(arm, lengths), recall[arm.policy]]
            for arm in report.arms
        ]
        answered = record["recall"]
        lines += [
            f"`builtin:{name}`, {report.docs} documents; recall of {answered['answers']} answers in "
            f"{answered['reference']['documents']} documents of {tokens_label(answered['tokens'])} tokens, "
            f"{recall['reference']} with the float32 reference:",
            "",
            *_table(
                ["policy", "bits", *(f"KL to {tokens_label(n)}" for n in lengths), "recall, change in points"], rows
            ),
            "",
            _separate_gain(report),
            "",
        ]
    lines.append("![KL by length, rounding ratio and window sweep of the built-in models](docs/evidence/builtin.png)")
    return "\n".join(lines)


def _separate_gain(report: KLReport) -> str:
    """Say how much a second copy in float32 gains NVFP4, per length."""
    points = {arm.policy: {p.n: p.mean for p in arm.by_length} for arm in report.arms}
    shared, separate = points["shared:nvfp4@L=16"], points["separate:nvfp4/fp32@L=16"]
    gains = [
        f"{above / below:.1f} times to {tokens_label(n)}"
        for n, above in shared.items()
        if above is not None and (below := separate[n])
    ]
    return f"The KL of `shared:nvfp4` over that of `separate:nvfp4/fp32`: {', '.join(gains)}."


def measured_tables(measurements: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what the models can do: recall and English by length, recall by task and distance, decays of the heads."""
    rows: list[list[str]] = []
    for name, values in measurements.items():
        for report in values["reports"]:
            bits = report["english_bits_per_byte"]
            rows.append(
                [
                    f"`{name}`",
                    f"{report['tokens']:,}",
                    f"{100 * report['recall']:.1f}%{_by_book(report['by_book'])}",
                    f"{report['answers']:,} in {len(report['by_book'])}",
                    _share(report["not_latest"]),
                    f"{bits:.3f} bits/byte (perplexity {2**bits:.2f} per byte)",
                ]
            )
    head = ["model", "tokens", "recall", "answers in books", "recall that needs the key", "held-out English"]
    lines = _table(head, rows)
    for key, title in (("by_kind", "task"), ("by_distance", "distance in tokens, from")):
        heads = list(next(iter(measurements.values()))["reports"][0][key])
        rows = [
            [f"`{name}`", f"{report['tokens']:,}", *(_share(report[key][head]) for head in heads)]
            for name, values in measurements.items()
            for report in values["reports"]
        ]
        lines += ["", f"Recall by {title}:", "", *_table(["model", "tokens", *heads], rows)]
    told: list[str] = []
    for name, values in measurements.items():
        lives = [head["half_life_tokens"] for head in values["half_life_tokens"]]
        slow = sum(life > 1000 for life in lives)
        told.append(f"`{name}` from {min(lives):.1f} tokens, with {slow} of {len(lives)} heads above 1,000")
    lines += [
        "",
        "Half-lives of the heads on the built-in documents (tokens after which the mean decay has halved the state): "
        f"{'; '.join(told)}. Each model's `measurements.json` lists them all.",
    ]
    return "\n".join(lines)


def _by_book(books: Sequence[tuple[int, int]]) -> str:
    resampler = DocumentResampler(len(books), seed=0)
    right, asked = (resampler.totals([np.array([book[i]], dtype=np.float64) for book in books]) for i in (0, 1))
    interval = ratio_interval(right, asked, units=resampler.units)
    return "" if interval is None else f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


def _share(tally: Sequence[float | None]) -> str:
    share, answers = tally
    return "—" if share is None else f"{100 * share:.1f}% of {answers}"


def windows_and_ratios(records: Records) -> str:
    """Return the tables of docs/builtin.md: RTN over SR by length, and KL by replay window."""
    lines = ["## What state policies do to them", ""]
    for name, record in records.items():
        report, windows = cast(KLReport, record["kl"]), cast(KLReport, record["windows"])
        lengths = [point.n for point in report.arms[0].by_length]
        lines += [
            f"`builtin:{name}`, mean KL with rounding to nearest over that with stochastic rounding, up to N and "
            "(in brackets) its interval; above 1, stochastic rounding is better:",
            "",
            *_table(
                ["formats", *(tokens_label(n) for n in lengths)],
                [[f"`{_short(ratio.nearest)}`", *_ratio_cells(ratio)] for ratio in report.rounding_ratios],
            ),
            "",
            f"`builtin:{name}`, mean KL up to {tokens_label(windows.arms[0].by_length[-1].n)} by replay window "
            f"({windows.docs} documents):",
            "",
            *_window_table(windows),
            "",
        ]
    return "\n".join(lines).rstrip()


def _ratio_cells(ratio: RoundingRatio) -> list[str]:
    cells: list[str] = []
    for point in ratio.by_length:
        if point.ratio is None:
            cells.append("—")
        elif point.ci95 is None:
            cells.append(f"{point.ratio:.2f}")
        else:
            cells.append(f"{point.ratio:.2f} [{point.ci95[0]:.2f}, {point.ci95[1]:.2f}]")
    return cells


def _by_form(windows: KLReport) -> dict[str, dict[int, ArmReport]]:
    forms: dict[str, dict[int, ArmReport]] = {}
    for arm in windows.arms:
        policy = Policy.parse(arm.policy)
        form = arm.policy.split("@")[0]
        if form != CONTROL:
            forms.setdefault(form, {})[policy.window_tokens] = arm
    return forms


def _window_table(windows: KLReport) -> list[str]:
    forms = _by_form(windows)
    sizes = sorted({window for arms in forms.values() for window in arms})
    rows = [
        [f"`{form}`", *(_points(arms[size], [arms[size].by_length[-1].n])[0] for size in sizes)]
        for form, arms in forms.items()
    ]
    return _table(["policy", *(f"L = {size}" for size in sizes)], rows)


def evidence_figure(records: Records) -> Figure:
    """Draw one row per model: KL by length, local RTN/SR ratio by length, KL by window."""
    figure = Figure(figsize=(15, 4.4 * len(records)), layout="constrained")
    grid = cast(Any, figure).subplots(len(records), 3, squeeze=False)
    for (name, record), (left, middle, right) in zip(records.items(), grid, strict=True):
        _draw_lengths(left, name, record["kl"])
        _draw_ratios(middle, name, record["kl"])
        _draw_windows(right, name, record["windows"])
    return figure


def _length_axis(axes: Any, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [tokens_label(n) for n in lengths])
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)


def _draw_lengths(axes: Any, name: str, report: KLReport) -> None:
    for index, arm in enumerate(report.arms):
        points = [p for p in arm.by_length if p.local_mean]
        style = {"color": "0.5", "linestyle": "--"} if arm.policy.startswith(CONTROL) else {"color": f"C{index % 10}"}
        axes.plot(
            [p.n for p in points], [p.local_mean for p in points], marker="o", ms=3, label=_short(arm.policy), **style
        )
        bands = [(p.n, *p.local_ci95) for p in points if p.local_ci95 is not None and p.local_ci95[0] > 0]
        axes.fill_between(*zip(*bands, strict=True), color=style["color"], alpha=0.15) if bands else None
    axes.set_yscale("log")
    _length_axis(axes, [p.n for p in report.arms[0].by_length])
    axes.set(
        xlabel="N (tokens)", ylabel="KL over (N/2, N], nats per token", title=f"builtin:{name}, window {report.window}"
    )
    axes.legend(fontsize="x-small")


def _draw_ratios(axes: Any, name: str, report: KLReport) -> None:
    for ratio in report.rounding_ratios:
        points = [p for p in ratio.by_length if p.local_ratio is not None]
        axes.plot([p.n for p in points], [p.local_ratio for p in points], marker="o", ms=3, label=_short(ratio.nearest))
        bands = [(p.n, *p.local_ci95) for p in points if p.local_ci95 is not None]
        if bands:
            axes.fill_between(*zip(*bands, strict=True), alpha=0.15)
    axes.axhline(1.0, color="0.5", linestyle=":")
    axes.set_yscale("log", base=2)
    _length_axis(axes, [p.n for p in report.arms[0].by_length])
    axes.set(xlabel="N (tokens)", ylabel="KL, nearest / stochastic, over (N/2, N]", title=f"builtin:{name}: rounding")
    axes.legend(fontsize="x-small")


def _draw_windows(axes: Any, name: str, windows: KLReport) -> None:
    forms = _by_form(windows)
    sizes = sorted({size for arms in forms.values() for size in arms})
    for form, arms in forms.items():
        points = [(size, arm.by_length[-1]) for size, arm in sorted(arms.items()) if arm.by_length[-1].mean is not None]
        axes.plot([size for size, _ in points], [p.mean for _, p in points], marker="o", ms=3, label=form)
        bands = [(size, *p.ci95) for size, p in points if p.ci95 is not None]
        if bands:
            axes.fill_between(*zip(*bands, strict=True), alpha=0.15)
    axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    length = tokens_label(windows.arms[0].by_length[-1].n)
    axes.set(
        xlabel="replay window L (tokens)",
        ylabel=f"mean KL to {length}, nats per token",
        title=f"builtin:{name}: window",
    )
    axes.legend(fontsize="x-small")
