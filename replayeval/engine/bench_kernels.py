"""Decode kernels against the field's conventional ones and the card's own bandwidth, after a check of correctness."""

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from replayeval.engine.kernel_cases import (
    SHAPES,
    Clock,
    GraphClock,
    LayerSets,
    half_window,
)
from replayeval.engine.kernel_checks import Accuracy, Checker, jobs_of
from replayeval.engine.kernel_peers import best_peer, ceilings, peers
from replayeval.errors import ConfigError, NumericsError
from replayssm.decode import Launch
from replayssm.decode_traffic import cycle_traffic, floor_seconds, state_bytes, step_traffic
from replayssm.policy import Policy

SCHEMA = "replayeval.bench.kernels/1"
BATCHES = (1, 8, 32, 128, 256, 512)
WINDOWS = (4, 8, 16, 32)
READ_FORMATS = ("fp32", "fp16", "fp8", "int8", "mxfp8", "nvfp4", "mxfp4")
FIRST_FORMATS = ("nvfp4", "fp8")
WINDOW = 16
BATCH = 256

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class KernelTiming:
    """One layer step under one policy.

    Attributes:
        shape: Model whose layer it is.
        policy: State policy.
        batch: Sequences.
        window: Replay window in tokens.
        launch: How the work was cut, chosen by a sweep.
        tried: `cycle_us` of every launch of the sweep.
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
    tried: dict[str, float]
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
        refused: Launches that could not be compiled or were wrong, with the reason; not timed.
        peers: Fastest configuration of the field's kernel, by shape and batch.
        left_out: Cases for which the time did not suffice.
        timings: By batch at window 16 (paper, Figure 8), by window at batch 256 (Figure 9), by read format (Figure 11).
    """

    device: str
    versions: dict[str, str]
    ceilings: dict[str, float]
    accuracy: tuple[Accuracy, ...]
    peers: dict[str, str]
    timings: tuple[KernelTiming, ...]
    refused: dict[str, str] = field(default_factory=dict[str, str])
    left_out: tuple[str, ...] = ()

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
    seconds: float = float("inf"),
    say: Say = lambda _: None,
    keep: Callable[[KernelBench], None] = lambda _: None,
    before_timing: Callable[[], None] = lambda: None,
) -> KernelBench:
    """Time decode kernels.

    Launches are chosen by a sweep per shape, batch and read format. Every launch that is timed is first checked against
    float64, in other processes, which also fills the compiler's cache; one that fails is left out and recorded.

    Args:
        shapes: Keys of `SHAPES`.
        batches: Batch sizes, at a window of 16.
        windows: Windows, at the largest batch up to 256.
        read_formats: Formats of separate read copies beside a float32 recurrence, at that batch and a window of 16.
        seconds: Time limit. Cases that do not fit are recorded as left out: of the formats but nvfp4 and fp8 first,
            then of the last batches.
        say: Told what is running.
        keep: Given what there is after every case, so that an interrupted run leaves what it measured.
        before_timing: Called once, when everything is checked and before anything is timed; may wait for others.

    Raises:
        ConfigError: Without a CUDA device or a peer's package.
        NumericsError: A peer is wrong, or no launch of a float32 policy is right.
    """
    require_cuda()
    started = time.monotonic()

    def left() -> float:
        return seconds - (time.monotonic() - started)

    speeds = ceilings()
    main = max((b for b in batches if b <= BATCH), default=batches[0])
    base, conventional = f"shared:fp32@L={WINDOW}", "conventional:fp32"
    texts = _policies(read_formats)
    with Checker(max(1, min(20, (os.cpu_count() or 2) - 2)), left) as checker:
        say("checking all kernels against float64")
        for name in shapes:
            checker.start(name, conventional, None)
            for text, of in [(conventional, batches), (base, batches), *((t, [main]) for t in texts[1:])]:
                for launch in dict.fromkeys(c for b in of for c in jobs_of(name, text, b)):
                    checker.start(name, text, launch)
        bench = _Bench(speeds=speeds, checker=checker, left=left, say=say, keep=keep)
        for name in shapes:
            # Importing FLA takes ten seconds, in which nothing could be timed.
            next(peers(SHAPES[name].recurrence))
        checker.wait()
        before_timing()
        for name in shapes:
            bench.case(name, main, [base])
        others = [f"shared:fp32@L={w}" for w in windows if w != WINDOW]
        for name in shapes:
            launch = bench.chosen(name, main)
            for text in others if launch is not None else []:
                checker.start(name, text, launch)
        # Nothing is timed while something is checked.
        checker.wait()
        for name in shapes:
            bench.case(name, main, others)
        first = [t for t in texts[1:] if any(f"separate:{f}/" in t for f in FIRST_FORMATS)]
        for name in shapes:
            bench.case(name, main, first)
        for batch in batches:
            for name in shapes:
                if batch != main:
                    bench.case(name, batch, [base])
        for name in shapes:
            bench.case(name, main, [t for t in texts[1:] if t not in first])
        return bench.outcome()


class _Bench:
    """Timings, case by case, while there is time."""

    def __init__(
        self,
        *,
        speeds: dict[str, float],
        checker: Checker,
        left: Callable[[], float],
        say: Say,
        keep: Callable[[KernelBench], None],
    ) -> None:
        self._speeds, self._checker, self._left, self._say, self._keep = speeds, checker, left, say, keep
        self._clock = GraphClock(repeats=10)
        self._generator = torch.Generator("cuda").manual_seed(0)
        self._cases: dict[tuple[str, int], _Case] = {}
        self.timings: list[KernelTiming] = []
        self.peers: dict[str, str] = {}
        self.left_out: list[str] = []

    def outcome(self) -> KernelBench:
        """What there is so far."""
        return KernelBench(
            device=torch.cuda.get_device_name(),
            versions={"torch": torch.__version__, "triton": _version("triton"), "python": platform.python_version()},
            ceilings=self._speeds,
            accuracy=tuple(self._checker.passed.values()),
            refused=self._checker.refused,
            peers=self.peers,
            timings=tuple(self.timings),
            left_out=tuple(self.left_out),
        )

    def chosen(self, name: str, batch: int) -> Launch | None:
        """The launch that suits the float32 policy of a layer at a batch; None if that was not timed."""
        case = self._cases.get((name, batch))
        return None if case is None else case.launch

    def _right(self, name: str, text: str) -> set[Launch]:
        return {launch for n, t, launch in self._checker.passed if launch and (n, t) == (name, text)}

    def case(self, name: str, batch: int, texts: Sequence[str]) -> None:
        """Time policies on a layer at a batch, and first of all the conventional kernels.

        Raises:
            NumericsError: No launch of a float32 policy is right.
        """
        for text in texts:
            if self._left() < 6:
                self.left_out.append(f"{name}, batch {batch}, {text}")
                continue
            case = self._cases.get((name, batch))
            if case is None:
                case = _Case(name=name, batch=batch, clock=self._clock, generator=self._generator, speeds=self._speeds)
                self._cases[name, batch] = case
                self.peers[f"{name}, batch {batch}"] = case.conventional(self._right(name, "conventional:fp32"))
            right = self._right(name, text)
            if not right:
                reasons = [why for key, why in self._checker.refused.items() if name in key and text in key]
                if text == f"shared:fp32@L={WINDOW}" and any("NumericsError" in why for why in reasons):
                    raise NumericsError(f"{name}, {text}: no launch is right: {reasons}")
                self.left_out.append(f"{name}, batch {batch}, {text}: no launch was checked")
                continue
            try:
                timing = case.time(Policy.parse(text), right)
            except Exception as error:
                # One case that does not fit in memory must not cost what was measured; the record says what happened.
                self.left_out.append(f"{name}, batch {batch}, {text}: {type(error).__name__}: {str(error)[:300]}")
                self._say(self.left_out[-1])
                continue
            self.timings.append(timing)
            self._say(
                f"{name}, batch {batch}, {text}: cycle {timing.cycle_us:.1f} (floor {timing.floor_us:.1f}, "
                f"conventional {timing.conventional_us:.1f}), read {timing.read_us:.1f}, "
                f"flush {timing.flush_us:.1f} us with {timing.launch}"
            )
            self._keep(self.outcome())


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
        self.launch: Launch | None = None
        self._peer_seconds = self._own_seconds = float("nan")

    def conventional(self, right: set[Launch] | None = None) -> str:
        """Time the field's kernel and this project's with a window of one; returns the peer's best configuration."""
        policy = Policy.parse("conventional:fp32")
        sets = self._sets(policy)
        peer, self._peer_seconds = best_peer(sets, self._clock)
        tried = [c for c in sets.candidates() if right is None or c in right]
        self._own_seconds = min(
            (sets.cycle_seconds(self._clock, c, staggered=False) for c in tried), default=float("nan")
        )
        return f"{peer.name}: {peer.configuration}"

    def time(self, policy: Policy, right: set[Launch] | None = None) -> KernelTiming:
        """Time a replay policy; float32 ones share the launch that suits the first of them, others choose their own.

        Args:
            policy: The policy.
            right: Launches that have been checked; by default all are taken for right.
        """
        sets = self._sets(policy)
        window = policy.window_tokens
        if self.launch is None or not policy.is_lossless:
            tried = [c for c in sets.candidates() if right is None or c in right]
        else:
            tried = [self.launch]
        found = {c: sets.cycle_seconds(self._clock, c, staggered=True) for c in tried}
        launch = min(found, key=lambda c: found[c])
        cycle = found[launch]
        if policy.is_lossless:
            self.launch = launch
        middle = half_window(window)
        return KernelTiming(
            shape=self._name,
            policy=str(policy),
            batch=self._batch,
            window=window,
            launch=str(launch),
            tried={str(c): 1e6 * x for c, x in found.items()},
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
