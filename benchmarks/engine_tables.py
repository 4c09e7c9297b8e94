"""Write the tables of `docs/window-kernels.md` from what was measured on a card.

    python benchmarks/engine_tables.py [--check]

The records are those of `engine_speed.py`, and timings of single layers. With `--check` nothing is written; exits with
1 where the document says something else than the records.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernel_tables import table

FOLDER = Path(__file__).parent
ENGINES = tuple(FOLDER / "results" / f"h200_engine_{name}.json" for name in ("qwen3.5-4b", "nemotron-3-nano-4b"))
WINDOWS = FOLDER / "results" / "h200_windows.json"
DOCUMENT = FOLDER.parent / "docs" / "window-kernels.md"
START, END = "<!-- engine timings -->\n", "<!-- end of engine timings -->"
KINDS = {
    "walk of the windows": ("walk_kernel", "step_kernel"),
    "read copies: stores and reads": ("serve_kernel",),
    "operands of the windows": ("prepare_kernel", "fold_kernel"),
    "casts of tokens to float32": ("tokens_kernel",),
    "projection onto the vocabulary": ("nvjet_sm90_tss",),
    "sums over the vocabulary": ("streaming_kl_kernel",),
}
"""What kernels do, by the beginning of their names; `tss` are cuBLAS products with float32 results."""
GIGA, KILO = 1e9, 1e3


def speeds(records: Sequence[dict[str, Any]]) -> str:
    """The engine beside the prefill and the step engine, over lengths."""
    rows: list[tuple[str, ...]] = []
    for record in records:
        step = record.get("step", {}).get("row_tokens_per_s")
        for run in record["runs"]:
            for engine in run.get("engine", ()):
                speed, prefill = engine["row_tokens_per_s"], run.get("prefill")
                kept = engine["weights_bytes"] + engine["cache_bytes"]
                rows.append(
                    (
                        f"{record['model']}, {run['tokens']:,}",
                        f"{engine['seconds']:.1f}",
                        f"{speed / KILO:.1f}",
                        "—" if prefill is None else f"{prefill['row_tokens_per_s'] / KILO:.1f}",
                        "—" if prefill is None else f"{speed / prefill['row_tokens_per_s']:.2f}",
                        "—" if step is None else f"{speed / step:,.0f}",
                        f"{engine['beyond_weights_and_cache_bytes'] / GIGA:.2f}",
                        "—" if prefill is None else f"{(prefill['peak_bytes'] - kept) / GIGA:.2f}",
                    )
                )
    head = (
        "model, tokens",
        "seconds",
        "engine, 1,000 row-tokens/s",
        "plain prefill, 1,000 row-tokens/s",
        "ratio",
        "times the step engine",
        "GB beyond weights and caches",
        "the same of the prefill",
    )
    return table(head, rows)


def shares(record: dict[str, Any]) -> str:
    """Where the time of the card goes, beside that of a prefill."""
    found = record["breakdown"]
    spent = {kind: 0.0 for kind in KINDS}
    for kernel in found["engine"]["kernels"]:
        for kind, names in KINDS.items():
            if kernel["kernel"].startswith(names):
                spent[kind] += kernel["us"]
    rest = found["engine"]["total_us"] - sum(spent.values())
    rows = [(kind, f"{us / KILO:.1f}") for kind, us in spent.items() if us]
    rows += [
        ("the rest of the model", f"{rest / KILO:.1f}"),
        ("all of it", f"{found['engine']['total_us'] / KILO:.1f}"),
        ("a plain prefill of the same tokens", f"{found['prefill']['total_us'] / KILO:.1f}"),
    ]
    return table((f"{record['model']}, {found['tokens']:,} tokens", "ms of kernels"), rows)


def windows(record: dict[str, Any]) -> str:
    """One layer and chunk over rows: wall time, and the kernels of each kind."""
    kinds = tuple(dict.fromkeys(kind for found in record["records"] for kind in found["us"]))
    head = (
        f"{record['shape']}, one layer, {record['tokens']:,} tokens",
        "ms of wall time",
        *(f"µs: {kind}" for kind in kinds),
    )
    rows = [
        (
            found["rows"] if found["variant"] is None else f"{found['rows']}; {found['variant']}",
            f"{found['seconds'] * KILO:.2f}",
            *(f"{found['us'][kind]:,.0f}" if kind in found["us"] else "—" for kind in kinds),
        )
        for found in record["records"]
    ]
    return table(head, rows)


def tables() -> str:
    """Everything that goes between the marks of the document."""
    engines = [json.loads(path.read_text(encoding="utf-8")) for path in ENGINES if path.exists()]
    parts = [speeds(engines), *(shares(e) for e in engines if "breakdown" in e)]
    if WINDOWS.exists():
        parts.append(windows(json.loads(WINDOWS.read_text(encoding="utf-8"))))
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the document is what the records say")
    check = parser.parse_args().check
    text = DOCUMENT.read_text(encoding="utf-8")
    before, mark, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not mark or not end:
        print(f"expected the marks {START.strip()} and {END} in {DOCUMENT}", file=sys.stderr)
        return 2
    wanted = before + START + tables() + END + after
    if check:
        if wanted != text:
            print(f"{DOCUMENT} differs from its records; run this script without --check", file=sys.stderr)
        return int(wanted != text)
    DOCUMENT.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
