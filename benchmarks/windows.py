"""Window kernels of the chunked engine at the shapes of real models: checked first, then timed; or compiled only.

    python benchmarks/windows.py time [--out windows.json]      on a CUDA device
    python benchmarks/windows.py time --shape NAME --policies shared:nvfp4@L=16 --head-parts 1      two rows of each
    python benchmarks/windows.py compile [--shape NAME]         without one: registers, stack and shared memory on sm_90

`time` exits with 1, and times nothing, where a kernel disagrees with the PyTorch path. One document, chunks of 2,048
tokens, several sets of rows. `--ready` and `--wait` name files that let several processes warm up together and
measure in turn.
"""

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from replayeval.engine.kernel_cases import SHAPES, LayerShape
from replayeval.engine.precision import exact_float32
from replayssm.backend import Execution
from replayssm.formats import Rounding, random_bits, store_and_load
from replayssm.formats.triton_format import block
from replayssm.formats.triton_store_kernels import pack_kernel, unpack_kernel
from replayssm.launch import is_interpreted
from replayssm.policy import REFERENCE, Policy, precision_arms
from replayssm.records import Recurrence, TokenInputs, with_room
from replayssm.replay import StateBank
from replayssm.token_inputs import ROOM
from replayssm.triton_tiles import (
    FOLD_WARPS,
    HEAD_PARTS,
    STAGES,
    WARPGROUP_ROWS,
    fold_registers,
    prepare_warps,
    serve_registers,
    tile_rows,
    warps,
)

TOKENS = 2048
LAYER = 0
PRODUCTS = {"ieee": 0, "tf32": 1, "bf16": 2, "bf16x6": 4}
LAYERS = 8
ROWS = {
    "reference and five arms of nvfp4": (REFERENCE, *precision_arms("nvfp4")),
    "six float32 rows": (Policy.parse("shared:fp32@L=16"),) * 6,
    "two rows rounded to fp16 after every token": (Policy.parse("conventional:fp16+sr"),) * 2,
}
FORMATS = {
    "fp32": (),
    "fp16+sr": ((2, 0, 1, 128, 0.0, True),),
    "nvfp4": ((5, 3, 1, 16, 6.0, False),),
    "nvfp4, nvfp4+sr": ((5, 3, 1, 16, 6.0, False), (5, 3, 1, 16, 6.0, True)),
}


TYPES = {
    **dict.fromkeys(("rows_ptr", "pieces_ptr", "tokens_ptr", "windows_ptr", "address_ptr", "exchange_ptr"), "*i32"),
    "divisor": "fp32",
}


def inputs_of(shape: LayerShape, rows: int, tokens: int, device: torch.device) -> TokenInputs:
    """Tokens of one sequence, repeated for every row."""
    make = torch.Generator(device=device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn((1, tokens, *size), generator=make, device=device)

    channels = (shape.heads, shape.d_k) if shape.recurrence is Recurrence.KDA else (shape.heads,)
    query, key = normal(shape.key_heads, shape.d_k), normal(shape.key_heads, shape.d_k)
    delta = shape.recurrence is not Recurrence.MAMBA2
    if delta:
        query = torch.nn.functional.normalize(query, dim=-1) * shape.d_k**-0.5
        key = torch.nn.functional.normalize(key, dim=-1)
    inputs = TokenInputs(
        query=query,
        key=key,
        value=normal(shape.heads, shape.d_v) * (1.0 if delta else 0.05),
        log_decay=-0.05 * normal(*channels).abs(),
        beta=normal(shape.heads).sigmoid() if delta else None,
    )
    return inputs.map(lambda x: x.expand(rows, *x.shape[1:]).contiguous())


def with_room_for_records(inputs: TokenInputs) -> TokenInputs:
    """The same tokens where those that stay buffered are put in front of the next, as in a model."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        rows, length, heads, width = x.shape
        return with_room(rows, ROOM, length, heads, width, x.device).copy_(x)

    moves = {name: moved(getattr(inputs, name)) for name in ("query", "key", "value")}
    return replace(inputs, **moves, room=ROOM)


def bank(policies: Sequence[Policy], execution: str) -> StateBank:
    """A bank of one document."""
    return StateBank(policies, sequences=[0] * len(policies), seed=1, execution=Execution.parse(execution))


def check(shape: LayerShape, device: torch.device) -> dict[str, float]:
    """Largest differences over the largest output: of float32 rows from float64, and of the first windows' stores.

    Both rows of the first window start at the same state, so a store of an arm must be the PyTorch store of the state
    that the float32 arm reached, bit for bit.
    """
    inputs = inputs_of(shape, 2, 96, device)
    exact = [REFERENCE, Policy.parse("separate:fp32/fp32@L=40")]
    truth = bank(exact, "torch").advance(LAYER, shape.recurrence, inputs.map(lambda x: x.double()))
    got = bank(exact, "triton").advance(LAYER, shape.recurrence, inputs)
    error = float((got - truth).abs().max() / truth.abs().max())
    texts = ["shared:fp32", *(f"shared:{f}{r}" for f in ("fp8", "nvfp4", "mxfp4", "fp16", "int8") for r in ("", "+sr"))]
    policies = [Policy.parse(text) for text in texts]
    stores = bank(policies, "triton")
    stores.advance(LAYER, shape.recurrence, inputs_of(shape, len(policies), 16, device))
    states = stores.checkpoints[LAYER].states
    wrong = 0
    for row, policy in enumerate(policies):
        fmt = policy.recurrence_format
        index = torch.tensor([0])
        bits = None
        if fmt.rounding is Rounding.STOCHASTIC:
            elements = states[0].numel()
            bits = random_bits(
                seed=1, layer=LAYER, copy=0, sequences=index, tokens=index + 15, elements=elements, device=device
            )
        wrong += int((store_and_load(states[:1], fmt, bits=bits) != states[row : row + 1]).sum())
    return {"relative_error_float32": error, "stored_elements_that_differ": wrong}


def step(states: StateBank, shape: LayerShape, inputs: TokenInputs, layers: range) -> None:
    """The next tokens of some layers."""
    for layer in layers:
        states.advance(layer, shape.recurrence, inputs)


def seconds_of(shape: LayerShape, execution: str, policies: Sequence[Policy], device: torch.device) -> dict[str, Any]:
    """Median seconds of one layer and the microseconds of its kernels, which run side by side and so add up to more.

    Layers of a model share the tables of a chunk, so some layers are timed together, after one that makes the tables
    and two chunks that only warm up.
    """
    inputs = inputs_of(shape, len(policies), TOKENS, device)
    if REFERENCE in policies:
        # Its windows end between those of the others, so there are records whenever a chunk begins.
        inputs = with_room_for_records(inputs)
    states = bank(policies, execution)
    first, others = range(1), range(1, 1 + LAYERS)
    for _ in range(2):
        step(states, shape, inputs, range(1 + LAYERS))
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        step(states, shape, inputs, first)
        start.record()
        step(states, shape, inputs, others)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / LAYERS)
    step(states, shape, inputs, first)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(states, shape, inputs, others)
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    return {
        "seconds": sorted(times)[len(times) // 2],
        "kernels_us": {e.key[:60]: e.self_device_time_total / LAYERS for e in events[:8]},
    }


def run_time(
    names: Sequence[str],
    executions: Sequence[str],
    rows: dict[str, tuple[Policy, ...]],
    out: Path | None,
    *,
    checked: bool,
    begin: Callable[[], None],
    head_parts: int | None,
) -> int:
    """Check and time some shapes, with as many programs per head as chosen from the device unless `head_parts` says."""
    if not torch.cuda.is_available():
        print("expected a CUDA device, found none; `compile` works without one", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    if head_parts is not None:
        walk_module().head_parts = lambda *_: head_parts
    records: list[dict[str, Any]] = []
    with exact_float32(), torch.inference_mode():
        for name in names:
            records.append({"shape": name, "device": torch.cuda.get_device_name(device)})
            if not checked:
                continue
            found = check(SHAPES[name], device)
            records[-1]["check"] = found
            print(name, found, flush=True)
            # 128 products of float32 and 96 tokens, each sum off by half a unit: 4 deviations of their random walk.
            bound = 8 * 2.0**-24 * (SHAPES[name].d_k + 3 * 96) ** 0.5
            if found["relative_error_float32"] > bound or found["stored_elements_that_differ"]:
                return 1
        for name, execution, policies in product(names, executions, rows.values()):
            inputs = inputs_of(SHAPES[name], len(policies), 48, device)
            bank(policies, execution).advance(LAYER, SHAPES[name].recurrence, inputs)
        torch.cuda.synchronize()
        begin()
        for record in records:
            shape = SHAPES[record["shape"]]
            for label, policies in rows.items():
                record[label] = {execution: seconds_of(shape, execution, policies, device) for execution in executions}
                print(record["shape"], label, record[label], flush=True)
            if out is not None:
                out.write_text(
                    json.dumps(
                        {
                            "rows": {label: [str(p) for p in policies] for label, policies in rows.items()},
                            "head_parts": head_parts,
                            "tokens": TOKENS,
                            "layers": records,
                        },
                        indent=1,
                    )
                    + "\n"
                )
    return 0


def walk_module() -> Any:
    """The host side of the kernels."""
    return importlib.import_module("replayssm.triton_walk")


def compiled(
    kernel: Any, num_warps: int, constants: dict[str, Any], *, stages: int = 3, limit: int | None = None
) -> dict[str, int]:
    """Registers, stack and shared memory of a kernel on sm_90."""
    names = [name for name in kernel.arg_names if name not in constants]
    kinds = {n: TYPES.get(n, "*fp32" if n.endswith("_ptr") else "i32") for n in names}
    if constants.get("PRODUCTS") in (2, 4):
        kinds |= {n: "*bf16" for n in names if n in ("reads_ptr", "keys_ptr")}
    if kernel in (pack_kernel, unpack_kernel):
        half = constants["ELEMENT"] == 2
        kinds |= {"payload_ptr": "*fp16" if half else "*u8", "scale_ptr": "*u8"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n.endswith("_ptr")}
    source = ASTSource(
        fn=kernel,
        signature={**kinds, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs=aligned,
    )
    made = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps, "num_stages": stages, "enable_fp_fusion": False, "maxnreg": limit},
    )
    # Estimated reciprocals are of normal numbers, and normal.
    if ".ftz" in made.asm["ptx"].replace("rcp.approx.ftz", ""):
        raise RuntimeError("expected subnormal numbers to be kept, got instructions that flush them to zero")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+)", usage), re.search(r"STACK:(\d+)", usage)
    if registers is None or stack is None:
        raise RuntimeError(f"expected the resource usage of a kernel, got {usage!r}")
    return {"registers": int(registers[1]), "stack": int(stack[1]), "shared": int(made.metadata.shared)}


def run_compile(names: Sequence[str], products: int) -> int:
    """Compile every kernel of some shapes."""
    if is_interpreted():
        print("expected compiled kernels, got TRITON_INTERPRET=1; unset it", file=sys.stderr)
        return 2
    for label, formats in FORMATS.items():
        for element, scale, rows, group_keys, _, stochastic in formats:
            common = {"D_K": 128, "BLOCK_V": 128, "BLOCK_K": 128, "ELEMENT": element, "SCALE": scale}
            common |= {"TILE_ROWS": rows, "GROUP_KEYS": group_keys}
            print("pack", label, compiled(pack_kernel, 8, {**common, "STOCHASTIC": stochastic}), flush=True)
            print("unpack", label, compiled(unpack_kernel, 8, common), flush=True)
    walks = importlib.import_module("replayssm.triton_pieces")
    for name in names:
        shape = SHAPES[name]
        kernels = importlib.import_module(f"replayssm.{shape.recurrence}.window_triton")
        common = {"D_K": shape.d_k, "BLOCK_K": 128, "BLOCK_T": 16, "PRODUCTS": products}
        whole = block(shape.d_v)
        split = tile_rows(whole_head=False, needed=1, d_v=shape.d_v, products=products)
        made = compiled(kernels.prepare_kernel, prepare_warps(shape.recurrence, products), common)
        print(name, "prepare", made, flush=True)
        limit = fold_registers(products)
        made = compiled(kernels.fold_kernel, FOLD_WARPS, {**common, "BLOCK_V": whole}, limit=limit)
        print(name, "fold", made, flush=True)
        common["RULE"] = list(Recurrence).index(shape.recurrence)
        for label, formats in FORMATS.items():
            whole_head = "nvfp4" in label
            rows = whole if whole_head else split
            for parts in range(1, 1 + (min(HEAD_PARTS, whole // WARPGROUP_ROWS) if whole_head and products else 1)):
                constants = {**common, "BLOCK_V": rows // parts, "FORMATS": formats, "PARTS": parts}
                made = compiled(walks.walk_kernel, warps(rows // parts, 128, products), constants, stages=STAGES)
                print(name, f"walk {label}, programs per head: {parts}", made, flush=True)
            count, stochastic = warps(rows, 128, products), any(f[-1] for f in formats)
            for several in (False, True):
                limit = serve_registers(count, products, several=several, stochastic=stochastic)
                constants = {**common, "BLOCK_V": rows, "FORMATS": formats, "SEVERAL": several}
                made = compiled(walks.serve_kernel, count, constants, stages=STAGES, limit=limit)
                print(name, f"serve {label}, several: {several}", made, flush=True)
    return 0


def main() -> int:
    """Run one of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "compile"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shape", choices=tuple(SHAPES))
    parser.add_argument("--products", choices=tuple(PRODUCTS), default="bf16x6", help="of the kernels to compile")
    parser.add_argument("--executions", nargs="+", default=["triton", "triton:tf32", "triton:bf16"], help="to time")
    parser.add_argument("--rows", choices=tuple(ROWS), nargs="*", help="sets of rows to time; all, unless --policies")
    parser.add_argument("--policies", type=Policy.parse, nargs="+", default=[], help="to time alone, two rows of each")
    parser.add_argument("--head-parts", type=int, help="programs that share a head in a walk; unless chosen by rule")
    parser.add_argument("--unchecked", action="store_true", help="time what was checked before")
    parser.add_argument("--ready", type=Path, help="made when the first kernels are warm")
    parser.add_argument("--wait", type=Path, help="measuring begins when this exists")
    arguments = parser.parse_args()

    def begin() -> None:
        if arguments.ready is not None:
            arguments.ready.touch()
        while arguments.wait is not None and not arguments.wait.exists():
            time.sleep(0.05)

    names = [arguments.shape] if arguments.shape else tuple(SHAPES)
    if arguments.what == "time":
        labels = arguments.rows if arguments.rows is not None else () if arguments.policies else tuple(ROWS)
        rows = {label: ROWS[label] for label in labels}
        rows |= {f"two rows of {policy}": (policy, policy) for policy in arguments.policies}
        return run_time(
            names,
            arguments.executions,
            rows,
            arguments.out,
            checked=not arguments.unchecked,
            begin=begin,
            head_parts=arguments.head_parts,
        )
    return run_compile(names, PRODUCTS[arguments.products])


if __name__ == "__main__":
    sys.exit(main())
