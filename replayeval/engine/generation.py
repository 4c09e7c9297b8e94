"""Generation under a state policy: many prompts, a fixed number of slots, each answer as if it were alone."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from replayeval.engine.generation_batch import Batch, PolicyDecoder
from replayeval.engine.generation_graph import FixedRows, Graphs, JoinedRows, Steps, kernel_problem
from replayeval.engine.generation_sampling import GREEDY, Prediction, Sampling, next_tokens
from replayeval.errors import ConfigError, NumericsError, UnsupportedArmError
from replayeval.models.head import OutputHead
from replayssm.backend import Execution
from replayssm.checkpoint import StoreObserver
from replayssm.policy import Policy

__all__ = ["Finish", "Generation", "Generator", "Graphs", "Request", "Steps", "StopText"]


class Finish(StrEnum):
    """Why a generation ended.

    `eos`: a token that ends a text. `stop`: the text contains a stop string. `length`: no token was left to spend, so
    the answer may be cut off. `diverged`: the state of a policy that rounds became so wrong that the logits are not
    finite; what was generated before stands.
    """

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    DIVERGED = "diverged"


class StopText:
    """Finds stop strings in generated text, as soon as they are complete.

    Args:
        decode: From tokens to text, special tokens included.
        texts: The stop strings.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], texts: Iterable[str]) -> None:
        self._decode = decode
        self._texts = tuple(text for text in texts if text)
        # A token may stand for no character at all, but a character takes at most four tokens, one per byte.
        self._tail = max((len(text.encode()) for text in self._texts), default=0) + 8

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Whether the text of `tokens` contains a stop string that its last token completed."""
        if not self._texts or not self._found(tokens[-self._tail :]):
            return False
        # The tail may begin inside a character or a word; the whole text decides.
        return self._found(tokens)

    def _found(self, tokens: Sequence[int]) -> bool:
        text = self._decode(tokens)
        return any(wanted in text for wanted in self._texts)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to go on from.

    Attributes:
        prompt: Token ids, at least one.
        sequence: Number below 2**32 that addresses all random bits of this answer, of its state and of its sampling.
        max_tokens: Most tokens to generate.
        sampling: How tokens are drawn.
        stop_tokens: Tokens that end the text; the one that did is part of the answer.
        stop_text: Finds stop strings.
    """

    prompt: Sequence[int]
    sequence: int
    max_tokens: int
    sampling: Sampling = GREEDY
    stop_tokens: frozenset[int] = frozenset()
    stop_text: StopText | None = None


@dataclass(frozen=True, kw_only=True)
class Generation:
    """An answer.

    Attributes:
        tokens: Generated token ids, the one that ended the text included.
        finish: Why it ended.
    """

    tokens: tuple[int, ...]
    finish: Finish


@dataclass(kw_only=True)
class _Slot:
    index: int
    request: Request
    tokens: list[int] = field(default_factory=list[int])

    def finish(self, finite: bool) -> Finish | None:
        if not finite:
            return Finish.DIVERGED
        if self.tokens[-1] in self.request.stop_tokens:
            return Finish.EOS
        if self.request.stop_text is not None and self.request.stop_text(self.tokens):
            return Finish.STOP
        return Finish.LENGTH if len(self.tokens) >= self.request.max_tokens else None


class Generator:
    """Generates answers under one policy.

    Each prompt is read by the reference recurrence and its state handed over once; generated tokens follow the policy.
    At most `slots` sequences decode side by side: one that is finished frees its slot, and the next prompt is admitted
    while the others go on.

    An answer does not depend on what decodes beside it, up to float rounding: random bits are addressed by sequence and
    token, states are kept apart, padding is masked, and what is left is that matrix products of another shape may add
    up in another order. In float32 that moves a logit by about 1e-5 of the largest one (tests hold it to 1e-4), so a
    token can only change where two logits are closer than that, or a store rounds a value that close to a tie.

    With backend triton, sequences decode in places that stay, through the decode kernels, and on a GPU each step is
    replayed as one CUDA graph; `steps` says whether that is so. Then what a step computes for a row depends on the
    number of places and on the room for keys, and on nothing in other rows. A generator keeps places and graphs from
    call to call; it has as many places as slots, or as the call with the most requests had requests.

    Args:
        head: The model.
        policy: What the states of generated tokens follow.
        seed: Seed of stochastic rounding and of sampling.
        slots: Sequences that decode side by side.
        observer: Called after each store.
        execution: What advances the states.
        graphs: Whether steps are replayed as CUDA graphs.

    Raises:
        UnsupportedArmError: When this execution cannot advance the policy on this model and device, or graphs are
            demanded where they cannot be.
        ConfigError: When there is no slot.
    """

    def __init__(
        self,
        head: OutputHead,
        policy: Policy,
        *,
        seed: int = 0,
        slots: int = 8,
        observer: StoreObserver | None = None,
        execution: Execution | None = None,
        graphs: Graphs = Graphs.AUTO,
    ) -> None:
        if slots < 1:
            raise ConfigError(f"expected at least 1 sequence side by side, got {slots}")
        self._head = head
        self._seed = seed
        self._slots = slots
        self._lossless = policy.is_lossless
        # One token at a time, a float32 state is cheapest when it is carried on at once.
        self._decoder = PolicyDecoder(
            head, policy, seed=seed, merge_lossless=False, observer=observer, execution=execution
        )
        problem = kernel_problem(head, self._decoder.execution, watched=observer is not None)
        self._rows: JoinedRows | FixedRows
        self._graphs = graphs
        if problem is None:
            # One place says whether it can be done; `generate` knows how many are needed.
            self._rows = FixedRows(self._decoder, places=1, seed=seed, graphs=graphs)
        elif graphs is Graphs.ON:
            raise UnsupportedArmError(f"graphs on: steps need the decode kernels: {problem}; use graphs auto or off")
        else:
            self._rows = JoinedRows(self._decoder)
        self._problem = problem

    @property
    def steps(self) -> Steps:
        """How generated tokens are computed; whether a step can be captured is known after the first one."""
        if isinstance(self._rows, FixedRows):
            return self._rows.steps
        return Steps(kernels=False, graphs=False, reason=self._problem)

    def generate(
        self, requests: Sequence[Request], *, progress: Callable[[int, Generation], None] | None = None
    ) -> list[Generation]:
        """Answer all requests.

        Args:
            requests: In any order; the longest prompts are admitted first.
            progress: Called with the index of each finished request and its answer.

        Returns:
            An answer per request, in the order of the requests.

        Raises:
            ConfigError: When a prompt is empty or a request allows no token.
            NumericsError: When logits behind a prompt, or under a policy that rounds nothing, are not finite.
        """
        for index, request in enumerate(requests):
            if not len(request.prompt) or request.max_tokens < 1:
                raise ConfigError(
                    f"request {index}: expected a prompt and an answer of at least 1 token, got {len(request.prompt)} "
                    f"and {request.max_tokens}"
                )
        places = min(self._slots, len(requests))
        if isinstance(self._rows, FixedRows) and self._rows.places < places:
            self._rows = FixedRows(self._decoder, places=places, seed=self._seed, graphs=self._graphs)
        waiting = deque(sorted(range(len(requests)), key=lambda i: -len(requests[i].prompt)))
        answers: dict[int, Generation] = {}
        slots: list[_Slot] = []

        def done(slot: _Slot, finish: Finish) -> None:
            answers[slot.index] = Generation(tokens=tuple(slot.tokens), finish=finish)
            if progress is not None:
                progress(slot.index, answers[slot.index])

        with self._decoder.running():
            self._rows.clear(max((len(r.prompt) + r.max_tokens for r in requests), default=0))
            while waiting or slots:
                parts: list[Batch] = []
                rows: list[list[int]] = []
                while waiting and len(slots) < self._slots:
                    for part, hidden, fresh in self._admit(requests, waiting, self._slots - len(slots)):
                        kept = self._next(fresh, Prediction.of(self._head.logits(hidden)), True, done=done)
                        parts.append(part)
                        rows.append(kept)
                        slots += [fresh[row] for row in kept]
                if parts:
                    self._rows.admit(parts, rows)
                if not slots:
                    continue
                prediction = self._rows.step([slot.tokens[-1] for slot in slots])
                kept = self._next(slots, prediction, False, done=done)
                if len(kept) < len(slots):
                    slots = [slots[row] for row in kept]
                    self._rows.keep(kept)
        return [answers[index] for index in range(len(requests))]

    def _admit(
        self, requests: Sequence[Request], waiting: deque[int], free: int
    ) -> list[tuple[Batch, Tensor, list[_Slot]]]:
        """Read the prompts of the next requests."""
        chosen = [waiting.popleft() for _ in range(min(free, len(waiting)))]
        admitted: list[tuple[Batch, Tensor, list[_Slot]]] = []
        for group in self._decoder.groups([len(requests[i].prompt) for i in chosen]):
            slots = [_Slot(index=chosen[i], request=requests[chosen[i]]) for i in group]
            batch, last = self._rows.prefill(
                [slot.request.prompt for slot in slots], [slot.request.sequence for slot in slots]
            )
            admitted.append((batch, last, slots))
        return admitted

    def _next(
        self, slots: list[_Slot], prediction: Prediction, prompt: bool, *, done: Callable[[_Slot, Finish], None]
    ) -> list[int]:
        """Append the next token of each slot and return the rows that go on."""
        tokens, finite = next_tokens(
            prediction,
            [slot.request.sampling for slot in slots],
            seed=self._seed,
            sequences=[slot.request.sequence for slot in slots],
            steps=[len(slot.tokens) for slot in slots],
        )
        kept: list[int] = []
        for row, (slot, token, good) in enumerate(zip(slots, tokens, finite, strict=True)):
            if not good and (prompt or self._lossless):
                raise NumericsError(
                    f"expected finite logits after {len(slot.tokens)} tokens of the answer to request {slot.index}, "
                    "got NaN or infinity, although no state was rounded; the weights or the dtype of the model cannot "
                    "carry this text"
                )
            if good:
                slot.tokens.append(token)
            finish = slot.finish(good)
            if finish is None:
                kept.append(row)
            else:
                done(slot, finish)
        return kept
