"""Packing and unpacking whole batches of states with the Triton device functions."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from replayssm.formats.format import Format
from replayssm.formats.packing import PackedState
from replayssm.formats.triton_format import PAYLOAD_DTYPES, SCALE_DTYPES, ScaleCode, TritonFormat, block
from replayssm.formats.triton_store_kernels import (
    pack_kernel,  # pyright: ignore[reportUnknownVariableType]
    unpack_kernel,  # pyright: ignore[reportUnknownVariableType]
)
from replayssm.launch import launch


@dataclass(frozen=True, kw_only=True)
class StoreAddress:
    """What the random bits of a store depend on, as `replayssm.formats.random_bits` takes it.

    Attributes:
        seed: 64-bit seed.
        layer: Index of the layer.
        copy: Which stored copy.
        sequences: Sequence id of each row.
        tokens: Index of the last token folded into each row's state.
    """

    seed: int
    layer: int
    copy: int
    sequences: Int64[Tensor, " rows"]
    tokens: Int64[Tensor, " rows"]


def as_words(values: list[int], device: torch.device) -> Tensor:
    """Unsigned 32-bit numbers as an int32 tensor of the same bits."""
    return torch.tensor([v - (1 << 32) if v >> 31 else v for v in values], dtype=torch.int32, device=device)


def pack(
    state: Float[Tensor, "rows heads d_v d_k"], fmt: Format, *, address: StoreAddress | None = None
) -> tuple[PackedState, Float[Tensor, "rows heads d_v d_k"]]:
    """Store float32 states as bytes.

    Args:
        state: float32, of any strides. Not modified.
        fmt: The format, without error feedback.
        address: Where random bits come from, for stochastic rounding only.

    Returns:
        The bytes, and what loads back: those of `replayssm.formats.pack`.

    Raises:
        ValueError: If the format does not suit the state or the kernels, or the address is missing or superfluous.

    Rounding: that of `replayssm.formats.store_and_load`.
    """
    rows, heads, d_v, d_k = state.shape
    how = TritonFormat.of(fmt, heads=heads, d_v=d_v, d_k=d_k)
    if state.dtype != torch.float32:
        raise ValueError(f"format {fmt}: expected a float32 state, got {state.dtype}; convert it with .float()")
    if how.stochastic != (address is not None):
        raise ValueError(
            f"format {fmt}: expected {'an' if how.stochastic else 'no'} address of random bits, got "
            f"{'none' if how.stochastic else 'one'}"
        )
    elements = d_v * d_k // 2 if fmt.spec.bits == 4 else d_v * d_k
    payload = torch.empty(rows * heads * elements, dtype=PAYLOAD_DTYPES[how.element], device=state.device)
    groups = heads * d_v * d_k // fmt.group_elements(heads=heads, d_v=d_v, d_k=d_k) if fmt.is_scaled else 0
    scales = torch.empty(rows * groups, dtype=SCALE_DTYPES.get(how.scale, torch.uint8), device=state.device)
    head_count = rows * heads if how.scale is ScaleCode.E4M3 else 0
    head_scales = torch.empty(head_count, dtype=torch.float32, device=state.device)
    loaded = torch.empty(state.shape, dtype=torch.float32, device=state.device)
    launch(
        pack_kernel,
        (rows, heads),
        state,
        *state.stride(),
        payload,
        scales,
        head_scales,
        loaded,
        _address_table(address, rows, state.device),
        how.divisor,
        heads,
        d_v,
        groups // heads,
        elements,
        D_K=d_k,
        BLOCK_V=block(d_v),
        BLOCK_K=block(d_k),
        ELEMENT=int(how.element),
        SCALE=int(how.scale),
        TILE_ROWS=how.tile_rows,
        GROUP_KEYS=how.group_keys,
        STOCHASTIC=how.stochastic,
        num_warps=8,
    )
    packed = PackedState(
        format=fmt,
        shape=tuple(state.shape),
        payload=payload.view(torch.uint8),
        scales=scales.view(torch.uint8),
        head_scales=head_scales.view(torch.uint8),
    )
    return packed, loaded


def unpack(packed: PackedState) -> Float[Tensor, "rows heads d_v d_k"]:
    """Load states from bytes: what `packed.unpack()` returns.

    Raises:
        ValueError: If the kernels cannot load the format.
    """
    rows, heads, d_v, d_k = packed.shape
    how = TritonFormat.of(packed.format, heads=heads, d_v=d_v, d_k=d_k)
    loaded = torch.empty(packed.shape, dtype=torch.float32, device=packed.payload.device)
    scales = packed.scales.view(SCALE_DTYPES.get(how.scale, torch.uint8))
    launch(
        unpack_kernel,
        (rows, heads),
        packed.payload.view(PAYLOAD_DTYPES[how.element]),
        scales,
        packed.head_scales.view(torch.float32),
        loaded,
        heads,
        d_v,
        scales.numel() // (rows * heads),
        d_v * d_k // 2 if packed.format.spec.bits == 4 else d_v * d_k,
        D_K=d_k,
        BLOCK_V=block(d_v),
        BLOCK_K=block(d_k),
        ELEMENT=int(how.element),
        SCALE=int(how.scale),
        TILE_ROWS=how.tile_rows,
        GROUP_KEYS=how.group_keys,
        num_warps=8,
    )
    return loaded


def _address_table(address: StoreAddress | None, rows: int, device: torch.device) -> Tensor:
    """int32 `[rows, 5]`: low and high half of the seed, layer and copy, sequence, token."""
    if address is None:
        return torch.zeros((rows, 5), dtype=torch.int32, device=device)
    common = [address.seed & 0xFFFFFFFF, address.seed >> 32, address.layer | address.copy << 24]
    pairs = zip(_integers(address.sequences), _integers(address.tokens), strict=True)
    words = [word for pair in pairs for word in (*common, *pair)]
    return as_words(words, device).view(rows, 5)


def _integers(vector: Tensor) -> list[int]:
    return vector.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
