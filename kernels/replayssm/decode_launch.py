"""How the decode kernels are cut into programs."""

from dataclasses import dataclass, replace

from replayssm.formats.triton_format import ScaleCode, block
from replayssm.records import Recurrence
from replayssm.slots import DecodeSlots

_FEW_HEADS = 256
"""Of all sequences: fewer wait for memory rather than for its bandwidth."""

_ENOUGH_PROGRAMS = 4096
"""Twice what the multiprocessors of a large card hold at a time."""


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
        flush_stages: Of its loop over tiles.
        flush_registers: Most registers per thread of it.
        tiles: Tiles of `rows` rows that a program works on, one after another.
        stages: Of that loop: how many tiles are on their way to shared memory or worked on at a time. With 1, the loop
            is unrolled and the next tile is on its way to registers.
        eager: Whether all records that a window can hold are loaded before it is known how many there are. Few
            sequences wait for memory rather than for its bandwidth.
    """

    rows: int
    warps: int
    registers: int | None = None
    flush_rows: int | None = None
    flush_warps: int = 8
    flush_tiles: int = 1
    flush_stages: int = 2
    flush_registers: int = 128
    tiles: int = 1
    stages: int = 1
    eager: bool = False


def default_launch(slots: DecodeSlots, batch: int) -> Launch:
    """The launch used unless another is given; `replayeval bench kernels` sweeps around it."""
    d_v = slots.shape.d_v
    widest = max(c.kernel.tile_rows for c in slots.copies)
    whole = any(c.kernel.whole_head for c in slots.copies)
    fewest = max(16, widest)
    wide = 32 if d_v % 32 == 0 else 16
    heads = batch * slots.shape.heads
    if any(c.format.is_scaled for c in slots.copies) and slots.policy.window_tokens > 1:
        # The delta rule holds two vectors against each tile, Mamba-2 one.
        registers = 80 if slots.shape.recurrence is Recurrence.MAMBA2 else 128
        cut = Launch(rows=wide, warps=1, registers=registers, tiles=_tiles(heads, d_v, wide), stages=3)
        if stores_again(slots):
            rows = 64 if d_v <= 64 else wide
            limit = 168 if rows > 16 else 255
            return replace(
                cut, flush_rows=rows, flush_warps=rows // 16, flush_tiles=-(-d_v // rows), flush_registers=limit
            )
        if whole:
            rows = block(d_v)
            return replace(cut, flush_rows=rows, flush_warps=max(1, min(16, rows // 8)))
        tiles = 2 if d_v % (2 * fewest) == 0 else 1
        return replace(cut, flush_rows=fewest, flush_warps=fewest // 16, flush_tiles=tiles, flush_registers=255)
    rows = block(d_v) if whole else fewest
    if slots.policy.window_tokens == 1 or slots.shape.recurrence is Recurrence.KDA or whole:
        rows = max(rows, wide)
        return Launch(rows=rows, warps=max(2, min(8, rows // 8)))
    # One warp per program: what the rows of a head share is computed by each of them, and none waits for another.
    warps = max(1, min(8, rows // 16))
    if heads < _FEW_HEADS:
        return Launch(rows=rows, warps=warps, eager=True)
    return Launch(rows=rows, warps=warps, registers=168, tiles=_tiles(heads, d_v, rows))


def _tiles(heads: int, d_v: int, rows: int) -> int:
    """Tiles of a program: all of a head where that leaves every multiprocessor several programs, else fewer.

    An even number above two is halved: with two, the second is on its way while the first is worked on.
    """
    tiles = -(-d_v // rows)
    while tiles > 2 and tiles % 2 == 0 and heads * -(-d_v // rows) // tiles < _ENOUGH_PROGRAMS:
        tiles //= 2
    return tiles


def stores_again(slots: DecodeSlots) -> bool:
    """Whether a read copy with a scale per head is made from a recurrence copy that has lost nothing.

    Then tiles of a head are stored there one by one, and read again when the scale is known; other programs have to
    hold whole heads in their registers.
    """
    main, read = slots.copies[0], slots.copies[-1]
    return slots.separate and read.kernel.scale is ScaleCode.E4M3 and main.format.is_identity
