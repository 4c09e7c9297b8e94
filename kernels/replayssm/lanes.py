"""The stored copies of all rows, side by side, and how each of them is stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from replayssm.formats import Format, Rounding, random_bits, store_and_load, store_and_load_with_feedback
from replayssm.policy import CheckpointSharing, Policy
from replayssm.schedule import Ints

LOSSLESS_WINDOW = 64
"""Window in which rows that lose nothing are walked when no other row sets one."""


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """One lane per stored copy: first the copy of every row that carries its recurrence, then the separate read copies.

    Attributes:
        rows: Row of each lane.
        copies: 0 for the copy that carries the recurrence, 1 for a separate read copy.
        formats: How the lane is stored; `None` keeps the working state as it is.
        windows: Window length of each row.
        first_windows: Tokens before the first store of each row.
    """

    rows: Ints
    copies: Ints
    formats: tuple[Format | None, ...]
    windows: Ints
    first_windows: Ints

    @classmethod
    def of(cls, policies: Sequence[Policy], *, dtype: torch.dtype, merge_lossless: bool) -> "Lanes":
        """The lanes of rows under these policies.

        A float32 store of a float32 state changes nothing, so with `merge_lossless` a conventional float32 row is
        walked in windows too. They are as long as the longest of the other rows and shifted by half a window, so that
        the row stays an independent evaluation: its sums are associated differently from those of any arm.
        """
        count = len(policies)
        separate = [r for r, p in enumerate(policies) if p.sharing is CheckpointSharing.SEPARATE]
        formats = [p.recurrence_format for p in policies] + [policies[r].read_format for r in separate]
        windows = np.array([p.window_tokens for p in policies], dtype=np.int64)
        first = windows.copy()
        exact = dtype == torch.float32
        if exact and merge_lossless:
            merged = [p.sharing is CheckpointSharing.CONVENTIONAL and p.is_lossless for p in policies]
            others = [int(w) for w, m in zip(windows, merged, strict=True) if not m]
            longest = max(4, max(others, default=LOSSLESS_WINDOW))
            windows[merged], first[merged] = longest, longest // 2
        return cls(
            rows=np.array([*range(count), *separate], dtype=np.int64),
            copies=np.array([0] * count + [1] * len(separate), dtype=np.int64),
            formats=tuple(None if exact and f.is_identity else f for f in formats),
            windows=windows,
            first_windows=first,
        )

    @classmethod
    def of_prompt(cls, count: int) -> "Lanes":
        """Lanes of rows that read their prompt: the working state is kept as it is."""
        windows = np.full(count, LOSSLESS_WINDOW, dtype=np.int64)
        rows = np.arange(count, dtype=np.int64)
        return cls(
            rows=rows,
            copies=np.zeros_like(rows),
            formats=(None,) * count,
            windows=windows,
            first_windows=windows,
        )

    @cached_property
    def of_rows(self) -> int:
        """Number of rows, which is also the number of lanes that carry a recurrence."""
        return len(self.windows)

    @cached_property
    def groups(self) -> dict[Format, Ints]:
        """Lanes of each format that changes what it stores."""
        members: dict[Format, list[int]] = {}
        for lane, fmt in enumerate(self.formats):
            if fmt is not None:
                members.setdefault(fmt, []).append(lane)
        return {fmt: np.array(found, dtype=np.int64) for fmt, found in members.items()}

    @cached_property
    def is_stochastic(self) -> bool:
        """Whether some lane is rounded stochastically."""
        return any(fmt is not None and fmt.rounding is Rounding.STOCHASTIC for fmt in self.formats)

    def subset(self, rows: Ints) -> tuple["Lanes", Ints]:
        """The lanes of some rows, renumbered, and which lanes they are."""
        if len(rows) == self.of_rows and bool((rows == np.arange(self.of_rows)).all()):
            return self, np.arange(len(self.rows))
        chosen = np.flatnonzero(np.isin(self.rows, rows))
        renumber = np.full(self.of_rows, -1, dtype=np.int64)
        renumber[rows] = np.arange(len(rows))
        part = Lanes(
            rows=renumber[self.rows[chosen]],
            copies=self.copies[chosen],
            formats=tuple(self.formats[lane] for lane in chosen.tolist()),
            windows=self.windows[rows],
            first_windows=self.first_windows[rows],
        )
        return part, chosen


def lane_index(lanes: Ints, device: torch.device) -> Int64[Tensor, " lanes"]:
    """A few lane or row numbers as an index on `device`, copied there once and not at every window."""
    return _lane_index(lanes.tobytes(), device)


@lru_cache(maxsize=1024)
def _lane_index(lanes: bytes, device: torch.device) -> Tensor:
    return torch.tensor(np.frombuffer(lanes, dtype=np.int64), device=device)


class RandomBits:
    """The random bits of the stores of one layer.

    They depend on (seed, layer, sequence, token index of the store, copy, element) alone, so lanes that agree in these
    (the same document under two stochastic arms) share them, and each block of bits is generated once.
    """

    def __init__(self, *, seed: int, layer: int, sequences: Ints, elements: int, device: torch.device) -> None:
        self._seed = seed
        self._layer = layer
        self._sequences: list[int] = sequences.tolist()
        self._elements = elements
        self._device = device

    def draw(self, lanes: Lanes, *, tokens: Ints, all_rows: Ints) -> tuple[Tensor, dict[int, int]]:
        """The blocks of bits that the stochastic lanes of a store need, and which block each lane uses.

        Args:
            lanes: The lanes that are stored.
            tokens: Token index of the store, per row of `lanes`.
            all_rows: Position of these rows among all rows of the run.

        Returns:
            Bits of shape `[blocks, elements]`, and the block of each stochastic lane.
        """
        slots: dict[tuple[int, int, int], int] = {}
        block: dict[int, int] = {}
        for lane, fmt in enumerate(lanes.formats):
            if fmt is not None and fmt.rounding is Rounding.STOCHASTIC:
                row = int(lanes.rows[lane])
                key = (int(lanes.copies[lane]), self._sequences[int(all_rows[row])], int(tokens[row]))
                block[lane] = slots.setdefault(key, len(slots))
        drawn: list[Tensor] = []
        order: list[int] = []
        for copy in sorted({key[0] for key in slots}):
            keys = [key for key in slots if key[0] == copy]
            order += [slots[key] for key in keys]
            drawn.append(
                random_bits(
                    seed=self._seed,
                    layer=self._layer,
                    copy=copy,
                    sequences=torch.tensor([key[1] for key in keys]),
                    tokens=torch.tensor([key[2] for key in keys]),
                    elements=self._elements,
                    device=self._device,
                )
            )
        place = {slot: position for position, slot in enumerate(order)}
        return torch.cat(drawn), {lane: place[slot] for lane, slot in block.items()}


def store_lanes(
    working: Float[Tensor, "rows heads d_v d_k"],
    lanes: Lanes,
    *,
    tokens: Ints,
    bits: RandomBits,
    all_rows: Ints,
    residuals: Float[Tensor, "lanes heads d_v d_k"] | None,
) -> tuple[Float[Tensor, "lanes heads d_v d_k"], Float[Tensor, "lanes heads d_v d_k"] | None]:
    """Store the working state of every row in each of its copies and load it back.

    Args:
        working: The materialised state of each row; both copies of a row are rounded from it.
        lanes: The copies of these rows.
        tokens: Token index of the store, per row.
        bits: Source of random bits.
        all_rows: Position of these rows among all rows of the run, which `bits` counts in.
        residuals: What error-feedback lanes lost at their last store; zeros when absent.

    Returns:
        What loads back, and the new residuals (absent while no lane has error feedback).

    Rounding: here and nowhere else; see `replayssm.formats`.
    """
    device = working.device
    stored = working.index_select(0, lane_index(lanes.rows, device))
    drawn, block = bits.draw(lanes, tokens=tokens, all_rows=all_rows) if lanes.is_stochastic else (None, {})
    for fmt, members in lanes.groups.items():
        index = lane_index(members, device)
        chosen = stored.index_select(0, index)
        own = None
        if drawn is not None and fmt.rounding is Rounding.STOCHASTIC:
            blocks = np.array([block[lane] for lane in members.tolist()], dtype=np.int64)
            own = drawn.index_select(0, lane_index(blocks, device))
        if fmt.error_feedback is None:
            loaded = store_and_load(chosen, fmt, bits=own)
        else:
            residuals = torch.zeros_like(stored) if residuals is None else residuals
            loaded, lost = store_and_load_with_feedback(chosen, residuals.index_select(0, index), fmt, bits=own)
            residuals = residuals.index_copy(0, index, lost)
        stored.index_copy_(0, index, loaded)
    return stored, residuals
