"""The host side of the Triton window kernels: tables of what each row does, and launches."""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from replayssm.backend import Products
from replayssm.formats.triton_format import TritonFormat, block
from replayssm.lanes import Lanes
from replayssm.launch import is_interpreted, launch, multiprocessors
from replayssm.policy import Policy
from replayssm.records import Recurrence, TokenInputs
from replayssm.schedule import Ints, Slab
from replayssm.triton_groups import Group, Groups
from replayssm.triton_streams import side_by_side
from replayssm.triton_tables import PIECE_TOKENS
from replayssm.triton_tiles import (
    FOLD_WARPS,
    STAGES,
    STEP_ELEMENTS,
    fold_registers,
    head_parts,
    prepare_warps,
    serve_registers,
    warps,
)

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


class TritonWalk:
    """Walks the windows of all rows of a bank.

    Args:
        seed: Seed of all stochastic rounding, 64 bits.
        sequences: Which sequence each row reads.
        products: Operands of the products.
    """

    def __init__(self, *, seed: int, sequences: Ints, products: Products) -> None:
        compiled = {Products.IEEE: 0, Products.TF32: 1, Products.BF16: 2, Products.BF16X6: 4}
        # The interpreter's products of bfloat16 numbers are wrong, so it takes them as float32.
        interpreted = {**compiled, Products.BF16: 3, Products.BF16X6: 5}
        self._products = (interpreted if is_interpreted() else compiled)[products]
        self._groups = Groups(seed=seed, sequences=sequences, products=self._products)

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

        most = head_parts(max(len(slab.rows) for slab in slabs) * heads, multiprocessors(device))
        chains: dict[tuple[int, int, bool, bool], list[Group]] = {}
        for slab in slabs:
            for group in self._groups.of(slab, lanes, (heads, d_v, d_k), most, device):
                chains.setdefault(group.kind, []).append(group)

        def step(group: Group) -> None:
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

        def walk(group: Group) -> None:
            if group.single:
                step(group)
                return
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

        side_by_side([[lambda group=group: walk(group) for group in chain] for chain in chains.values()], device)

    def _unset_operand(self, places: tuple[int, int], vectors: int, block_k: int, device: torch.device) -> Tensor:
        """Room for an operand of so many vectors per token at each place."""
        parts = 3 if self._products in _SPLIT_PRODUCTS else 1
        dtype = torch.bfloat16 if self._products in _BFLOAT16_PRODUCTS else torch.float32
        return _unset((*places, parts, vectors * PIECE_TOKENS, block_k), device, dtype)


def _unset(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _zeros(heads: int, parts: int, device: torch.device) -> Tensor:
    """What the programs that share heads exchange, and one number to begin with; see `place_in_grid`."""
    return torch.zeros(1 + heads * parts if parts > 1 else 1, dtype=torch.int32, device=device)
