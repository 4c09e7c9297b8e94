"""Compile the decode and streaming kernels for an H200 on a machine without a card, and say what they need.

    python benchmarks/compile_for_hopper.py [--quick]

ptxas comes with Triton, so registers, spills and instructions are known before any card is: one line per kernel. Exits
with 1 where steps that only read a float32 copy spill at all, or those that flush too more than a little. Does not run
under `TRITON_INTERPRET=1`.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from replayeval.engine.kernel_cases import SHAPES
from replayssm.decode import DecodeToken, Launch, default_launch, prepare_step
from replayssm.policy import Policy
from replayssm.records import Recurrence
from replayssm.slots import DecodeCursors, DecodeSlots, Mamba2Constants
from replayssm.streaming_kl import StreamLaunch

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
MOST_SPILLED = 256
"""Bytes per thread."""

INSTRUCTIONS = ("LDG", "LDGSTS", "STG", "LDL", "STL", "SHFL", "FFMA", "BAR", "MUFU", "HGMMA")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a kernel needs.

    Attributes:
        registers: Per thread.
        spilled: Bytes of stack per thread.
        shared: Bytes of shared memory per program.
        instructions: How often each kind occurs in the machine code.
    """

    registers: int
    spilled: int
    shared: int
    instructions: dict[str, int]


def compile_kernel(kernel: Any, arguments: dict[str, Any], *, warps: int, **options: int) -> Compiled:
    """Compile a kernel for these arguments, whose tensors need no data, as a launch would."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for position, parameter in enumerate(kernel.params):
        name = parameter.name
        value = arguments[name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": warps, **options})
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([tools / "cuobjdump", "-res-usage", binary], capture_output=True, text=True, check=True)
        code = subprocess.run([tools / "nvdisasm", binary], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    if found is None:
        raise ValueError(f"expected cuobjdump to report registers, got {usage.stdout[-300:]!r}")
    return Compiled(
        registers=int(found[1]),
        spilled=int(found[2]),
        shared=int(compiled.metadata.shared),
        instructions={k: len(re.findall(rf"\b{k}\b", code)) for k in INSTRUCTIONS},
    )


def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(*size, dtype=dtype, device="meta")


def decode_slots(name: str, policy: str, batch: int) -> DecodeSlots:
    """Slots of a layer, without data."""
    shape = SHAPES[name]
    constants = None
    if shape.recurrence is Recurrence.MAMBA2:
        constants = Mamba2Constants(decay_rate=empty(shape.heads), dt_bias=empty(shape.heads), skip=empty(shape.heads))
    return DecodeSlots(shape, Policy.parse(policy), slots=batch, constants=constants, device="meta")


def decode_kernel(name: str, policy: str, launch: Launch | None, *, batch: int = 256) -> dict[str, Compiled]:
    """The launches of a decode step of a layer: that of all sequences, and that beside it for flushes."""
    shape = SHAPES[name]
    slots = decode_slots(name, policy, batch)
    mamba = shape.recurrence is Recurrence.MAMBA2
    channels = (shape.d_k,) if shape.recurrence is Recurrence.KDA else ()
    half = torch.bfloat16
    token = DecodeToken(
        query=empty(batch, shape.key_heads, shape.d_k, dtype=half),
        key=empty(batch, shape.key_heads, shape.d_k, dtype=half),
        value=empty(batch, shape.heads, shape.d_v, dtype=half),
        log_decay=None if mamba else empty(batch, shape.heads, *channels),
        beta=None if mamba else empty(batch, shape.heads),
        dt=empty(batch, shape.heads) if mamba else None,
    )
    out = empty(batch, shape.heads, shape.d_v, dtype=half)
    index = empty(batch, dtype=torch.int32)
    step = prepare_step(slots, DecodeCursors(slots=batch, device="meta"), token, index, out=out, launch=launch)
    launches = {"step": step} if step.flush is None else {"reads": step, "flushes": step.flush}
    return {
        what: compile_kernel(one.kernel, {**one.arguments, "EARLY": what == "step"}, warps=one.warps, **one.options)
        for what, one in launches.items()
    }


def streaming_kernel(rows: int, cut: StreamLaunch) -> Compiled:
    """The kernel of the streaming scores for a chunk of 2,048 tokens."""
    from replayssm.streaming_kl_triton import streaming_kl_kernel

    arguments = {
        "logits": empty(rows, 2048, cut.words),
        "bias": empty(cut.words, dtype=torch.bfloat16),
        "targets": empty(2048, dtype=torch.int32),
        "statistics": empty(6, 2048, rows),
        "places": empty(2048, rows, dtype=torch.int32),
        "rows": rows,
        "time": 2048,
        "stride": cut.words,
        "first_word": cut.words,
        "fresh": 0,
        **dict.fromkeys(("multiplier", "divisor", "cap"), 1.0),
        **{"BN": cut.words, "HAS_BIAS": False, "FINISH": False, "HAS_CAP": False},
    }
    return compile_kernel(streaming_kl_kernel, arguments, warps=cut.warps)


def main() -> None:
    """Compile and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one decode kernel only")
    quick = parser.parse_args().quick
    failed = False
    names = ("Nemotron-3-Super-120B-A12B",) if quick else tuple(SHAPES)
    policies = ("shared:fp32@L=16",) if quick else ("shared:fp32@L=16", "conventional:fp32", "separate:nvfp4/fp32@L=16")
    for name in names:
        # Reads alone, as they are within the launch that flushes too.
        alone = replace(default_launch(decode_slots(name, policies[0], 256), 256), flush_rows=16, flush_warps=1)
        reads = decode_kernel(name, policies[0], alone)["reads"]
        print(f"{name}, {policies[0]}, reads alone: {reads}", flush=True)
        failed |= reads.spilled > 0
        for policy in policies:
            for what, found in decode_kernel(name, policy, None).items():
                print(f"{name}, {policy}, {what}: {found}", flush=True)
                if "nvfp4" not in policy:
                    # A few spills of a flush are the price of sharing a multiprocessor.
                    failed |= found.spilled > (0 if policy.startswith("conventional") else MOST_SPILLED)
    if not quick:
        for rows in (2, 6):
            print(f"streaming KL, {rows} rows: {streaming_kernel(rows, StreamLaunch())}", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
