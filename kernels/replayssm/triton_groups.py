"""Rows of a slab that the window kernels walk in one launch, and the tables that say what each row does."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replayssm.formats import Format, Rounding
from replayssm.formats.triton_format import ScaleCode, TritonFormat
from replayssm.lanes import Lanes
from replayssm.launch import is_interpreted
from replayssm.schedule import Ints, Slab
from replayssm.triton_tables import STORES, WRITES, piece_tables, serve_table, words
from replayssm.triton_tiles import WARPGROUP_ROWS, tile_rows

_REMEMBERED_TABLES = 64


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows of a slab that one launch walks, with its tables on the device.

    Attributes:
        rows: int32 `[rows, 8]`; see `replayssm.triton_window`.
        pieces: int32 `[rows, longest, 4]`.
        tokens: int32 `[rows, longest, PIECE_TOKENS]`.
        windows: int32 `[slots, 8]`, the read copies that the walk leaves and the windows that they serve.
        slots: Read copies that the walk leaves, those before the first store included.
        before: Slot and lane of the read copy of each such row before its first store.
        formats: Compile-time description of the recurrence formats that the table of rows refers to.
        read_formats: Likewise of the read formats.
        single: Whether every window is one token and no row has a read copy: walked token by token.
        parts: Programs that share a head whose scales depend on all of it.
        block_v: Value rows per program of the walk.
        read_block_v: Value rows per program that stores and reads read copies.
        several: Whether a window that a read copy serves is several pieces.
    """

    rows: Tensor
    pieces: Tensor
    tokens: Tensor
    windows: Tensor
    slots: int
    before: tuple[Tensor, Tensor]
    formats: tuple[tuple[int | float, ...], ...]
    read_formats: tuple[tuple[int | float, ...], ...]
    single: bool
    parts: int
    block_v: int
    read_block_v: int
    several: bool

    @property
    def kind(self) -> tuple[int, int, bool, bool]:
        """What the rows of a group have in common, in whatever slab: a row is always of one kind."""
        return self.block_v, self.parts, self.single, self.slots > 0


class Groups:
    """The groups of slabs, with what rows of all of them have in common.

    Args:
        seed: Seed of all stochastic rounding, 64 bits.
        sequences: Which sequence each row reads.
        products: Operands of the products, as the kernels number them.
    """

    def __init__(self, *, seed: int, sequences: Ints, products: int) -> None:
        self._seed = seed
        self._sequences = sequences
        self._products = products
        self._tables: dict[tuple[object, ...], tuple[Slab, Lanes, list[Group]]] = {}

    def of(self, slab: Slab, lanes: Lanes, shape: tuple[int, int, int], most: int, device: torch.device) -> list[Group]:
        """The launches of a slab. Layers of one forward pass share slabs, so the tables are kept."""
        key = (id(slab), id(lanes), shape, most, device)
        if key not in self._tables:
            while len(self._tables) >= _REMEMBERED_TABLES:
                self._tables.pop(next(iter(self._tables)))
            # The slab and the lanes are kept too, so that their ids stay theirs.
            self._tables[key] = (slab, lanes, self._make(slab, lanes, shape, most, device))
        return self._tables[key][2]

    def _make(
        self, slab: Slab, lanes: Lanes, shape: tuple[int, int, int], most: int, device: torch.device
    ) -> list[Group]:
        heads, d_v, d_k = shape
        read_lanes = {row: lane for lane, row in enumerate(_integers(lanes.rows)) if lane >= lanes.of_rows}
        members: dict[tuple[int, int, bool, bool], list[int]] = {}
        for place, row in enumerate(_integers(slab.rows)):
            fmt = lanes.formats[row]
            known = [] if fmt is None else [TritonFormat.of(fmt, heads=heads, d_v=d_v, d_k=d_k)]
            separate = row in read_lanes
            single = int(lanes.windows[row]) == 1 and not separate
            # Without products, a program needs no more rows than the scale.
            rows = _block_v(known, d_v, 0 if single else self._products)
            parts = 1 if single else self._parts(known, rows, most)
            # Rows with read copies are walked apart: their windows are served while others are still walked.
            members.setdefault((rows // parts, parts, single, separate), []).append(place)
        formats = [lanes.formats[row] for row in _integers(slab.rows)]

        def cost(place: int) -> int:
            fmt = formats[place]
            return 0 if fmt is None else 1 + (fmt.rounding is Rounding.STOCHASTIC)

        # Programs start in order, and what takes longest should not start last. Nor should what takes more of a
        # multiprocessor than smaller programs on each of them leave.
        ordered = [(kind, sorted(places, key=cost, reverse=True)) for kind, places in members.items()]
        ordered.sort(key=lambda group: (group[0][2], cost(group[1][0]), group[0][0], group[0][3]), reverse=True)
        return [
            self._group(slab, lanes, read_lanes, np.array(places, dtype=np.int64), *kind[:3], shape, device)
            for kind, places in ordered
        ]

    def _parts(self, formats: Sequence[TritonFormat], rows: int, most: int) -> int:
        """Programs that share a head, of so many rows, whose scales depend on all of it: they exchange its largest.

        The interpreter runs programs one after another, where one cannot wait for the next.
        """
        if self._products == 0 or is_interpreted():
            return 1
        whole = [f for f in formats if f.whole_head]
        if not whole or any(f.scale is not ScaleCode.E4M3 or f.tile_rows > WARPGROUP_ROWS for f in whole):
            return 1
        return max(1, min(most, rows // WARPGROUP_ROWS))

    def _group(
        self,
        slab: Slab,
        lanes: Lanes,
        read_lanes: dict[int, int],
        places: Ints,
        block_v: int,
        parts: int,
        single: bool,
        shape: tuple[int, int, int],
        device: torch.device,
    ) -> Group:
        heads, d_v, d_k = shape
        order: dict[Format, int] = {}
        read_order: dict[Format, int] = {}

        def numbered(fmt: Format | None, order: dict[Format, int]) -> int:
            return -1 if fmt is None else order.setdefault(fmt, len(order))

        slots = np.full(len(places), -1, dtype=np.int64)
        separate = np.flatnonzero(np.isin(slab.rows[places], list(read_lanes)))
        per_row = len(slab.index) + 1
        slots[separate] = np.arange(len(separate)) * per_row
        pieces, tokens, counts, windows = piece_tables(slab, places, slots)
        rows: list[list[int]] = []
        for row, count in zip(_integers(slab.rows[places]), _integers(counts), strict=True):
            read = read_lanes.get(row, -1)
            rows.append(
                [
                    row,
                    read,
                    numbered(lanes.formats[row], order),
                    numbered(lanes.formats[read], read_order) if read >= 0 else -1,
                    int(self._sequences[row]),
                    self._seed & 0xFFFFFFFF,
                    self._seed >> 32,
                    count,
                ]
            )
        formats, read_formats = (
            [TritonFormat.of(f, heads=heads, d_v=d_v, d_k=d_k) for f in fs] for fs in (order, read_order)
        )
        place, piece = np.nonzero(((pieces[..., 1] & STORES) != 0) & (pieces[..., 3] >= 0))
        flags, token, slot = (pieces[place, piece, field] for field in (1, 2, 3))
        lane = np.where((flags & WRITES) != 0, np.array(rows, dtype=np.int64)[place, 1], -1)
        return Group(
            rows=words(np.array(rows, dtype=np.int64), device),
            pieces=words(pieces, device),
            tokens=words(tokens, device),
            windows=words(serve_table(windows, np.stack([slot, place, token, lane], axis=-1)), device),
            slots=len(separate) * per_row,
            before=(
                torch.as_tensor(slots[separate], device=device),
                torch.tensor([read_lanes[row] for row in _integers(slab.rows[places[separate]])], device=device).long(),
            ),
            formats=tuple(_constants(f) for f in formats),
            read_formats=tuple(_constants(f) for f in read_formats),
            single=single,
            parts=parts,
            block_v=block_v,
            read_block_v=_block_v(read_formats, d_v, self._products),
            several=bool((windows[:, 2] > 1).any()),
        )


def _block_v(formats: Sequence[TritonFormat], d_v: int, products: int) -> int:
    needed = max((f.tile_rows for f in formats), default=1)
    return tile_rows(whole_head=any(f.whole_head for f in formats), needed=needed, d_v=d_v, products=products)


def _constants(fmt: TritonFormat) -> tuple[int | float, ...]:
    return int(fmt.element), int(fmt.scale), fmt.tile_rows, fmt.group_keys, float(fmt.divisor), fmt.stochastic


def _integers(vector: Ints) -> list[int]:
    return vector.tolist()
