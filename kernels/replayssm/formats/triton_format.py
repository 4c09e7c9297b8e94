"""What a kernel needs to know of a format: small integers instead of names."""

import math
from dataclasses import dataclass
from enum import IntEnum

import torch

from replayssm.formats.format import Format, Granularity, Rounding, ScaleType


class ElementCode(IntEnum):
    """Element types, numbered as in `triton_bits`."""

    FP32 = 0
    BF16 = 1
    FP16 = 2
    E4M3 = 3
    E5M2 = 4
    E2M1 = 5
    INT8 = 6
    INT16 = 7


class ScaleCode(IntEnum):
    """Scale types, numbered as in `triton_payload`."""

    NONE = 0
    FP32 = 1
    FP16 = 2
    E4M3 = 3
    E8M0 = 4


PAYLOAD_DTYPES = {
    ElementCode.FP32: torch.float32,
    ElementCode.BF16: torch.int16,
    ElementCode.FP16: torch.float16,
    ElementCode.E4M3: torch.uint8,
    ElementCode.E5M2: torch.uint8,
    ElementCode.E2M1: torch.uint8,
    ElementCode.INT8: torch.int8,
    ElementCode.INT16: torch.int16,
}
"""Dtype of the payload tensor that kernels take: codes, as in `PackedState.payload` viewed as this dtype."""

SCALE_DTYPES = {
    ScaleCode.FP32: torch.float32,
    ScaleCode.FP16: torch.float16,
    ScaleCode.E4M3: torch.uint8,
    ScaleCode.E8M0: torch.uint8,
}


@dataclass(frozen=True, kw_only=True)
class TritonFormat:
    """A format for one shape of state, as arguments of the device functions in `triton_payload` and `triton_ops`.

    Attributes:
        element: `ELEMENT`.
        scale: `SCALE`.
        tile_rows: `TILE_ROWS`, value rows that share a scale; for a scale per head all rows of the padded tile.
        group_keys: `GROUP_KEYS`, keys that share a scale.
        divisor: `divisor`; for E8M0 the power of two that the exponent is multiplied with.
        stochastic: `STOCHASTIC`.
        whole_head: Whether a program must hold all rows of a head, because a scale depends on all of them.
    """

    element: ElementCode
    scale: ScaleCode
    tile_rows: int
    group_keys: int
    divisor: float
    stochastic: bool
    whole_head: bool

    @classmethod
    def of(cls, fmt: Format, *, heads: int, d_v: int, d_k: int) -> "TritonFormat":
        """The arguments for a format.

        Args:
            fmt: The format, without error feedback.
            heads: Heads of one sequence's state.
            d_v: Value rows per head.
            d_k: Keys per row.

        Raises:
            ValueError: If the format does not suit such a state, or the kernels cannot store it.
        """
        fmt.group_elements(heads=heads, d_v=d_v, d_k=d_k)
        problem = _unsupported(fmt, d_k=d_k)
        if problem is not None:
            raise ValueError(f"format {fmt}: {problem}; use backend torch")
        block_v, block_k = block(d_v), block(d_k)
        per_block = fmt.granularity is Granularity.BLOCK and fmt.group < d_k
        tile = {Granularity.HEAD: block_v, Granularity.TILE: fmt.group}.get(fmt.granularity, 1)
        return cls(
            element=ElementCode[fmt.element.name],
            scale=ScaleCode[fmt.scale.name],
            tile_rows=tile,
            group_keys=fmt.group if per_block else block_k,
            divisor=2.0 ** (1 - math.frexp(fmt.divisor)[1]) if fmt.scale is ScaleType.E8M0 else fmt.divisor,
            stochastic=fmt.rounding is Rounding.STOCHASTIC,
            whole_head=fmt.granularity is Granularity.HEAD or fmt.scale is ScaleType.E4M3,
        )


def block(size: int) -> int:
    """The power of two of at least 16 that holds an axis of a tile."""
    return max(16, 1 << (size - 1).bit_length())


def _unsupported(fmt: Format, *, d_k: int) -> str | None:
    if fmt.error_feedback is not None:
        return "the Triton kernels keep no error-feedback copy"
    if fmt.granularity is Granularity.TENSOR:
        return "a scale per tensor spans heads, which different programs of the Triton kernels hold"
    row_in_one_block = fmt.granularity is Granularity.BLOCK and fmt.group == d_k
    if fmt.granularity.is_sized and fmt.group & (fmt.group - 1) and not row_in_one_block:
        return f"the Triton kernels group {fmt.granularity.value}s of a power of two, got {fmt.group}"
    return None
