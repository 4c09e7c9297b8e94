"""Draw decode timings by batch, window and read format.

    python benchmarks/kernel_figure.py [RECORD.json] [--out FIGURE]

By default `results/h200_kernels.json` becomes `docs/kernels.png`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernel_tables import BATCH, RECORD, SHORT, WINDOW
from matplotlib.figure import Figure

FIGURE = Path(__file__).parents[1] / "docs" / "kernels.png"
COLOURS = dict(zip(SHORT, ("#0072b2", "#56b4e9", "#d55e00", "#e69f00"), strict=True))
READS = {f"separate:{name}/fp32": name for name in ("fp16", "int8", "fp8", "mxfp8", "nvfp4", "mxfp4")}


def draw(record: dict[str, Any]) -> Figure:
    """Speedups over the best public conventional kernel by batch and window, and of reading steps by format."""
    timings = record["timings"]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    figure.suptitle(f"{record['device']}; dotted: what bytes alone allow", fontsize="small")
    batches, windows, formats = figure.subplots(1, 3)
    for name, colour in COLOURS.items():
        of = [t for t in timings if t["shape"] == name and t["policy"].startswith("shared:fp32@")]
        _line(batches, [t for t in of if t["window"] == WINDOW], "batch", SHORT[name], colour)
        _line(windows, [t for t in of if t["batch"] == BATCH], "window", SHORT[name], colour)
    for axes, label in ((batches, "sequences"), (windows, "replay window, tokens")):
        axes.axhline(1.0, color="#888888", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.set(xlabel=label, ylim=(0, None))
    batches.set(ylabel="times the best public conventional kernel", title=f"float32 states, L = {WINDOW}")
    windows.set(title=f"float32 states, {BATCH} sequences")
    batches.legend(frameon=False, fontsize=8)
    _bars(formats, [t for t in timings if t["batch"] == BATCH and t["window"] == WINDOW])
    for axes in (batches, windows, formats):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _line(axes: Any, timings: Sequence[dict[str, Any]], key: str, label: str, colour: str) -> None:
    points = sorted(
        (t[key], t["conventional_us"] / t["cycle_us"], t["conventional_us"] / t["floor_us"]) for t in timings
    )
    if points:
        where, measured, ceiling = zip(*points, strict=True)
        axes.plot(where, measured, marker="o", markersize=3, color=colour, label=label)
        # What bytes alone allow; for few sequences it is far above anything.
        kept = [(x, y) for x, y in zip(where, ceiling, strict=True) if y <= 1.3 * max(p[1] for p in points)]
        axes.plot([x for x, _ in kept], [y for _, y in kept], color=colour, linewidth=0.8, linestyle=":")


def _bars(axes: Any, timings: Sequence[dict[str, Any]]) -> None:
    found = {(t["shape"], t["policy"].split("@")[0]): t for t in timings}
    base = {name: found.get((name, "shared:fp32")) for name in SHORT}
    for place, policy in enumerate(READS):
        for number, (name, colour) in enumerate(COLOURS.items()):
            one, whole = found.get((name, policy)), base[name]
            if one is None or whole is None:
                continue
            x = place + 0.2 * (number - 1.5)
            axes.bar(x, whole["read_us"] / one["read_us"], width=0.18, color=colour)
            ceiling = whole["read_floor_us"] / one["read_floor_us"]
            axes.plot([x - 0.09, x + 0.09], [ceiling, ceiling], color=colour, linewidth=1.2, linestyle=":")
    axes.axhline(1.0, color="#888888", linewidth=0.8)
    axes.set_xticks(range(len(READS)), READS.values())
    axes.set(
        xlabel="read copy",
        ylabel="times a step that reads float32",
        title=f"read copies, {BATCH} sequences, L = {WINDOW}",
    )


def main() -> None:
    """Draw a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, nargs="?", default=RECORD, help="JSON of `replayeval bench kernels`")
    parser.add_argument("--out", type=Path, default=FIGURE)
    arguments = parser.parse_args()
    draw(json.loads(arguments.record.read_text(encoding="utf-8"))).savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
