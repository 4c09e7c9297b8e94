"""Teacher forcing: known tokens go through the model in chunks while every SSM layer follows its state policies."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from replayeval.engine.memory import peak_memory_bytes
from replayeval.engine.scoring import Scorer, TokenScores, score_tokens
from replayeval.engine.streaming import check_streaming, score_streaming
from replayeval.errors import ConfigError, NumericsError
from replayeval.models.attention import causal_attention
from replayeval.models.head import OutputHead
from replayeval.models.hook import hooked
from replayeval.store.scores import DocumentScores
from replayssm.backend import Execution
from replayssm.checkpoint import StoreObserver
from replayssm.policy import REFERENCE, Policy
from replayssm.records import Recurrence, TokenInputs
from replayssm.replay import StateBank

DEFAULT_CHUNK = 1024

ChunkDone = Callable[[int], None]


class Engine(StrEnum):
    """How tokens are fed.

    `chunk`: many tokens per forward pass, the SSM layers walked window by window. `step`: one token per forward pass,
    every store where decoding would make it; the oracle of the first, and far slower.
    """

    CHUNK = "chunk"
    STEP = "step"


@dataclass(frozen=True, kw_only=True)
class Forcing:
    """How documents are forced through a model.

    Attributes:
        arms: Policies that are compared with the float32 reference.
        engine: Chunks or single tokens.
        chunk_tokens: Tokens per forward pass of the chunked engine; it regroups the same computation.
        prefill_tokens: Tokens at the start of each document that count as prompt.
        seed: Seed of stochastic rounding.
        scorer: What turns final hidden states into scores.
        execution: What advances the recurrent states.
    """

    arms: tuple[Policy, ...]
    engine: Engine = Engine.CHUNK
    chunk_tokens: int = DEFAULT_CHUNK
    prefill_tokens: int = 0
    seed: int = 0
    scorer: Scorer = Scorer.TORCH
    execution: Execution = Execution()

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        if not self.arms:
            raise ConfigError("expected at least one arm to compare with the reference, got none")
        repeated = sorted({str(a) for a in self.arms if self.arms.count(a) > 1})
        if repeated:
            raise ConfigError(f"expected different arms, got {', '.join(repeated)} more than once")
        if self.chunk_tokens < 1:
            raise ConfigError(f"expected a chunk of at least 1 token, got {self.chunk_tokens}")
        if self.prefill_tokens < 0:
            raise ConfigError(f"expected a prompt of 0 or more tokens, got {self.prefill_tokens}")

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies of one document's rows: the reference, then the arms."""
        return (REFERENCE, *self.arms)

    @property
    def tokens_per_pass(self) -> int:
        """Tokens of one forward pass."""
        return 1 if self.engine is Engine.STEP else self.chunk_tokens


@dataclass(frozen=True, kw_only=True)
class DocumentTokens:
    """A document, ready to be forced.

    Attributes:
        index: Place in the run; also the sequence number of its random bits.
        doc_id: Identity of its tokens.
        tokens: Token ids; those beyond `read_tokens` only serve as the next token of the last one.
        read_tokens: Tokens that are fed to the model, prompt included.
    """

    index: int
    doc_id: str
    tokens: np.ndarray
    read_tokens: int


class _Guard:
    """A bank of states whose non-finite outputs are noted and replaced by zeros.

    A pass over many tokens multiplies what lies in the future of a token by zero, in attention and inside windows, and
    zero times NaN is NaN: without this, an arm that diverges would seem to do so at the start of the pass.
    """

    def __init__(self, bank: StateBank) -> None:
        self._bank = bank
        self._bad: Tensor | None = None

    def advance(
        self, layer: int, recurrence: Recurrence, inputs: TokenInputs, *, valid: Bool[Tensor, "rows time"] | None = None
    ) -> Float[Tensor, "rows time heads d_v"]:
        """Advance the bank."""
        outputs = self._bank.advance(layer, recurrence, inputs, valid=valid)
        # Extremes are NaN where an output is: one pass over the outputs, where a test of each takes four.
        lowest, highest = outputs.flatten(2).aminmax(dim=-1)
        bad = ~(lowest.isfinite() & highest.isfinite())
        self._bad = bad if self._bad is None else self._bad | bad.to(self._bad.device)
        return outputs.masked_fill_(bad[..., None, None], 0)

    def mark(self, hidden: Float[Tensor, "rows time hidden"]) -> Float[Tensor, "rows time hidden"]:
        """Hidden states with NaN where some output of this pass was not finite."""
        bad, self._bad = self._bad, None
        return hidden if bad is None else hidden.masked_fill(bad.to(hidden.device).unsqueeze(-1), torch.nan)


def forced_hidden_states(
    head: OutputHead,
    tokens: Sequence[np.ndarray],
    forcing: Forcing,
    *,
    sequences: Sequence[int],
    observer: StoreObserver | None = None,
    banks: list[StateBank] | None = None,
    chunk_done: Callable[[int, Float[Tensor, "rows time hidden"]], None],
) -> None:
    """Feed documents side by side and hand out the final hidden states of each chunk.

    Args:
        head: The model.
        tokens: Token ids of each document; shorter ones are padded on the right, which nothing before it can see.
        forcing: Policies and engine.
        sequences: Sequence number of each document.
        observer: Called after each store.
        banks: If given, receives the bank of states, for checks.
        chunk_done: Called with the position of each chunk and its hidden states; rows are documents, and within each
            the reference and the arms. A token at which a state gave a non-finite output has NaN there.
    """
    policies = forcing.policies
    longest = max(len(t) for t in tokens)
    padded = np.zeros((len(tokens), longest), dtype=np.int64)
    for row, ids in enumerate(tokens):
        padded[row, : len(ids)] = ids
    rows = torch.as_tensor(np.repeat(padded, len(policies), axis=0), device=head.input_device)
    prompt = forcing.prefill_tokens
    bank = StateBank(
        policies * len(tokens),
        sequences=[s for s in sequences for _ in policies],
        seed=forcing.seed,
        prompt=prompt > 0,
        merge_lossless=forcing.engine is Engine.CHUNK,
        observer=observer,
        execution=forcing.execution,
    )
    if banks is not None:
        banks.append(bank)
    cache = head.new_cache(len(rows))
    guard = _Guard(bank)
    attention = causal_attention(head.config, head.input_device)
    with torch.inference_mode(), attention, hooked(head.model, guard) as report:
        position = 0
        while position < longest:
            # The prompt is read in large passes by either engine: it is no decoding.
            size = forcing.tokens_per_pass if position >= prompt else min(forcing.chunk_tokens, prompt - position)
            part = rows[:, position : position + size]
            hidden = head.hidden(part, cache, position)
            report.verify()
            chunk_done(position, guard.mark(hidden))
            position += part.shape[1]
            if position == prompt and prompt:
                bank.hand_over()


def score_document(
    head: OutputHead, document: DocumentTokens, forcing: Forcing, *, progress: ChunkDone | None = None
) -> DocumentScores:
    """Measure one document under all arms.

    Args:
        head: The model.
        document: Token ids.
        forcing: Policies and engine.
        progress: Called with the number of tokens of each finished pass.

    Returns:
        Scores of every decoded token; an arm that becomes non-finite is marked at that token and is NaN from there on.

    Raises:
        NumericsError: When the reference itself becomes non-finite.
    """
    started = time.perf_counter()
    targets = _targets(document)
    parts: list[TokenScores] = []
    pending: list[tuple[int, _OnItsWay]] = []

    def settle() -> None:
        for first, coming in pending:
            scores = coming.arrived()
            if not bool(scores.reference_finite.all()):
                raise NumericsError(
                    "expected finite logits of the float32 reference, got NaN or infinity in tokens "
                    f"{first} to {first + len(scores.reference_finite) - 1} of document {document.index} "
                    f"({document.doc_id}); the weights or the dtype of the model cannot carry this text"
                )
            parts.append(scores)
        pending.clear()

    def collect(position: int, hidden: Tensor) -> None:
        skip = max(0, forcing.prefill_tokens - position)
        if skip < hidden.shape[1]:
            wanted = targets[position + skip : position + hidden.shape[1]]
            kept = hidden[:, skip:]
            if forcing.scorer is Scorer.TRITON:
                scores = score_streaming(head, kept, wanted)
                if not parts and not pending:
                    check_streaming(head, kept, wanted, scores)
            else:
                scores = score_tokens(head.logits, kept, wanted)
            # Only now is the pass before waited for, while the device has this one to do.
            coming = _OnItsWay(scores)
            settle()
            pending.append((position + skip, coming))
        if progress is not None:
            progress(hidden.shape[1])

    forced_hidden_states(
        head,
        [document.tokens[: document.read_tokens]],
        forcing,
        sequences=[document.index],
        chunk_done=collect,
    )
    settle()
    return _assemble(document, forcing, parts, seconds=time.perf_counter() - started)


def _targets(document: DocumentTokens) -> Int64[Tensor, " time"]:
    targets = np.full(document.read_tokens, -1, dtype=np.int64)
    following = document.tokens[1 : document.read_tokens + 1]
    targets[: len(following)] = following
    return torch.as_tensor(targets)


class _OnItsWay:
    """Scores that a device is still computing, and that are copied to the CPU once it has."""

    def __init__(self, scores: TokenScores) -> None:
        self._scores = TokenScores(**{k: v.to("cpu", non_blocking=True) for k, v in vars(scores).items()})
        self._event: Any = None
        if scores.kl_nats.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(scores.kl_nats.device))

    def arrived(self) -> TokenScores:
        """Wait for them."""
        if self._event is not None:
            self._event.synchronize()
        return self._scores


def _assemble(
    document: DocumentTokens, forcing: Forcing, parts: list[TokenScores], *, seconds: float
) -> DocumentScores:
    if not parts:
        raise ConfigError(
            f"document {document.index} ({document.doc_id}) has {document.read_tokens} tokens, all of which belong to "
            f"the prompt of {forcing.prefill_tokens}; shorten --prefill or pass longer documents"
        )
    kl = torch.cat([p.kl_nats for p in parts], dim=1).numpy()
    nll = torch.cat([p.nll_nats for p in parts], dim=1).numpy()
    agrees = torch.cat([p.top1_agrees for p in parts], dim=1).numpy()
    finite = torch.cat([p.finite for p in parts], dim=1).numpy()
    diverged: list[int | None] = []
    for arm in range(len(kl)):
        bad = np.flatnonzero(~finite[arm])
        first = int(bad[0]) if len(bad) else None
        diverged.append(None if first is None else first + 1)
        if first is not None:
            kl[arm, first:] = np.nan
            nll[arm, first:] = np.nan
            agrees[arm, first:] = False
    return DocumentScores(
        doc_index=document.index,
        doc_id=document.doc_id,
        prefill_tokens=forcing.prefill_tokens,
        arms=tuple(str(a) for a in forcing.arms),
        kl_nats=kl,
        nll_nats=nll,
        nll_reference_nats=torch.cat([p.nll_reference_nats for p in parts]).numpy(),
        top1_agrees=agrees,
        diverged_at=tuple(diverged),
        counters={
            "seconds": seconds,
            "tokens": float(document.read_tokens),
            "rows": float(len(forcing.policies)),
            "chunk_tokens": float(forcing.tokens_per_pass),
            "peak_memory_bytes": float(peak_memory_bytes()),
        },
    )
