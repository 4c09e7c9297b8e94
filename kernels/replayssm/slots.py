"""Where a serving engine keeps the recurrent states of one layer: stored copies and records per slot, on one device.

A *slot* belongs to a sequence for as long as it is served. Everything that changes from token to token lies on the
device, cursors included, so a captured graph of decode steps can be replayed without the host looking.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from replayssm.formats import Format, PackedState, ScaleType, pack, random_bits
from replayssm.formats.triton_format import PAYLOAD_DTYPES, SCALE_DTYPES, TritonFormat
from replayssm.policy import CheckpointSharing, Policy
from replayssm.records import Recurrence


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One SSM layer.

    Attributes:
        recurrence: What it computes.
        key_heads: Heads of keys and queries; each serves `heads / key_heads` consecutive value heads.
        heads: Value heads, one state each.
        d_k: Keys per state.
        d_v: Value rows per state.

    Raises:
        ValueError: When a number is not positive or the heads do not divide.
    """

    recurrence: Recurrence
    key_heads: int
    heads: int
    d_k: int
    d_v: int

    def __post_init__(self) -> None:
        """Refuse shapes that no layer has."""
        if min(self.key_heads, self.heads, self.d_k, self.d_v) < 1 or self.heads % self.key_heads:
            raise ValueError(
                "expected positive sizes and value heads that are a multiple of the key heads, got "
                f"key_heads={self.key_heads}, heads={self.heads}, d_k={self.d_k}, d_v={self.d_v}"
            )

    @property
    def state(self) -> tuple[int, int, int]:
        """`(heads, d_v, d_k)`."""
        return self.heads, self.d_v, self.d_k


@dataclass(frozen=True, kw_only=True)
class Mamba2Constants:
    """The parameters of a Mamba-2 layer that enter each step, float32.

    Attributes:
        decay_rate: `A`, negative.
        dt_bias: Added to `dt` before the softplus.
        skip: `D`; zeros without a skip term.
        dt_limit: Smallest and largest step size.
    """

    decay_rate: Float[Tensor, " heads"]
    dt_bias: Float[Tensor, " heads"]
    skip: Float[Tensor, " heads"]
    dt_limit: tuple[float, float] = (0.0, float("inf"))


class DecodeCursors:
    """How far the sequence in each slot has come; shared by all layers of a model and advanced once per token.

    Attributes:
        records: Records in each slot since its last store.
        tokens: Tokens that each slot has consumed.
        sequences: Sequence id of each slot, which its random bits depend on.
    """

    def __init__(self, *, slots: int, device: torch.device | str) -> None:
        self.records: Int32[Tensor, " slots"] = torch.zeros(slots, dtype=torch.int32, device=device)
        self.tokens: Int64[Tensor, " slots"] = torch.zeros(slots, dtype=torch.int64, device=device)
        self.sequences: Int64[Tensor, " slots"] = torch.arange(slots, dtype=torch.int64, device=device)


class StoredCopy:
    """One stored copy of the state of every slot, each laid out like `PackedState`.

    Attributes:
        format: How it is stored.
        kernel: The same as arguments of the kernels.
        payload: Codes, `[slots, bytes or numbers of one state]`.
        scales: Stored scales, `[slots, scales of one state]`; a placeholder without scales.
        head_scales: float32, `[slots, heads]`; a placeholder unless the format has them.
    """

    def __init__(self, fmt: Format, shape: LayerShape, *, slots: int, device: torch.device | str) -> None:
        heads, d_v, d_k = shape.state
        self.format = fmt
        self.kernel = TritonFormat.of(fmt, heads=heads, d_v=d_v, d_k=d_k)
        self._shape = shape
        elements = heads * d_v * d_k
        packed = fmt.spec.bits < 8
        self.scales_per_head = (
            0 if not fmt.is_scaled else d_v * d_k // fmt.group_elements(heads=heads, d_v=d_v, d_k=d_k)
        )
        dtype = PAYLOAD_DTYPES[self.kernel.element]
        self.payload = torch.zeros(slots, elements // 2 if packed else elements, dtype=dtype, device=device)
        scales = SCALE_DTYPES[self.kernel.scale] if fmt.is_scaled else torch.float32
        self.scales = torch.zeros(slots, max(1, heads * self.scales_per_head), dtype=scales, device=device)
        self.head_scales = torch.zeros(slots, heads, dtype=torch.float32, device=device)

    def write(
        self, slot_index: Int64[Tensor, " rows"], state: Float[Tensor, "rows heads d_v d_k"], bits: Tensor | None
    ) -> None:
        """Store working states into slots.

        Rounding: that of `replayssm.formats.pack`.
        """
        packed = pack(state, self.format, bits=bits)
        rows = state.shape[0]
        self.payload[slot_index] = packed.payload.view(self.payload.dtype).view(rows, -1)
        if packed.scales.numel():
            self.scales[slot_index] = packed.scales.view(self.scales.dtype).view(rows, -1)
        if packed.head_scales.numel():
            self.head_scales[slot_index] = packed.head_scales.view(torch.float32).view(rows, -1)

    def packed(self, slot: int) -> PackedState:
        """The bytes of one slot."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.payload.device)

        def as_bytes(x: Tensor, *, present: bool) -> Tensor:
            return x[slot].contiguous().view(torch.uint8) if present else empty

        return PackedState(
            format=self.format,
            shape=self._shape.state,
            payload=as_bytes(self.payload, present=True),
            scales=as_bytes(self.scales, present=self.format.is_scaled),
            head_scales=as_bytes(self.head_scales, present=self.format.scale is ScaleType.E4M3),
        )


class DecodeSlots:
    """Stored states and records of one layer.

    Records lose nothing: keys (and the values of Mamba-2 and of separate checkpoints) stay in the dtype in which the
    model gives them, with the float32 norm of a key beside it; writes `u`, decays, step sizes, strengths are float32.
    In a Gated DeltaNet layer with separate checkpoints a record has a row of the *solution* too, the inverse of the
    unit lower triangle that couples the writes of a window (Yang et al., 2024, the WY form): it grows by a row per
    token for little, where a flush would have to solve it with all its threads waiting.

    Args:
        shape: The layer.
        policy: How its states are stored.
        slots: Sequences that can be served at a time.
        input_dtype: Dtype of keys and values as the model gives them.
        normalise: Whether delta-rule keys and queries come raw and are L2-normalised here (eps 1e-6 inside the root)
            and queries scaled by `d_k**-0.5`; otherwise they are used as they come.
        constants: Parameters of a Mamba-2 layer.
        seed: Seed of stochastic rounding.
        layer: Index of the layer, which its random bits depend on.
        device: Where everything lies.

    Raises:
        ValueError: When the policy's formats cannot be stored by the kernels, constants are missing, superfluous or no
            float32 numbers per head, or the kernels do not take the dtype.
    """

    def __init__(
        self,
        shape: LayerShape,
        policy: Policy,
        *,
        slots: int,
        input_dtype: torch.dtype = torch.bfloat16,
        normalise: bool = True,
        constants: Mamba2Constants | None = None,
        seed: int = 0,
        layer: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        mamba = shape.recurrence is Recurrence.MAMBA2
        if mamba != (constants is not None):
            raise ValueError(
                f"a {shape.recurrence} layer takes {'its' if mamba else 'no'} Mamba2Constants, got {constants}"
            )
        if input_dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"expected keys and values in float32, bfloat16 or float16, got {input_dtype}")
        for name in ("decay_rate", "dt_bias", "skip") if constants is not None else ():
            given: Tensor = getattr(constants, name)
            if given.dtype is not torch.float32 or given.shape != (shape.heads,) or not given.is_contiguous():
                raise ValueError(
                    f"expected contiguous float32 `{name}` of {shape.heads} heads, got {given.dtype} "
                    f"{tuple(given.shape)} with strides {given.stride()}"
                )
        self.shape = shape
        self.policy = policy
        self.input_dtype = input_dtype
        self.normalise = normalise and not mamba
        self.constants = constants
        self.seed, self.layer = seed, layer
        self.copies = tuple(StoredCopy(f, shape, slots=slots, device=device) for f in policy.copies)
        self.philox = torch.tensor([seed & 0xFFFFFFFF, seed >> 32, layer], dtype=torch.int64, device=device)
        self.records = _records(shape, policy, slots=slots, dtype=input_dtype, normalise=self.normalise, device=device)

    @property
    def separate(self) -> bool:
        """Whether outputs read a copy of their own."""
        return self.policy.sharing is CheckpointSharing.SEPARATE

    @property
    def nbytes(self) -> int:
        """Bytes of the stored copies and the records of all slots."""
        stored = sum(
            x.nbytes
            for c in self.copies
            for x, used in (
                (c.payload, True),
                (c.scales, c.format.is_scaled),
                (c.head_scales, c.format.scale is ScaleType.E4M3),
            )
            if used
        )
        return stored + sum(x.nbytes for x in self.records.values())

    def admit(
        self, slot_index: Int64[Tensor, " rows"], state: Float[Tensor, "rows heads d_v d_k"], cursors: DecodeCursors
    ) -> None:
        """Store the states at the end of prompts into slots, whose windows then begin.

        Args:
            slot_index: One slot per row, none of them negative.
            state: float32 working states.
            cursors: Those of these slots; `tokens` must count the tokens of the prompts already.

        Raises:
            ValueError: The states have another shape than those of the layer.

        Rounding: once, in each copy.
        """
        wanted = (len(slot_index), *self.shape.state)
        if tuple(state.shape) != wanted:
            raise ValueError(f"expected states [rows, heads, d_v, d_k] of shape {wanted}, got {tuple(state.shape)}")
        cursors.records[slot_index] = 0
        for number, copy in enumerate(self.copies):
            bits = None
            if copy.kernel.stochastic:
                bits = random_bits(
                    seed=self.seed,
                    layer=self.layer,
                    copy=number,
                    sequences=cursors.sequences[slot_index],
                    tokens=(cursors.tokens[slot_index] - 1).clamp_min(0),
                    elements=state[0].numel(),
                    device=state.device,
                )
            copy.write(slot_index, state, bits)


def _records(
    shape: LayerShape,
    policy: Policy,
    *,
    slots: int,
    dtype: torch.dtype,
    normalise: bool,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """Record tensors by name; a window of one token keeps none, and unused ones have no elements."""
    window = policy.window_tokens if policy.window_tokens > 1 else 0
    separate = policy.sharing is CheckpointSharing.SEPARATE
    keys, heads = (slots, shape.key_heads, window), (slots, shape.heads, window)

    def make(size: tuple[int, ...], kind: torch.dtype, *, used: bool = True) -> Tensor:
        return torch.zeros(size if used else (0,), dtype=kind, device=device)

    if shape.recurrence is Recurrence.MAMBA2:
        return {
            "key": make((*keys, shape.d_k), dtype),
            "log_decay": make(heads, torch.float32),
            "dt": make(heads, torch.float32),
            "value": make((*heads, shape.d_v), dtype),
        }
    channels = shape.recurrence is Recurrence.KDA
    decays = (*heads, shape.d_k) if channels else heads
    return {
        "key": make((*keys, shape.d_k), dtype),
        "norm": make(keys, torch.float32, used=normalise),
        "write": make((*heads, shape.d_v), torch.float32),
        "log_decay": make(decays, torch.float32),
        "value": make((*heads, shape.d_v), dtype, used=separate),
        "beta": make(heads, torch.float32, used=separate),
        "solution": make((*heads, window), torch.float32, used=separate and not channels),
    }
