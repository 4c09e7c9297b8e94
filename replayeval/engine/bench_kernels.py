"""Decode kernels against the field's conventional ones and the card's own bandwidth, after a check of correctness."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from replayeval.engine.kernel_cases import (
    SHAPES,
    Clock,
    GraphClock,
    LayerSets,
    compile_ahead,
    random_slots,
    random_token,
)
from replayeval.engine.kernel_peers import best_peer, ceilings, check_peer, peers, relative_error
from replayeval.errors import ConfigError, NumericsError
from replayssm.decode import Launch, advance, decode_step, default_launch
from replayssm.decode_reference import ReferenceDecoder
from replayssm.decode_traffic import cycle_traffic, floor_seconds, state_bytes, step_traffic
from replayssm.policy import Policy

SCHEMA = "replayeval.bench.kernels/1"
BATCHES = (1, 8, 32, 128, 256, 512)
WINDOWS = (4, 8, 16, 32)
READ_FORMATS = ("fp32", "fp16", "fp8", "int8", "mxfp8", "nvfp4", "mxfp4")
WINDOW = 16
BATCH = 256

STATE_LIMIT = 1e-6
"""Relative error (L2) of a float32 state after its flushes; float32 recurrences of the field leave 2e-7 to 5e-7."""

OUTPUT_LIMIT = 1e-5
"""Relative error (L2) of outputs in float32: sums of some hundred terms, each with a few epsilons."""

FLIPPED_LIMIT = 1e-3
"""The same where low-precision copies are read: about one rounding in 10**5 falls the other way and moves an element by
an eighth of itself, so the norm moves by 0.125 * 10**-2.5."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """A check that was passed before anything was timed.

    Attributes:
        shape: Model whose layer it was.
        policy: State policy.
        state_error: Relative L2 error of the stored states against float64, after two flushes.
        output_error: Relative L2 error of the outputs, written in float32.
        peer_error: That of the peer's first output.
    """

    shape: str
    policy: str
    state_error: float
    output_error: float
    peer_error: float


@dataclass(frozen=True, kw_only=True)
class KernelTiming:
    """One layer step under one policy.

    Attributes:
        shape: Model whose layer it is.
        policy: State policy.
        batch: Sequences.
        window: Replay window in tokens.
        launch: How the work was cut, chosen by a sweep.
        cycle_us: Mean over a window whose cursors are staggered, in microseconds.
        aligned_us: Mean over a window in which all sequences flush together.
        read_us: A step that does not flush, at half a window of records.
        flush_us: A step in which every sequence flushes.
        conventional_us: The best conventional kernel of the field at this batch.
        own_conventional_us: This project's kernel with a window of one token.
        floor_us: Time of the bytes of the cycle at the card's bandwidth.
        read_floor_us: Likewise of `read_us`.
        flush_floor_us: Likewise of `flush_us`.
        bytes_per_step: Mean over the window, all sequences.
        speedup: `conventional_us / cycle_us`.
    """

    shape: str
    policy: str
    batch: int
    window: int
    launch: str
    cycle_us: float
    aligned_us: float
    read_us: float
    flush_us: float
    conventional_us: float
    own_conventional_us: float
    floor_us: float
    read_floor_us: float
    flush_floor_us: float
    bytes_per_step: float
    speedup: float


@dataclass(frozen=True, kw_only=True)
class KernelBench:
    """The outcome.

    Attributes:
        device: Name of the card.
        versions: Of torch, Triton, Python.
        ceilings: Bytes per second of streams on this card.
        accuracy: Checks passed.
        peers: Fastest configuration of the field's kernel, by shape and batch.
        timings: By batch at window 16 (paper, Figure 8), by window at batch 256 (Figure 9), by read format (Figure 11).
    """

    device: str
    versions: dict[str, str]
    ceilings: dict[str, float]
    accuracy: tuple[Accuracy, ...]
    peers: dict[str, str]
    timings: tuple[KernelTiming, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON values, with the schema."""
        return {"schema": SCHEMA, **asdict(self)}


def require_cuda() -> None:
    """Refuse to measure without a card.

    Raises:
        ConfigError: There is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            "expected a CUDA device to time kernels on, got none; run `replayeval bench kernels` on a machine with an "
            "NVIDIA GPU (`replayeval doctor` shows what this one has)"
        )


def bench_kernels(
    *,
    shapes: Sequence[str] = tuple(SHAPES)[:4],
    batches: Sequence[int] = BATCHES,
    windows: Sequence[int] = WINDOWS,
    read_formats: Sequence[str] = READ_FORMATS,
    say: Say = lambda _: None,
) -> KernelBench:
    """Time decode kernels.

    Args:
        shapes: Keys of `SHAPES`.
        batches: Batch sizes, at a window of 16.
        windows: Windows, at the largest batch up to 256.
        read_formats: Formats of separate read copies beside a float32 recurrence, at that batch and a window of 16.
        say: Told what is running.

    Raises:
        ConfigError: Without a CUDA device or a peer's package.
        NumericsError: A kernel or peer is wrong; nothing was timed.
    """
    require_cuda()
    clock = GraphClock()
    generator = torch.Generator("cuda").manual_seed(0)
    say("measuring the bandwidth of this card")
    speeds = ceilings()
    say("compiling")
    texts = [*_policies(read_formats), "conventional:fp32", *(f"shared:fp32@L={w}" for w in windows)]
    compile_ahead([(name, text) for name in shapes for text in dict.fromkeys(texts)], max(1, (os.cpu_count() or 2) - 2))
    say("checking all kernels against float64")
    accuracy = [check(name, text, generator) for name in shapes for text in _policies(read_formats)]
    timings: list[KernelTiming] = []
    chosen: dict[str, str] = {}
    main = max((b for b in batches if b <= BATCH), default=batches[0])
    for name in shapes:
        for batch in batches:
            say(f"{name}, batch {batch}")
            case = _Case(name=name, batch=batch, clock=clock, generator=generator, speeds=speeds)
            chosen[f"{name}, batch {batch}"] = case.conventional()
            texts = [f"shared:fp32@L={w}" for w in (windows if batch == main else (WINDOW,))]
            if batch == main:
                texts += _policies(read_formats)[1:]
            timings += [case.time(Policy.parse(text)) for text in texts]
    return KernelBench(
        device=torch.cuda.get_device_name(),
        versions={"torch": torch.__version__, "triton": _version("triton"), "python": platform.python_version()},
        ceilings=speeds,
        accuracy=tuple(accuracy),
        peers=chosen,
        timings=tuple(timings),
    )


def check(name: str, text: str, generator: torch.Generator, *, batch: int = 4, steps: int | None = None) -> Accuracy:
    """Check a policy on a layer, with staggered cursors and a padded row, and the peer's first configuration.

    Args:
        name: Key of `SHAPES`.
        text: The policy.
        generator: Source of states and tokens; its device is where everything runs.
        batch: Slots; one more row is padding.
        steps: Tokens; by default two windows of a float32 policy, and one flush of every slot of another.

    Raises:
        NumericsError: An error is above its limit.
    """
    shape, policy = SHAPES[name], Policy.parse(text)
    slots, cursors = random_slots(shape, policy, batch, torch.bfloat16, generator)
    device = generator.device
    reference = ReferenceDecoder(slots, tokens=[0] * batch)
    wrong = total = 0.0
    for step in range(steps or (2 * policy.window_tokens if policy.is_lossless else policy.window_tokens + batch)):
        # Slot i joins at step i, so that every cursor is met beside every other.
        index = [s if s <= step else -1 for s in range(batch)] + [-1]
        token = random_token(shape, batch + 1, torch.bfloat16, generator)
        out = torch.zeros_like(token.value, dtype=torch.float32)
        chosen = torch.tensor(index, dtype=torch.int32, device=device)
        decode_step(slots, cursors, token, chosen, out=out)
        advance(cursors, chosen, window=policy.window_tokens)
        expected = reference.step(token, index)
        wrong += float((out.double() - expected).square().sum())
        total += float(expected.square().sum())
    output_error = (wrong / total) ** 0.5
    states = [(slots.copies[0].packed(s).unpack(), reference.state(s)) for s in range(batch)]
    state_error = max(relative_error(got, expected) for got, expected in states)
    # A low-precision store is only as near as its roundings are: some of them fall the other way.
    exact = policy.recurrence_format.is_identity
    limit = OUTPUT_LIMIT if policy.is_lossless else FLIPPED_LIMIT
    if not output_error <= limit or (exact and not state_error <= STATE_LIMIT):
        raise NumericsError(
            f"{name}, {text}: expected outputs within {limit:.0e} and states within {STATE_LIMIT:.0e} of "
            f"float64, got {output_error:.1e} and {state_error:.1e}; nothing was timed"
        )
    return Accuracy(
        shape=name,
        policy=text,
        state_error=state_error,
        output_error=output_error,
        peer_error=_check_peers(name, generator),
    )


def _check_peers(name: str, generator: torch.Generator) -> float:
    shape = SHAPES[name]
    slots, _ = random_slots(shape, Policy.parse("conventional:fp32"), 2, torch.bfloat16, generator)
    token = random_token(shape, 2, torch.bfloat16, generator)
    expected = ReferenceDecoder(slots, tokens=[0, 0]).step(token, [0, 1])
    first = next(peers(shape.recurrence))
    return check_peer(first, slots, token, expected, OUTPUT_LIMIT)


class _Case:
    """One layer at one batch."""

    def __init__(
        self, *, name: str, batch: int, clock: Clock, generator: torch.Generator, speeds: dict[str, float]
    ) -> None:
        self._name = name
        self._shape = SHAPES[name]
        self._batch = batch
        self._clock = clock
        self._generator = generator
        self._speeds = speeds
        self._launch: Launch | None = None
        self._peer_seconds = self._own_seconds = float("nan")

    def conventional(self) -> str:
        """Time the field's kernel and this project's with a window of one; returns the peer's best configuration."""
        policy = Policy.parse("conventional:fp32")
        sets = self._sets(policy)
        peer, self._peer_seconds = best_peer(sets, self._clock)
        self._own_seconds = min(sets.cycle_seconds(self._clock, c, staggered=False) for c in sets.candidates())
        return f"{peer.name}: {peer.configuration}"

    def time(self, policy: Policy) -> KernelTiming:
        """Time a replay policy; float32 ones share the launch that suits the first of them, others choose their own."""
        sets = self._sets(policy)
        window = policy.window_tokens
        if self._launch is None or not policy.is_lossless:
            launch = min(sets.candidates(), key=lambda c: sets.cycle_seconds(self._clock, c, staggered=True))
            launch = launch or default_launch(sets.slots[0], self._batch)
        else:
            launch = self._launch
        if policy.is_lossless:
            self._launch = launch
        middle = window // 2
        cycle = sets.cycle_seconds(self._clock, launch, staggered=True)
        return KernelTiming(
            shape=self._name,
            policy=str(policy),
            batch=self._batch,
            window=window,
            launch=str(launch),
            cycle_us=1e6 * cycle,
            aligned_us=1e6 * sets.cycle_seconds(self._clock, launch, staggered=False),
            read_us=1e6 * sets.step_seconds(self._clock, launch, [middle]),
            flush_us=1e6 * sets.step_seconds(self._clock, launch, [window - 1]),
            conventional_us=1e6 * self._peer_seconds,
            own_conventional_us=1e6 * self._own_seconds,
            floor_us=1e6 * self._floor(cycle_traffic(self._shape, policy)),
            read_floor_us=1e6 * self._floor(step_traffic(self._shape, policy, middle)),
            flush_floor_us=1e6 * self._floor(step_traffic(self._shape, policy, window - 1)),
            bytes_per_step=self._batch
            * (cycle_traffic(self._shape, policy).read + cycle_traffic(self._shape, policy).written),
            speedup=self._peer_seconds / cycle,
        )

    def _floor(self, traffic: Any) -> float:
        return floor_seconds(
            traffic,
            batch=self._batch,
            read_only=self._speeds["read"],
            mixed=self._speeds["read_modify_write"],
        )

    def _sets(self, policy: Policy) -> LayerSets:
        torch.cuda.empty_cache()
        return LayerSets(
            self._shape, policy, self._batch, self._generator, stored_bytes=state_bytes(self._shape, policy)[1]
        )


def _policies(read_formats: Sequence[str]) -> list[str]:
    """The float32 policy, then a separate read copy in each other format."""
    texts = [f"shared:fp32@L={WINDOW}"]
    return texts + [f"separate:{f}/fp32@L={WINDOW}" for f in read_formats if f != "fp32"]


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)
