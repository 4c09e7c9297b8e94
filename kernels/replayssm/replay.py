"""Every recurrent state of a run: all layers, all sequences, all arms, advanced together."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from replayssm.backend import Backend, Execution
from replayssm.checkpoint import Checkpoint, StoreObserver
from replayssm.lanes import Lanes, RandomBits
from replayssm.launch import triton_problem
from replayssm.policy import Policy
from replayssm.records import Recurrence, TokenInputs
from replayssm.schedule import Schedule, plan
from replayssm.triton_tables import PIECE_TOKENS
from replayssm.triton_tiles import scratch_elements
from replayssm.triton_walk import TritonWalk, check_supported

_SLAB_ELEMENTS = 2**26
_KERNEL_SLAB_ELEMENTS = 2**28
_REMEMBERED_PLANS = 4


class StateBank:
    """The states of all layers for rows that each follow a policy.

    Args:
        policies: One per row.
        sequences: Which sequence each row reads; rows of one sequence under different policies share random bits.
        seed: Seed of all stochastic rounding, 64 bits.
        prompt: Start in the prompt, where every row follows the unrounded recurrence until `hand_over`.
        merge_lossless: Walk conventional float32 rows in windows, which is exact up to the order of sums. The
            step-by-step oracle switches this off.
        observer: Called after each store with what was stored.
        execution: What walks the windows. Backend triton needs a CUDA device, float32 tokens and formats that its
            kernels store; the hand-over at the end of a prompt is PyTorch in either.

    Raises:
        ValueError: When policies and sequences differ in number, or there are none.

    Source: ReplaySSM, replay windows and state policies.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        *,
        sequences: Sequence[int],
        seed: int,
        prompt: bool = False,
        merge_lossless: bool = True,
        observer: StoreObserver | None = None,
        execution: Execution | None = None,
    ) -> None:
        if not policies or len(policies) != len(sequences):
            raise ValueError(
                f"expected one sequence per policy and at least one, got {len(policies)} policies and "
                f"{len(sequences)} sequences"
            )
        self._policies = tuple(policies)
        self._sequences = np.array(sequences, dtype=np.int64)
        self._seed = seed
        self._prompt = prompt
        self._merge_lossless = merge_lossless
        self._observer = observer
        self._execution = Execution() if execution is None else execution
        self._triton: TritonWalk | None = None
        if self._execution.backend is Backend.TRITON:
            self._triton = TritonWalk(seed=seed, sequences=self._sequences, products=self._execution.products)
        self._checkpoints: dict[int, Checkpoint] = {}
        self._lanes: dict[tuple[torch.dtype, bool], Lanes] = {}
        self._plans: dict[tuple[object, ...], Schedule] = {}

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._policies)

    @property
    def execution(self) -> Execution:
        """What walks the windows."""
        return self._execution

    @property
    def checkpoints(self) -> dict[int, Checkpoint]:
        """The checkpoint of each layer that has advanced so far."""
        return dict(self._checkpoints)

    def advance(
        self,
        layer: int,
        recurrence: Recurrence,
        inputs: TokenInputs,
        *,
        valid: Bool[Tensor, "rows time"] | None = None,
    ) -> Float[Tensor, "rows time heads d_v"]:
        """Take one layer through its next tokens under every row's policy.

        Args:
            layer: Index of the layer in its model.
            recurrence: The layer's recurrence.
            inputs: Tokens of every row, float32 (or float64 in tests, where float32 is a rounding format too).
            valid: Tokens that count; padding leaves a row's state and window untouched and outputs zeros.

        Returns:
            Outputs in the dtype of `inputs`.

        Raises:
            ValueError: When shapes or dtypes do not fit, or differ from those of the layer's earlier tokens, or the
                backend cannot advance such states.

        Rounding: at the stores of each row's policy.
        """
        inputs.validate(recurrence)
        if inputs.rows != self.rows:
            raise ValueError(f"layer {layer}: expected tokens of {self.rows} rows, got {inputs.rows}")
        if valid is not None and tuple(valid.shape) != (inputs.rows, inputs.time):
            raise ValueError(
                f"layer {layer}: expected `valid` of shape {(inputs.rows, inputs.time)}, got {tuple(valid.shape)}"
            )
        checkpoint = self._checkpoints.get(layer)
        if checkpoint is None:
            checkpoint = self._begin(layer, recurrence, inputs)
        elif checkpoint.recurrence is not recurrence or checkpoint.states.shape[1:] != inputs.state_shape:
            raise ValueError(
                f"layer {layer}: expected {checkpoint.recurrence} tokens for states of shape "
                f"{tuple(checkpoint.states.shape[1:])}, got {recurrence} tokens for {inputs.state_shape}"
            )
        elif checkpoint.states.dtype != inputs.value.dtype:
            raise ValueError(f"layer {layer}: expected {checkpoint.states.dtype} tokens, got {inputs.value.dtype}")
        if inputs.time == 0:
            return torch.zeros_like(inputs.value)
        # The folds of a prompt keep the working state as it is: nothing is stored until the hand-over.
        observer = None if self._prompt else self._observer
        return checkpoint.advance(inputs, self._plan(checkpoint, inputs, valid), observer=observer)

    def hand_over(self) -> None:
        """End the prompt: from here on each row follows its policy, from a state stored once in its formats.

        Raises:
            ValueError: When the bank is not in a prompt.
        """
        if not self._prompt:
            raise ValueError("expected a bank that is reading its prompt, got one that was handed over already")
        self._prompt = False
        for checkpoint in self._checkpoints.values():
            checkpoint.hand_over(self._lanes_for(checkpoint.states.dtype), observer=self._observer)

    @staticmethod
    def join(banks: "Sequence[StateBank]", rows: Sequence[Sequence[int]] | None = None) -> "StateBank":
        """A new bank of chosen rows of several ones, for sequences that come and go while others decode.

        The given banks stay as they are. A row keeps its policy, its sequence, its states and its place in its window,
        so nothing that it reads or stores later depends on the rows beside it.

        Args:
            banks: Banks of the same model and seed, behind their prompts.
            rows: Which rows of each, in order; a row may be chosen several times. All rows when absent.

        Raises:
            ValueError: When a bank is still in its prompt, when banks differ in seed, execution or layers, or no
                row is chosen.
        """
        if rows is None:
            rows = [range(bank.rows) for bank in banks]
        if any(bank._prompt for bank in banks):
            raise ValueError("expected banks that were handed over, got one that is still reading its prompt")
        if len({(bank._seed, bank._merge_lossless, bank._execution) for bank in banks}) > 1:
            raise ValueError("expected banks with one seed and one way to walk windows, got different ones")
        if len({frozenset(bank._checkpoints) for bank in banks}) > 1:
            raise ValueError(f"expected banks of the same layers, got {[sorted(b._checkpoints) for b in banks]}")
        chosen = [(bank, row) for bank, wanted in zip(banks, rows, strict=True) for row in wanted]
        joined = StateBank(
            [bank._policies[row] for bank, row in chosen],
            sequences=[int(bank._sequences[row]) for bank, row in chosen],
            seed=banks[0]._seed,
            merge_lossless=banks[0]._merge_lossless,
            observer=banks[0]._observer,
            execution=banks[0]._execution,
        )
        for layer in banks[0]._checkpoints:
            parts = [bank._checkpoints[layer] for bank in banks]
            states = parts[0].states
            joined._checkpoints[layer] = Checkpoint.join(
                parts,
                rows,
                lanes=joined._lanes_for(states.dtype),
                bits=joined._bits(layer, elements=states[0].numel(), device=states.device),
                triton=joined._triton,
            )
        return joined

    def roll_back(self, tokens: int | Sequence[int]) -> None:
        """Forget the last tokens of each row, in all layers; they must not have been stored yet.

        Args:
            tokens: How many, for every row or row by row; padding does not count.

        Raises:
            ValueError: When some row has stored its state since; nothing is rolled back then.
        """
        counts = np.broadcast_to(np.array(tokens, dtype=np.int64), (self.rows,))
        for checkpoint in self._checkpoints.values():
            checkpoint.check_roll_back(counts)
        for checkpoint in self._checkpoints.values():
            checkpoint.roll_back(counts)

    def _begin(self, layer: int, recurrence: Recurrence, inputs: TokenInputs) -> Checkpoint:
        heads, d_v, d_k = inputs.state_shape
        if self._triton is not None:
            problem = triton_problem(inputs.value.device)
            if problem is not None:
                raise ValueError(f"layer {layer}: {problem}")
            if inputs.value.dtype != torch.float32:
                raise ValueError(f"layer {layer}: backend triton takes float32 tokens, got {inputs.value.dtype}")
            check_supported(self._policies, heads=heads, d_v=d_v, d_k=d_k)
        bits = self._bits(layer, elements=heads * d_v * d_k, device=inputs.value.device)
        checkpoint = Checkpoint(
            layer=layer,
            recurrence=recurrence,
            lanes=self._lanes_for(inputs.value.dtype),
            first=inputs,
            bits=bits,
            triton=self._triton,
        )
        self._checkpoints[layer] = checkpoint
        return checkpoint

    def _bits(self, layer: int, *, elements: int, device: torch.device) -> RandomBits:
        return RandomBits(seed=self._seed, layer=layer, sequences=self._sequences, elements=elements, device=device)

    def _lanes_for(self, dtype: torch.dtype) -> Lanes:
        key = (dtype, self._prompt)
        if key not in self._lanes:
            if self._prompt:
                self._lanes[key] = Lanes.of_prompt(self.rows)
            else:
                self._lanes[key] = Lanes.of(self._policies, dtype=dtype, merge_lossless=self._merge_lossless)
        return self._lanes[key]

    def _plan(self, checkpoint: Checkpoint, inputs: TokenInputs, valid: Tensor | None) -> Schedule:
        """The windows of this call; layers of one forward pass stand at the same cursors and share it."""
        mask = None if valid is None else valid.cpu().numpy()
        lanes = self._lanes_for(inputs.value.dtype)
        widest = int(lanes.windows.max())
        heads, d_v, d_k = inputs.state_shape
        per_token = heads * (4 * d_v + 4 * widest + (4 * d_k if checkpoint.recurrence is Recurrence.KDA else 1))
        per_step = len(lanes.rows) * widest * (per_token + 4 * inputs.key.shape[-2] * d_k)
        if self._triton is not None:
            # What the kernels keep of each piece, and the read copies of every window.
            per_piece = scratch_elements(checkpoint.recurrence, heads, inputs.key.shape[-2], d_v, d_k)
            per_step = self.rows * -(-widest // PIECE_TOKENS) * per_piece
            per_step += (len(lanes.rows) - self.rows) * heads * d_v * d_k
        longest = max(1, (_SLAB_ELEMENTS if self._triton is None else _KERNEL_SLAB_ELEMENTS) // per_step)
        key = (
            checkpoint.cursors.key(),
            lanes.windows.tobytes(),
            checkpoint.buffered_time,
            inputs.time,
            longest,
            None if mask is None else mask.tobytes(),
        )
        if key not in self._plans:
            while len(self._plans) >= _REMEMBERED_PLANS:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = plan(
                checkpoint.cursors,
                lanes.windows,
                buffered_time=checkpoint.buffered_time,
                time=inputs.time,
                valid=mask,
                steps_per_slab=longest,
            )
        return self._plans[key]
