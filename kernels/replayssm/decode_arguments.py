"""What a decode step takes: the token that a layer gives, and the arguments of the kernels."""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from replayssm.decode_launch import stores_again
from replayssm.formats.triton_format import ElementCode, ScaleCode, block
from replayssm.launch import is_interpreted
from replayssm.records import Recurrence
from replayssm.slots import DecodeCursors, DecodeSlots, StoredCopy

WIDE, FLAT, MATRIX = 0, 1, 2

_FEWEST_RECORDS = 16
"""Records of a tile where they meet the tensor cores."""

EPSILON = 1e-6
"""Inside the root of the L2 norm of delta-rule keys and queries."""


@dataclass(frozen=True, kw_only=True)
class DecodeToken:
    """One token of each sequence, as the projections and the convolution of a layer leave it.

    Attributes:
        query: Mamba-2: `C`. Delta rules: raw, or ready if the slots do not normalise. Its dtype may be another than
            that of the keys.
        key: Mamba-2: `B`. Delta rules likewise. In the input dtype of the slots.
        value: Mamba-2: `x`. In the input dtype of the slots.
        log_decay: Delta rules: natural log of the decay per head, or (KDA) per head and key channel.
        beta: Delta rules: write strength.
        dt: Mamba-2: step size before bias and softplus.
    """

    query: Float[Tensor, "rows key_heads d_k"]
    key: Float[Tensor, "rows key_heads d_k"]
    value: Float[Tensor, "rows heads d_v"]
    log_decay: Float[Tensor, "rows heads"] | Float[Tensor, "rows heads d_k"] | None = None
    beta: Float[Tensor, "rows heads"] | None = None
    dt: Float[Tensor, "rows heads"] | None = None

    def validate(self, slots: DecodeSlots) -> None:
        """Check shapes, dtypes and presence.

        Raises:
            ValueError: Naming the first tensor that does not fit.
        """
        shape = slots.shape
        rows = self.value.shape[0]
        delta = shape.recurrence is not Recurrence.MAMBA2
        channels = (shape.d_k,) if shape.recurrence is Recurrence.KDA else ()
        expected: dict[str, tuple[int, ...] | None] = {
            "query": (rows, shape.key_heads, shape.d_k),
            "key": (rows, shape.key_heads, shape.d_k),
            "value": (rows, shape.heads, shape.d_v),
            "log_decay": (rows, shape.heads, *channels) if delta else None,
            "beta": (rows, shape.heads) if delta else None,
            "dt": None if delta else (rows, shape.heads),
        }
        for name, size in expected.items():
            tensor: Tensor | None = getattr(self, name)
            got = None if tensor is None else tuple(tensor.shape)
            if got != size:
                raise ValueError(f"{shape.recurrence} decode: expected `{name}` of shape {size}, got {got}")
        for name in ("key", "value"):
            dtype = getattr(self, name).dtype
            if dtype != slots.input_dtype:
                raise ValueError(
                    f"{shape.recurrence} decode: expected `{name}` in {slots.input_dtype}, the dtype of its records, "
                    f"got {dtype}"
                )


def step_arguments(
    slots: DecodeSlots, cursors: DecodeCursors, token: DecodeToken, slot_index: Tensor, out: Tensor
) -> tuple[Any, dict[str, Any]]:
    """The kernel of a layer and everything that it takes but for how the work is cut."""
    kernel, own = _mamba2(slots, token) if slots.shape.recurrence is Recurrence.MAMBA2 else _delta(slots, token)
    return kernel, own | _common(slots, cursors, slot_index, out, query_dtype=token.query.dtype)


def kernel_named(module: str, name: str) -> Any:
    """A kernel, whose module imports Triton, on first use."""
    return getattr(importlib.import_module(module), name)


def _common(
    slots: DecodeSlots, cursors: DecodeCursors, slot_index: Tensor, out: Tensor, *, query_dtype: torch.dtype
) -> dict[str, Any]:
    shape, window = slots.shape, slots.policy.window_tokens
    main, read = slots.copies[0], slots.copies[-1]
    words = _reads_words(read, shape.d_k)
    return {
        "out": out,
        "slot_index": slot_index,
        "cursors": cursors.records,
        "tokens": cursors.tokens,
        "sequences": cursors.sequences,
        "philox": slots.philox,
        **_copy(read, "read_"),
        "read_words": read.payload.view(torch.int32) if words else read.payload,
        "WORDS": words,
        "FORM": _form(slots, query_dtype, words=words),
        **_copy(main, ""),
        "out_row": out.stride(0),
        "out_head": out.stride(1),
        "out_step": out.stride(2),
        "count_rows": len(out),
        "KEY_HEADS": shape.key_heads,
        "HEADS": shape.heads,
        "DV": shape.d_v,
        "DK": shape.d_k,
        "BK": block(shape.d_k),
        "WINDOW": window,
        "LP": max(_FEWEST_RECORDS, 1 << max(window - 2, 0).bit_length()),
        "SEPARATE": slots.separate,
        "AGAIN": stores_again(slots),
        "INTERPRETED": is_interpreted(),
    }


def _form(slots: DecodeSlots, query_dtype: torch.dtype, *, words: bool) -> int:
    """How the copy that serves outputs is read; see `replayssm.decode_tiles`."""
    kernel, block_k = slots.copies[-1].kernel, block(slots.shape.d_k)
    groups = block_k // kernel.group_keys
    halves = slots.input_dtype is query_dtype is torch.bfloat16
    if words and halves and slots.shape.recurrence is not Recurrence.KDA:
        codes = 8 if kernel.element is ElementCode.E2M1 else 4
        fits = block_k // codes >= 16 and kernel.group_keys % codes == 0
        per_block = kernel.scale is ScaleCode.E8M0 or (
            kernel.scale is ScaleCode.E4M3 and kernel.element is ElementCode.E2M1
        )
        if fits and (groups == 1 if kernel.scale in (ScaleCode.FP32, ScaleCode.FP16) else per_block and groups > 1):
            return MATRIX
    if words or kernel.element is ElementCode.E2M1 or groups > 1:
        return FLAT
    return WIDE


def _reads_words(copy: StoredCopy, d_k: int) -> bool:
    """Whether rows and scale blocks are whole words of the codes that `word_code` knows."""
    codes = 32 // copy.format.spec.bits
    known = copy.kernel.element in (ElementCode.E4M3, ElementCode.E5M2, ElementCode.E2M1, ElementCode.INT8)
    return known and copy.format.is_scaled and d_k % codes == 0 and copy.kernel.group_keys % codes == 0


def _copy(copy: StoredCopy, prefix: str) -> dict[str, Any]:
    kernel = copy.kernel
    upper = prefix.upper()
    return {
        f"{prefix}payload": copy.payload,
        f"{prefix}scales": copy.scales,
        f"{prefix}head_scales": copy.head_scales,
        f"{prefix}divisor": kernel.divisor,
        f"{upper}ELEMENT": int(kernel.element),
        f"{upper}SCALE": int(kernel.scale),
        f"{upper}TILE_ROWS": kernel.tile_rows,
        f"{upper}GROUP": kernel.group_keys,
        f"{upper}STOCHASTIC": kernel.stochastic,
        f"{upper}SCALES": copy.scales_per_head,
    }


def _strides(name: str, x: Tensor) -> dict[str, int]:
    return {f"{name}_row": x.stride(0), f"{name}_head": x.stride(1), f"{name}_step": x.stride(2)}


def _vectors(token: DecodeToken) -> dict[str, Any]:
    return {
        "query": token.query,
        "key": token.key,
        "value": token.value,
        **_strides("query", token.query),
        **_strides("key", token.key),
        **_strides("value", token.value),
    }


def _mamba2(slots: DecodeSlots, token: DecodeToken) -> tuple[Any, dict[str, Any]]:
    constants, records, dt = slots.constants, slots.records, token.dt
    if constants is None or dt is None:
        raise ValueError("mamba2 decode: expected constants and `dt`, got none")
    return kernel_named("replayssm.mamba2.decode_triton", "mamba2_decode_kernel"), {
        **_vectors(token),
        "dt": dt,
        "dt_row": dt.stride(0),
        "dt_head": dt.stride(1),
        "dt_bias": constants.dt_bias,
        "decay_rate": constants.decay_rate,
        "skip": constants.skip,
        "smallest_step": constants.dt_limit[0],
        "largest_step": constants.dt_limit[1],
        "key_records": records["key"],
        "decay_records": records["log_decay"],
        "step_records": records["dt"],
        "value_records": records["value"],
    }


def _delta(slots: DecodeSlots, token: DecodeToken) -> tuple[Any, dict[str, Any]]:
    log_decay, beta, records = token.log_decay, token.beta, slots.records
    if log_decay is None or beta is None:
        raise ValueError(f"{slots.shape.recurrence} decode: expected `log_decay` and `beta`, got none")
    channels = slots.shape.recurrence is Recurrence.KDA
    return kernel_named("replayssm.gdn.decode_triton", "delta_decode_kernel"), {
        **_vectors(token),
        "log_decay": log_decay,
        "decay_row": log_decay.stride(0),
        "decay_head": log_decay.stride(1),
        "decay_step": log_decay.stride(2) if channels else 0,
        "beta": beta,
        "beta_row": beta.stride(0),
        "beta_head": beta.stride(1),
        "scale": slots.shape.d_k**-0.5 if slots.normalise else 1.0,
        "epsilon": EPSILON,
        "key_records": records["key"],
        "norm_records": records["norm"],
        "write_records": records["write"],
        "decay_records": records["log_decay"],
        "value_records": records["value"],
        "beta_records": records["beta"],
        "solution_records": records["solution"],
        "CHANNELS": channels,
        "NORMALISE": slots.normalise,
    }
