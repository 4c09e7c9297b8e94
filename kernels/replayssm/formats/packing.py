"""The bytes of a stored state: what a checkpoint really occupies."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from replayssm.formats.cast import corrected_state, quantize
from replayssm.formats.elements import ElementType, decode_table
from replayssm.formats.format import Format, ScaleType

_NATIVE = {
    ElementType.FP32: torch.float32,
    ElementType.BF16: torch.bfloat16,
    ElementType.FP16: torch.float16,
    ElementType.E4M3: torch.float8_e4m3fn,
    ElementType.E5M2: torch.float8_e5m2,
    ElementType.INT8: torch.int8,
    ElementType.INT16: torch.int16,
}
_NATIVE_SCALES = {
    ScaleType.FP32: torch.float32,
    ScaleType.FP16: torch.float16,
    ScaleType.E4M3: torch.float8_e4m3fn,
    ScaleType.E8M0: torch.float8_e8m0fnu,
}


@dataclass(frozen=True, kw_only=True)
class PackedState:
    """A batch of stored states.

    Attributes:
        format: How they are stored; never with error feedback, whose copy is a state of its own.
        shape: Shape of the states, `[*rows, heads, d_v, d_k]`.
        payload: Codes in C order, little-endian; of two 4-bit codes in a byte the first is the low half.
        scales: Scale of each group in C order, little-endian; empty without scales.
        head_scales: float32 scale of each head, little-endian; empty unless the scale type is `e4m3`.
    """

    format: Format
    shape: tuple[int, ...]
    payload: UInt8[Tensor, " payload"]
    scales: UInt8[Tensor, " scales"]
    head_scales: UInt8[Tensor, " head_scales"]

    @property
    def nbytes(self) -> int:
        """Bytes that the states occupy: `format.bits_per_element` times the number of elements, over 8."""
        return self.payload.numel() + self.scales.numel() + self.head_scales.numel()

    def unpack(self) -> Float[Tensor, "*rows heads d_v d_k"]:
        """Load the states.

        Returns:
            float32, bit for bit what `store_and_load` returns for the same state and random bits.
        """
        values = _decode(self.payload, self.format.element)
        if self.format.is_scaled:
            scales = self.scales.view(_NATIVE_SCALES[self.format.scale]).to(torch.float32)
            if self.format.scale is ScaleType.E4M3:
                of_heads = self.head_scales.view(torch.float32)
                scales = (_by_group(scales, of_heads.numel()) * of_heads.unsqueeze(-1)).flatten()
            values = _by_group(values, scales.numel()) * scales.unsqueeze(-1)
        return values.view(self.shape)


def pack(
    state: Float[Tensor, "*rows heads d_v d_k"],
    fmt: Format,
    *,
    bits: Int64[Tensor, "*rows elements"] | None = None,
) -> PackedState:
    """Store a state as bytes.

    Args:
        state: float32 or float64. Not modified.
        fmt: The format, without error feedback.
        bits: Random words from `random_bits`, for stochastic rounding only.

    Returns:
        The bytes.

    Raises:
        ValueError: As for `store_and_load`.

    Rounding: that of `store_and_load`.
    """
    if fmt.error_feedback is not None:
        raise ValueError(f"format {fmt} is stored as two copies; use pack_with_feedback")
    payload, scales = quantize(state, fmt, bits=bits)
    empty = torch.empty(0, dtype=torch.uint8, device=state.device)
    stored = empty if scales is None else _bytes(scales.stored, _NATIVE_SCALES[fmt.scale])
    per_head = empty if scales is None or scales.per_head is None else _bytes(scales.per_head, torch.float32)
    return PackedState(
        format=fmt,
        shape=tuple(state.shape),
        payload=_encode(payload, fmt.element),
        scales=stored,
        head_scales=per_head,
    )


def pack_with_feedback(
    state: Float[Tensor, "*rows heads d_v d_k"],
    residual: Float[Tensor, "*rows heads d_v d_k"] | None,
    fmt: Format,
    *,
    bits: Int64[Tensor, "*rows elements"] | None = None,
) -> tuple[PackedState, PackedState]:
    """Store a state with error feedback as bytes.

    Args:
        state: float32 or float64. Not modified.
        residual: The unpacked residual of the last store, or None at the first.
        fmt: A format with error feedback.
        bits: Random words from `random_bits`, for stochastic rounding of the state only.

    Returns:
        The state and the residual; together they unpack to what `store_and_load_with_feedback` returns.

    Raises:
        ValueError: As for `store_and_load_with_feedback`.

    Rounding: that of `store_and_load_with_feedback`.
    """
    corrected, main, feedback = corrected_state(state, residual, fmt)
    packed = pack(corrected, main, bits=bits)
    return packed, pack(corrected - packed.unpack(), feedback)


def _by_group(flat: Tensor, groups: int) -> Tensor:
    return flat.view(groups, flat.numel() // max(groups, 1))


def _bytes(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).contiguous().view(torch.uint8).flatten()


def _encode(payload: Tensor, element: ElementType) -> Tensor:
    flat = payload.flatten()
    if element.spec.has_nan:
        return _bytes(flat, _NATIVE[element])
    # A NaN payload stands in a group whose scale says NaN already.
    flat = flat.nan_to_num(0.0, 0.0, 0.0)
    if element.spec.is_integer:
        return _bytes(flat, _NATIVE[element])
    magnitude = flat.abs()
    # 0, 0.5, 1, 1.5, 2, 3, 4, 6 are codes 0 to 7: steps of a half, then of one, then of two.
    steps = (magnitude * 2).clamp(max=4) + (magnitude - 2).clamp(0, 2) + (magnitude / 2 - 2).clamp(0, 1)
    codes = steps.to(torch.uint8) | (flat.signbit().to(torch.uint8) << 3)
    return codes[0::2] | (codes[1::2] << 4)


def _decode(payload: Tensor, element: ElementType) -> Tensor:
    if element.spec.bits < 8:
        codes = torch.stack([payload & 0xF, payload >> 4], dim=-1).flatten()
        table = torch.tensor(decode_table(element), dtype=torch.float32, device=payload.device)
        return table[codes.to(torch.int64)]
    return payload.view(_NATIVE[element]).to(torch.float32)
