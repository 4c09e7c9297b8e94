"""Runs of one engine with everything that it stored and said, and the comparison of two of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from replayeval.engine.forcing import DocumentTokens, Engine, Forcing, forced_hidden_states
from replayeval.engine.scoring import kl_divergence
from replayeval.models.head import OutputHead
from replayssm.checkpoint import StoreEvent
from replayssm.formats import Format
from replayssm.policy import Policy

Address = tuple[int, int, int, int]
"""Layer, row, copy, token of a store."""

NOISE = 1e-5
"""Two engines do the same float32 arithmetic in another order. Sums of at most 64 products, through at most four layers
whose norms divide, leave 64 * 4 * 2**-24 = 1.5e-5 at the very worst and an order less in practice. Differences of a
state are held against the largest element of its head, because a row of small values is a difference of larger ones."""

_MANTISSA_BITS = {"bf16": 7, "fp16": 10, "e4m3": 3, "e5m2": 2, "e2m1": 1}
_SMALLEST_STEP = {"bf16": 0.0, "fp16": 0.0, "e4m3": 2.0**-9 / 448, "e5m2": 2.0**-16 / 57344, "e2m1": 0.5 / 6}


def quantum(state: Tensor, fmt: Format) -> Tensor:
    """Distance from each stored element to the next value that the format has, at the least."""
    size = state.abs().amax(-1, keepdim=True)
    name = fmt.element.value
    if name.startswith("int"):
        return (size / (2 ** (int(name[3:]) - 1) - 1)).expand_as(state)
    # A value of a binade is up to twice its lower end, and the steps below that end are half as wide.
    return torch.maximum(state.abs() * 2.0 ** -(_MANTISSA_BITS[name] + 2), _SMALLEST_STEP[name] * size)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One document under one engine: logits `[rows, time, vocabulary]` and every stored state."""

    logits: Tensor
    stores: dict[Address, Tensor] = field(repr=False)

    def kl(self, *, skip: int = 0) -> Tensor:
        """`[arms, time]`, in nats."""
        logp = self.logits[:, skip:].double().log_softmax(-1)
        return kl_divergence(logp[:1].expand(len(logp) - 1, -1, -1), logp[1:])


def document(tokens: int, *, seed: int = 1, index: int = 0) -> DocumentTokens:
    ids = np.random.default_rng(seed).integers(0, 256, tokens)
    return DocumentTokens(index=index, doc_id="document", tokens=ids, read_tokens=tokens)


def policies(texts: Sequence[str], *, window: int = 8) -> tuple[Policy, ...]:
    return tuple(Policy.parse(text, default_window=window) for text in texts)


def run(
    model: PreTrainedModel,
    tokens: np.ndarray,
    arms: Sequence[Policy],
    *,
    engine: Engine = Engine.CHUNK,
    chunk: int = 16,
    prefill: int = 0,
    seed: int = 0,
    sequence: int = 0,
) -> Run:
    """Force one document through `model` and keep everything."""
    return run_side_by_side(
        model, [tokens], arms, sequences=[sequence], engine=engine, chunk=chunk, prefill=prefill, seed=seed
    )[0]


def run_side_by_side(
    model: PreTrainedModel,
    documents: Sequence[np.ndarray],
    arms: Sequence[Policy],
    *,
    sequences: Sequence[int],
    engine: Engine = Engine.CHUNK,
    chunk: int = 16,
    prefill: int = 0,
    seed: int = 0,
) -> list[Run]:
    """Force documents of any lengths through `model` in one batch and keep what belongs to each."""
    head = OutputHead(model)
    width = 1 + len(arms)
    parts: list[Tensor] = []
    stores: list[dict[Address, Tensor]] = [{} for _ in documents]

    def observe(event: StoreEvent) -> None:
        for lane, (row, copy, token) in enumerate(
            zip(event.rows.tolist(), event.copies.tolist(), event.tokens.tolist(), strict=True)
        ):
            address = (event.layer, row % width, copy, token)
            own = stores[row // width]
            if address in own:
                raise ValueError(f"stored twice: {address}")
            if token < len(documents[row // width]):
                own[address] = event.states[lane].clone()

    forced_hidden_states(
        head,
        documents,
        Forcing(arms=tuple(arms), engine=engine, chunk_tokens=chunk, prefill_tokens=prefill, seed=seed),
        sequences=sequences,
        observer=observe,
        chunk_done=lambda _, hidden: parts.append(hidden),
    )
    with torch.no_grad():
        logits = head.logits(torch.cat(parts, dim=1))
    return [
        Run(logits=logits[i * width : (i + 1) * width, : len(tokens)], stores=stores[i])
        for i, tokens in enumerate(documents)
    ]


@dataclass(frozen=True, kw_only=True)
class RowComparison:
    """Two runs of one row, up to and including the stores of the token at which they first part.

    From there on both follow legitimate but different trajectories: a rounding decision fell the other way.

    Attributes:
        compared: Elements of stored states.
        flipped: How many of them differ by more than float32 noise.
        expected: How many may: for each element the float32 noise of its layer over the quantum of the format there.
        first_flip: Token of the first store with one, if any.
        noise: Largest difference of the elements that did not flip, relative to the largest of their head.
        missing: Stores (layer, copy, token) that one run has and the other does not.
        logits: Largest difference of a logit up to then, relative to the largest logit.
    """

    compared: int
    flipped: int
    expected: float
    first_flip: int | None
    noise: float
    missing: tuple[tuple[int, int, int], ...]
    logits: float


def compare_row(
    first: Run, second: Run, row: int, policy: Policy, *, row_of_second: int | None = None, noise: float = NOISE
) -> RowComparison:
    """Compare what two engines stored and said in one row.

    Args:
        first: One engine.
        second: The other.
        row: Row of the first run, and of the second unless `row_of_second` is given.
        policy: What that row follows.
        row_of_second: Where the second run has it.
        noise: Differences of unrounded states, relative to the largest element of the head.
    """
    other = row if row_of_second is None else row_of_second
    stores = [
        {(layer, copy, token): state for (layer, r, copy, token), state in run.stores.items() if r == wanted}
        for run, wanted in ((first, row), (second, other))
    ]
    compared = flipped = 0
    expected = largest = 0.0
    first_flip: int | None = None
    for address in sorted(stores[0].keys() & stores[1].keys(), key=lambda a: a[2]):
        token = address[2]
        if first_flip is not None and token > first_flip:
            break
        fmt = policy.copies[address[1]]
        a, b = stores[0][address], stores[1][address]
        size = b.abs().amax((-1, -2), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        gap = (a - b).abs() / size
        beyond = gap > NOISE
        compared += gap.numel()
        if not fmt.is_identity:
            steps = quantum(b, fmt) / size
            expected += float((noise / steps[steps > NOISE]).clamp_max(1).sum())
        flipped += int(beyond.sum())
        largest = max(largest, float(gap.masked_fill(beyond, 0).amax()))
        if bool(beyond.any()):
            first_flip = token
    upto = None if first_flip is None else first_flip + 1
    gap = (first.logits[row, :upto] - second.logits[other, :upto]).abs().amax()
    return RowComparison(
        compared=compared,
        flipped=flipped,
        expected=expected,
        first_flip=first_flip,
        noise=largest,
        missing=tuple(sorted(stores[0].keys() ^ stores[1].keys())),
        logits=float(gap / second.logits.abs().amax()),
    )


BLOCK = 16
"""Elements that change together when the scale of a block falls the other way; a stop at the first flip counts one."""


def faults(first: Run, second: Run, arms: Sequence[Policy], *, kl_tolerance: float, prefill: int = 0) -> list[str]:
    """Everything in which two engines disagree by more than float32 noise and the flips that it explains.

    The first arm has to keep its state in float32: it shows how large the noise is.
    """
    if not arms[0].is_lossless:
        raise ValueError(f"expected the first arm to be lossless, got {arms[0]}")
    control = compare_row(first, second, 1, arms[0])
    found: list[str] = []
    kl = [r.kl(skip=prefill).mean(1) for r in (first, second)]
    for row, arm in enumerate(arms, start=1):
        c = compare_row(first, second, row, arm, noise=control.noise)
        allowed = 0.0 if arm.is_lossless else BLOCK + c.expected
        if c.missing or not c.compared:
            found.append(f"{arm}: {c.compared} elements compared, stores of one run alone: {c.missing[:5]}")
        if c.flipped > allowed:
            found.append(f"{arm}: {c.flipped} of {c.compared} elements flipped, expected at most {allowed:.1f}")
        if not c.logits <= NOISE:
            found.append(f"{arm}: logits differ by {c.logits:.2g} before any flip")
        tolerance = kl_tolerance if c.first_flip is not None else min(kl_tolerance, UNFLIPPED_KL)
        a, b = (float(k[row - 1]) for k in kl)
        if max(a, b) > FLOOR and not abs(a - b) <= tolerance * b:
            found.append(f"{arm}: mean KL {a:.6g} and {b:.6g}")
    return found


FLOOR = 1e-9
"""A KL below it is rounding noise: the square of 1e-5 times logits of order ten."""

UNFLIPPED_KL = 5e-3
"""Without a flip a KL of 1e-5 and more moves by logit noise over logit difference, 1e-5 / sqrt(2e-5) = 0.2 percent."""
