"""The host side of the Triton window kernels: tables of what each row does, and launches."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from replayssm.backend import Products
from replayssm.formats import Format, Rounding
from replayssm.formats.triton_format import ScaleCode, TritonFormat, block
from replayssm.lanes import Lanes
from replayssm.launch import is_interpreted, launch
from replayssm.policy import Policy
from replayssm.records import Recurrence, TokenInputs
from replayssm.schedule import Ints, Slab
from replayssm.triton_streams import side_by_side
from replayssm.triton_tables import PIECE_TOKENS, STORES, WRITES, piece_tables, serve_table, words
from replayssm.triton_tiles import (
    FOLD_WARPS,
    STAGES,
    STEP_ELEMENTS,
    WARPGROUP_ROWS,
    fold_registers,
    head_parts,
    prepare_warps,
    serve_registers,
    tile_rows,
    warps,
)

_REMEMBERED_TABLES = 64

_BFLOAT16_PRODUCTS = (2, 4)
_SPLIT_PRODUCTS = (4, 5)
_RULES = {Recurrence.MAMBA2: 0, Recurrence.GDN: 1, Recurrence.KDA: 2}

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
        slabs: Sequence[Slab],
        outputs: Float[Tensor, "tokens heads d_v"],
    ) -> None:
        """Walk the windows of slabs. Rows wait for their own windows only, not for those of others.

        Args:
            states: What the copies of all rows load back as. Overwritten at the stores.
            lanes: The lanes of all rows.
            layer: Index of the layer, for random bits.
            recurrence: The layer's recurrence.
            tokens: The tokens that the slabs index, float32.
            slabs: Which windows, in order.
            outputs: Receives the outputs of the slabs' tokens.

        Rounding: at the end of each complete window, from the working state, after the outputs were read.
        """
        heads, d_v, d_k = tokens.state_shape
        inputs = tokens.map(lambda x: x.contiguous())
        kernels: Any = importlib.import_module(_MODULES[recurrence])
        pieces: Any = importlib.import_module("replayssm.triton_pieces")
        steps: Any = importlib.import_module("replayssm.triton_steps")
        rule = int(_RULES[recurrence])
        block_k = block(d_k)
        sizes: dict[str, Any] = {"D_K": d_k, "BLOCK_K": block_k, "BLOCK_T": PIECE_TOKENS, "PRODUCTS": self._products}
        delta = recurrence is not Recurrence.MAMBA2
        key_heads = inputs.key.shape[-2]
        vectors = [inputs.log_decay] if inputs.beta is None else [inputs.log_decay, inputs.beta]
        key_places = heads if recurrence is Recurrence.KDA else key_heads
        device = states.device

        most = head_parts(max(len(slab.rows) for slab in slabs) * heads, _multiprocessors(device))
        chains: dict[tuple[int, int, bool, bool], list[_Group]] = {}
        for slab in slabs:
            for group in self._groups(slab, lanes, (heads, d_v, d_k), most, device):
                chains.setdefault(group.kind, []).append(group)

        def step(group: _Group) -> None:
            launch(
                steps.step_kernel,
                (-(-d_v // group.block_v), heads, len(group.tokens)),
                inputs.query,
                inputs.key,
                inputs.value,
                vectors[0],
                vectors[-1],
                states,
                outputs,
                group.rows,
                group.pieces,
                group.tokens,
                layer,
                heads,
                key_heads,
                d_v,
                group.tokens.shape[1],
                D_K=d_k,
                BLOCK_V=group.block_v,
                BLOCK_K=block_k,
                BLOCK_T=PIECE_TOKENS,
                FORMATS=group.formats,
                RULE=rule,
                num_warps=max(1, min(8, group.block_v * block_k // STEP_ELEMENTS)),
            )

        def walk(group: _Group) -> None:
            if group.single:
                return step(group)
            count, longest = group.tokens.shape[:2]
            places = count * longest
            squares = _unset((2 if delta else 1, places, heads, PIECE_TOKENS, PIECE_TOKENS), device)
            launch(
                kernels.prepare_kernel,
                (places * heads,),
                inputs.query,
                inputs.key,
                *vectors,
                *squares,
                group.tokens,
                heads,
                key_heads,
                **sizes,
                num_warps=prepare_warps(recurrence, self._products),
            )
            operands = (
                self._unset_operand((places, heads if delta else key_heads), 2 if delta else 1, block_k, device),
                self._unset_operand((places, key_places), 1, block_k, device),
                _unset((places, heads, 2, d_v, PIECE_TOKENS), device),
                _unset((places, heads, block_k if recurrence is Recurrence.KDA else 3 * PIECE_TOKENS), device),
            )
            launch(
                kernels.fold_kernel,
                (places * heads,),
                inputs.query,
                inputs.key,
                inputs.value,
                *vectors,
                *squares,
                *operands,
                group.tokens,
                heads,
                key_heads,
                d_v,
                BLOCK_V=block(d_v),
                **sizes,
                num_warps=FOLD_WARPS,
                maxnreg=fold_registers(self._products),
            )
            copies = _unset((group.slots, heads, d_v, d_k), device)
            if group.slots:
                copies.index_copy_(0, group.before[0], states.index_select(0, group.before[1]))
            launch(
                pieces.walk_kernel,
                (-(-d_v // group.block_v), heads, count),
                *operands,
                states,
                copies,
                _zeros(places * heads, group.parts, device),
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
                RULE=rule,
                PARTS=group.parts,
                **sizes,
                num_stages=STAGES,
                num_warps=warps(group.block_v, block_k, self._products),
            )
            serve_warps = warps(group.read_block_v, block_k, self._products)
            limit = serve_registers(
                serve_warps,
                self._products,
                several=group.several,
                stochastic=any(stochastic for *_, stochastic in group.read_formats),
            )
            launch(
                pieces.serve_kernel,
                (len(group.windows), heads, -(-d_v // group.read_block_v)),
                *operands,
                states,
                copies,
                outputs,
                group.rows,
                group.windows,
                group.pieces,
                group.tokens,
                layer,
                heads,
                key_heads,
                d_v,
                longest,
                BLOCK_V=group.read_block_v,
                FORMATS=group.read_formats,
                RULE=rule,
                SEVERAL=group.several,
                **sizes,
                num_stages=STAGES,
                num_warps=serve_warps,
                maxnreg=limit,
            )
            return None

        side_by_side([[lambda group=group: walk(group) for group in chain] for chain in chains.values()], device)

    def _unset_operand(self, places: tuple[int, int], vectors: int, block_k: int, device: torch.device) -> Tensor:
        """Room for an operand of so many vectors per token at each place."""
        parts = 3 if self._products in _SPLIT_PRODUCTS else 1
        dtype = torch.bfloat16 if self._products in _BFLOAT16_PRODUCTS else torch.float32
        return _unset((*places, parts, vectors * PIECE_TOKENS, block_k), device, dtype)

    def _groups(
        self, slab: Slab, lanes: Lanes, shape: tuple[int, int, int], most: int, device: torch.device
    ) -> list[_Group]:
        """The launches of a slab. Layers of one forward pass share slabs, so the tables are kept."""
        key = (id(slab), id(lanes), shape, most, device)
        if key not in self._tables:
            while len(self._tables) >= _REMEMBERED_TABLES:
                self._tables.pop(next(iter(self._tables)))
            # The slab and the lanes are kept too, so that their ids stay theirs.
            self._tables[key] = (slab, lanes, self._make_groups(slab, lanes, shape, most, device))
        return self._tables[key][2]

    def _make_groups(
        self, slab: Slab, lanes: Lanes, shape: tuple[int, int, int], most: int, device: torch.device
    ) -> list[_Group]:
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
        place, piece = np.nonzero(((pieces[..., 1] & STORES) != 0) & (pieces[..., 3] >= 0))
        flags, token, slot = (pieces[place, piece, field] for field in (1, 2, 3))
        lane = np.where((flags & WRITES) != 0, np.array(rows, dtype=np.int64)[place, 1], -1)
        return _Group(
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


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)  # pyright: ignore


def _unset(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _zeros(heads: int, parts: int, device: torch.device) -> Tensor:
    """What the programs that share heads exchange, and one number to begin with; see `place_in_grid`."""
    return torch.zeros(1 + heads * parts if parts > 1 else 1, dtype=torch.int32, device=device)


def _block_v(formats: Sequence[TritonFormat], d_v: int, products: int) -> int:
    needed = max((f.tile_rows for f in formats), default=1)
    return tile_rows(whole_head=any(f.whole_head for f in formats), needed=needed, d_v=d_v, products=products)


def _constants(fmt: TritonFormat) -> tuple[int | float, ...]:
    return int(fmt.element), int(fmt.scale), fmt.tile_rows, fmt.group_keys, float(fmt.divisor), fmt.stochastic


def _integers(vector: Ints) -> list[int]:
    return vector.tolist()
