"""The kernels behind `triton_store`: one program per state and head."""

# pyright: basic

import triton
import triton.language as tl

from replayssm.formats.triton_bits import magnitude_bits, philox_bits
from replayssm.formats.triton_ops import load_state, store_state


@triton.jit
def pack_kernel(
    state_ptr,
    row_stride,
    head_stride,
    v_stride,
    k_stride,
    payload_ptr,
    scale_ptr,
    head_scale_ptr,
    loaded_ptr,
    address_ptr,
    divisor,
    heads,
    d_v,
    groups,
    elements,
    D_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    GROUP_KEYS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Store one head of one state and load it back; `address_ptr` is `[rows, 5]`, see `triton_store`."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    rows = tl.arange(0, BLOCK_V)
    keys = tl.arange(0, BLOCK_K)
    mask = rows < d_v
    inside = mask[:, None] & (keys < D_K)[None, :]
    where = row * row_stride + head * head_stride + rows[:, None] * v_stride + keys[None, :] * k_stride
    values = tl.load(state_ptr + where, mask=inside, other=0.0)
    words = tl.zeros((BLOCK_V, BLOCK_K), dtype=tl.uint32)
    if STOCHASTIC:
        table = address_ptr + row * 5
        words = philox_bits(
            tl.load(table).to(tl.uint32),
            tl.load(table + 1).to(tl.uint32),
            tl.load(table + 2).to(tl.uint32),
            tl.load(table + 3).to(tl.uint32),
            tl.load(table + 4).to(tl.uint32),
            head * d_v + rows,
            D_K,
            BLOCK_K,
        )
    index = row * heads + head
    head_bits = tl.max(tl.max(magnitude_bits(values), axis=1), axis=0)
    loaded = store_state(
        values,
        words,
        payload_ptr + index * elements,
        scale_ptr + index * groups,
        head_scale_ptr + index,
        head_bits,
        divisor,
        rows,
        mask,
        D_K,
        ELEMENT,
        SCALE,
        TILE_ROWS,
        GROUP_KEYS,
        STOCHASTIC,
    )
    tl.store(loaded_ptr + index * d_v * D_K + rows[:, None] * D_K + keys[None, :], loaded, mask=inside)


@triton.jit
def unpack_kernel(
    payload_ptr,
    scale_ptr,
    head_scale_ptr,
    loaded_ptr,
    heads,
    d_v,
    groups,
    elements,
    D_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    GROUP_KEYS: tl.constexpr,
):
    """Load one head of one state."""
    index = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    rows = tl.arange(0, BLOCK_V)
    keys = tl.arange(0, BLOCK_K)
    mask = rows < d_v
    loaded = load_state(
        payload_ptr + index * elements,
        scale_ptr + index * groups,
        head_scale_ptr + index,
        rows,
        mask,
        D_K,
        BLOCK_K,
        ELEMENT,
        SCALE,
        TILE_ROWS,
        GROUP_KEYS,
    )
    inside = mask[:, None] & (keys < D_K)[None, :]
    tl.store(loaded_ptr + index * d_v * D_K + rows[:, None] * D_K + keys[None, :], loaded, mask=inside)
