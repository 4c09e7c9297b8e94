"""Storing a state and loading it back, without the detour over bytes."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from replayssm.formats.elements import ElementType
from replayssm.formats.format import Format, Rounding
from replayssm.formats.rounding import (
    magnitudes_of,
    round_stochastically,
    round_stochastically_to_bfloat16,
    round_to_nearest,
)
from replayssm.formats.scales import Scales, compute_scales


def store_and_load(
    state: Float[Tensor, "*rows heads d_v d_k"],
    fmt: Format,
    *,
    bits: Int64[Tensor, "*rows elements"] | None = None,
) -> Float[Tensor, "*rows heads d_v d_k"]:
    """Store a state in a format and load it back.

    Args:
        state: float32 or float64. Not modified.
        fmt: The format, without error feedback.
        bits: Random words from `random_bits`, for stochastic rounding only.

    Returns:
        What loads back, in the dtype of `state`; for `fp32` it may be `state` itself.

    Raises:
        ValueError: If the shape does not suit the format, the dtype is another one, the format has error feedback, or
            `bits` are missing, superfluous or of another shape.

    Rounding: a float64 state is first rounded to float32. Payloads are `state / scale`, rounded to float32 and then as
        the format says; what loads back is `payload * scale`, rounded to float32.
    """
    if fmt.error_feedback is not None:
        raise ValueError(
            f"format {fmt} keeps the error of the last store in a second copy, and this store was given none; use "
            "store_and_load_with_feedback"
        )
    payload, scales = quantize(state, fmt, bits=bits)
    if scales is not None:
        payload.mul_(scales.effective)
    return payload.view(state.shape).to(state.dtype)


def store_and_load_with_feedback(
    state: Float[Tensor, "*rows heads d_v d_k"],
    residual: Float[Tensor, "*rows heads d_v d_k"] | None,
    fmt: Format,
    *,
    bits: Int64[Tensor, "*rows elements"] | None = None,
) -> tuple[Float[Tensor, "*rows heads d_v d_k"], Float[Tensor, "*rows heads d_v d_k"]]:
    """Store a state with error feedback and load it back.

    What the last store lost is added to the state before this store; what this store loses is kept for the next one,
    itself stored in the format `fmt.error_feedback`.

    Args:
        state: float32 or float64. Not modified.
        residual: What the last call returned as residual, or None at the first store.
        fmt: A format with error feedback.
        bits: Random words from `random_bits`, for stochastic rounding of the state only.

    Returns:
        What loads back, and the loaded residual, both in the dtype of `state`.

    Raises:
        ValueError: As for `store_and_load`, or if the format has no error feedback.

    Rounding: the sum and the difference are float32. The residual is always rounded to nearest.
    """
    corrected, main, feedback = corrected_state(state, residual, fmt)
    loaded = store_and_load(corrected, main, bits=bits)
    lost = store_and_load(corrected - loaded, feedback)
    return loaded.to(state.dtype), lost.to(state.dtype)


def corrected_state(
    state: Float[Tensor, "*rows heads d_v d_k"], residual: Float[Tensor, "*rows heads d_v d_k"] | None, fmt: Format
) -> tuple[Float[Tensor, "*rows heads d_v d_k"], Format, Format]:
    """What a store with error feedback really stores.

    Args:
        state: float32 or float64.
        residual: What the last store lost, in the dtype of `state`, or None.
        fmt: A format with error feedback.

    Returns:
        The float32 sum of both, the format that stores it, and the format that stores what that loses.

    Raises:
        ValueError: If the format has no error feedback, or the residual is not like the state.
    """
    if fmt.error_feedback is None:
        raise ValueError(f"expected a format with error feedback, such as int8[ef=int8], got {fmt}; use store_and_load")
    if residual is not None and (residual.shape != state.shape or residual.dtype != state.dtype):
        raise ValueError(
            f"expected a residual like the state, {state.dtype}{list(state.shape)}, got "
            f"{residual.dtype}{list(residual.shape)}; pass back what the last store returned, or None at the first"
        )
    working = _as_float32(state, fmt)
    corrected = working if residual is None else working + residual.to(torch.float32)
    return corrected, replace(fmt, error_feedback=None), fmt.error_feedback


def quantize(
    state: Float[Tensor, "*rows heads d_v d_k"], fmt: Format, *, bits: Int64[Tensor, "*rows elements"] | None
) -> tuple[Float[Tensor, "rows groups size"], Scales | None]:
    """Payloads in units of their scale, each exactly a value of the element type, and the scales.

    Args:
        state: float32 or float64.
        fmt: The format; its error feedback is ignored.
        bits: Random words, for stochastic rounding only.

    Returns:
        Payloads as float32 (for an unscaled format: what loads back, possibly sharing memory with the state) and the
        scales, or None without scales. Payloads of a group whose scale is NaN are unspecified.

    Raises:
        ValueError: As for `store_and_load`.
    """
    working = _as_float32(state, fmt)
    heads, d_v, d_k = state.shape[-3:]
    size = fmt.group_elements(heads=heads, d_v=d_v, d_k=d_k)
    rows = state.shape[:-3].numel()
    values = working.reshape(rows, heads * d_v * d_k // size, size)
    words = _words(state, fmt, bits, values)
    if not fmt.is_scaled:
        return _round_unscaled(values, fmt, words), None
    magnitudes = magnitudes_of(values)
    scales = compute_scales(magnitudes, fmt, heads=heads)
    payload = _round(magnitudes.div_(scales.effective).clamp_(max=fmt.spec.largest), fmt, words)
    payload.copysign_(values)
    # Integers have no negative zero: -0 + 0 is +0.
    return payload.add_(0.0) if fmt.spec.is_integer else payload, scales


def _round(magnitudes: Tensor, fmt: Format, words: Tensor | None) -> Tensor:
    if words is None:
        return round_to_nearest(magnitudes, fmt.spec)
    return round_stochastically(magnitudes, fmt.spec, words)


def _round_unscaled(values: Tensor, fmt: Format, words: Tensor | None) -> Tensor:
    match fmt.element, words:
        case ElementType.FP32, _:
            return values
        case ElementType.BF16, None:
            return values.to(torch.bfloat16).to(torch.float32)
        case ElementType.FP16, None:
            return values.to(torch.float16).to(torch.float32)
        case ElementType.BF16, words:
            return round_stochastically_to_bfloat16(values, words)
        case ElementType.FP16, words:
            # 2**17 stands for everything beyond the grid point 65536, which the cast then makes infinite.
            magnitudes = magnitudes_of(values).clamp_(max=2.0**17)
            poison = magnitudes - magnitudes
            rounded = round_stochastically(magnitudes, fmt.spec, words).add_(poison).copysign_(values)
            return rounded.to(torch.float16).to(torch.float32)
        case _:
            magnitudes = magnitudes_of(values)
            poison = magnitudes - magnitudes
            return _round(magnitudes.clamp_(max=fmt.spec.largest), fmt, words).add_(poison).copysign_(values)


def _as_float32(state: Tensor, fmt: Format) -> Tensor:
    if state.ndim < 3:
        raise ValueError(f"format {fmt}: expected a state [..., heads, d_v, d_k], got shape {list(state.shape)}")
    if state.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"format {fmt}: expected a float32 or float64 working state, got {state.dtype}; convert it with .float()"
        )
    return state.to(torch.float32)


def _words(state: Tensor, fmt: Format, bits: Tensor | None, values: Tensor) -> Tensor | None:
    if fmt.rounding is Rounding.NEAREST_EVEN:
        if bits is not None:
            raise ValueError(f"format {fmt} rounds to nearest and takes no random bits, got some; pass bits=None")
        return None
    if bits is None:
        raise ValueError(f"format {fmt} rounds stochastically and needs random bits; pass bits=random_bits(...)")
    expected = (*state.shape[:-3], state.shape[-3:].numel())
    if bits.shape != expected or bits.dtype != torch.int64 or bits.device != state.device:
        raise ValueError(
            f"format {fmt}: expected int64 random bits {list(expected)} on {state.device}, got {bits.dtype} "
            f"{list(bits.shape)} on {bits.device}"
        )
    return bits.reshape(values.shape)
