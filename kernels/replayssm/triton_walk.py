"""The host side of the Triton window kernels: tables of what each row does, and launches."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from replayssm.backend import Products
from replayssm.formats import Format
from replayssm.formats.triton_format import TritonFormat, block
from replayssm.lanes import Lanes
from replayssm.launch import is_interpreted, launch
from replayssm.policy import Policy
from replayssm.records import Recurrence, TokenInputs
from replayssm.schedule import Ints, Slab

PIECE_TOKENS = 16
"""Tokens that the kernels take at once: the smallest side of a matrix product."""

_STORES, _WRITES = 1, 2
_REMEMBERED_TABLES = 64
_SPLIT_ROWS = 32
PREPARE_WARPS = {Recurrence.MAMBA2: 2, Recurrence.GDN: 8, Recurrence.KDA: 4}
"""Warps of the preparation: with fewer, its float32 products keep more operands per thread than it has registers."""

_MODULES = {
    Recurrence.MAMBA2: "replayssm.mamba2.window_triton",
    Recurrence.GDN: "replayssm.gdn.window_triton",
    Recurrence.KDA: "replayssm.kda.window_triton",
}


def check_supported(policies: Sequence[Policy], *, heads: int, d_v: int, d_k: int) -> None:
    """Refuse policies whose stores the kernels cannot make.

    Raises:
        ValueError: Naming the first policy and why.
    """
    for policy in policies:
        for fmt in policy.copies:
            try:
                TritonFormat.of(fmt, heads=heads, d_v=d_v, d_k=d_k)
            except ValueError as error:
                raise ValueError(f"policy {policy}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Rows of a slab that one launch walks, with its tables on the device.

    Attributes:
        rows: int32 `[rows, 8]`; see `replayssm.triton_window`.
        pieces: int32 `[rows, longest, 4]`.
        tokens: int32 `[rows, longest, PIECE_TOKENS]`.
        windows: int32 `[windows, 4]`, the windows of the rows that have a read copy.
        entries: int32 `[stores, 4]`, the stores of read copies.
        slots: Read copies that the walk leaves, those before the first store included.
        before: Slot and lane of the read copy of each such row before its first store.
        formats: Compile-time description of the recurrence formats that the table of rows refers to.
        read_formats: Likewise of the read formats.
        block_v: Value rows per program of the walk.
        read_block_v: Value rows per program of the stores of read copies.
    """

    rows: Tensor
    pieces: Tensor
    tokens: Tensor
    windows: Tensor
    entries: Tensor
    slots: int
    before: tuple[Tensor, Tensor]
    formats: tuple[tuple[int | float, ...], ...]
    read_formats: tuple[tuple[int | float, ...], ...]
    block_v: int
    read_block_v: int


class TritonWalk:
    """Walks the windows of all rows of a bank.

    Args:
        seed: Seed of all stochastic rounding, 64 bits.
        sequences: Which sequence each row reads.
        products: Operands of the products.
    """

    def __init__(self, *, seed: int, sequences: Ints, products: Products) -> None:
        self._seed = seed
        self._sequences = sequences
        compiled = {Products.IEEE: 0, Products.TF32: 1, Products.BF16: 2, Products.BF16X6: 4}
        # The interpreter's products of bfloat16 numbers are wrong, so it takes them as float32.
        interpreted = {**compiled, Products.BF16: 3, Products.BF16X6: 5}
        self._products = (interpreted if is_interpreted() else compiled)[products]
        self._tables: dict[tuple[object, ...], tuple[Slab, Lanes, list[_Group]]] = {}

    def walk(
        self,
        states: Float[Tensor, "lanes heads d_v d_k"],
        lanes: Lanes,
        *,
        layer: int,
        recurrence: Recurrence,
        tokens: TokenInputs,
        slab: Slab,
        outputs: Float[Tensor, "tokens heads d_v"],
    ) -> None:
        """Walk the windows of a slab.

        Args:
            states: What the copies of all rows load back as. Overwritten at the stores.
            lanes: The lanes of all rows.
            layer: Index of the layer, for random bits.
            recurrence: The layer's recurrence.
            tokens: The tokens that the slab indexes, float32.
            slab: Which windows.
            outputs: Receives the outputs of the slab's tokens.

        Rounding: at the end of each complete window, from the working state, after the outputs were read.
        """
        heads, d_v, d_k = tokens.state_shape
        inputs = tokens.map(lambda x: x.contiguous())
        kernels: Any = importlib.import_module(_MODULES[recurrence])
        sizes: dict[str, Any] = {
            "D_K": d_k,
            "BLOCK_K": block(d_k),
            "BLOCK_T": PIECE_TOKENS,
            "PRODUCTS": self._products,
        }
        squares = 1 if recurrence is Recurrence.MAMBA2 else 2
        vectors = [inputs.log_decay] if inputs.beta is None else [inputs.log_decay, inputs.beta]
        key_heads = inputs.key.shape[-2]
        store_copies: Any = importlib.import_module("replayssm.triton_window").store_copies_kernel
        groups = self._groups(slab, lanes, (heads, d_v, d_k), states.device)

        def walk(group: _Group) -> tuple[Tensor, ...]:
            count, longest = group.tokens.shape[:2]
            scratch = _unset((squares, count * longest, heads, PIECE_TOKENS, PIECE_TOKENS), states.device)
            launch(
                kernels.prepare_kernel,
                (count * longest, heads),
                inputs.query,
                inputs.key,
                *vectors,
                *scratch,
                group.tokens,
                heads,
                key_heads,
                **sizes,
                num_warps=PREPARE_WARPS[recurrence],
            )
            copies = _unset((group.slots, heads, d_v, d_k), states.device)
            if group.slots:
                copies.index_copy_(0, group.before[0], states.index_select(0, group.before[1]))
            launch(
                kernels.walk_kernel,
                (-(-d_v // group.block_v), heads, count),
                inputs.query,
                inputs.key,
                inputs.value,
                *vectors,
                *scratch,
                states,
                copies,
                outputs,
                group.rows,
                group.pieces,
                group.tokens,
                layer,
                heads,
                key_heads,
                d_v,
                longest,
                BLOCK_V=group.block_v,
                FORMATS=group.formats,
                **sizes,
                num_warps=warps(group.block_v, block(d_k)),
            )
            launch(
                store_copies,
                (len(group.entries), heads, -(-d_v // group.read_block_v)),
                copies,
                states,
                group.rows,
                group.entries,
                layer,
                heads,
                d_v,
                D_K=d_k,
                BLOCK_K=block(d_k),
                BLOCK_V=group.read_block_v,
                FORMATS=group.read_formats,
                num_warps=warps(group.read_block_v, block(d_k)),
            )
            block_v = _block_v([], d_v)
            launch(
                kernels.serve_kernel,
                (len(group.windows), heads, -(-d_v // block_v)),
                inputs.query,
                inputs.key,
                inputs.value,
                *vectors,
                *scratch,
                copies,
                outputs,
                group.windows,
                group.pieces,
                group.tokens,
                heads,
                key_heads,
                d_v,
                longest,
                BLOCK_V=block_v,
                **sizes,
                num_warps=warps(block_v, block(d_k)),
            )
            return scratch, copies

        _side_by_side([lambda group=group: walk(group) for group in groups], states.device)

    def _groups(self, slab: Slab, lanes: Lanes, shape: tuple[int, int, int], device: torch.device) -> list[_Group]:
        """The launches of a slab. Layers of one forward pass share slabs, so the tables are kept."""
        key = (id(slab), id(lanes), shape, device)
        if key not in self._tables:
            while len(self._tables) >= _REMEMBERED_TABLES:
                self._tables.pop(next(iter(self._tables)))
            # The slab and the lanes are kept too, so that their ids stay theirs.
            self._tables[key] = (slab, lanes, self._make_groups(slab, lanes, shape, device))
        return self._tables[key][2]

    def _make_groups(self, slab: Slab, lanes: Lanes, shape: tuple[int, int, int], device: torch.device) -> list[_Group]:
        heads, d_v, d_k = shape
        read_lanes = {row: lane for lane, row in enumerate(_integers(lanes.rows)) if lane >= lanes.of_rows}
        members: dict[int, list[int]] = {}
        for place, row in enumerate(_integers(slab.rows)):
            fmt = lanes.formats[row]
            known = [] if fmt is None else [TritonFormat.of(fmt, heads=heads, d_v=d_v, d_k=d_k)]
            members.setdefault(_block_v(known, d_v), []).append(place)
        return [
            self._group(slab, lanes, read_lanes, np.array(places, dtype=np.int64), block_v, shape, device)
            for block_v, places in members.items()
        ]

    def _group(
        self,
        slab: Slab,
        lanes: Lanes,
        read_lanes: dict[int, int],
        places: Ints,
        block_v: int,
        shape: tuple[int, int, int],
        device: torch.device,
    ) -> _Group:
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
        place, piece = np.nonzero(((pieces[..., 1] & _STORES) != 0) & (pieces[..., 3] >= 0))
        flags, token, slot = (pieces[place, piece, field] for field in (1, 2, 3))
        lane = np.where((flags & _WRITES) != 0, np.array(rows, dtype=np.int64)[place, 1], -1)
        return _Group(
            rows=_words(np.array(rows, dtype=np.int64), device),
            pieces=_words(pieces, device),
            tokens=_words(tokens, device),
            windows=_words(windows, device),
            entries=_words(np.stack([slot, place, token, lane], axis=-1), device),
            slots=len(separate) * per_row,
            before=(
                torch.as_tensor(slots[separate], device=device),
                torch.tensor([read_lanes[row] for row in _integers(slab.rows[places[separate]])], device=device).long(),
            ),
            formats=tuple(_constants(f) for f in formats),
            read_formats=tuple(_constants(f) for f in read_formats),
            block_v=block_v,
            read_block_v=_block_v(read_formats, d_v),
        )


def _side_by_side(launches: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Make independent launches, on a CUDA device on streams of their own: one alone may not fill it.

    Args:
        launches: Each returns the memory that its kernels use, which is kept until the streams have joined.
        device: Where the kernels run.
    """
    if device.type != "cuda" or len(launches) < 2:
        for launch_all in launches:
            launch_all()
        return
    main, sides = torch.cuda.current_stream(device), _side_streams(device, len(launches) - 1)
    for side in sides:
        side.wait_stream(main)
    kept = [launches[0]()]
    for launch_all, side in zip(launches[1:], sides, strict=True):
        with torch.cuda.stream(side):
            kept.append(launch_all())
    for side in sides:
        main.wait_stream(side)
    del kept


@cache
def _side_streams(device: torch.device, count: int) -> list[Any]:
    return [torch.cuda.Stream(device) for _ in range(count)]


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
        stores * _STORES + writes * _WRITES,
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


def warps(block_v: int, block_k: int) -> int:
    """Warps per program: 16 state elements per thread where a program may have so many threads.

    The operands of a float32 product are in registers too, and take several times what the state takes.
    """
    return max(1, min(16, block_v * block_k // 512))


def _unset(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)


def _block_v(formats: Sequence[TritonFormat], d_v: int) -> int:
    """Value rows per program: all of a head where a scale depends on all of them, else as few as a tile has."""
    if any(f.whole_head for f in formats):
        return block(d_v)
    # Heads of 80 rows divide into 5 tiles of 16, and would waste a third of 3 tiles of 32.
    split = _SPLIT_ROWS if d_v % _SPLIT_ROWS == 0 or d_v % 16 else 16
    return min(block(d_v), max(split, *(f.tile_rows for f in formats), 1))


def _constants(fmt: TritonFormat) -> tuple[int | float, ...]:
    return int(fmt.element), int(fmt.scale), fmt.tile_rows, fmt.group_keys, float(fmt.divisor), fmt.stochastic


def _integers(vector: Ints) -> list[int]:
    return vector.tolist()


def _words(values: Ints, device: torch.device) -> Tensor:
    """Integers below 2**32 as int32 of the same low bits, on the device."""
    return torch.as_tensor(values.astype(np.uint32).view(np.int32), device=device)
