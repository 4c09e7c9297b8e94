"""Measure the built-in models and put what comes out into the documents: `make evidence`.

Writes docs/evidence/MODEL-{kl,windows,recall}.json, the figure docs/evidence/builtin.png, the tables between the marks
in README.md and docs/builtin.md, and the slices that tests/models/test_builtin_slices.py repeats. What was measured
before is taken from the working directory, so a stopped measurement goes on. `--draw` only renews figure and tables
from the records.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from evidence_text import evidence_figure, measured_tables, readme_block, windows_and_ratios

from replayeval.engine.forcing import Forcing
from replayeval.engine.precision import exact_float32
from replayeval.engine.recall import recalled_answers
from replayeval.measure import measure_kl
from replayeval.models.builtin import BUILTIN_MODELS, builtin_corpus, builtin_path
from replayeval.models.builtin.documents import DocumentKind
from replayeval.policies import parse_policies
from replayeval.report.schema import KLReport
from replayeval.stats.paired import ArmAnswers, compare
from replayeval.subject import load_subject
from replayssm.backend import Execution

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "evidence"
POLICIES = (
    "shared:fp32",
    "shared:fp16+sr",
    "shared:fp8",
    "shared:fp8+sr",
    "shared:nvfp4",
    "shared:nvfp4+sr",
    "separate:fp8/fp16+sr",
    "separate:nvfp4/fp32",
    "separate:nvfp4/fp16+sr",
)
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
WINDOWS = (1, 4, 16, 64)
RECALL_TOKENS = 4096
PARTS = ("slices", "recall", "windows", "lengths")
SLICE_POLICIES = ("shared:fp8", "shared:nvfp4", "separate:nvfp4/fp32")
SLICE_CHUNKS = (1024, 1000, 700, 512, 333, 128)
SLICES = ROOT / "tests" / "models" / "builtin_slices.json"


def _progress(name: str) -> Any:
    last = -1

    def show(done: int, total: int) -> None:
        nonlocal last
        percent = 100 * done // total
        if percent != last:
            last = percent
            print(f"\r{name}: {percent}% of {total} tokens", end="", file=sys.stderr, flush=True)

    return show


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Where to measure: a device and what advances the states there."""

    device: str
    backend: str


def measure_lengths(name: str, work: Path, docs: int, machine: Machine) -> KLReport:
    """Measure all policies over documents of 32K tokens."""
    result = measure_kl(
        f"builtin:{name}",
        arms=POLICIES,
        lengths=LENGTHS,
        docs=docs,
        device=machine.device,
        backend=machine.backend,
        out=work / f"{name}-kl",
        resume=True,
        progress=_progress(f"{name} KL"),
    )
    return result.report


def measure_windows(name: str, work: Path, docs: int, machine: Machine) -> KLReport:
    """Measure shared and separate checkpoints over the replay window."""
    forms = ("shared:fp8", "shared:nvfp4", "separate:nvfp4/fp32")
    arms = ["shared:fp32@L=16", *(f"{form}@L={window}" for form in forms for window in WINDOWS)]
    result = measure_kl(
        f"builtin:{name}",
        arms=arms,
        lengths=(4096,),
        docs=docs,
        device=machine.device,
        backend=machine.backend,
        out=work / f"{name}-windows",
        resume=True,
        progress=_progress(f"{name} windows"),
    )
    return result.report


def measure_recall(name: str, docs: int, machine: Machine) -> dict[str, Any]:
    """Count the answers that each policy has right, paired with the reference."""
    subject = load_subject(
        f"builtin:{name}", None, dtype="auto", device=machine.device, revision=None, trust_remote_code=False
    )
    books = builtin_corpus(docs, RECALL_TOKENS, 0, mixture=(DocumentKind.RECALL,))
    forcing = Forcing(arms=parse_policies(POLICIES, None, 16), execution=Execution.parse(machine.backend))
    show = _progress(f"{name} recall")
    done = 0

    def advanced(tokens: int) -> None:
        nonlocal done
        done += tokens
        show(done, docs * RECALL_TOKENS)

    with exact_float32():
        answered = recalled_answers(subject.head, books, forcing, progress=advanced)
    arms = [
        ArmAnswers(policy=policy, scores=[document.right[row].astype(np.float64) for document in answered])
        for row, policy in enumerate(answered[0].policies)
    ]
    comparison = compare(arms[0], arms[1:], seed=0)
    answers = sum(document.right.shape[1] for document in answered)
    return {"tokens": RECALL_TOKENS, "answers": answers, **dataclasses.asdict(comparison)}


def measure_slice(name: str) -> dict[str, Any]:
    """Measure one document of 2K tokens, and how far its means move when float32 sums are taken in another order.

    Where a rounding falls the other way, everything after it is another sample of the same error. The spread over
    chunk sizes is therefore what a repetition on another machine has to keep to. On the CPU, where tests repeat it.
    """
    means: dict[str, list[float]] = {policy: [] for policy in SLICE_POLICIES}
    nll = 0.0
    for chunk in SLICE_CHUNKS:
        result = measure_kl(f"builtin:{name}", arms=SLICE_POLICIES, lengths=(2048,), docs=1, chunk=chunk, device="cpu")
        for policy, scores in zip(SLICE_POLICIES, result.scores[0].kl_nats, strict=True):
            means[policy].append(float(scores.mean()))
        nll = float(result.scores[0].nll_reference_nats.mean())
    logs = {policy: np.log(values) for policy, values in means.items()}
    return {
        "tokens": 2048,
        "chunks": list(SLICE_CHUNKS),
        "nll_reference_nats": nll,
        "kl_nats": {policy: float(np.exp(values.mean())) for policy, values in logs.items()},
        "log_spread": {policy: float(values.std(ddof=1)) for policy, values in logs.items()},
    }


def _keep(report: KLReport, path: Path) -> None:
    values = json.loads(report.to_json())
    # Where the measurement was kept is nobody's business.
    values["provenance"]["arguments"]["given"].pop("out", None)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _put(path: Path, block: str, mark: str = "evidence") -> None:
    start, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(start)
    _, after = rest.split(end)
    path.write_text(f"{before}{start}\n{block}\n{end}{after}", encoding="utf-8")


def draw() -> None:
    """Renew figure and tables from the records."""
    records = {name: _load(name) for name in BUILTIN_MODELS}
    evidence_figure(records).savefig(RECORDS / "builtin.png", dpi=110)
    _put(ROOT / "README.md", readme_block(records))
    builtin = ROOT / "docs" / "builtin.md"
    _put(builtin, windows_and_ratios(records))
    cards = {name: (builtin_path(name) / "measurements.json").read_text(encoding="utf-8") for name in BUILTIN_MODELS}
    _put(builtin, measured_tables({name: json.loads(card) for name, card in cards.items()}), "measured")


def _load(name: str) -> dict[str, Any]:
    return {
        "kl": KLReport.load(RECORDS / f"{name}-kl.json"),
        "windows": KLReport.load(RECORDS / f"{name}-windows.json"),
        "recall": json.loads((RECORDS / f"{name}-recall.json").read_text(encoding="utf-8")),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="renew figure and tables from the records, measure nothing")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "evidence", help="where measurements are kept")
    parser.add_argument("--models", nargs="+", default=list(BUILTIN_MODELS), choices=BUILTIN_MODELS)
    parser.add_argument("--docs", type=int, default=8, help="documents of 32K tokens; twice as many for recall")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="torch", help="what advances the states: torch, or triton on a GPU")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="what to measure")
    options = parser.parse_args()
    RECORDS.mkdir(exist_ok=True)
    machine = Machine(device=options.device, backend=options.backend)
    for name in [] if options.draw else options.models:
        if "slices" in options.parts:
            slices = json.loads(SLICES.read_text(encoding="utf-8")) if SLICES.is_file() else {}
            SLICES.write_text(json.dumps(slices | {name: measure_slice(name)}, indent=1) + "\n", encoding="utf-8")
        if "recall" in options.parts:
            recall = measure_recall(name, 2 * options.docs, machine)
            (RECORDS / f"{name}-recall.json").write_text(json.dumps(recall, indent=1) + "\n", encoding="utf-8")
        if "windows" in options.parts:
            windows = measure_windows(name, options.work, max(1, options.docs // 2), machine)
            _keep(windows, RECORDS / f"{name}-windows.json")
        if "lengths" in options.parts:
            kl = measure_lengths(name, options.work, options.docs, machine)
            _keep(kl, RECORDS / f"{name}-kl.json")
    if all(
        (RECORDS / f"{name}-{part}.json").is_file() for name in BUILTIN_MODELS for part in ("kl", "windows", "recall")
    ):
        draw()


if __name__ == "__main__":
    main()
