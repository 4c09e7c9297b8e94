"""Checks of decode kernels and of their peers against float64, many at a time; what passes may be timed."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass

import torch

from replayeval.engine.kernel_cases import SHAPES, candidates, random_slots, random_token
from replayeval.engine.kernel_peers import check_peer, peers, relative_error
from replayeval.errors import NumericsError
from replayssm.decode import Launch, advance, decode_step
from replayssm.decode_reference import ReferenceDecoder
from replayssm.policy import Policy
from replayssm.records import Recurrence
from replayssm.slots import DecodeSlots, Mamba2Constants

MANY = 256
"""A batch whose default launch is that for many sequences."""

STATE_LIMIT = 1e-6
"""Relative error (L2) of a float32 state after its flushes; float32 recurrences of the field leave 2e-7 to 5e-7."""

OUTPUT_LIMIT = 1e-5
"""Relative error (L2) of outputs in float32: sums of some hundred terms, each with a few epsilons."""

FLIPPED_LIMIT = 1e-3
"""The same where low-precision copies are read: about one rounding in 10**5 falls the other way and moves an element by
an eighth of itself, so the norm moves by 0.125 * 10**-2.5."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """A check that was passed before anything was timed.

    Attributes:
        shape: Model whose layer it was.
        policy: State policy.
        state_error: Relative L2 error of the stored states against float64, after two flushes.
        output_error: Relative L2 error of the outputs, written in float32.
        launch: How the work was cut.
    """

    shape: str
    policy: str
    state_error: float
    output_error: float
    launch: str


def check(
    name: str,
    text: str,
    generator: torch.Generator,
    *,
    batch: int = 4,
    steps: int | None = None,
    launch: Launch | None = None,
) -> Accuracy:
    """Check a policy on a layer, with staggered cursors and a padded row.

    Args:
        name: Key of `SHAPES`.
        text: The policy.
        generator: Source of states and tokens; its device is where everything runs.
        batch: Slots; one more row is padding.
        steps: Tokens; by default two windows of a float32 policy, and one flush of every slot of another.
        launch: How the work is cut; by default as for so few slots.

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
        decode_step(slots, cursors, token, chosen, out=out, launch=launch)
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
        launch=str(launch),
    )


def check_peers(name: str, generator: torch.Generator) -> Accuracy:
    """Check the peer of a layer: its first configuration against float64, after which all of them have run.

    Raises:
        NumericsError: It is wrong.
    """
    shape = SHAPES[name]
    slots, _ = random_slots(shape, Policy.parse("conventional:fp32"), 2, torch.bfloat16, generator)
    token = random_token(shape, 2, torch.bfloat16, generator)
    expected = ReferenceDecoder(slots, tokens=[0, 0]).step(token, [0, 1])
    every = list(peers(shape.recurrence))
    error = check_peer(every[0], slots, token, expected, OUTPUT_LIMIT)
    for peer in every[1:] if generator.device.type == "cuda" else []:
        peer.run(slots, token, slots.copies[0].payload, torch.empty_like(token.value))
    return Accuracy(shape=name, policy=every[0].name, state_error=0.0, output_error=error, launch="")


Check = tuple[str, str, Launch | None]
"""Shape, policy, launch; None for the peers of the shape."""


def jobs_of(name: str, text: str, batch: int) -> list[Launch]:
    """The launches that are tried for a policy at a batch."""
    shape = SHAPES[name]
    constants = None
    if shape.recurrence is Recurrence.MAMBA2:
        nothing = torch.empty(shape.heads, device="meta")
        constants = Mamba2Constants(decay_rate=nothing, dt_bias=nothing, skip=nothing)
    return candidates(DecodeSlots(shape, Policy.parse(text), slots=1, constants=constants, device="meta"), batch)


class Checker:
    """Checks launches in processes of their own; a context manager.

    Args:
        workers: Processes.
        left: Seconds that are left; checks are waited for during half of them.

    Attributes:
        passed: What was found.
        refused: Why a launch must not be timed.
    """

    def __init__(self, workers: int, left: Callable[[], float]) -> None:
        self._pool = ProcessPoolExecutor(max_workers=workers, mp_context=multiprocessing.get_context("spawn"))
        self._left = left
        self._running: dict[Check, Future[Accuracy]] = {}
        self.passed: dict[Check, Accuracy] = {}
        self.refused: dict[str, str] = {}

    def __enter__(self) -> "Checker":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def start(self, name: str, text: str, launch: Launch | None) -> None:
        """Begin a check."""
        self._running[name, text, launch] = self._pool.submit(_checked, (name, text, launch))

    def wait(self) -> None:
        """Wait for all that were begun.

        Raises:
            NumericsError: A peer is wrong.
            ConfigError: A peer is missing.
        """
        wait(self._running.values(), timeout=max(0.0, min(0.5 * self._left(), 1e6)))
        for key, future in self._running.items():
            if not future.done():
                self.refused[str(key)] = "not checked in time"
                continue
            error = future.exception()
            if error is None:
                self.passed[key] = future.result()
            elif key[2] is None:
                raise error
            else:
                self.refused[str(key)] = f"{type(error).__name__}: {str(error)[:300]}"
        self._running.clear()


def _checked(key: Check) -> Accuracy:
    name, text, launch = key
    generator = torch.Generator("cuda").manual_seed(0)
    if launch is None:
        return check_peers(name, generator)
    # A flush of every slot; what a second one shows of errors that grow, the default launch shows for all.
    slots = 4
    short = launch != jobs_of(name, text, MANY)[0]
    return check(
        name,
        text,
        generator,
        batch=slots,
        steps=Policy.parse(text).window_tokens + slots if short else None,
        launch=launch,
    )
