"""How the decode kernels are cut into programs."""

from dataclasses import dataclass

from replayssm.formats.triton_format import block
from replayssm.records import Recurrence
from replayssm.slots import DecodeSlots


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a decode kernel is cut into programs.

    Attributes:
        rows: Value rows of a program, a power of two.
        warps: Warps of a program.
        registers: Most registers per thread, or None to let the compiler choose.
        flush_rows: Where flushes have a launch of their own, the value rows of its programs. A flush that stores a
            scaled format needs many registers, which would keep the steps that only read from sharing a multiprocessor.
        flush_warps: Warps of a program of that launch.
        flush_tiles: Tiles of a program of that launch.
        tiles: Tiles of `rows` rows that a program works on, one after another.
        stages: Of that loop: how many tiles are on their way from memory or worked on at a time.
        eager: Whether all records that a window can hold are loaded before it is known how many there are. Few
            sequences wait for memory rather than for its bandwidth.
    """

    rows: int
    warps: int
    registers: int | None = None
    flush_rows: int | None = None
    flush_warps: int = 8
    flush_tiles: int = 1
    tiles: int = 1
    stages: int = 3
    eager: bool = False


def default_launch(slots: DecodeSlots, batch: int) -> Launch:
    """The launch used unless another is given; `replayeval bench kernels` sweeps around it."""
    d_v = slots.shape.d_v
    widest = max(c.kernel.tile_rows for c in slots.copies)
    fewest = block(d_v) if any(c.kernel.whole_head for c in slots.copies) else max(16, widest)
    few = batch * slots.shape.heads < 2048
    rows = 32 if d_v % 32 == 0 else 16
    if any(c.format.is_scaled for c in slots.copies) and slots.policy.window_tokens > 1:
        flush_rows = max(fewest, rows)
        return Launch(
            rows=rows,
            warps=1,
            registers=128,
            tiles=1 if few else -(-d_v // rows),
            flush_rows=flush_rows,
            flush_warps=max(1, min(16, flush_rows // 8)),
        )
    if few:
        # Few sequences: small tiles, so that every multiprocessor has work.
        return Launch(rows=fewest, warps=max(2, min(8, fewest // 8)), eager=True)
    rows = max(fewest, rows)
    if slots.policy.window_tokens == 1 or slots.shape.recurrence is Recurrence.KDA:
        return Launch(rows=rows, warps=max(2, min(8, rows // 8)))
    # Few warps per program: what the rows of a head share is computed by each of them.
    return Launch(
        rows=rows,
        warps=max(1, min(8, rows // 16)),
        registers=128,
        tiles=-(-d_v // rows),
        flush_rows=fewest,
        flush_warps=4,
        flush_tiles=-(-d_v // fewest),
    )
