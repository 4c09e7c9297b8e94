"""Scales: one positive number per group of elements, computed in float32 and rounded to its stored type.

Everything here works on magnitudes whose groups are consecutive, as `[rows, groups, elements per group]`.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from replayssm.formats.elements import ElementType
from replayssm.formats.format import Format, ScaleType
from replayssm.formats.rounding import EXPONENT_MASK, float32_bits, round_to_nearest

E4M3_LARGEST = 448.0
E4M3_SMALLEST = 2.0**-9
FP16_LARGEST = 65504.0
FP16_SMALLEST = 2.0**-24

SMALLEST_SCALE = 2.0**-126
"""No scale is below the smallest normal float32, so hardware that flushes subnormals sees the same scales."""

SMALLEST_GLOBAL_SCALE = SMALLEST_SCALE / E4M3_SMALLEST
"""The smallest E4M3 scale times this is still a normal float32."""


@dataclass(frozen=True, kw_only=True)
class Scales:
    """The stored scales of a batch of states.

    Attributes:
        stored: Scale of each group, a float32 that its stored type represents exactly.
        per_head: The float32 scale of each head that multiplies `stored`, or None.
        effective: What payloads are divided by and multiplied with: `stored`, times the scale of the head if any.
    """

    stored: Float[Tensor, "rows groups"]
    per_head: Float[Tensor, "rows heads"] | None
    effective: Float[Tensor, "rows groups 1"]


def largest_magnitudes(magnitudes: Float[Tensor, "rows groups size"]) -> Float[Tensor, "rows groups"]:
    """The largest magnitude of each group; NaN where a group holds one.

    Magnitudes order as their bit patterns do, NaN above infinity, and integers reduce faster.
    """
    return magnitudes.view(torch.int32).amax(dim=-1).view(torch.float32)


def compute_scales(magnitudes: Float[Tensor, "rows groups size"], fmt: Format, *, heads: int) -> Scales:
    """Scales of every group.

    Args:
        magnitudes: Absolute values of the states, float32.
        fmt: A format with scales.
        heads: Heads of each state, for the per-head scale.

    Returns:
        The scales. A group with a value that is not finite has the scale NaN, so that all of it loads back as NaN (with
        per-head scales: all of the head). Every other scale is positive and finite; a group of zeros has the smallest.

    Rounding: float32 division, then to nearest, ties to even, in the stored type, limited to its smallest and largest
        positive values. `e8m0` keeps the exponent of the largest magnitude, minus that of the divisor (the rule of OCP
        microscaling).
    """
    largest = largest_magnitudes(magnitudes)
    # A tensor, because GPUs divide by a Python number through its rounded reciprocal.
    divisor = torch.full((), fmt.divisor, dtype=torch.float32, device=largest.device)
    # Zero where everything is finite, NaN elsewhere; limits below would turn an infinity into a finite scale.
    poison = largest - largest
    per_head = None
    if fmt.scale is ScaleType.E4M3:
        per_head, stored = _scales_per_head(largest, divisor, heads=heads)
    elif fmt.scale is ScaleType.E8M0:
        exponent = (float32_bits(largest) & EXPONENT_MASK).view(torch.float32)
        stored = exponent.mul_(2.0 ** (1 - math.frexp(fmt.divisor)[1])).clamp_(min=SMALLEST_SCALE)
    elif fmt.scale is ScaleType.FP16:
        stored = largest.div(divisor).clamp_(FP16_SMALLEST, FP16_LARGEST).to(torch.float16).to(torch.float32)
    else:
        stored = largest.div(divisor).clamp_(min=SMALLEST_SCALE)
    stored.add_(poison)
    effective = stored if per_head is None else _times_head(stored, per_head)
    return Scales(stored=stored, per_head=per_head, effective=effective.unsqueeze(-1))


def _scales_per_head(largest: Tensor, divisor: Tensor, *, heads: int) -> tuple[Tensor, Tensor]:
    by_head = _by_head(largest, heads)
    of_head = by_head.amax(dim=-1)
    per_head = of_head.div(divisor * E4M3_LARGEST).clamp_(min=SMALLEST_GLOBAL_SCALE).add_(of_head - of_head)
    stored = by_head.div(per_head.mul(divisor).unsqueeze(-1)).clamp_(E4M3_SMALLEST, E4M3_LARGEST)
    return per_head, round_to_nearest(stored, ElementType.E4M3.spec).view(largest.shape)


def _times_head(stored: Tensor, per_head: Tensor) -> Tensor:
    return (_by_head(stored, per_head.shape[-1]) * per_head.unsqueeze(-1)).view(stored.shape)


def _by_head(groups: Tensor, heads: int) -> Tensor:
    rows, count = groups.shape
    return groups.view(rows, heads, count // heads)
