"""What bounds the decode kernels on a card: plain loads of the same tiles, and single steps for a profiler.

    python benchmarks/decode_limits.py streams
    ncu --clock-control none -k regex:decode_kernel python benchmarks/decode_limits.py steps LAYER POLICY

`streams` times, for the float32 states of Qwen3.5-4B at a batch of 256, a kernel that only loads tiles and adds them
up, in several cuts, without and with the reads and writes of records beside it. `steps` takes one step that reads half
a window of records and one flush of all, with the default launch.
"""

import argparse
import sys
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from replayeval.engine.kernel_cases import SHAPES, GraphClock, LayerSets, half_window
from replayssm.decode_traffic import state_bytes
from replayssm.policy import Policy

# pyright: reportUntypedFunctionDecorator=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

HEADS = 256 * 32
HEAD_ROWS = 128
RECORD_BYTES = 8 * 512
CUTS = ((8, 16, 1), (4, 16, 1), (1, 16, 1), (4, 32, 2), (2, 64, 4), (1, 128, 8))
"""Tiles per program, rows per tile, warps."""


@triton.jit
def stream_kernel(
    states, records, out, TILES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, RECORDS: tl.constexpr,
    WRITES: tl.constexpr,
):  # fmt: skip
    """Adds up tiles `[ROWS, 128]`; STAGES of one keep the next tile in registers, more keep tiles in shared memory."""
    program = tl.program_id(0).to(tl.int64)
    base = states + program * (TILES * ROWS * 128)
    where = tl.arange(0, ROWS)[:, None] * 128 + tl.arange(0, 32)[None, :]
    total = tl.zeros((ROWS, 32), tl.float32)
    if RECORDS:
        half = tl.arange(0, 8)[:, None] * 128 + tl.arange(0, 128)[None, :]
        total += tl.sum(tl.sum(tl.load(records + program * 2048 + half), axis=1), axis=0)
    if STAGES == 1:
        tile = ()
        for c in tl.static_range(4):
            tile = tile + (tl.load(base + c * 32 + where),)
        for t in tl.static_range(TILES):
            now = tile
            if t + 1 < TILES:
                tile = ()
                for c in tl.static_range(4):
                    tile = tile + (tl.load(base + (t + 1) * (ROWS * 128) + c * 32 + where),)
            for c in tl.static_range(4):
                total += now[c]
    else:
        for t in tl.range(0, TILES, num_stages=STAGES):
            for c in tl.static_range(4):
                total += tl.load(base + t * (ROWS * 128) + c * 32 + where)
    found = tl.sum(tl.sum(total, axis=1), axis=0)
    if WRITES:
        tl.store(out + program * 2048 + tl.arange(0, 128), found + tl.zeros((128,), tl.float32))
        tl.store(out + program * 2048 + 512 + tl.arange(0, 64), found + tl.zeros((64,), tl.float32))
    else:
        tl.store(out + program, found)


def streams() -> None:
    """Print the times of plain loads."""
    states = [torch.randn(HEADS * HEAD_ROWS * 128, device="cuda") for _ in range(2)]
    records, out = torch.randn(HEADS * 2048, device="cuda"), torch.zeros(HEADS * 2048, device="cuda")
    clock = GraphClock()

    def run(programs: int, cut: tuple[int, ...], warps: int, beside: bool) -> None:
        kernel: Any = stream_kernel
        for one in states:
            kernel[(programs,)](one, records, out, *cut, beside, beside, num_warps=warps)

    for (tiles, rows, warps), stages in product(CUTS, (1, 3)):
        programs = HEADS * HEAD_ROWS // (tiles * rows)
        # Records and writes belong to heads, so only where a program has a whole one.
        for beside in (False, True) if programs == HEADS else (False,):
            seconds = clock.seconds(partial(run, programs, (tiles, rows, stages), warps, beside)) / len(states)
            moved = HEADS * (HEAD_ROWS * 512 + (RECORD_BYTES if beside else 0))
            what = f"{tiles} tiles of {rows} rows, {warps} warps, {stages} stages"
            more = ", records and writes" if beside else ""
            print(f"{what}{more}: {seconds * 1e6:.1f} us, {moved / seconds / 1e12:.2f} TB/s read")


def steps(name: str, text: str) -> None:
    """Take one reading step and one flush."""
    shape, policy = SHAPES[name], Policy.parse(text)
    generator = torch.Generator("cuda").manual_seed(0)
    sets = LayerSets(shape, policy, 256, generator, stored_bytes=state_bytes(shape, policy)[1])
    step = sets.prepare(None)[0]
    for cursor in (half_window(policy.window_tokens), policy.window_tokens - 1):
        sets.place([cursor])
        step.run()
        torch.cuda.synchronize()


def main() -> int:
    """Run one of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("streams", "steps"))
    parser.add_argument("layer", nargs="?", default="Qwen3.5-4B", choices=tuple(SHAPES))
    parser.add_argument("policy", nargs="?", default="shared:fp32@L=16")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("expected a CUDA device, found none", file=sys.stderr)
        return 2
    if arguments.what == "streams":
        streams()
    else:
        steps(arguments.layer, arguments.policy)
    return 0


if __name__ == "__main__":
    sys.exit(main())
