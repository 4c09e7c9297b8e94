"""Tables of decode timings by batch, window and read format.

    python benchmarks/kernel_tables.py [--check]
    python benchmarks/kernel_tables.py RECORD.json

The first renews the tables in `docs/kernels.md` from `results/h200_kernels.json`; with `--check` it writes nothing and
exits with 1 where they differ. The second prints those of any record of `replayeval bench kernels --json`.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RECORD = FOLDER / "results" / "h200_kernels.json"
DOCUMENT = FOLDER.parent / "docs" / "kernels.md"
START, END = "<!-- decode timings -->\n", "<!-- end of decode timings -->"
SHORT = {
    "Nemotron-3-Nano-4B": "Nano-4B",
    "Nemotron-3-Super-120B-A12B": "Super-120B",
    "Qwen3.5-4B": "Qwen3.5-4B",
    "Qwen3.5-122B-A10B": "Qwen3.5-122B",
}
LAYERS = {**SHORT, "Kimi-Linear-48B-A3B": "Kimi-Linear-48B"}
"""Those of the paper, and what else can be timed."""
WINDOW, BATCH = 16, 256


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; the first column is text, the others are numbers."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def number(value: float) -> str:
    """Microseconds, to a tenth below 100."""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def by_batch(timings: Sequence[dict[str, Any]]) -> str:
    """One float32 policy at a window of 16, over batches."""
    rows = [
        (
            f"{LAYERS[t['shape']]}, {t['batch']}",
            number(t["conventional_us"]),
            number(t["own_conventional_us"]),
            number(t["cycle_us"]),
            f"{t['conventional_us'] / t['cycle_us']:.2f}",
            number(t["floor_us"]),
            f"{t['cycle_us'] / t['floor_us']:.2f}",
            number(t["aligned_us"]),
        )
        for t in sorted(timings, key=lambda t: (tuple(LAYERS).index(t["shape"]), t["batch"]))
        if t["policy"] == f"shared:fp32@L={WINDOW}"
    ]
    head = (
        "layer, batch",
        "best public conventional",
        "own conventional",
        "replay cycle",
        "speedup",
        "floor",
        "of floor",
    )
    return table((*head, "aligned cycle"), rows)


def by_window(timings: Sequence[dict[str, Any]]) -> str:
    """Float32 states at a batch of 256, over windows."""
    rows = [
        (
            f"{LAYERS[t['shape']]}, {t['window']}",
            number(t["cycle_us"]),
            f"{t['conventional_us'] / t['cycle_us']:.2f}",
            f"{t['cycle_us'] / t['floor_us']:.2f}",
            number(t["read_us"]),
            f"{t['read_us'] / t['read_floor_us']:.2f}",
            number(t["flush_us"]),
            f"{t['flush_us'] / t['flush_floor_us']:.2f}",
        )
        for t in sorted(timings, key=lambda t: (tuple(LAYERS).index(t["shape"]), t["window"]))
        if t["batch"] == BATCH and t["policy"].startswith("shared:fp32@")
    ]
    head = ("layer, window", "cycle", "speedup", "of floor", "reading step", "of floor", "flush of all", "of floor")
    return table(head, rows)


def by_format(timings: Sequence[dict[str, Any]]) -> str:
    """Read copies beside a float32 recurrence, at a batch of 256 and a window of 16."""
    base = {t["shape"]: t for t in timings if t["batch"] == BATCH and t["policy"] == f"shared:fp32@L={WINDOW}"}
    rows = [
        (
            f"{LAYERS[t['shape']]}, {t['policy'].split('@')[0]}",
            number(t["read_us"]),
            f"{base[t['shape']]['read_us'] / t['read_us']:.2f}",
            number(t["read_floor_us"]),
            f"{base[t['shape']]['read_floor_us'] / t['read_floor_us']:.2f}",
            number(t["flush_us"]),
            f"{t['flush_us'] / t['flush_floor_us']:.2f}",
            number(t["cycle_us"]),
            f"{t['conventional_us'] / t['cycle_us']:.2f}",
        )
        for t in sorted(timings, key=lambda t: (tuple(LAYERS).index(t["shape"]), t["read_floor_us"]), reverse=False)
        if t["batch"] == BATCH and t["window"] == WINDOW
    ]
    head = ("layer, policy", "reading step", "faster than fp32", "its floor", "by bytes", "flush of all", "of floor")
    return table((*head, "cycle", "speedup"), rows)


def accuracy(found: Sequence[dict[str, Any]]) -> str:
    """The largest errors per policy over all layers and launches."""
    policies = dict.fromkeys(a["policy"] for a in found if a["launch"])
    rows: list[tuple[str, ...]] = []
    for policy in policies:
        of = [a for a in found if a["policy"] == policy and a["launch"]]
        worst = [max(a[key] for a in of) for key in ("output_error", "state_error")]
        rows.append((policy, str(len(of)), *(f"{x:.1e}" for x in worst)))
    return table(("policy", "launches", "outputs", "states after flushes"), rows)


def section(record: dict[str, Any]) -> str:
    """All tables of a record."""
    speeds = ", ".join(f"{k.replace('_', ' ')} {v / 1e12:.2f}" for k, v in record["ceilings"].items())
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    parts = [
        f"{record['device']}, {versions}; TB/s of plain streams in the same run: {speeds}. Times are microseconds per "
        "layer and token.",
        "**By batch** (paper, Figure 8), `shared:fp32@L=16`, staggered cursors:",
        by_batch(record["timings"]),
        f"**By window** (Figure 9), batch {BATCH}; a reading step finds half a window of records:",
        by_window(record["timings"]),
        f"**By read format** (Figure 11), batch {BATCH}, `L = {WINDOW}`:",
        by_format(record["timings"]),
        "**Errors** relative to float64 (L2), over every launch that was timed:",
        accuracy(record["accuracy"]),
    ]
    if record["refused"]:
        parts.append(f"Not timed, because a check failed or was late: {', '.join(record['refused'])}.")
    if record["left_out"]:
        parts.append("Not measured: " + "; ".join(_grouped(record["left_out"])) + ".")
    return "\n\n".join(parts) + "\n"


def _grouped(cases: Sequence[str]) -> list[str]:
    """Cases, `layer, batch, policy` each with a reason or none, by what follows the layer."""
    layers: dict[str, list[str]] = {}
    for case in cases:
        name, _, rest = case.partition(", ")
        layers.setdefault(rest, []).append(LAYERS.get(name, name))
    return [f"{rest} ({', '.join(names)})" for rest, names in layers.items()]


def main() -> None:
    """Print tables of a record, or renew or compare those of the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, nargs="?", help="JSON file of `replayeval bench kernels`")
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    found = section(json.loads((arguments.record or RECORD).read_text(encoding="utf-8")))
    if arguments.record is not None:
        print(found)
        return
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    renewed = before + START + found + "\n" + END + after
    if arguments.check:
        sys.exit(int(renewed != text))
    DOCUMENT.write_text(renewed, encoding="utf-8")


if __name__ == "__main__":
    main()
