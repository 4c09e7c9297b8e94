"""The tables that tell the window kernels what each row does, piece by piece; `replayssm.triton_window` reads them."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from replayssm.schedule import Ints, Slab

PIECE_TOKENS = 16
"""Tokens that the kernels take at once: the smallest side of a matrix product."""

STORES, WRITES = 1, 2
"""Flags of a piece: its window ends with a store; the store stays in memory."""


def piece_tables(slab: Slab, places: Ints, slots: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut the windows of some rows of a slab into pieces of at most PIECE_TOKENS tokens.

    Args:
        slab: The windows.
        places: Which of the slab's rows.
        slots: Slot of each row's read copy before the first window, or −1 without one; the next window's follows it.

    Returns:
        `[rows, longest, 4]` tokens, flags, last token and slot of each piece; `[rows, longest, PIECE_TOKENS]` flat
        index of each token or −1; `[rows]` pieces of each row; `[windows, 4]` row, first piece, pieces and slot of the
        windows of rows with a read copy.
    """
    index, lengths = slab.index[:, places], slab.lengths[:, places]
    complete = slab.complete[:, places]
    steps, rows, width = index.shape
    per_window = -(-width // PIECE_TOKENS)
    padded = np.full((steps, rows, per_window * PIECE_TOKENS), -1, dtype=np.int64)
    padded[:, :, :width] = index
    number = np.arange(per_window, dtype=np.int64)
    in_window = (lengths - 1) // PIECE_TOKENS + 1
    length: Ints = np.clip(lengths[..., None] - PIECE_TOKENS * number, 0, PIECE_TOKENS)
    stores = complete[..., None] & (number == in_window[..., None] - 1)
    # A later window of the launch overwrites what an earlier one stored, so only the last store goes to memory.
    writes = stores & (np.cumsum(complete[::-1], axis=0)[::-1] == 1)[..., None]
    reads = np.where(slots >= 0, slots + np.arange(steps, dtype=np.int64)[:, None], -1)
    fields = [
        length,
        stores * STORES + writes * WRITES,
        np.broadcast_to(slab.store_tokens[:, places, None], length.shape),
        np.broadcast_to(np.where(reads >= 0, reads + 1, -1)[..., None], length.shape),
    ]

    def by_row(x: Ints) -> Ints:
        return x.swapaxes(0, 1).reshape(rows, steps * per_window, *x.shape[3:])

    used = by_row(length) > 0
    counts = used.sum(axis=1)
    order = np.argsort(~used, axis=1, kind="stable")[:, : int(counts.max())]
    pieces = np.take_along_axis(by_row(np.stack(fields, axis=-1)), order[..., None], axis=1)
    flat = by_row(padded.reshape(steps, rows, per_window, PIECE_TOKENS))
    tokens = np.take_along_axis(flat, order[..., None], axis=1)
    row = np.broadcast_to(np.arange(rows, dtype=np.int64), reads.shape)
    windows = np.stack([row, np.cumsum(in_window, axis=0) - in_window, in_window, reads], axis=-1)
    return pieces, tokens, counts, windows[reads >= 0]


def serve_table(windows: Ints, stores: Ints) -> Ints:
    """One line per read copy: the window that it serves, if any, and its store, if the walk left it unstored.

    Args:
        windows: `[windows, 4]` row, first piece, pieces, slot.
        stores: `[stores, 4]` slot, row, last token, lane that the copy stays in or −1.

    Returns:
        `[slots, 8]` row, first piece, pieces or 0, slot, whether to store, token, lane, unused.
    """
    used, line = np.unique(np.concatenate([windows[:, 3], stores[:, 0]]), return_inverse=True)
    table = np.zeros((len(used), 8), dtype=np.int64)
    table[:, 3], table[:, 6] = used, -1
    table[line[: len(windows)], :3] = windows[:, :3]
    of_store = line[len(windows) :]
    table[of_store, 0] = stores[:, 1]
    table[of_store, 4:7] = np.stack([np.ones_like(stores[:, 2]), stores[:, 2], stores[:, 3]], axis=-1)
    return table


def one_step(slab: Slab, step: int) -> Slab:
    """A slab of one of the steps of a slab."""
    part = slice(step, step + 1)
    return replace(
        slab,
        index=slab.index[part],
        lengths=slab.lengths[part],
        complete=slab.complete[part],
        store_tokens=slab.store_tokens[part],
    )


def words(values: Ints, device: torch.device) -> Tensor:
    """Integers below 2**32 as int32 of the same low bits, on the device."""
    return torch.as_tensor(values.astype(np.uint32).view(np.int32), device=device)
