"""The checkpoint of one layer: stored copies, buffered records, cursors; append, read, flush, roll back."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from replayssm.gdn.window import DeltaWindow
from replayssm.kda.window import KdaWindow
from replayssm.lanes import Lanes, RandomBits, lane_index, store_lanes
from replayssm.mamba2.window import Mamba2Window
from replayssm.records import Recurrence, TokenInputs
from replayssm.schedule import Bools, Cursors, Ints, Schedule, Slab
from replayssm.triton_tables import one_step
from replayssm.triton_walk import TritonWalk
from replayssm.window import Window, pick, repeat_lanes

WINDOW_FORMS: dict[Recurrence, type[Mamba2Window] | type[DeltaWindow]] = {
    Recurrence.MAMBA2: Mamba2Window,
    Recurrence.GDN: DeltaWindow,
    Recurrence.KDA: KdaWindow,
}


@dataclass(frozen=True, kw_only=True)
class StoreEvent:
    """One store, as an observer sees it.

    Attributes:
        layer: Index of the layer in its model.
        rows: Row of each stored lane.
        copies: 0 for the copy that carries the recurrence, 1 for a separate read copy.
        tokens: Token index of the store, per lane.
        states: What loads back, `[lanes, heads, d_v, d_k]`.
    """

    layer: int
    rows: Ints
    copies: Ints
    tokens: Ints
    states: Tensor


StoreObserver = Callable[[StoreEvent], None]


class Checkpoint:
    """The states of one layer for all rows of a run.

    Attributes:
        stores: Stores made so far, summed over lanes; the folds of a prompt are forgotten at its hand-over.
    """

    def __init__(
        self,
        *,
        layer: int,
        recurrence: Recurrence,
        lanes: Lanes,
        first: TokenInputs,
        bits: RandomBits,
        triton: TritonWalk | None = None,
    ) -> None:
        self.stores = 0
        self._layer = layer
        self._recurrence = recurrence
        self._lanes = lanes
        self._bits = bits
        self._triton = triton
        self._states = first.value.new_zeros(len(lanes.rows), *first.state_shape)
        self._residuals: Tensor | None = None
        self._records: TokenInputs | None = None
        self.cursors = Cursors.start(lanes.first_windows)

    @property
    def recurrence(self) -> Recurrence:
        """The recurrence that this layer follows."""
        return self._recurrence

    @property
    def buffered_time(self) -> int:
        """Length of the record buffer's time axis."""
        return 0 if self._records is None else self._records.time

    @property
    def states(self) -> Float[Tensor, "lanes heads d_v d_k"]:
        """What the copies load back as: recurrence copies of all rows, then the separate read copies."""
        return self._states

    def advance(
        self, inputs: TokenInputs, schedule: Schedule, *, observer: StoreObserver | None = None
    ) -> Float[Tensor, "rows time heads d_v"]:
        """Append tokens: read their outputs, flush every window that becomes complete, buffer the rest.

        Args:
            inputs: New tokens of every row.
            schedule: Their windows, planned from this checkpoint's cursors.
            observer: Called after each store.

        Returns:
            Outputs of the new tokens; zeros where the schedule counts a token as padding.

        Rounding: at each flush, from the working state, after the outputs were read.
        """
        tokens = inputs if self._records is None else self._records.then(inputs)
        heads, d_v, _ = inputs.state_shape
        spare = tokens.rows * tokens.time
        outputs = inputs.value.new_zeros(spare + 1, heads, d_v)
        if self._triton is None:
            for slab in schedule.slabs:
                index = torch.as_tensor(slab.index, device=outputs.device)
                read = self._walk(tokens.take(index, padded=slab.padded), slab, observer)
                target = index.masked_fill(index < 0, spare) if slab.padded else index
                outputs.index_copy_(0, target.reshape(-1), read.movedim(-1, 2).reshape(-1, heads, d_v))
        elif schedule.slabs:
            self._launch(self._triton, tokens, schedule.slabs, outputs, observer)
        self.cursors = schedule.after
        places = schedule.buffer
        if 0 < places.shape[1] < inputs.room:
            # As many as the next tokens will have room for.
            places = np.pad(places, ((0, 0), (0, inputs.room - places.shape[1])), constant_values=-1)
        self._records = None
        if places.size:
            # Layers of a chunk share the index: a copy from memory that is not pinned waits for the device each time.
            buffer = lane_index(places, outputs.device).view(places.shape)
            self._records = tokens.take(buffer, padded=bool((places < 0).any()))
        return outputs[:-1].view(tokens.rows, tokens.time, heads, d_v)[:, tokens.time - inputs.time :]

    def _launch(
        self,
        triton: TritonWalk,
        tokens: TokenInputs,
        slabs: Sequence[Slab],
        outputs: Tensor,
        observer: StoreObserver | None,
    ) -> None:
        """Walk the windows of slabs with kernels: all at once, or step by step where somebody watches the stores."""
        parts = [slabs]
        if observer is not None:
            parts = [[one_step(slab, step)] for slab in slabs for step in range(len(slab.index))]
        for part in parts:
            triton.walk(
                self._states,
                self._lanes,
                layer=self._layer,
                recurrence=self._recurrence,
                tokens=tokens,
                slabs=part,
                outputs=outputs,
            )
            copies = np.bincount(self._lanes.rows, minlength=self._lanes.of_rows)
            self.stores += sum(int((slab.complete * copies[slab.rows]).sum()) for slab in part)
            if observer is not None and part[0].complete.any():
                lanes, chosen = self._lanes.subset(part[0].rows)
                done = part[0].complete[0][lanes.rows]
                observer(
                    StoreEvent(
                        layer=self._layer,
                        rows=part[0].rows[lanes.rows[done]],
                        copies=lanes.copies[done],
                        tokens=part[0].store_tokens[0][lanes.rows[done]],
                        states=self._states[torch.as_tensor(chosen[done], device=self._states.device)],
                    )
                )

    def _walk(
        self, inputs: TokenInputs, slab: Slab, observer: StoreObserver | None
    ) -> Float[Tensor, "steps rows heads d_v window"]:
        """Walk the windows of a slab one after another."""
        device = self._states.device
        lanes, chosen = self._lanes.subset(slab.rows)
        everything = len(chosen) == len(self._lanes.rows)
        picked = lane_index(chosen, device)
        states = self._states if everything else self._states.index_select(0, picked)
        rows = lanes.of_rows
        split = len(lanes.rows) > rows
        separate = lane_index(lanes.rows[rows:], device)
        flushed = torch.as_tensor(_flush_mask(slab, lanes), device=device)

        windows: Window = WINDOW_FORMS[self._recurrence].prepare(inputs)
        wide = repeat_lanes(windows, lane_index(lanes.rows, device)) if split else windows
        collected: list[Tensor] = []
        for step in range(len(slab.index)):
            outputs, writes = pick(wide, step).outputs(states)
            read = outputs[:rows]
            if split:
                working = outputs.index_select(0, separate)
                served = torch.where(flushed[step], working, outputs[rows:])
                read = read.index_copy(0, separate, served)
            collected.append(read)
            if slab.complete[step].any():
                folded = pick(windows, step).fold(states[:rows], writes[:rows])
                states = self._store(folded, states, lanes, slab, step, chosen, observer)
        if everything:
            self._states = states
        else:
            self._states = self._states.index_copy(0, picked, states)
        return torch.stack(collected)

    def _store(
        self,
        folded: Tensor,
        before: Tensor,
        lanes: Lanes,
        slab: Slab,
        step: int,
        chosen: Ints,
        observer: StoreObserver | None,
    ) -> Tensor:
        """Store the rows whose window is complete; the others keep the copies that they had."""
        residuals = self._residuals
        if residuals is not None and len(chosen) != len(residuals):
            residuals = residuals.index_select(0, lane_index(chosen, residuals.device))
        stored, lost = store_lanes(
            folded,
            lanes,
            tokens=slab.store_tokens[step],
            bits=self._bits,
            all_rows=slab.rows,
            residuals=residuals,
        )
        done = slab.complete[step][lanes.rows]
        if not done.all():
            mask = torch.as_tensor(done, device=stored.device).view(-1, 1, 1, 1)
            stored = torch.where(mask, stored, before)
            if lost is not None:
                lost = torch.where(mask, lost, torch.zeros_like(lost) if residuals is None else residuals)
        if lost is not None:
            kept = self._states.new_zeros(self._states.shape) if self._residuals is None else self._residuals
            self._residuals = kept.index_copy(0, lane_index(chosen, lost.device), lost)
        self.stores += int(done.sum())
        if observer is not None:
            observer(
                StoreEvent(
                    layer=self._layer,
                    rows=slab.rows[lanes.rows[done]],
                    copies=lanes.copies[done],
                    tokens=slab.store_tokens[step][lanes.rows[done]],
                    states=stored[torch.as_tensor(done, device=stored.device)],
                )
            )
        return stored

    def hand_over(self, lanes: Lanes, *, observer: StoreObserver | None = None) -> None:
        """End the prompt: fold what is buffered and store the state of every row once, in each copy of `lanes`.

        Rounding: once, from the float32 (in tests float64) state at the end of the prompt.
        """
        states = self._states
        if self._records is not None:
            index = np.arange(self._records.rows * self._records.time).reshape(1, self._records.rows, -1)
            # The buffer is as long as its longest row, and may still hold tokens that were rolled back.
            index = np.where(np.arange(self._records.time) < self.cursors.records[:, None], index, -1)
            rest = self._records.take(torch.as_tensor(index, device=states.device), padded=bool((index < 0).any()))
            window = pick(WINDOW_FORMS[self._recurrence].prepare(rest), 0)
            states = window.fold(states, window.outputs(states)[1])
        rows = np.arange(lanes.of_rows)
        tokens = np.maximum(self.cursors.seen - 1, 0)
        self._states, self._residuals = store_lanes(
            states, lanes, tokens=tokens, bits=self._bits, all_rows=rows, residuals=None
        )
        self._records = None
        self._lanes = lanes
        self.cursors = Cursors.start(lanes.first_windows, seen=self.cursors.seen)
        self.stores = len(lanes.rows)
        if observer is not None:
            observer(
                StoreEvent(
                    layer=self._layer,
                    rows=lanes.rows,
                    copies=lanes.copies,
                    tokens=tokens[lanes.rows],
                    states=self._states,
                )
            )

    @staticmethod
    def join(
        parts: "Sequence[Checkpoint]",
        rows: Sequence[Sequence[int]],
        *,
        lanes: Lanes,
        bits: RandomBits,
        triton: TritonWalk | None = None,
    ) -> "Checkpoint":
        """A new checkpoint of chosen rows of several ones, which stay as they are.

        Args:
            parts: Checkpoints of the same layer, behind their prompts.
            rows: Which rows of each part, in order; a row may be chosen several times.
            lanes: The copies of the chosen rows.
            bits: Source of random bits of the chosen rows.
            triton: What walks the windows of the chosen rows, if kernels do.
        """
        place: dict[tuple[int, int, int], int] = {}
        for number, part in enumerate(parts):
            for row, kind in zip(part._lanes.rows.tolist(), part._lanes.copies.tolist(), strict=True):
                place[number, row, kind] = len(place)
        chosen = [(number, row) for number, wanted in enumerate(rows) for row in wanted]
        members = [
            place[*chosen[row], kind] for row, kind in zip(lanes.rows.tolist(), lanes.copies.tolist(), strict=True)
        ]
        index = torch.tensor(members, device=parts[0]._states.device)

        joined = copy.copy(parts[0])
        joined._lanes, joined._bits, joined._triton = lanes, bits, triton
        joined._states = torch.cat([part._states for part in parts]).index_select(0, index)
        joined.stores = sum(part.stores for part in parts)
        if all(part._residuals is None for part in parts):
            joined._residuals = None
        else:
            lost = [torch.zeros_like(p._states) if p._residuals is None else p._residuals for p in parts]
            joined._residuals = torch.cat(lost).index_select(0, index)
        joined.cursors = Cursors.of([part.cursors for part in parts], rows)
        joined._records = _join_records([part._records for part in parts], rows)
        return joined

    def check_roll_back(self, tokens: Ints) -> None:
        """Check that the last tokens of each row are still buffered.

        Raises:
            ValueError: Naming the first row that has fewer: its state has been stored since.
        """
        refused = np.flatnonzero((tokens < 0) | (tokens > self.cursors.records))
        if len(refused):
            row = int(refused[0])
            raise ValueError(
                f"layer {self._layer}, row {row}: can roll back 0 to {self.cursors.records[row]} tokens (those "
                f"buffered since the last store), got {tokens[row]}"
            )

    def roll_back(self, tokens: Ints) -> None:
        """Forget the last tokens of each row, which must still be buffered (a rejected speculation)."""
        self.check_roll_back(tokens)
        self.cursors = replace(
            self.cursors,
            records=self.cursors.records - tokens,
            remaining=self.cursors.remaining + tokens,
            seen=self.cursors.seen - tokens,
        )


def _join_records(parts: Sequence[TokenInputs | None], rows: Sequence[Sequence[int]]) -> TokenInputs | None:
    """The buffered tokens of chosen rows; shorter buffers are filled up behind a row's own with neutral tokens."""
    present = [part for part in parts if part is not None]
    longest = max((part.time for part in present), default=0)
    if longest == 0:
        return None
    taken: list[TokenInputs] = []
    for part, wanted in zip(parts, rows, strict=True):
        source = present[0] if part is None else part
        time = 0 if part is None else part.time
        token = np.arange(longest)
        index = np.where(token < time, np.array(wanted, dtype=np.int64)[:, None] * time + token, -1)
        taken.append(source.take(torch.as_tensor(index, device=source.value.device), padded=time < longest))
    if len(taken) == 1:
        return taken[0]
    return TokenInputs(
        query=torch.cat([t.query for t in taken]),
        key=torch.cat([t.key for t in taken]),
        value=torch.cat([t.value for t in taken]),
        log_decay=torch.cat([t.log_decay for t in taken]),
        beta=None if taken[0].beta is None else torch.cat([t.beta for t in taken if t.beta is not None]),
    )


def _flush_mask(slab: Slab, lanes: Lanes) -> Bools:
    """`[steps, separate rows, 1, 1, window]`: the tokens whose output comes from the materialised state."""
    rows = lanes.rows[lanes.of_rows :]
    width = np.arange(int(slab.index.shape[-1]), dtype=np.int64)
    last = width == slab.lengths[:, rows, None] - 1
    return (last & slab.complete[:, rows, None])[:, :, None, None, :]
