"""The windows that `plan` lays out, against a plain walk over the tokens."""

import numpy as np
import pytest

from replayssm.schedule import Cursors, Schedule, plan

Window = tuple[list[int], bool, int]


class PlainRow:
    """One row walked token by token: what is buffered, and how many tokens the next store is away."""

    def __init__(self, first: int, window: int) -> None:
        self.window, self.remaining, self.seen = window, first, 0
        self.buffer: list[int] = []

    def walk(self, fresh: list[int]) -> list[Window]:
        windows: list[Window] = []
        if not fresh:
            return windows
        current: list[int] = []
        full = self.remaining + len(self.buffer)
        index = self.seen - len(self.buffer) - 1
        for token in [*range(len(self.buffer)), *fresh]:
            current.append(token)
            index += 1
            if len(current) == full:
                windows.append((current, True, index))
                current, full = [], self.window
        if current:
            windows.append((current, False, index))
        self.buffer, self.remaining = current, full - len(current)
        self.seen += len(fresh)
        return windows


def windows_of(schedule: Schedule, rows: int, stride: int) -> list[list[Window]]:
    found: list[list[Window]] = [[] for _ in range(rows)]
    for slab in schedule.slabs:
        for step in range(len(slab.index)):
            for place, row in enumerate(slab.rows.tolist()):
                tokens = [int(i) - row * stride for i in slab.index[step, place] if i >= 0]
                assert len(tokens) == slab.lengths[step, place]
                found[row].append((tokens, bool(slab.complete[step, place]), int(slab.store_tokens[step, place])))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_windows_are_those_of_a_plain_walk(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 5))
    windows = rng.integers(1, 9, rows)
    first = np.maximum(1, windows // 2) if seed % 3 == 0 else windows
    plain = [PlainRow(int(f), int(w)) for f, w in zip(first, windows, strict=True)]
    cursors, buffered = Cursors.start(first), 0
    for _ in range(4):
        time = int(rng.integers(1, 20))
        valid = None if seed % 2 else rng.random((rows, time)) < 0.7
        schedule = plan(
            cursors,
            windows,
            buffered_time=buffered,
            time=time,
            valid=valid,
            steps_per_slab=int(rng.integers(1, 5)),
        )
        fresh = [[buffered + t for t in range(time) if valid is None or valid[row, t]] for row in range(rows)]
        stride = buffered + time
        assert windows_of(schedule, rows, stride) == [
            row.walk(tokens) for row, tokens in zip(plain, fresh, strict=True)
        ]
        kept = [[int(i) - row * stride for i in schedule.buffer[row] if i >= 0] for row in range(rows)]
        assert kept == [row.buffer for row in plain]
        cursors, buffered = schedule.after, schedule.buffer.shape[1]
        assert cursors.records.tolist() == [len(row.buffer) for row in plain]
        assert cursors.remaining.tolist() == [row.remaining for row in plain]
        assert cursors.seen.tolist() == [row.seen for row in plain]
        for row in plain:
            row.buffer = list(range(len(row.buffer)))
