"""Decoding: one token per sequence, for one layer, against the states and records in its slots."""

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from replayssm.decode_launch import Launch, default_launch
from replayssm.formats.triton_format import ElementCode, ScaleCode, block
from replayssm.launch import is_interpreted
from replayssm.launch import launch as launch_kernel
from replayssm.records import Recurrence
from replayssm.slots import DecodeCursors, DecodeSlots, StoredCopy

WIDE, FLAT, MATRIX = 0, 1, 2
ALL_STEPS, READS_ONLY, FLUSHES_ONLY = 0, 1, 2

_FEWEST_RECORDS = 16
"""Records of a tile where they meet the tensor cores."""

_FLUSH_REGISTERS = 128
"""Most registers per thread of a launch for flushes: 16 warps share a multiprocessor."""

EPSILON = 1e-6
"""Inside the root of the L2 norm of delta-rule keys and queries."""


@dataclass(frozen=True, kw_only=True)
class DecodeToken:
    """One token of each sequence, as the projections and the convolution of a layer leave it.

    Attributes:
        query: Mamba-2: `C`. Delta rules: raw, or ready if the slots do not normalise.
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


def decode_step(
    slots: DecodeSlots,
    cursors: DecodeCursors,
    token: DecodeToken,
    slot_index: Int32[Tensor, " rows"],
    *,
    out: Float[Tensor, "rows heads d_v"],
    launch: Launch | None = None,
) -> None:
    """Take one layer through one token of every sequence, with the Triton kernels.

    A slot with fewer than `window - 1` records gives its output through the stored copy and the records, and keeps one
    record more. A slot with `window - 1` of them flushes: the state is materialised and stored in every copy. Which of
    the two happens is read from `cursors` on the device; `advance` moves them once all layers have read the token.

    Args:
        slots: States and records. Updated.
        cursors: Not changed here.
        token: The inputs; any strides.
        slot_index: The slot of each row; no slot twice. A negative one is padding: its row of `out` is left as it is.
        out: Receives the outputs, rounded to its dtype.
        launch: How to cut the work; chosen by shape and batch when absent.

    Raises:
        ValueError: When something does not fit.

    Rounding: at flushes, in the formats of the policy; `y` to the dtype of `out`. All products and sums are float32.

    Source: ReplaySSM, the output and flush equations of a replay window; shared and separate checkpoints.
    """
    prepared = prepare_step(slots, cursors, token, slot_index, out=out, launch=launch)
    prepared.run()


@dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """A decode step, ready to be launched or to be compiled ahead.

    Attributes:
        kernel: The Triton kernel.
        grid: Programs.
        arguments: Everything that the kernel takes, by name.
        warps: Warps of a program.
        registers: Most registers per thread, or None.
        flush: The launch that follows for the sequences which flush, where they have their own.
    """

    kernel: Any
    grid: tuple[int]
    arguments: dict[str, Any]
    warps: int
    registers: int | None = None
    flush: "PreparedStep | None" = None

    @property
    def options(self) -> dict[str, int]:
        """Options of the compiler beside the number of warps."""
        return {} if self.registers is None else {"maxnreg": self.registers}

    def run(self) -> None:
        """Launch the kernel on the current stream."""
        names: list[str] = self.kernel.arg_names
        constants = {n: v for n, v in self.arguments.items() if n.isupper()}
        given = [self.arguments[n] for n in names if n not in constants]
        # Fusing is safe: what is multiplied with a scale is next multiplied with something else.
        launch_kernel(self.kernel, self.grid, *given, num_warps=self.warps, fused=True, **self.options, **constants)
        if self.flush is not None:
            self.flush.run()


def prepare_step(
    slots: DecodeSlots,
    cursors: DecodeCursors,
    token: DecodeToken,
    slot_index: Int32[Tensor, " rows"],
    *,
    out: Float[Tensor, "rows heads d_v"],
    launch: Launch | None = None,
) -> PreparedStep:
    """Check a decode step and lay out its arguments; see `decode_step`. Repeated launches can share the result.

    Raises:
        ValueError: When something does not fit.
    """
    token.validate(slots)
    rows = token.value.shape[0]
    if tuple(out.shape) != tuple(token.value.shape):
        raise ValueError(f"expected `out` of shape {tuple(token.value.shape)}, got {tuple(out.shape)}")
    if slot_index.dtype is not torch.int32 or tuple(slot_index.shape) != (rows,) or not slot_index.is_contiguous():
        raise ValueError(
            f"expected contiguous int32 slots of {rows} rows, got {slot_index.dtype} {tuple(slot_index.shape)}"
        )
    launch = launch or default_launch(slots, rows)
    kernel, arguments = _mamba2(slots, token) if slots.shape.recurrence is Recurrence.MAMBA2 else _delta(slots, token)
    arguments |= _common(slots, cursors, slot_index, out)
    heads = slots.shape.heads
    two = launch.flush_rows is not None and slots.policy.window_tokens > 1
    splits = _check_launch(slots, launch.rows, launch.tiles, () if two else slots.copies)
    flush = None
    if two and launch.flush_rows is not None:
        cuts = _check_launch(slots, launch.flush_rows, launch.flush_tiles, slots.copies)
        flush = PreparedStep(
            kernel=kernel,
            grid=(min(rows * heads * cuts, _flush_programs(out.device, launch.flush_warps)),),
            arguments={**arguments, **_cut(slots, rows, _flushing(launch), cuts, FLUSHES_ONLY)},
            warps=launch.flush_warps,
            registers=_FLUSH_REGISTERS,
        )
    return PreparedStep(
        kernel=kernel,
        grid=(rows * heads * splits,),
        arguments={**arguments, **_cut(slots, rows, launch, splits, READS_ONLY if two else ALL_STEPS)},
        warps=launch.warps,
        registers=launch.registers,
        flush=flush,
    )


def advance(
    cursors: DecodeCursors, slot_index: Int32[Tensor, " rows"], *, window: int, rows_per_program: int = 128
) -> None:
    """Move the cursors of the slots past the token that all layers have just read.

    Args:
        cursors: Updated.
        slot_index: As for `decode_step`.
        window: The replay window.
        rows_per_program: Width of a program.
    """
    count = slot_index.shape[0]
    launch_kernel(
        _kernel("replayssm.decode_records", "advance_cursors_kernel"),
        (-(-count // rows_per_program),),
        slot_index,
        cursors.records,
        cursors.tokens,
        count,
        num_warps=4,
        WINDOW=window,
        BLOCK=rows_per_program,
    )


def _kernel(module: str, name: str) -> Any:
    """A kernel, whose module imports Triton, on first use."""
    return getattr(importlib.import_module(module), name)


def _check_launch(slots: DecodeSlots, rows: int, tiles: int, stored: tuple[StoredCopy, ...]) -> int:
    """Programs per head; refuses launches that would split what shares a scale."""
    d_v = slots.shape.d_v
    for copy in stored:
        kernel = copy.kernel
        if (kernel.whole_head and rows < d_v) or rows % kernel.tile_rows:
            need = f"all {d_v} rows" if kernel.whole_head else f"a multiple of {kernel.tile_rows} rows"
            raise ValueError(f"format {copy.format}: a program must hold {need}, which share a scale, got {rows}")
    if rows < 1 or rows & (rows - 1):
        raise ValueError(f"expected a power of two of rows per program, got {rows}")
    if tiles < 1:
        raise ValueError(f"expected at least one tile per program, got {tiles}")
    return -(-d_v // (rows * tiles))


@cache
def _flush_programs(device: torch.device, warps: int) -> int:
    """Programs of a launch that looks for flushes: as many as can be there at once, for most steps have few."""
    if device.type != "cuda":
        return 3
    at_once = max(1, 65536 // (_FLUSH_REGISTERS * 32 * warps))
    return at_once * int(torch.cuda.get_device_properties(device).multi_processor_count)  # pyright: ignore


def _flushing(launch: Launch) -> Launch:
    """The cut of the launch that follows for flushes."""
    return Launch(rows=launch.flush_rows or launch.rows, warps=launch.flush_warps, tiles=launch.flush_tiles, stages=2)


def _cut(slots: DecodeSlots, batch: int, launch: Launch, splits: int, steps: int) -> dict[str, Any]:
    return {
        "BV": launch.rows,
        "TILES": launch.tiles,
        "STAGES": launch.stages,
        "EAGER": launch.eager,
        "SPLITS": splits,
        "MASKED": launch.rows * launch.tiles * splits != slots.shape.d_v,
        "STEPS": steps,
        # Only a launch that looks for flushes depends on the batch, and on few sizes of it.
        "ROWS": max(256, 1 << (max(batch, 1) - 1).bit_length()) if steps == FLUSHES_ONLY else 1,
    }


def _common(slots: DecodeSlots, cursors: DecodeCursors, slot_index: Tensor, out: Tensor) -> dict[str, Any]:
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
        "FORM": _form(slots, words),
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
        "INTERPRETED": is_interpreted(),
    }


def _form(slots: DecodeSlots, words: bool) -> int:
    """How the copy that serves outputs is read; see `replayssm.decode_tiles`."""
    kernel, block_k = slots.copies[-1].kernel, block(slots.shape.d_k)
    groups = block_k // kernel.group_keys
    if words and slots.input_dtype is torch.bfloat16 and slots.shape.recurrence is not Recurrence.KDA:
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
    known = copy.kernel.element in (ElementCode.E4M3, ElementCode.E5M2, ElementCode.E2M1)
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
    return _kernel("replayssm.mamba2.decode_triton", "mamba2_decode_kernel"), {
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
    return _kernel("replayssm.gdn.decode_triton", "delta_decode_kernel"), {
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
        "CHANNELS": channels,
        "NORMALISE": slots.normalise,
    }
