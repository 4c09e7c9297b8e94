"""Rows that decode together under one policy: prompts come in, tokens are appended, rows leave."""

# transformers' cache is untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn
from transformers import DynamicCache

from replayeval.engine.generation_cache import join_caches
from replayeval.engine.generation_slots import SlotStates
from replayeval.errors import ConfigError, UnsupportedArmError
from replayeval.models.architectures import Core, SsmLayer, find_mixers
from replayeval.models.head import OutputHead
from replayeval.models.hook import HookReport, hooked
from replayssm.backend import Backend, Execution
from replayssm.checkpoint import StoreObserver
from replayssm.launch import triton_problem
from replayssm.policy import REFERENCE, Policy
from replayssm.records import Recurrence, TokenInputs
from replayssm.replay import StateBank
from replayssm.triton_walk import check_supported

PASS_TOKENS = 16384
"""Tokens of one pass over known tokens, all rows together; it regroups the same computation."""

_PADDING_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows at work.

    Attributes:
        bank: Their states, behind the prompt.
        cache: Their keys, values and convolution states.
        mask: Which slots of the cache hold a token of the row; the others are padding.
        lengths: Tokens of each row so far, which is the position of its next token.
        sequences: Sequence number of each row's random bits.
    """

    bank: StateBank
    cache: DynamicCache
    mask: Bool[Tensor, "rows slots"]
    lengths: Int64[Tensor, " rows"]
    sequences: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.bank.rows

    @staticmethod
    def join(parts: "Sequence[Batch]", rows: Sequence[Sequence[int]]) -> "Batch":
        """A batch of chosen rows of several ones, in order; a row may be chosen several times.

        The last slots of all rows are aligned and slots that no row uses are dropped. The given batches stay as they
        are.
        """
        index = [
            torch.tensor(list(wanted), dtype=torch.int64, device=p.mask.device)
            for p, wanted in zip(parts, rows, strict=True)
        ]
        lengths = torch.cat([part.lengths.index_select(0, i) for part, i in zip(parts, index, strict=True)])
        slots = int(lengths.max())
        masks: list[Tensor] = []
        for part, i in zip(parts, index, strict=True):
            missing = slots - part.mask.shape[1]
            mask = part.mask.index_select(0, i)
            masks.append(nn.functional.pad(mask, (missing, 0)) if missing > 0 else mask[:, -missing:])
        return Batch(
            bank=StateBank.join([part.bank for part in parts], rows),
            cache=join_caches([part.cache for part in parts], rows, slots=slots),
            mask=torch.cat(masks),
            lengths=lengths,
            sequences=tuple(part.sequences[row] for part, wanted in zip(parts, rows, strict=True) for row in wanted),
        )


class PolicyDecoder:
    """Runs a model so that prompts follow the reference recurrence and all later tokens a policy.

    Args:
        head: The model.
        policy: What the state of decoded tokens follows.
        seed: Seed of stochastic rounding.
        merge_lossless: Walk a conventional float32 state in windows, which is faster for many known tokens and slower
            for one at a time.
        pass_tokens: Tokens of one pass, all rows together.
        observer: Called after each store.
        execution: What advances the states; results say which.

    Raises:
        UnsupportedArmError: When this execution cannot advance the policy on this model and device.
    """

    def __init__(
        self,
        head: OutputHead,
        policy: Policy,
        *,
        seed: int,
        merge_lossless: bool,
        pass_tokens: int = PASS_TOKENS,
        observer: StoreObserver | None = None,
        execution: Execution | None = None,
    ) -> None:
        self.head = head
        self.policy = policy
        self.pads = can_pad(head)
        self.execution = Execution() if execution is None else execution
        check_execution(head, policy, self.execution)
        self._seed = seed
        self._merge_lossless = merge_lossless
        self.pass_tokens = pass_tokens
        self._observer = observer
        self._driver = _Switch()
        self._report: HookReport | None = None

    @contextmanager
    def running(self) -> Generator[None]:
        """Hook the model; prompts and tokens are taken inside the block only."""
        with torch.inference_mode(), hooked(self.head.model, self._driver) as report:
            self._report = report
            try:
                yield
            finally:
                self._report = None

    def groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """Which prompts to read in one pass: neighbours in a queue, given the lengths of its prompts.

        Prompts of different lengths share a pass only if the model allows padding, and only as long as padding is at
        most a quarter of what the pass reads.
        """
        groups: list[list[int]] = []
        for index in range(len(lengths)):
            group = [*groups[-1], index] if groups else [index]
            widest = max(lengths[i] for i in group)
            wasted = sum(widest - lengths[i] for i in group)
            if groups and wasted <= (_PADDING_SHARE * widest * len(group) if self.pads else 0):
                groups[-1].append(index)
            else:
                groups.append([index])
        return groups

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sequences: Sequence[int],
        decoded: bool = False,
        states: SlotStates | None = None,
    ) -> tuple[Batch, Float[Tensor, "rows hidden"]]:
        """Read prompts side by side.

        Args:
            prompts: Token ids; of equal length unless `pads`.
            sequences: Sequence number of each row's random bits.
            decoded: Let the prompt follow the policy too, as if all of it had been decoded.
            states: Slots that the rows are meant for. The hand-over then leaves states unrounded, for `states.admit`.

        Returns:
            The batch after the hand-over, and the final hidden state of each prompt's last token.

        Raises:
            ConfigError: When a prompt is empty.
            ValueError: When lengths differ although the model does not allow padding.

        Rounding: at the hand-over, once; with `decoded`, as the policy says.
        """
        counts = [len(prompt) for prompt in prompts]
        if min(counts) == 0:
            raise ConfigError("expected prompts of at least 1 token, got an empty one")
        longest = max(counts)
        if min(counts) < longest and not self.pads:
            raise ValueError(f"expected prompts of equal length for this model, got lengths {sorted(set(counts))}")
        device = self.head.input_device
        ids = torch.zeros((len(prompts), longest), dtype=torch.int64)
        valid = torch.zeros((len(prompts), longest), dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(list(prompt), dtype=torch.int64)
            valid[row, longest - len(prompt) :] = True
        bank = StateBank(
            [self.policy if states is None else REFERENCE] * len(prompts),
            sequences=sequences,
            seed=self._seed,
            prompt=not decoded,
            merge_lossless=self._merge_lossless,
            observer=self._observer,
            execution=self.execution,
        )
        batch = Batch(
            bank=bank,
            cache=self.head.new_cache(len(prompts)),
            mask=torch.zeros((len(prompts), 0), dtype=torch.bool, device=device),
            lengths=torch.zeros(len(prompts), dtype=torch.int64, device=device),
            sequences=tuple(sequences),
        )
        self._driver.states = states
        size = max(1, self.pass_tokens // len(prompts))
        hidden = torch.empty(0)
        for start in range(0, longest, size):
            part = slice(start, start + size)
            batch, hidden = self.extend(batch, ids[:, part].to(device), valid=valid[:, part].to(device))
        if not decoded:
            bank.hand_over()
        return batch, hidden[:, -1]

    def extend(
        self,
        batch: Batch,
        tokens: Int64[Tensor, "rows time"],
        *,
        valid: Bool[Tensor, "rows time"] | None = None,
    ) -> tuple[Batch, Float[Tensor, "rows time hidden"]]:
        """Append tokens to every row.

        Args:
            batch: The rows; it is of no use afterwards.
            tokens: What each row reads next.
            valid: Tokens that count; padding leaves a row as it is. All when absent.

        Returns:
            The batch, and final hidden states; those of padding mean nothing.

        Rounding: as the policy says, at each store.
        """
        if self._report is None:
            raise RuntimeError("tokens can be appended inside a `running` block only")
        fresh = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
        mask = torch.cat([batch.mask, fresh], dim=1)
        positions = (batch.lengths[:, None] + fresh.cumsum(1) - 1).clamp_min(0)
        self._driver.bank = batch.bank
        padded = not bool(mask.all())
        hidden = self.head.hidden(
            tokens,
            batch.cache,
            batch.mask.shape[1],
            attention_mask=mask if padded else None,
            positions=positions if padded else None,
        )
        self._report.verify()
        longer = replace(batch, mask=mask, lengths=batch.lengths + fresh.sum(1))
        return longer, hidden

    def step(
        self,
        tokens: Int64[Tensor, "places 1"],
        cache: DynamicCache,
        *,
        mask: Shaped[Tensor, "places 1 1 slots"],
        positions: Int64[Tensor, "places 1"],
        states: SlotStates,
    ) -> Float[Tensor, "places 1 hidden"]:
        """Run the model on one token per place, whose states the decode kernels advance; never waits for the device.

        Args:
            tokens: What each place reads.
            cache: Keys, values and convolution states of the places; updated.
            mask: Which slots of the cache each place attends to, as the model's attention takes it.
            positions: Position of each token in its sequence.
            states: States and records of the places; updated, but for their cursors.

        Rounding: as the policy says, at each store.
        """
        if self._report is None:
            raise RuntimeError("tokens can be appended inside a `running` block only")
        self._driver.states = states
        states.decoding = True
        try:
            hidden = self.head.hidden(tokens, cache, attention_mask=mask, positions=positions)
        finally:
            states.decoding = False
        self._report.verify()
        return hidden

    @contextmanager
    def attempt(self) -> Generator[None]:
        """A block whose failure leaves no trace of the passes that it broke off in what is known of the layers."""
        assert self._report is not None
        report = self._report
        before = [(counts, dict(counts)) for counts in (report.forwards, report.calls, report.tokens)]
        try:
            yield
        except BaseException:
            for counts, kept in before:
                counts.update(kept)
            raise


class _Switch:
    """Hands the hooked model to the bank or the slots whose rows are in the current pass."""

    def __init__(self) -> None:
        self.bank: StateBank | None = None
        self.states: SlotStates | None = None

    def answer(self, layer: SsmLayer, core: Core, arguments: Mapping[str, Any]) -> Any | None:
        """Let the slots look at a call of a core, and answer it while they decode."""
        return None if self.states is None else self.states.answer(layer, core, arguments)

    def advance(
        self, layer: int, recurrence: Recurrence, inputs: TokenInputs, *, valid: Bool[Tensor, "rows time"] | None = None
    ) -> Float[Tensor, "rows time heads d_v"]:
        """Advance the bank of the current pass."""
        assert self.bank is not None
        return self.bank.advance(layer, recurrence, inputs, valid=valid)


def check_execution(head: OutputHead, policy: Policy, execution: Execution) -> None:
    """Check that `execution` can advance the policy on this model and where it lies.

    Raises:
        UnsupportedArmError: Saying why it cannot.
    """
    if execution.backend is not Backend.TRITON:
        return
    problem = triton_problem(head.input_device)
    if problem is not None:
        raise UnsupportedArmError(problem)
    for layer, _ in find_mixers(head.model):
        try:
            check_supported((policy,), heads=layer.heads, d_v=layer.d_v, d_k=layer.d_k)
        except ValueError as error:
            raise UnsupportedArmError(f"layer {layer.layer_idx}: {error}") from error


def can_pad(head: OutputHead) -> bool:
    """Whether prompts of different lengths may share a pass, padded on the left.

    A mixer zeroes padding before its input projection, so that the convolution behind it sees what it sees before the
    first token of a sequence: nothing. A bias in that projection breaks this, and the padding would leak into the first
    tokens. Prompts of such models are read in groups of equal length.
    """
    for _, mixer in find_mixers(head.model):
        for name, child in mixer.named_children():
            biased = any(parameter.endswith("bias") for parameter, _ in child.named_parameters())
            if isinstance(child, nn.Linear) and biased and name not in ("out_proj", "o_proj"):
                return False
    return True
