"""What a recurrence consumes for each token, and which recurrence that is."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Float, Int64
from torch import Tensor


class Recurrence(StrEnum):
    """The recurrences of hybrid models that keep a matrix-valued state."""

    MAMBA2 = "mamba2"
    GDN = "gdn"
    KDA = "kda"


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """The inputs of one layer's recurrence for a run of tokens; as a buffer of past tokens these are the *records*.

    Everything is float32 (float64 in tests). Each key head serves `heads / key_heads` consecutive value heads.

    Attributes:
        query: What reads the state. Mamba-2: `C`. GDN and KDA: L2-normalised and scaled by `d_k**-0.5`.
        key: What addresses the state. Mamba-2: `B`. GDN and KDA: L2-normalised.
        value: What is written. Mamba-2: `dt * x`.
        log_decay: Natural log of the decay of each token; one per head, or (KDA) one per head and key channel.
        beta: Write strength of the delta rule, or `None` for Mamba-2, which has no delta rule.
        room: Tokens that fit into the memory of `query`, `key` and `value` in front of each row, which is otherwise
            unused: earlier tokens of just that number are put there, and these are not copied.

    Source: ReplaySSM, the table of recurrences and the definition of a record.
    """

    query: Float[Tensor, "*rows time key_heads d_k"]
    key: Float[Tensor, "*rows time key_heads d_k"]
    value: Float[Tensor, "*rows time heads d_v"]
    log_decay: Float[Tensor, "*rows time heads"] | Float[Tensor, "*rows time heads d_k"]
    beta: Float[Tensor, "*rows time heads"] | None
    room: int = 0

    @property
    def rows(self) -> int:
        """Number of independent states that these tokens feed."""
        return self.value.shape[0]

    @property
    def time(self) -> int:
        """Number of tokens per row."""
        return self.value.shape[1]

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """`(heads, d_v, d_k)` of the state that these inputs address."""
        return self.value.shape[-2], self.value.shape[-1], self.key.shape[-1]

    def map(self, function: Callable[[Tensor], Tensor]) -> "TokenInputs":
        """Apply `function` to every tensor that is present."""
        return TokenInputs(
            query=function(self.query),
            key=function(self.key),
            value=function(self.value),
            log_decay=function(self.log_decay),
            beta=None if self.beta is None else function(self.beta),
        )

    def then(self, later: "TokenInputs") -> "TokenInputs":
        """These tokens followed by `later` ones, row by row."""
        in_place = later.room == self.time

        def joined(first: Tensor, second: Tensor) -> Tensor:
            return with_room_filled(first, second) if in_place else torch.cat([first, second], dim=1)

        return TokenInputs(
            query=joined(self.query, later.query),
            key=joined(self.key, later.key),
            value=joined(self.value, later.value),
            log_decay=torch.cat([self.log_decay, later.log_decay], dim=1),
            beta=None if self.beta is None or later.beta is None else torch.cat([self.beta, later.beta], dim=1),
        )

    def take(self, index: Int64[Tensor, "*shape"], *, padded: bool) -> "TokenInputs":
        """Gather tokens by their flat index `row * time + token`; with `padded`, negative ones give neutral tokens.

        A neutral token has no decay, writes nothing and reads nothing, so a window that is shorter than its neighbours
        can be filled up with it.
        """
        flat = index.reshape(-1)
        missing = flat < 0
        source = flat.clamp_min(0) if padded else flat

        def gather(x: Tensor) -> Tensor:
            picked = x.flatten(0, 1).index_select(0, source)
            if padded:
                picked.masked_fill_(missing.view(-1, *[1] * (picked.dim() - 1)), 0)
            return picked.view(*index.shape, *x.shape[2:])

        return self.map(gather)

    def validate(self, recurrence: Recurrence) -> None:
        """Check that shapes and dtypes fit each other and the recurrence.

        Raises:
            ValueError: Naming the first tensor that does not fit, its shape, and what was expected.
        """
        heads, d_v, d_k = self.state_shape
        lead = (self.rows, self.time)
        key_heads = self.key.shape[-2]
        expected: dict[str, tuple[int, ...]] = {
            "query": (*lead, key_heads, d_k),
            "key": (*lead, key_heads, d_k),
            "value": (*lead, heads, d_v),
            "log_decay": (*lead, heads, d_k) if recurrence is Recurrence.KDA else (*lead, heads),
        }
        if recurrence is not Recurrence.MAMBA2:
            expected["beta"] = (*lead, heads)
        for name, shape in expected.items():
            tensor: Tensor | None = getattr(self, name)
            got = None if tensor is None else tuple(tensor.shape)
            if tensor is None or got != shape:
                raise ValueError(f"{recurrence} inputs: expected `{name}` of shape {shape}, got {got}")
            if tensor.dtype != self.value.dtype or tensor.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"{recurrence} inputs: expected `{name}` in float32 or float64 like `value` ({self.value.dtype}), "
                    f"got {tensor.dtype}"
                )
        if recurrence is Recurrence.MAMBA2 and self.beta is not None:
            raise ValueError("mamba2 inputs: expected no `beta` (Mamba-2 has no delta rule), got one")
        if heads % key_heads:
            raise ValueError(f"{recurrence} inputs: {heads} value heads are not a multiple of {key_heads} key heads")


def with_room(
    rows: int, room: int, time: int, heads: int, width: int, device: torch.device
) -> Float[Tensor, "rows time heads width"]:
    """Unset float32 tokens with unused memory for `room` more in front of those of each row."""
    return torch.empty(rows, room + time, heads, width, dtype=torch.float32, device=device)[:, room:]


def with_room_filled(
    first: Float[Tensor, "rows room heads width"], second: Float[Tensor, "rows time heads width"]
) -> Float[Tensor, "rows both heads width"]:
    """Put tokens into the room in front of tokens that `with_room` made; contiguous."""
    room = first.shape[1]
    whole = second.as_strided(
        (second.shape[0], room + second.shape[1], *second.shape[2:]),
        second.stride(),
        second.storage_offset() - room * second.stride(1),
    )
    whole[:, :room] = first
    return whole
