"""How the window kernels are cut into programs: value rows, warps, memory. Chosen on an H200."""

from replayssm.formats.triton_format import block
from replayssm.records import Recurrence
from replayssm.triton_tables import PIECE_TOKENS

FOLD_WARPS = 4
"""Warps of the kernel that makes the operands of a piece."""
STEP_ELEMENTS = 1024
"""State elements per warp of the walk of rows that are rounded after every token."""
STAGES = 2
"""Pieces whose operands a walk has in shared memory; more leave room for fewer programs."""
WARPGROUP_ROWS = 64
"""Rows of a matrix product that the four warps of a warpgroup take together."""
HEAD_PARTS = 2
"""Most programs that share a head whose scales depend on all of it; below a warpgroup's rows products cost double."""
_SERVE_REGISTERS = {4: 168, 8: 128}
_FOLD_REGISTERS = 128
_SPLIT_ROWS = 32


def scratch_elements(recurrence: Recurrence, heads: int, key_heads: int, d_v: int, d_k: int) -> int:
    """Float32 numbers, at most, that the kernels keep of one piece of one row."""
    delta = recurrence is not Recurrence.MAMBA2
    of_keys = heads if recurrence is Recurrence.KDA else key_heads
    vectors = 2 * heads + of_keys if delta else 2 * key_heads
    # Three bfloat16 numbers take the room of one and a half.
    return PIECE_TOKENS * (3 * vectors * block(d_k) // 2 + heads * (2 * d_v + 2 * PIECE_TOKENS + 3)) + heads * block(
        d_k
    )


def head_parts(heads: int, multiprocessors: int) -> int:
    """Programs that share a head whose scales depend on all of it. Results do not depend on it.

    Two halves take little more than half the time, but wait for each other; so only where heads are few.

    Args:
        heads: Heads of all rows that are walked side by side.
        multiprocessors: Of the device.
    """
    return HEAD_PARTS if heads <= multiprocessors else 1


def fold_registers(products: int) -> int | None:
    """Most registers per thread of the kernel that makes operands: four programs share a multiprocessor.

    Float32 products take more, as they do in `warps`.
    """
    return _FOLD_REGISTERS if products != 0 else None


def serve_registers(num_warps: int, products: int, *, several: bool, stochastic: bool) -> int | None:
    """Most registers per thread of the kernel that stores and reads read copies, if there is a limit.

    Three programs of a warpgroup, or two of two warpgroups, share a multiprocessor then. Not where random words, or the
    operands with which windows of several pieces advance a state, take more.

    Args:
        num_warps: Warps per program.
        products: Operands of the products, as the kernels number them.
        several: Whether a window is several pieces.
        stochastic: Whether a copy is rounded stochastically.
    """
    return None if products == 0 or several or stochastic else _SERVE_REGISTERS.get(num_warps)


def prepare_warps(recurrence: Recurrence, products: int) -> int:
    """Warps of the preparation: few, as most of it is a sequence of sums over 16 numbers.

    Float32 products keep more operands per thread than it has registers unless there are more threads.
    """
    if recurrence is Recurrence.KDA:
        return 4
    return {Recurrence.MAMBA2: 2, Recurrence.GDN: 8}[recurrence] if products == 0 else 1


def warps(block_v: int, block_k: int, products: int) -> int:
    """Warps per program: as many as keep a state and the operands of its products in registers.

    On tensor cores a warpgroup takes 64 rows. The operands of a float32 product are in registers too, and take several
    times what the state takes.
    """
    if products == 0:
        return max(1, min(16, block_v * block_k // 512))
    return max(1, min(8, block_v * block_k // 2048))


def tile_rows(*, whole_head: bool, needed: int, d_v: int, products: int) -> int:
    """Value rows per program: all of a head where a scale depends on all of them, else few, so that there are many.

    Args:
        whole_head: Whether a scale does.
        needed: Rows that share a scale, a power of two.
        d_v: Value rows of a head.
        products: Operands of the products, as the kernels number them.
    """
    if whole_head:
        return block(d_v)
    if products == 0:
        # Heads of 80 rows divide into 5 tiles of 16, and would waste a third of 3 tiles of 32.
        split = _SPLIT_ROWS if d_v % _SPLIT_ROWS == 0 or d_v % 16 else 16
    else:
        split = WARPGROUP_ROWS
    return min(block(d_v), max(split, needed))
