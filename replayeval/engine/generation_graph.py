"""One-token steps in fixed places: nothing moves or grows from token to token, so a CUDA graph can replay them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import torch
from torch import Tensor

from replayeval.engine.generation_batch import Batch, PolicyDecoder
from replayeval.engine.generation_fixed import FixedCache, fixed_problem
from replayeval.engine.generation_sampling import Prediction
from replayeval.engine.generation_slots import SlotStates
from replayeval.errors import UnsupportedArmError
from replayeval.models.head import OutputHead
from replayssm.backend import Backend, Execution

__all__ = ["FixedRows", "Graphs", "JoinedRows", "Steps", "capacity_for", "kernel_problem"]

CAPACITY_STEP = 64
"""Tokens by which the room of attention is rounded up; kernels like whole tiles."""

SPARE_TOKENS = 256
"""Least room that a row gets beyond what it needs, and its least growth: each growth is a new capture."""

_ATTENTION = ("sdpa", "eager")
_WARM_UPS = 2


class Graphs(StrEnum):
    """Whether one-token steps are replayed as a CUDA graph.

    `auto`: where they can be; `Steps` says where not, and why. `on`: an error where they cannot. `off`: never.
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How generated tokens are computed.

    Attributes:
        kernels: Whether the decode kernels advance the states, in places that stay; else rows are joined and the states
            advance in windows, as in a measurement.
        graphs: Whether steps are replayed as a CUDA graph.
        reason: Why not all of this.
    """

    kernels: bool
    graphs: bool
    reason: str | None = None

    def __str__(self) -> str:
        """What a record says."""
        what = "windows" if not self.kernels else "decode kernels" + (" in a CUDA graph" if self.graphs else "")
        return what if self.reason is None else f"{what} ({self.reason})"


def kernel_problem(head: OutputHead, execution: Execution, *, watched: bool) -> str | None:
    """Why one-token steps cannot run in fixed places with the decode kernels, or None if they can."""
    if execution.backend is not Backend.TRITON:
        return f"backend {execution.backend}"
    if watched:
        return "stores are watched, and the decode kernels do not show theirs"
    devices = {str(p.device) for p in head.model.parameters()}
    if len(devices) > 1:
        return f"the model lies on {', '.join(sorted(devices))}"
    attention = getattr(head.config, "_attn_implementation", None)
    if attention not in _ATTENTION:
        return f"attention {attention} takes no mask of its own"
    return fixed_problem(head.new_cache(1))


def capacity_for(needed: int, most: int) -> int:
    """Room for tokens of a row when `needed` are, so that growth is rare and nothing is far too wide.

    Args:
        needed: Tokens that the longest row has after the next step.
        most: Tokens that any row can come to.
    """
    wanted = min(max(needed + needed // 4, needed + SPARE_TOKENS - 1), most)
    return -(-max(wanted, needed) // CAPACITY_STEP) * CAPACITY_STEP


class JoinedRows:
    """Rows side by side in one batch, joined anew whenever one comes or goes.

    Args:
        decoder: Reads prompts and appends tokens.
    """

    def __init__(self, decoder: PolicyDecoder) -> None:
        self._decoder = decoder
        self._batch: Batch | None = None
        self._rows = 0

    def clear(self, most: int) -> None:
        """Forget all rows; `most` tokens are the longest that a row can become."""
        del most
        self._batch, self._rows = None, 0

    def prefill(self, prompts: Sequence[Sequence[int]], sequences: Sequence[int]) -> tuple[Batch, Tensor]:
        """Read prompts; the batch behind them and the final hidden state of each."""
        return self._decoder.prefill(prompts, sequences=sequences)

    def admit(self, parts: Sequence[Batch], rows: Sequence[Sequence[int]]) -> None:
        """Let chosen rows of what was read decode behind those that do."""
        parts = parts if self._batch is None else [self._batch, *parts]
        chosen = [*rows] if self._batch is None else [list(range(self._rows)), *rows]
        self._join(parts, chosen)

    def keep(self, rows: Sequence[int]) -> None:
        """Let all other rows go."""
        assert self._batch is not None
        self._join([self._batch], [rows])

    def step(self, tokens: Sequence[int]) -> Prediction:
        """Append a token to every row and predict the one behind it; of use until the next step."""
        assert self._batch is not None
        pending = torch.tensor([[token] for token in tokens], device=self._batch.mask.device)
        self._batch, hidden = self._decoder.extend(self._batch, pending)
        return Prediction.of(self._decoder.head.logits(hidden[:, -1]))

    def _join(self, parts: Sequence[Batch], rows: Sequence[Sequence[int]]) -> None:
        present = [(part, wanted) for part, wanted in zip(parts, rows, strict=True) if len(wanted)]
        self._rows = sum(len(wanted) for _, wanted in present)
        if not present:
            self._batch = None
        elif len(present) == 1 and list(present[0][1]) == list(range(present[0][0].rows)):
            self._batch = present[0][0]
        else:
            self._batch = Batch.join([part for part, _ in present], [wanted for _, wanted in present])


class FixedRows:
    """Rows in places of their own: a row that is admitted takes a free place and keeps it until it is let go.

    All places take every step, the empty ones too: those leave slots and cursors as they are, and what they compute is
    thrown away. Each place keeps its tokens from its first slot of the attention cache on, without padding; what lies
    behind them is masked. So the arithmetic of a row depends on the number of places and on the room they have, and on
    nothing that happens in other places.

    Args:
        decoder: Reads prompts and runs the model.
        places: Sequences side by side.
        seed: Seed of stochastic rounding.
        graphs: Whether steps are replayed as a CUDA graph.

    Raises:
        UnsupportedArmError: With `Graphs.ON`, where there is no CUDA device; later, where a step cannot be captured.
    """

    def __init__(self, decoder: PolicyDecoder, *, places: int, seed: int, graphs: Graphs) -> None:
        self._decoder = decoder
        device = decoder.head.input_device
        self._wanted = graphs
        self._reason: str | None = None
        if graphs is Graphs.OFF:
            self._reason = "graphs are off"
        elif device.type != "cuda":
            self._refuse(f"CUDA graphs need a CUDA device, got {device}")
        self._states = SlotStates(decoder.policy, places=places, seed=seed, device=device)
        self._ids = torch.zeros((places, 1), dtype=torch.int64, device=device)
        self._positions = torch.zeros(places, dtype=torch.int64, device=device)
        self._cache: FixedCache | None = None
        self._capacity = 0
        self._most = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._prediction: Prediction | None = None
        self._lengths = [0] * places
        self._places: list[int] = []
        self.captures = 0

    @property
    def steps(self) -> Steps:
        """How steps are computed."""
        return Steps(kernels=True, graphs=self._reason is None, reason=self._reason)

    @property
    def places(self) -> int:
        """Sequences that can decode side by side."""
        return len(self._lengths)

    @property
    def capacity(self) -> int:
        """Tokens that each place has room for."""
        return self._capacity

    def clear(self, most: int) -> None:
        """Forget all rows; `most` tokens are the longest that a row can become."""
        self._most = most
        self._release(self._places)
        self._places = []

    def prefill(self, prompts: Sequence[Sequence[int]], sequences: Sequence[int]) -> tuple[Batch, Tensor]:
        """Read prompts; the batch behind them, its states unrounded, and the final hidden state of each."""
        return self._decoder.prefill(prompts, sequences=sequences, states=self._states)

    def admit(self, parts: Sequence[Batch], rows: Sequence[Sequence[int]]) -> None:
        """Let chosen rows of what was read decode in free places.

        Rounding: their states, once, in the formats of the policy.
        """
        for part, wanted in zip(parts, rows, strict=True):
            if len(wanted):
                self._admit(part, wanted)

    def keep(self, rows: Sequence[int]) -> None:
        """Let all other rows go."""
        kept = set(rows)
        self._release([place for row, place in enumerate(self._places) if row not in kept])
        self._places = [self._places[row] for row in rows]

    def step(self, tokens: Sequence[int]) -> Prediction:
        """Append a token to every row and predict the one behind it; of use until the next step."""
        self._make_room(max(self._lengths) + 1)
        waiting = [0] * self.places
        for place, token in zip(self._places, tokens, strict=True):
            waiting[place] = token
            self._lengths[place] += 1
        self._ids.copy_(torch.tensor(waiting).unsqueeze(1))
        if self._graph is None and self._reason is None:
            self._capture()
        if self._graph is None:
            self._prediction = self._body()
        else:
            self._graph.replay()
        assert self._prediction is not None
        if self._places == list(range(self.places)):
            return self._prediction
        return self._prediction.take(self._index(self._places))

    def _admit(self, part: Batch, rows: Sequence[int]) -> None:
        free = [place for place, length in enumerate(self._lengths) if not length]
        places = free[: len(rows)]
        index, picked = self._index(places), self._index(rows)
        lengths = part.lengths.index_select(0, picked)
        counted = cast(list[int], lengths.tolist())  # pyright: ignore[reportUnknownMemberType]
        if self._cache is None:
            self._cache = FixedCache(part.cache, places=self.places, positions=self._positions)
        self._make_room(max([*self._lengths, *counted]) + 1)
        self._cache.admit(part.cache, rows, places, lengths=counted)
        self._positions[index] = lengths
        sequences = [part.sequences[row] for row in rows]
        self._states.admit(part.bank, rows, index, sequences=sequences, tokens=lengths)
        for place, length in zip(places, counted, strict=True):
            self._lengths[place] = length
        self._places = [*self._places, *places]

    def _release(self, places: Sequence[int]) -> None:
        if not places:
            return
        index = self._index(places)
        self._states.release(index)
        self._positions[index] = 0
        for place in places:
            self._lengths[place] = 0

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._positions.device)

    def _make_room(self, needed: int) -> None:
        """Let every place hold `needed` tokens; a step that was recorded for less room is of no use then."""
        if needed <= self._capacity:
            return
        assert self._cache is not None
        self._graph, self._prediction = None, None
        self._capacity = capacity_for(needed, self._most)
        self._cache.grow(self._capacity)

    def _body(self) -> Prediction:
        """One token for every place; reads and writes tensors that stay where they are, and nothing on the host."""
        assert self._cache is not None
        head = self._decoder.head
        mask = self._cache.mask(head.config, dtype=head.model.dtype)
        hidden = self._decoder.step(
            self._ids, self._cache.cache, mask=mask, positions=self._positions[:, None], states=self._states
        )
        logits = head.logits(hidden[:, -1])
        self._states.advance()
        self._positions.add_(self._states.slot_index >= 0)
        return Prediction.of(logits)

    def _capture(self) -> None:
        """Record a step. Nothing of a row changes: the steps that warm up run on empty places and are undone."""
        assert self._cache is not None
        slot_index, positions = self._states.slot_index.clone(), self._positions.clone()
        kept = self._cache.save()
        self._states.slot_index.fill_(-1)
        self._positions.zero_()
        try:
            with self._decoder.attempt():
                self._record()
        except (RuntimeError, UnsupportedArmError) as error:
            self._graph, self._prediction = None, None
            cause = _root(error)
            if isinstance(cause, torch.OutOfMemoryError):
                # Fewer rows are the remedy, and the caller's.
                raise cause from error
            self._refuse(f"the step of this model cannot be captured: {_first_line(cause)}")
        finally:
            self._states.slot_index.copy_(slot_index)
            self._positions.copy_(positions)
            self._cache.restore(kept)

    def _record(self) -> None:
        with torch.cuda.device(self._positions.device):
            stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    self._body()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                prediction = self._body()
        self._graph, self._prediction = graph, prediction
        self.captures += 1

    def _refuse(self, reason: str) -> None:
        if self._wanted is Graphs.ON:
            raise UnsupportedArmError(f"graphs on: {reason}; use graphs auto or off")
        self._reason = reason


def _root(error: BaseException) -> BaseException:
    """What went wrong first: ending a capture that failed raises once more."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
