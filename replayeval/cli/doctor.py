"""`replayeval doctor`: is this installation fit to measure?"""

import importlib.util
import inspect
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from replayeval.report.text import printable

EXAMPLES = """\b
Example:
  replayeval doctor
"""
REQUIRED = ("torch", "transformers", "datasets", "safetensors", "numpy", "scipy", "pandas", "pyarrow", "pydantic")
OPTIONAL = {
    "triton": "Triton kernels",
    "fla": "flash-linear-attention",
    "mamba_ssm": "mamba-ssm",
    "causal_conv1d": "causal-conv1d",
    "kernels": "Hugging Face kernels",
    "lm_eval": "lm-eval tasks",
    "ray": "sweeps on many machines",
}
# The four words of Philox4x32-10 for key 0 and counter 0, from the known-answer tests of Random123.
PHILOX_ZERO = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


class Status(StrEnum):
    """How one finding is to be read."""

    GOOD = "ok"
    NOTE = "note"
    FAILED = "FAILED"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    subject: str
    status: Status
    detail: str


def run() -> None:
    """Check this installation and run a quick numerical self-test."""
    findings: list[Finding] = []
    for look in (_python, _packages, _devices, _optional, _cores, _numerics):
        findings.extend(_guarded(look))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    styles = {Status.GOOD: "green", Status.NOTE: "yellow", Status.FAILED: "bold red"}
    for finding in findings:
        table.add_row(
            Text(str(finding.status), style=styles[finding.status]), finding.subject, Text(printable(finding.detail))
        )
    Console().print(table)
    if any(finding.status is Status.FAILED for finding in findings):
        raise typer.Exit(1)


def _guarded(look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    # A broken installation can raise anything on import; the report goes on to the next subject.
    findings: list[Finding] = []
    try:
        findings.extend(look())
    except Exception as error:
        findings.append(
            Finding(
                subject=look.__name__.removeprefix("_"), status=Status.FAILED, detail=f"{type(error).__name__}: {error}"
            )
        )
    return findings


def _python() -> Iterator[Finding]:
    yield Finding(
        subject="replayeval",
        status=Status.GOOD,
        detail=f"{version('replayeval')} on Python {platform.python_version()}, {platform.platform()}",
    )


def _packages() -> Iterator[Finding]:
    for name in REQUIRED:
        try:
            yield Finding(subject=name, status=Status.GOOD, detail=version(name))
        except PackageNotFoundError:
            yield Finding(subject=name, status=Status.FAILED, detail=f"not installed: pip install {name}")


def _devices() -> Iterator[Finding]:
    import torch

    threads = torch.get_num_threads()
    yield Finding(subject="cpu", status=Status.GOOD, detail=f"{threads} thread{'s' if threads != 1 else ''}")
    if not torch.cuda.is_available():
        yield Finding(subject="cuda", status=Status.NOTE, detail="no CUDA device; models run on the CPU")
    for index in range(torch.cuda.device_count()):
        properties: Any = cast(Any, torch.cuda).get_device_properties(index)
        yield Finding(
            subject=f"cuda:{index}",
            status=Status.GOOD,
            detail=f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"compute capability {properties.major}.{properties.minor}",
        )


def _optional() -> Iterator[Finding]:
    for module, use in OPTIONAL.items():
        specification = importlib.util.find_spec(module)
        # A folder without __init__.py in the working directory is found as well, and is no package.
        present = specification is not None and specification.origin is not None
        yield Finding(
            subject=module, status=Status.GOOD, detail=f"{use}: {'installed' if present else 'not installed'}"
        )


def _cores() -> Iterator[Finding]:
    from replayeval.models.architectures import ARCHITECTURES

    missing: list[str] = []
    replaced: list[str] = []
    for architecture in ARCHITECTURES:
        try:
            module = importlib.import_module(architecture.module)
        except ModuleNotFoundError:
            missing.append(architecture.name)
            continue
        for name in (architecture.cores.chunk.name, architecture.cores.step.name):
            core = getattr(module, name, None)
            if core is None:
                missing.append(f"{architecture.name}.{name}")
            elif inspect.isfunction(core) and inspect.getclosurevars(core).nonlocals.get("is_new_implementation"):
                replaced.append(f"{architecture.name}.{name}")
    if missing:
        yield Finding(
            subject="cores",
            status=Status.FAILED,
            detail=f"this transformers has no {', '.join(missing)}; models of these architectures cannot be measured",
        )
    if replaced:
        yield Finding(
            subject="cores",
            status=Status.NOTE,
            detail=f"another package stands in for {', '.join(replaced)}. Measuring replaces those cores all the same; "
            "only the check against the model's own logits runs through that package",
        )
    if not missing and not replaced:
        yield Finding(
            subject="cores",
            status=Status.GOOD,
            detail=f"the torch cores of all {len(ARCHITECTURES)} architectures are in place",
        )


def _numerics() -> Iterator[Finding]:
    import torch

    from replayssm.formats import Format, pack, random_bits, store_and_load

    zero = torch.zeros(1, dtype=torch.int64)
    drawn = random_bits(seed=0, layer=0, copy=0, sequences=zero, tokens=zero, elements=4, device="cpu")
    words = cast(list[int], cast(Any, drawn[0]).tolist())
    yield _verdict(
        "random bits",
        tuple(words) == PHILOX_ZERO,
        "Philox4x32-10 gives its known answer",
        f"Philox4x32-10 gives {words} instead of {list(PHILOX_ZERO)}",
    )
    state = torch.linspace(-3, 3, 2 * 32 * 32).reshape(1, 2, 32, 32)
    for name in ("fp8", "nvfp4", "int8"):
        form = Format.parse(name)
        loaded = store_and_load(state, form)
        yield _verdict(
            name,
            bool(torch.equal(pack(state, form).unpack(), loaded)) and not torch.equal(loaded, state),
            "stored bytes load back to the rounded state, bit for bit",
            "stored bytes do not load back to the rounded state",
        )


def _verdict(subject: str, passed: bool, good: str, bad: str) -> Finding:
    return Finding(subject=subject, status=Status.GOOD if passed else Status.FAILED, detail=good if passed else bad)
