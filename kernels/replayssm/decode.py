"""Decoding: one token per sequence, for one layer, against the states and records in its slots."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from replayssm.decode_arguments import DecodeToken, kernel_named, step_arguments
from replayssm.decode_launch import Launch, default_launch, stores_again
from replayssm.launch import is_interpreted, multiprocessors
from replayssm.launch import launch as launch_kernel
from replayssm.slots import DecodeCursors, DecodeSlots, StoredCopy

ALL_STEPS, READS_ONLY, FLUSHES_ONLY = 0, 1, 2


def decode_step(
    slots: DecodeSlots,
    cursors: DecodeCursors,
    token: DecodeToken,
    slot_index: Int32[Tensor, " rows"],
    *,
    out: Float[Tensor, "rows heads d_v"],
    launch: Launch | None = None,
) -> None:
    """Take one layer through one token of every sequence, with the Triton kernels.

    A slot with fewer than `window - 1` records gives its output through the stored copy and the records, and keeps one
    record more. A slot with `window - 1` of them flushes: the state is materialised and stored in every copy. Which of
    the two happens is read from `cursors` on the device; `advance` moves them once all layers have read the token.

    Args:
        slots: States and records. Updated.
        cursors: Not changed here.
        token: The inputs; any strides.
        slot_index: The slot of each row; no slot twice. A negative one is padding: its row of `out` is left as it is.
        out: Receives the outputs, rounded to its dtype.
        launch: How to cut the work; chosen by shape and batch when absent.

    Raises:
        ValueError: When something does not fit.

    Rounding: at flushes, in the formats of the policy; `y` to the dtype of `out`. All products and sums are float32.

    Source: ReplaySSM, the output and flush equations of a replay window; shared and separate checkpoints.
    """
    prepared = prepare_step(slots, cursors, token, slot_index, out=out, launch=launch)
    prepared.run()


@dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """A decode step, ready to be launched or to be compiled ahead.

    Attributes:
        kernel: The Triton kernel.
        grid: Programs.
        arguments: Everything that the kernel takes, by name.
        warps: Warps of a program.
        registers: Most registers per thread, or None.
        flush: The launch beside it for the sequences which flush, where they have their own.
    """

    kernel: Any
    grid: tuple[int]
    arguments: dict[str, Any]
    warps: int
    registers: int | None = None
    flush: "PreparedStep | None" = None

    @property
    def early(self) -> bool:
        """Whether its programs may be set up while the kernel before it ends; they wait for its results."""
        return bool(self.arguments["EARLY"])

    @property
    def options(self) -> dict[str, int]:
        """Options of the compiler beside the number of warps."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return limit | ({"launch_pdl": True} if self.early else {})

    def run(self) -> None:
        """Launch the kernel on the current stream.

        Flushes that have a launch of their own run beside the steps that only read, on a stream that is joined again:
        few sequences flush at a time, and each is a chain of waits. The two touch no slot and no output together.
        """
        if self.flush is None:
            self._launch()
        elif is_interpreted():
            self._launch()
            self.flush.run()
        else:
            device = self.arguments["out"].device
            main, side = torch.cuda.current_stream(device), _side_stream(device)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                self.flush.run()
            self._launch()
            main.wait_stream(side)

    def _launch(self) -> None:
        names: list[str] = self.kernel.arg_names
        constants = {n: v for n, v in self.arguments.items() if n.isupper()}
        given = [self.arguments[n] for n in names if n not in constants]
        # Fusing is safe: what is multiplied with a scale is next multiplied with something else.
        launch_kernel(self.kernel, self.grid, *given, num_warps=self.warps, fused=True, **self.options, **constants)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where flushes run beside the steps that read."""
    return torch.cuda.Stream(device)


def prepare_step(
    slots: DecodeSlots,
    cursors: DecodeCursors,
    token: DecodeToken,
    slot_index: Int32[Tensor, " rows"],
    *,
    out: Float[Tensor, "rows heads d_v"],
    launch: Launch | None = None,
) -> PreparedStep:
    """Check a decode step and lay out its arguments; see `decode_step`. Repeated launches can share the result.

    Raises:
        ValueError: When something does not fit.
    """
    token.validate(slots)
    rows = token.value.shape[0]
    if tuple(out.shape) != tuple(token.value.shape):
        raise ValueError(f"expected `out` of shape {tuple(token.value.shape)}, got {tuple(out.shape)}")
    if slot_index.dtype is not torch.int32 or tuple(slot_index.shape) != (rows,) or not slot_index.is_contiguous():
        raise ValueError(
            f"expected contiguous int32 slots of {rows} rows, got {slot_index.dtype} {tuple(slot_index.shape)}"
        )
    held, counted = slots.copies[0].payload.shape[0], cursors.records.shape[0]
    if held != counted:
        raise ValueError(f"expected cursors of as many slots as the layer has, {held}, got {counted}")
    launch = launch or default_launch(slots, rows)
    kernel, arguments = step_arguments(slots, cursors, token, slot_index, out)
    heads = slots.shape.heads
    two = launch.flush_rows is not None and slots.policy.window_tokens > 1
    # Where streams meet, a launch waits for more than the kernel before it.
    arguments["EARLY"] = not two and _launches_early(out.device)
    splits = _check_launch(slots, launch.rows, launch.tiles, () if two else slots.copies)
    flush = None
    if two and launch.flush_rows is not None:
        cuts = _check_launch(slots, launch.flush_rows, launch.flush_tiles, slots.copies)
        flush = PreparedStep(
            kernel=kernel,
            grid=(min(rows * heads * cuts, _flush_programs(out.device, launch.flush_warps, launch.flush_registers)),),
            arguments={**arguments, **_cut(slots, rows, _flushing(launch), cuts, FLUSHES_ONLY)},
            warps=launch.flush_warps,
            registers=launch.flush_registers,
        )
    return PreparedStep(
        kernel=kernel,
        grid=(rows * heads * splits,),
        arguments={**arguments, **_cut(slots, rows, launch, splits, READS_ONLY if two else ALL_STEPS)},
        warps=launch.warps,
        registers=launch.registers,
        flush=flush,
    )


def advance(
    cursors: DecodeCursors, slot_index: Int32[Tensor, " rows"], *, window: int, rows_per_program: int = 128
) -> None:
    """Move the cursors of the slots past the token that all layers have just read.

    Args:
        cursors: Updated.
        slot_index: As for `decode_step`.
        window: The replay window.
        rows_per_program: Width of a program.
    """
    count = slot_index.shape[0]
    launch_kernel(
        kernel_named("replayssm.decode_records", "advance_cursors_kernel"),
        (-(-count // rows_per_program),),
        slot_index,
        cursors.records,
        cursors.tokens,
        count,
        num_warps=4,
        WINDOW=window,
        BLOCK=rows_per_program,
    )


def _check_launch(slots: DecodeSlots, rows: int, tiles: int, stored: tuple[StoredCopy, ...]) -> int:
    """Programs per head; refuses launches that would split what shares a scale."""
    d_v = slots.shape.d_v
    for copy in stored:
        kernel = copy.kernel
        held = rows * tiles if stores_again(slots) else rows
        if (kernel.whole_head and held < d_v) or rows % kernel.tile_rows:
            need = f"all {d_v} rows" if kernel.whole_head else f"a multiple of {kernel.tile_rows} rows"
            raise ValueError(f"format {copy.format}: a program must hold {need}, which share a scale, got {held}")
        if kernel.whole_head and tiles > 1 and not stores_again(slots):
            # A tile beyond the last row would leave the scale of nothing behind.
            raise ValueError(
                f"format {copy.format}: a program must hold all {d_v} rows in one tile, for they share a scale, got "
                f"{tiles} tiles of {rows} rows"
            )
    if rows < 1 or rows & (rows - 1):
        raise ValueError(f"expected a power of two of rows per program, got {rows}")
    if tiles < 1:
        raise ValueError(f"expected at least one tile per program, got {tiles}")
    return -(-d_v // (rows * tiles))


@cache
def _launches_early(device: torch.device) -> bool:
    """Whether a kernel can be set up while the one before it ends: programmatic dependent launch, from Hopper on."""
    return device.type == "cuda" and not is_interpreted() and torch.cuda.get_device_capability(device) >= (9, 0)


def _flush_programs(device: torch.device, warps: int, registers: int) -> int:
    """Programs of a launch that looks for flushes: as many as can be there at once, for most steps have few."""
    if device.type != "cuda":
        return 3
    return max(1, 65536 // (registers * 32 * warps)) * multiprocessors(device)


def _flushing(launch: Launch) -> Launch:
    """The cut of the launch beside it for flushes."""
    return Launch(
        rows=launch.flush_rows or launch.rows,
        warps=launch.flush_warps,
        tiles=launch.flush_tiles,
        stages=launch.flush_stages,
    )


def _cut(slots: DecodeSlots, batch: int, launch: Launch, splits: int, steps: int) -> dict[str, Any]:
    return {
        "BV": launch.rows,
        "TILES": launch.tiles,
        "STAGES": launch.stages,
        "EAGER": launch.eager,
        "SPLITS": splits,
        "MASKED": launch.rows * launch.tiles * splits != slots.shape.d_v,
        "STEPS": steps,
        # Only a launch that looks for flushes depends on the batch, and on few sizes of it.
        "ROWS": max(256, 1 << (max(batch, 1) - 1).bit_length()) if steps == FLUSHES_ONLY else 1,
    }
