"""A kernel that stores with given random words, so that words can sit on either side of a decision."""

import torch
import triton
import triton.language as tl

from replayssm.formats import Format, PackedState
from replayssm.formats.triton_bits import magnitude_bits
from replayssm.formats.triton_format import PAYLOAD_DTYPES, SCALE_DTYPES, TritonFormat, block
from replayssm.formats.triton_ops import load_state, store_and_load_tile, store_state
from replayssm.launch import launch


@triton.jit
def store_kernel(
    state_ptr,
    words_ptr,
    payload_ptr,
    scale_ptr,
    head_scale_ptr,
    stored_ptr,
    tiled_ptr,
    loaded_ptr,
    divisor,
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
    DIVISOR: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    head = tl.program_id(0)
    rows, keys = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K)
    mask = rows < d_v
    inside = mask[:, None] & (keys < D_K)[None, :]
    at = head * d_v * D_K + rows[:, None] * D_K + keys[None, :]
    values = tl.load(state_ptr + at, mask=inside, other=0.0)
    words = tl.load(words_ptr + at, mask=inside, other=0).to(tl.uint32)
    payload = payload_ptr + head * elements
    scales = scale_ptr + head * groups
    largest = tl.max(tl.max(magnitude_bits(values), axis=1), axis=0)
    stored = store_state(
        values, words, payload, scales, head_scale_ptr + head, largest, divisor, rows, mask,
        D_K, ELEMENT, SCALE, TILE_ROWS, GROUP_KEYS, STOCHASTIC,
    )  # fmt: skip
    tiled = store_and_load_tile(values, words, ELEMENT, SCALE, TILE_ROWS, GROUP_KEYS, DIVISOR, STOCHASTIC)
    loaded = load_state(
        payload, scales, head_scale_ptr + head, rows, mask, D_K, BLOCK_K, ELEMENT, SCALE, TILE_ROWS, GROUP_KEYS
    )
    tl.store(stored_ptr + at, stored, mask=inside)
    tl.store(tiled_ptr + at, tiled, mask=inside)
    tl.store(loaded_ptr + at, loaded, mask=inside)


def store(
    state: torch.Tensor, fmt: Format, words: torch.Tensor | None, *, divisor: float | None = None
) -> tuple[PackedState, dict[str, torch.Tensor]]:
    """Store `[rows, heads, d_v, d_k]`; the bytes, and what three device functions say loads back."""
    rows, heads, d_v, d_k = state.shape
    how = TritonFormat.of(fmt, heads=heads, d_v=d_v, d_k=d_k)
    divisor = how.divisor if divisor is None else divisor
    elements = d_v * d_k // 2 if fmt.spec.bits == 4 else d_v * d_k
    groups = heads * d_v * d_k // fmt.group_elements(heads=heads, d_v=d_v, d_k=d_k) if fmt.is_scaled else 0
    device = state.device
    given = torch.zeros(state.shape, dtype=torch.int64) if words is None else words.view(state.shape)
    # Everything that the kernel must fill is poisoned.
    payload = torch.full((rows * heads * elements,), 0x55, dtype=torch.uint8, device=device)
    payload = payload.to(PAYLOAD_DTYPES[how.element])
    scales = torch.full((rows * groups,), 0x55, device=device).to(SCALE_DTYPES.get(how.scale, torch.uint8))
    head_scales = torch.full((rows * heads if fmt.scale.value == "e4m3" else 0,), torch.nan, device=device)
    loaded = {name: torch.full(state.shape, 12345.0, device=device) for name in ("stored", "tiled", "loaded")}
    launch(
        store_kernel, (rows * heads,), state, given.to(device), payload, scales, head_scales, *loaded.values(), divisor,
        d_v, groups // heads, elements, D_K=d_k, BLOCK_V=block(d_v), BLOCK_K=block(d_k), ELEMENT=int(how.element),
        SCALE=int(how.scale), TILE_ROWS=how.tile_rows, GROUP_KEYS=how.group_keys, DIVISOR=divisor,
        STOCHASTIC=how.stochastic, num_warps=4,
    )  # fmt: skip
    packed = PackedState(
        format=fmt, shape=tuple(state.shape), payload=payload.view(torch.uint8), scales=scales.view(torch.uint8),
        head_scales=head_scales.view(torch.uint8),
    )  # fmt: skip
    return packed, loaded
