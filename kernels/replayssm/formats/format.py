"""A storage format as a frozen value, and the table of named formats."""

import math
from dataclasses import dataclass
from enum import StrEnum

from replayssm.formats.elements import ElementSpec, ElementType


class Rounding(StrEnum):
    """How a payload is rounded to its element type. Scales are always rounded to nearest, ties to even."""

    NEAREST_EVEN = "rtn"
    STOCHASTIC = "sr"


class Granularity(StrEnum):
    """Which elements share one scale."""

    NONE = "none"
    TENSOR = "tensor"
    HEAD = "head"
    ROW = "row"
    TILE = "tile"
    BLOCK = "block"

    @property
    def is_sized(self) -> bool:
        """Whether the granularity carries a number: `tile=N` value rows, `block=N` keys."""
        return self in (Granularity.TILE, Granularity.BLOCK)


class ScaleType(StrEnum):
    """The type in which a scale is stored.

    `e4m3` comes with one float32 scale per head; `e8m0` is a power of two.
    """

    NONE = "none"
    FP32 = "fp32"
    FP16 = "fp16"
    E4M3 = "e4m3"
    E8M0 = "e8m0"

    @property
    def bits(self) -> int:
        """Stored width of one scale."""
        return {"none": 0, "fp32": 32, "fp16": 16, "e4m3": 8, "e8m0": 8}[self.value]


GLOBAL_SCALE_BITS = 32
"""Width of the per-head float32 scale that accompanies `e4m3` scales."""

LARGEST_GROUP = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one copy of a state is stored.

    Attributes:
        element: Type of the payload.
        granularity: Which elements share a scale.
        group: The number of a sized granularity (value rows of a tile, keys of a block), else 0.
        scale: Type of the stored scale.
        divisor: A scale is the largest magnitude of its group over this number; 0 where there is no scale.
        rounding: How payloads are rounded.
        error_feedback: Format of the second copy that keeps what the last store rounded away, or None.

    Raises:
        ValueError: When the parts contradict each other.
    """

    element: ElementType
    granularity: Granularity = Granularity.NONE
    group: int = 0
    scale: ScaleType = ScaleType.NONE
    divisor: float = 0.0
    rounding: Rounding = Rounding.NEAREST_EVEN
    error_feedback: "Format | None" = None

    def __post_init__(self) -> None:
        problems = [
            *_scale_problems(self),
            *_group_problems(self),
            *_rounding_problems(self),
            *_feedback_problems(self),
        ]
        if problems:
            raise ValueError("; ".join(problems))

    @classmethod
    def parse(cls, text: str) -> "Format":
        """Read a format from its text form, such as `fp8[tile=32,max=240]+sr` or `int8[ef=int8]`.

        Case and spaces do not matter.

        Args:
            text: `NAME`, optionally `[OPTION,…]` with options `tensor|head|row|tile=N|block=N`, `max=X`,
                `scale=fp32|fp16|e4m3|e8m0|none`, `ef=FORMAT`, and optionally `+rtn` or `+sr`.

        Returns:
            The format.

        Raises:
            ValueError: With what was expected, what came and, for a mistyped name, the nearest one that exists.
        """
        from replayssm.formats.grammar import parse_fields

        return cls(**parse_fields(text))

    def __str__(self) -> str:
        """The canonical text, defaults omitted: `Format.parse(str(f)) == f`."""
        from replayssm.formats.grammar import render

        return render(self)

    @property
    def is_identity(self) -> bool:
        """Whether storing a float32 state changes nothing."""
        return self.element is ElementType.FP32

    @property
    def is_scaled(self) -> bool:
        """Whether scales are stored."""
        return self.scale is not ScaleType.NONE

    @property
    def spec(self) -> ElementSpec:
        """The numbers that define the element type."""
        return self.element.spec

    def group_elements(self, *, heads: int, d_v: int, d_k: int) -> int:
        """Number of consecutive elements (C order in `[heads, d_v, d_k]`) that share a scale.

        Args:
            heads: Heads of one sequence's state.
            d_v: Value rows per head.
            d_k: Keys per row.

        Returns:
            The size of one group; the whole state where there is no scale.

        Raises:
            ValueError: If the groups of this format do not divide such a state.
        """
        shape = f"[heads={heads}, d_v={d_v}, d_k={d_k}]"
        if self.granularity is Granularity.BLOCK and d_k % self.group:
            raise ValueError(
                f"format {self}: blocks of {self.group} keys need d_k to be a multiple of {self.group}, got a state "
                f"{shape}; use block=N with N dividing {d_k}, or row"
            )
        if self.granularity is Granularity.TILE and d_v % self.group:
            raise ValueError(
                f"format {self}: tiles of {self.group} value rows need d_v to be a multiple of {self.group}, got a "
                f"state {shape}; use tile=N with N dividing {d_v}, or head"
            )
        if self.spec.bits < 8 and d_k % 2:
            raise ValueError(f"format {self}: two codes share a byte, so d_k must be even, got a state {shape}")
        match self.granularity:
            case Granularity.NONE | Granularity.TENSOR:
                return heads * d_v * d_k
            case Granularity.HEAD:
                return d_v * d_k
            case Granularity.ROW:
                return d_k
            case Granularity.TILE:
                return self.group * d_k
            case Granularity.BLOCK:
                return self.group

    def bits_per_element(self, *, heads: int, d_v: int, d_k: int) -> float:
        """Stored bits per state element, with scales and the error-feedback copy.

        Args:
            heads: Heads of one sequence's state.
            d_v: Value rows per head.
            d_k: Keys per row.

        Returns:
            The average width in bits.

        Raises:
            ValueError: If the groups of this format do not divide such a state.
        """
        elements = heads * d_v * d_k
        group = self.group_elements(heads=heads, d_v=d_v, d_k=d_k)
        bits = self.spec.bits * elements
        if self.is_scaled:
            bits += self.scale.bits * (elements // group)
        if self.scale is ScaleType.E4M3:
            bits += GLOBAL_SCALE_BITS * heads
        total = bits / elements
        if self.error_feedback is not None:
            total += self.error_feedback.bits_per_element(heads=heads, d_v=d_v, d_k=d_k)
        return total


@dataclass(frozen=True, kw_only=True)
class NamedFormat:
    """An entry of the table of named formats.

    Attributes:
        format: The format without options; its fields are the defaults of the name.
        aliases: Other names for it.
        summary: One line for listings.
    """

    format: Format
    aliases: tuple[str, ...] = ()
    summary: str


def _scale_problems(f: Format) -> list[str]:
    spec = f.spec
    if not f.is_scaled:
        problems: list[str] = []
        if not spec.has_nan:
            problems.append(
                f"{f.element.value} payloads need a scale, got scale=none: without one the type is useless for states "
                "and cannot show a state that diverged"
            )
        if f.divisor:
            problems.append(f"max= sets the divisor of a scale, got max={f.divisor:g} in a format without scales")
        return problems
    if spec.bits > 8 and not spec.is_integer:
        return [f"{f.element.value} is stored as it is, without scales; got scale={f.scale.value}"]
    if not (math.isfinite(f.divisor) and 1 <= f.divisor <= 2 * spec.largest):
        return [
            f"max= must lie in [1, {2 * spec.largest:g}] for {f.element.value} payloads (largest value "
            f"{spec.largest:g}), got {f.divisor:g}"
        ]
    if f.scale is ScaleType.E4M3 and f.granularity is Granularity.TENSOR:
        return [
            "scale=e4m3 comes with one float32 scale per head, so groups may not span heads; got tensor; use head, "
            "row, tile=N or block=N"
        ]
    return []


def _group_problems(f: Format) -> list[str]:
    problems: list[str] = []
    if f.is_scaled == (f.granularity is Granularity.NONE):
        have = "with" if f.is_scaled else "without"
        problems.append(f"granularity says who shares a scale, got granularity {f.granularity.value} {have} scales")
    if f.granularity.is_sized and not 1 <= f.group <= LARGEST_GROUP:
        problems.append(f"{f.granularity.value}= must be in 1…{LARGEST_GROUP}, got {f.group}")
    if not f.granularity.is_sized and f.group:
        problems.append(f"{f.granularity.value} takes no number, got {f.group}")
    return problems


def _rounding_problems(f: Format) -> list[str]:
    if f.is_identity and f.rounding is Rounding.STOCHASTIC:
        return ["fp32 stores a float32 state exactly, so there is nothing to round stochastically; write fp32"]
    return []


def _feedback_problems(f: Format) -> list[str]:
    if f.error_feedback is None:
        return []
    if f.is_identity:
        return ["fp32 stores a float32 state exactly, so there is no error to feed back; drop ef="]
    if f.error_feedback.error_feedback is not None:
        return [f"the error-feedback copy cannot have one of its own, got ef={f.error_feedback}"]
    if f.error_feedback.rounding is Rounding.STOCHASTIC:
        return [f"the error-feedback copy is rounded to nearest, got ef={f.error_feedback}; drop its +sr"]
    return []


def _scaled(element: ElementType, granularity: Granularity, scale: ScaleType, group: int = 0) -> Format:
    return Format(
        element=element, granularity=granularity, group=group, scale=scale, divisor=element.spec.largest
    )  # fmt: skip


NAMED_FORMATS: dict[str, NamedFormat] = {
    "fp32": NamedFormat(
        format=Format(element=ElementType.FP32),
        aliases=("float32",),
        summary="IEEE binary32, the working precision: stores change nothing",
    ),
    "bf16": NamedFormat(format=Format(element=ElementType.BF16), aliases=("bfloat16",), summary="bfloat16, no scale"),
    "fp16": NamedFormat(
        format=Format(element=ElementType.FP16),
        aliases=("float16",),
        summary="IEEE binary16, no scale; overflows to infinity",
    ),
    "fp8": NamedFormat(
        format=_scaled(ElementType.E4M3, Granularity.ROW, ScaleType.FP32),
        aliases=("e4m3", "fp8_e4m3"),
        summary="OCP E4M3, float32 scale per row",
    ),
    "fp8_e5m2": NamedFormat(
        format=_scaled(ElementType.E5M2, Granularity.ROW, ScaleType.FP32),
        aliases=("e5m2",),
        summary="OCP E5M2, float32 scale per row",
    ),
    "int8": NamedFormat(
        format=_scaled(ElementType.INT8, Granularity.ROW, ScaleType.FP32),
        summary="symmetric 8-bit integers, float32 scale per row",
    ),
    "int16": NamedFormat(
        format=_scaled(ElementType.INT16, Granularity.ROW, ScaleType.FP32),
        summary="symmetric 16-bit integers, float32 scale per row",
    ),
    "nvfp4": NamedFormat(
        format=_scaled(ElementType.E2M1, Granularity.BLOCK, ScaleType.E4M3, 16),
        summary="E2M1, E4M3 scale per block of 16 keys over a float32 scale per head",
    ),
    "mxfp8": NamedFormat(
        format=_scaled(ElementType.E4M3, Granularity.BLOCK, ScaleType.E8M0, 32),
        aliases=("mxfp8_e4m3",),
        summary="OCP microscaling E4M3, power-of-two scale per block of 32 keys",
    ),
    "mxfp4": NamedFormat(
        format=_scaled(ElementType.E2M1, Granularity.BLOCK, ScaleType.E8M0, 32),
        summary="OCP microscaling E2M1, power-of-two scale per block of 32 keys",
    ),
}
"""Every named format. A new name is one new entry."""
