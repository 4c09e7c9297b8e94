"""What `replayeval bench kernels` runs: the layers of the paper's models, random tokens for them, and a clock."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from replayssm.decode import DecodeToken, Launch, PreparedStep, advance, default_launch, prepare_step
from replayssm.policy import Policy
from replayssm.records import Recurrence
from replayssm.slots import DecodeCursors, DecodeSlots, LayerShape, Mamba2Constants

SHAPES: dict[str, LayerShape] = {
    "Nemotron-3-Nano-4B": LayerShape(recurrence=Recurrence.MAMBA2, key_heads=8, heads=96, d_k=128, d_v=80),
    "Nemotron-3-Super-120B-A12B": LayerShape(recurrence=Recurrence.MAMBA2, key_heads=8, heads=128, d_k=128, d_v=64),
    "Qwen3.5-4B": LayerShape(recurrence=Recurrence.GDN, key_heads=16, heads=32, d_k=128, d_v=128),
    "Qwen3.5-122B-A10B": LayerShape(recurrence=Recurrence.GDN, key_heads=16, heads=64, d_k=128, d_v=128),
    "Kimi-Linear-48B-A3B": LayerShape(recurrence=Recurrence.KDA, key_heads=32, heads=32, d_k=128, d_v=128),
}
"""One SSM layer of each model (ReplaySSM, Table 5; Kimi Linear from its configuration)."""

CACHE_BYTES = 512 * 2**20
"""States of this size together do not stay in the cache of any card from one round to the next; `LayerSets` makes at
most 64 layers, which small batches of 4-bit states do not reach it with."""


class Clock(Protocol):
    """Measures how long launches take on the device."""

    def seconds(self, run: Callable[[], None]) -> float:
        """Median time of `run`, which only launches kernels."""
        ...


@dataclass(frozen=True, kw_only=True)
class GraphClock:
    """Replays a captured CUDA graph, so that launches cost the host nothing.

    Attributes:
        repeats: Replays of which the median is taken.
    """

    repeats: int = 20

    def seconds(self, run: Callable[[], None]) -> float:
        """Median time of one replay."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for _ in range(2):
            graph.replay()
        return event_seconds(graph.replay, self.repeats)


def event_seconds(run: Callable[[], None], repeats: int) -> float:
    """Median time between CUDA events around `run`."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        start.record()  # pyright: ignore[reportUnknownMemberType]
        run()
        end.record()  # pyright: ignore[reportUnknownMemberType]
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3


def random_token(shape: LayerShape, rows: int, dtype: torch.dtype, generator: torch.Generator) -> DecodeToken:
    """One token per row; decays and strengths spread as trained layers have them."""
    device = generator.device

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    channels = (shape.d_k,) if shape.recurrence is Recurrence.KDA else ()
    delta = shape.recurrence is not Recurrence.MAMBA2
    return DecodeToken(
        query=draw(rows, shape.key_heads, shape.d_k).to(dtype),
        key=draw(rows, shape.key_heads, shape.d_k).to(dtype),
        value=draw(rows, shape.heads, shape.d_v).to(dtype),
        log_decay=-0.1 * draw(rows, shape.heads, *channels).exp() if delta else None,
        beta=draw(rows, shape.heads).sigmoid() if delta else None,
        dt=None if delta else draw(rows, shape.heads) - 2,
    )


def random_slots(
    shape: LayerShape, policy: Policy, slots: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[DecodeSlots, DecodeCursors]:
    """Slots with random states, at the beginning of their windows."""
    device = generator.device
    constants = None
    if shape.recurrence is Recurrence.MAMBA2:
        uniform = torch.rand(3, shape.heads, generator=generator, device=device)
        constants = Mamba2Constants(decay_rate=-uniform[0] - 0.1, dt_bias=uniform[1], skip=uniform[2])
    made = DecodeSlots(shape, policy, slots=slots, input_dtype=dtype, constants=constants, device=device)
    cursors = DecodeCursors(slots=slots, device=device)
    chunk = max(1, 2**28 // (shape.heads * shape.d_v * shape.d_k))
    for start in range(0, slots, chunk):
        index = torch.arange(start, min(start + chunk, slots), device=device)
        states = torch.randn(len(index), *shape.state, generator=generator, device=device)
        made.admit(index, states, cursors)
    return made, cursors


def half_window(window: int) -> int:
    """Records of a reading step half way through a window.

    The last step flushes, and of a window of two the other one reads no record.
    """
    return max(0, min(window // 2, window - 2))


FEW = 64
"""Up to this batch, launches meant for many sequences compete with those meant for few."""


def candidates(slots: DecodeSlots, batch: int) -> list[Launch]:
    """Launch configurations to choose from, the default first."""
    found = _around(slots, default_launch(slots, batch))
    if 1 < batch <= FEW and slots.policy.window_tokens > 1:
        found += [default_launch(slots, 1), default_launch(slots, 1 << 20)]
    return list(dict.fromkeys(found))


def _around(slots: DecodeSlots, default: Launch) -> list[Launch]:
    """Cuts (rows, warps, registers, stages) that other cards and shapes may prefer to the default."""
    d_v, read = slots.shape.d_v, slots.copies[-1]
    cuts: list[tuple[int, int, int | None, int]]
    if slots.policy.window_tokens == 1:
        widest = max(c.kernel.tile_rows for c in slots.copies)
        cuts = [(32, 4, None, 1), (16, 4, None, 1), (16, 2, None, 1), (16, 1, None, 1), (8, 2, 128, 1)]
        cuts = [] if any(c.kernel.whole_head for c in slots.copies) else [c for c in cuts if c[0] >= widest]
    elif read.format.is_scaled:
        cuts = [(default.rows, 1, 104, 3), (default.rows, 1, 128, 2)]
    elif default.tiles > 1:
        cuts = [(16, 1, 152, 1), (32, 2, 168, 1), (16, 1, 168, 3)]
    else:
        cuts = [(16, 2, 128, 1), (16, 4, 128, 1)]
    found = [default]
    for rows, warps, limit, stages in cuts:
        if d_v % rows == 0:
            tiles = max(1, default.tiles * default.rows // rows)
            found.append(replace(default, rows=rows, warps=warps, registers=limit, stages=stages, tiles=tiles))
    if default.tiles > 1 and default.tiles % 2 == 0:
        found.append(replace(default, tiles=default.tiles // 2))
    if default.tiles > 1 and default.flush_rows is None:
        # Flushes beside the reads, with more warps than those.
        wide = 32 if d_v % 32 == 0 else 16
        beside = replace(default, flush_rows=wide, flush_warps=2, flush_tiles=-(-d_v // wide), flush_stages=1)
        found.append(replace(beside, flush_registers=168 if wide == 32 else 128))
    return found


class LayerSets:
    """The same layer several times over, so that no state is still in the cache when its turn comes again.

    Args:
        shape: The layer.
        policy: How its states are stored.
        batch: Sequences.
        generator: Source of states and tokens; its device is where everything lies.
        stored_bytes: Bytes of one sequence's state in this layer.
        dtype: Of the inputs.
    """

    def __init__(
        self,
        shape: LayerShape,
        policy: Policy,
        batch: int,
        generator: torch.Generator,
        *,
        stored_bytes: float,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.count = max(2, min(64, -(-CACHE_BYTES // int(batch * stored_bytes))))
        made = [random_slots(shape, policy, batch, dtype, generator) for _ in range(self.count)]
        self.window = policy.window_tokens
        self.batch = batch
        self.slots = [m[0] for m in made]
        self.cursors = made[0][1]
        self.token = random_token(shape, batch, dtype, generator)
        self.index = torch.arange(batch, dtype=torch.int32, device=generator.device)
        self.out = torch.empty_like(self.token.value)

    def candidates(self) -> list[Launch]:
        """Launch configurations to choose from, the default first."""
        return candidates(self.slots[0], self.batch)

    def prepare(self, launch: Launch | None) -> list[PreparedStep]:
        """One step of each layer."""
        return [prepare_step(s, self.cursors, self.token, self.index, out=self.out, launch=launch) for s in self.slots]

    def place(self, cursors: Sequence[int]) -> None:
        """Put the cursors of the sequences, one after another, on these numbers of records."""
        records = [cursors[i % len(cursors)] for i in range(self.batch)]
        self.cursors.records.copy_(torch.tensor(records, dtype=torch.int32))

    def step_seconds(self, clock: Clock, launch: Launch | None, cursors: Sequence[int]) -> float:
        """Time of one layer step, repeated at the same cursors."""
        steps = self.prepare(launch)
        self.place(cursors)

        def run() -> None:
            for step in steps:
                step.run()

        return clock.seconds(run) / len(steps)

    def cycle_seconds(self, clock: Clock, launch: Launch | None, *, staggered: bool) -> float:
        """Mean time of a layer step over a whole window, moving the cursors once per token included."""
        steps = self.prepare(launch)
        self.place(range(self.window) if staggered else [0])

        def run() -> None:
            for _ in range(self.window):
                for step in steps:
                    step.run()
                advance(self.cursors, self.index, window=self.window)

        return clock.seconds(run) / (len(steps) * self.window)
