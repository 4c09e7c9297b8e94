"""Speed of the engine against named peers, measured in one run on the same rows, after a check of correctness."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from replayeval.engine.forcing import DocumentTokens, Engine, Forcing, score_document
from replayeval.engine.memory import peak_memory_bytes
from replayeval.errors import NumericsError
from replayeval.models.head import OutputHead
from replayssm.policy import Policy

SCHEMA = "replayeval.bench.engine/1"

AGREEMENT_EPSILONS = 2**12
"""Allowed difference of the engines' NLL in epsilons of the model's dtype.

Logits of magnitude 2**4 to 2**5 come out of a few hundred float32 sums of length 2**8 to 2**12, whose rounding errors
add up like their square root.
"""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One contestant.

    Attributes:
        name: What ran.
        rows: Sequences side by side: the reference and the arms.
        tokens: Tokens of each row.
        seconds: Median over the repeats.
        row_tokens_per_s: `rows * tokens / seconds`.
    """

    name: str
    rows: int
    tokens: int
    seconds: float
    row_tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class EngineBench:
    """The outcome of `bench_engine`.

    Attributes:
        timings: All contestants.
        chunk_over_step: Chunked engine over the step engine, one arm and the reference.
        chunk_over_forward: Chunked engine with all arms over a plain forward pass of as many rows.
        agreement_nats: Largest difference, over tokens, of the reference's NLL between the two engines.
        arms: Policies of the many-arm runs.
        peak_memory_bytes: Of the process or the devices, over everything that ran.
    """

    timings: tuple[Timing, ...]
    chunk_over_step: float
    chunk_over_forward: float
    agreement_nats: float
    arms: tuple[str, ...]
    peak_memory_bytes: int

    def to_json(self) -> dict[str, Any]:
        """JSON values, with the schema."""
        return {"schema": SCHEMA, **asdict(self)}


def bench_engine(
    head: OutputHead,
    tokens: np.ndarray,
    arms: tuple[Policy, ...],
    *,
    chunk_tokens: int,
    repeats: int = 3,
    say: Callable[[str], None] = lambda _: None,
) -> EngineBench:
    """Time the engine on one document.

    The plain forward pass is the model as transformers runs it, logits included, on `1 + len(arms)` copies of the
    document: once all tokens in one pass, once in the engine's chunks with a cache; the faster one is the peer. Before
    anything is timed, the chunked engine must agree with the step engine on the opening of the document, where both
    follow the same arithmetic: in the reference.

    Args:
        head: The model.
        tokens: Token ids of the document.
        arms: Policies of the many-arm run; the second of them (or the only one) is the arm of the one-arm runs.
        chunk_tokens: Tokens per pass.
        repeats: Timed repetitions after one untimed; the step engine runs once.
        say: Told what is running.
    """
    document = DocumentTokens(index=0, doc_id="bench", tokens=tokens, read_tokens=len(tokens))
    one = (arms[min(1, len(arms) - 1)],)
    rows = 1 + len(arms)

    say("checking the chunked engine against the step engine")
    opening = DocumentTokens(index=0, doc_id="bench", tokens=tokens, read_tokens=min(len(tokens), 256))
    by_chunk = score_document(head, opening, Forcing(arms=arms, chunk_tokens=chunk_tokens))
    by_step = score_document(head, opening, Forcing(arms=arms, engine=Engine.STEP))
    agreement = float(np.nanmax(np.abs(by_chunk.nll_reference_nats - by_step.nll_reference_nats)))
    limit = AGREEMENT_EPSILONS * float(torch.finfo(head.model.dtype).eps)
    if not agreement <= limit:
        raise NumericsError(
            f"expected the chunked and the step engine to agree on the reference to {limit:.3g} nats per token, got a "
            f"difference of {agreement:.3g}; nothing was timed"
        )

    def forward(size: int) -> Callable[[], object]:
        ids = torch.as_tensor(np.repeat(tokens[None], rows, axis=0), device=head.input_device)

        def run() -> None:
            cache = head.new_cache(rows) if size < len(tokens) else None
            with torch.inference_mode():
                for start in range(0, len(tokens), size):
                    head.logits(head.hidden(ids[:, start : start + size], cache, start))

        return run

    def chunked(policies: tuple[Policy, ...]) -> Callable[[], object]:
        return lambda: score_document(head, document, Forcing(arms=policies, chunk_tokens=chunk_tokens))

    count = len(tokens)
    contestants: list[tuple[str, int, Callable[[], object], int]] = [
        ("plain forward, one pass", rows, forward(count), repeats),
        (f"plain forward, chunks of {chunk_tokens}", rows, forward(min(chunk_tokens, count)), repeats),
        (f"chunked engine, {len(arms)} arms", rows, chunked(arms), repeats),
        ("chunked engine, 1 arm", 2, chunked(one), repeats),
        ("step engine, 1 arm", 2, lambda: score_document(head, document, Forcing(arms=one, engine=Engine.STEP)), 0),
    ]
    timings: list[Timing] = []
    for name, width, function, times in contestants:
        say(name)
        seconds = _median_seconds(function, times)
        timings.append(
            Timing(name=name, rows=width, tokens=count, seconds=seconds, row_tokens_per_s=width * count / seconds)
        )
    best_forward = min(timings[0].seconds, timings[1].seconds)
    return EngineBench(
        timings=tuple(timings),
        chunk_over_step=timings[4].seconds / timings[3].seconds,
        chunk_over_forward=best_forward / timings[2].seconds,
        agreement_nats=agreement,
        arms=tuple(str(a) for a in arms),
        peak_memory_bytes=peak_memory_bytes(),
    )


def _median_seconds(function: Callable[[], object], repeats: int) -> float:
    if repeats:
        function()
    samples: list[float] = []
    for _ in range(max(1, repeats)):
        _synchronise()
        started = time.perf_counter()
        function()
        _synchronise()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)


def _synchronise() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
