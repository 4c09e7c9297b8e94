"""Where the windows of each row begin and end: the host-side plan of one call, shared by all layers.

Rows advance independently: each has its own window length, its own number of buffered records, and its own tokens that
count (padding does not). One call is cut into *slabs*: runs of steps during which the same rows are still at work, so
that everything inside the windows of a slab is one batched tensor program over `[steps, rows, window]`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Cursors:
    """How far each row has come.

    Attributes:
        records: Tokens buffered since the last store of the row.
        remaining: Tokens still to come before the next store.
        seen: Tokens consumed in all, buffered ones included.
    """

    records: Ints
    remaining: Ints
    seen: Ints

    @classmethod
    def start(cls, first_window: Ints, *, seen: Ints | None = None) -> "Cursors":
        """Cursors of rows whose first store comes after `first_window` tokens."""
        zeros = np.zeros_like(first_window)
        return cls(records=zeros, remaining=first_window, seen=zeros if seen is None else seen)

    @classmethod
    def of(cls, parts: "Sequence[Cursors]", rows: Sequence[Sequence[int]]) -> "Cursors":
        """Cursors of chosen rows of several parts, in order."""
        index = [np.array(wanted, dtype=np.int64) for wanted in rows]
        return cls(
            records=np.concatenate([part.records[i] for part, i in zip(parts, index, strict=True)]),
            remaining=np.concatenate([part.remaining[i] for part, i in zip(parts, index, strict=True)]),
            seen=np.concatenate([part.seen[i] for part, i in zip(parts, index, strict=True)]),
        )

    def key(self) -> bytes:
        """Equal for cursors that lead to the same plan."""
        return self.records.tobytes() + self.remaining.tobytes() + self.seen.tobytes()


@dataclass(frozen=True, kw_only=True)
class Slab:
    """Steps during which the same rows are at work.

    Attributes:
        rows: The rows at work.
        index: `[steps, rows, window]`, flat index into the tokens of the call; −1 where a window is shorter.
        lengths: `[steps, rows]`, tokens in each window.
        complete: `[steps, rows]`, whether the window ends with a store; false only in the last step of a row.
        store_tokens: `[steps, rows]`, 0-based index in its sequence of the last token of each window.
    """

    rows: Ints
    index: Ints
    lengths: Ints
    complete: Bools
    store_tokens: Ints

    @property
    def padded(self) -> bool:
        """Whether some window is shorter than the widest one."""
        return bool((self.index < 0).any())


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The plan of one call.

    Attributes:
        slabs: In order.
        buffer: `[rows, records]`, flat index of the tokens that stay buffered afterwards; −1 beyond a row's own.
        after: Cursors after the call.
    """

    slabs: tuple[Slab, ...]
    buffer: Ints
    after: Cursors


def plan(
    cursors: Cursors,
    windows: Ints,
    *,
    buffered_time: int,
    time: int,
    valid: Bools | None = None,
    steps_per_slab: int = 1 << 30,
) -> Schedule:
    """Lay out the windows of a call.

    The tokens of the call are the buffered records (time axis 0…`buffered_time`, each row's first ones in use) followed
    by `time` new tokens; flat indices are `row * (buffered_time + time) + position`.

    Args:
        cursors: Where each row stands.
        windows: Window length of each row.
        buffered_time: Length of the record buffer's time axis.
        time: New tokens per row.
        valid: Which new tokens count; all when absent.
        steps_per_slab: Longest slab, which bounds the memory that one takes.
    """
    rows = len(windows)
    fresh = np.full(rows, time, dtype=np.int64) if valid is None else valid.sum(axis=1).astype(np.int64)
    tokens = np.where(fresh > 0, cursors.records + fresh, 0)
    position = _positions(cursors.records, fresh, buffered_time, time, valid)
    first = cursors.records + cursors.remaining
    steps = np.where(tokens > 0, 1 + np.maximum(0, -(-(tokens - first) // windows)), 0)

    slabs: list[Slab] = []
    for begin, end in _slab_bounds(steps, steps_per_slab):
        active = np.flatnonzero(steps > begin)
        step = np.arange(begin, end)[:, None]
        start = np.where(step == 0, 0, first[active] + (step - 1) * windows[active])
        full = np.where(step == 0, first[active], windows[active])
        lengths = np.minimum(full, tokens[active] - start)
        width = np.arange(int(lengths.max()))
        place = np.minimum(start[..., None] + width, position.shape[1] - 1)
        flat = position[active[None, :, None], place] + (active * (buffered_time + time))[None, :, None]
        slabs.append(
            Slab(
                rows=active,
                index=np.where(width < lengths[..., None], flat, -1),
                lengths=lengths,
                complete=lengths == full,
                store_tokens=(cursors.seen - cursors.records)[active] + start + lengths - 1,
            )
        )
    return _finish(cursors, windows, slabs, tokens, fresh, position, steps, first, buffered_time + time)


def _positions(records: Ints, fresh: Ints, buffered_time: int, time: int, valid: Bools | None) -> Ints:
    """`[rows, tokens]`: time index of the n-th token that a row works through, its records first."""
    count = int((records + fresh).max(initial=0))
    order = np.arange(count)[None, :]
    if valid is None:
        return np.where(order < records[:, None], order, buffered_time + np.minimum(order - records[:, None], time - 1))
    position = np.zeros((len(records), count), dtype=np.int64)
    for row, old in enumerate(records.tolist()):
        chosen = np.flatnonzero(valid[row])
        position[row, :old] = np.arange(old)
        position[row, old : old + len(chosen)] = buffered_time + chosen
    return position


def _slab_bounds(steps: Ints, longest: int) -> Iterator[tuple[int, int]]:
    begin = 0
    for end in np.unique(steps[steps > 0]).tolist():
        while begin < end:
            yield begin, min(end, begin + longest)
            begin = min(end, begin + longest)


def _finish(
    cursors: Cursors,
    windows: Ints,
    slabs: list[Slab],
    tokens: Ints,
    fresh: Ints,
    position: Ints,
    steps: Ints,
    first: Ints,
    stride: int,
) -> Schedule:
    """What stays buffered, and where each row stands afterwards."""
    last_start = np.where(steps <= 1, 0, first + (steps - 2) * windows)
    last_full = np.where(steps <= 1, first, windows)
    left = tokens - last_start
    idle = steps == 0
    complete = ~idle & (left == last_full)
    records = np.where(idle, cursors.records, np.where(complete, 0, left))
    remaining = np.where(idle, cursors.remaining, np.where(complete, windows, last_full - left))
    begin = np.where(idle, 0, last_start)
    width = np.arange(int(records.max(initial=0)))
    place = np.minimum(begin[:, None] + width, max(position.shape[1] - 1, 0))
    rows = np.arange(len(windows))
    kept = np.where(idle[:, None], width, position[rows[:, None], place] if position.shape[1] else 0)
    buffer = np.where(width < records[:, None], kept + rows[:, None] * stride, -1)
    after = Cursors(records=records, remaining=remaining, seen=cursors.seen + fresh)
    return Schedule(slabs=tuple(slabs), buffer=buffer, after=after)
