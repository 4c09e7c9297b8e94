"""Tables of decode timings: those of `docs/kernels.md`, or of a record of `replayeval bench kernels --json`.

    python benchmarks/kernel_tables.py [--check]
    python benchmarks/kernel_tables.py RECORD.json

The first renews the tables in the document from `results/h200_decode_*.json`; with `--check` it writes nothing and
exits with 1 where they differ. The second prints tables by batch, window and read format.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
DOCUMENT = FOLDER.parent / "docs" / "kernels.md"
START, END = "<!-- decode timings -->\n", "<!-- end of decode timings -->"
SHORT = {
    "Nemotron-3-Nano-4B": "Nano-4B",
    "Nemotron-3-Super-120B-A12B": "Super-120B",
    "Qwen3.5-4B": "Qwen3.5-4B",
    "Qwen3.5-122B-A10B": "Qwen3.5-122B",
}
WINDOW, BATCH = 16, 256
KINDS = (("cycle", "floor_us"), ("read", "read_floor_us"), ("flush", "flush_floor_us"))


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
            f"{SHORT[t['shape']]}, {t['batch']}",
            number(t["conventional_us"]),
            number(t["own_conventional_us"]),
            number(t["cycle_us"]),
            f"{t['conventional_us'] / t['cycle_us']:.2f}",
            number(t["floor_us"]),
            f"{t['cycle_us'] / t['floor_us']:.2f}",
            number(t["aligned_us"]),
        )
        for t in sorted(timings, key=lambda t: (tuple(SHORT).index(t["shape"]), t["batch"]))
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
            f"{SHORT[t['shape']]}, {t['window']}",
            number(t["cycle_us"]),
            f"{t['conventional_us'] / t['cycle_us']:.2f}",
            f"{t['cycle_us'] / t['floor_us']:.2f}",
            number(t["read_us"]),
            f"{t['read_us'] / t['read_floor_us']:.2f}",
            number(t["flush_us"]),
            f"{t['flush_us'] / t['flush_floor_us']:.2f}",
        )
        for t in sorted(timings, key=lambda t: (tuple(SHORT).index(t["shape"]), t["window"]))
        if t["batch"] == BATCH and t["policy"].startswith("shared:fp32@")
    ]
    head = ("layer, window", "cycle", "speedup", "of floor", "reading step", "of floor", "flush of all", "of floor")
    return table(head, rows)


def by_format(timings: Sequence[dict[str, Any]]) -> str:
    """Read copies beside a float32 recurrence, at a batch of 256 and a window of 16."""
    base = {t["shape"]: t for t in timings if t["batch"] == BATCH and t["policy"] == f"shared:fp32@L={WINDOW}"}
    rows = [
        (
            f"{SHORT[t['shape']]}, {t['policy'].split('@')[0]}",
            number(t["read_us"]),
            f"{base[t['shape']]['read_us'] / t['read_us']:.2f}",
            number(t["read_floor_us"]),
            f"{base[t['shape']]['read_floor_us'] / t['read_floor_us']:.2f}",
            number(t["flush_us"]),
            f"{t['flush_us'] / t['flush_floor_us']:.2f}",
            number(t["cycle_us"]),
            f"{t['conventional_us'] / t['cycle_us']:.2f}",
        )
        for t in sorted(timings, key=lambda t: (tuple(SHORT).index(t["shape"]), t["read_floor_us"]), reverse=False)
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
        parts.append("For lack of time not measured: " + "; ".join(record["left_out"]) + ".")
    return "\n\n".join(parts) + "\n"


def rounds() -> list[dict[str, Any]]:
    """The runs on a card so far, oldest first."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("h200_decode_*.json"))]


def latest(found: Sequence[dict[str, Any]]) -> str:
    """The last timing of every layer, policy and batch, with the run it is from."""
    last: dict[tuple[str, str, int], tuple[int, dict[str, Any]]] = {}
    for run, record in enumerate(found, 1):
        for row in record["rows"]:
            last[row["shape"], row["policy"], row["batch"]] = run, row
    rows: list[tuple[str, ...]] = []
    for (shape, policy, batch), (run, t) in sorted(
        last.items(), key=lambda item: (-item[0][2], item[0][1] != f"shared:fp32@L={WINDOW}", item[0][1], item[0][0])
    ):
        parts = [(t.get(f"{kind}_us"), t.get(floor)) for kind, floor in KINDS]
        cells = [cell for value, floor in parts for cell in _with_floor(value, floor)]
        conventional = t["conventional_us"]
        faster = f"{conventional / t['cycle_us']:.2f}"
        rows.append((f"{SHORT[shape]}, {policy}, {batch}", str(run), number(conventional), faster, *cells))
    head = ("layer, policy, batch", "run", "public conventional", "speedup")
    return table((*head, "cycle", "of floor", "reading step", "of floor", "flush of all", "of floor"), rows)


def _with_floor(value: float | None, floor: float | None) -> tuple[str, str]:
    if value is None:
        return "–", "–"
    return number(value), "–" if floor is None else f"{value / floor:.2f}"


def forms(found: Sequence[dict[str, Any]]) -> str:
    """What each form of the kernels took with float32 states at a batch of 256."""
    shapes = tuple(SHORT)
    rows: list[tuple[str, ...]] = []
    for run, record in enumerate(found, 1):
        of = {
            row["shape"]: row
            for row in record["rows"]
            if row["batch"] == BATCH and row["policy"] == f"shared:fp32@L={WINDOW}"
        }
        cells = [
            " / ".join(number(of[s][f"{kind}_us"]) for kind, _ in KINDS) if s in of else "not measured" for s in shapes
        ]
        rows.append((f"{run}. {record['form']} ({record['commit']})", *cells))
    return table(("run: form (commit)", *SHORT.values()), rows)


def measured() -> str:
    """Everything between the marks."""
    found = rounds()
    return "\n\n".join(
        (
            "All on one NVIDIA H200 each; microseconds per layer and token; the best launch of a sweep.",
            latest(found),
            f"Cycle / reading step / flush of all, float32, batch {BATCH}, `L = {WINDOW}`, by form of the kernels:",
            forms(found),
            "",
        )
    )


def main() -> None:
    """Print tables of a record, or renew or compare those of the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, nargs="?", help="JSON file of `replayeval bench kernels`")
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    if arguments.record is not None:
        print(section(json.loads(arguments.record.read_text(encoding="utf-8"))))
        return
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    renewed = before + START + measured() + END + after
    if arguments.check:
        sys.exit(int(renewed != text))
    DOCUMENT.write_text(renewed, encoding="utf-8")


if __name__ == "__main__":
    main()
