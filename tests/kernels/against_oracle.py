"""What the comparisons of `StateBank` with the float64 oracle share: inputs, stores, policies and the tolerance."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from replayssm.formats import Format, Rounding, random_bits, store_and_load
from replayssm.policy import CheckpointSharing, Policy
from replayssm.records import Recurrence, TokenInputs
from replayssm.replay import StateBank
from tests.oracles import recurrence as oracle

SEED = 0x1234_5678_9ABC_DEF0
LAYER = 3

# A float64 sum of d_k (32) products, folded over a window of at most 128 tokens, errs by at most 32 * 128 * 2**-53
# = 4.5e-13 of the largest magnitude; the coarsest wrong store differs by a float32 rounding, 6e-8 of an element.
RELATIVE_TOLERANCE = 1e-12

PLAIN_FORMATS = ("fp32", "bf16", "fp16", "fp8", "nvfp4", "int8")
FORMATS = (*PLAIN_FORMATS, *(f"{name}+sr" for name in PLAIN_FORMATS if name != "fp32"))
WINDOWS = (1, 5, 16, 64)
RECURRENCES = tuple(Recurrence)

# One arm of every kind, with windows that divide neither each other nor the lengths of the tests.
MIXED_ARMS = (
    "conventional:fp32",
    "conventional:bf16",
    "conventional:fp16+sr",
    "shared:fp32@L=16",
    "shared:nvfp4@L=16",
    "shared:fp8+sr@L=5",
    "shared:int8@L=1",
    "separate:nvfp4/fp32@L=16",
    "separate:nvfp4+sr/fp16+sr@L=5",
    "separate:fp8/bf16@L=64",
    "separate:int8+sr/fp16+sr@L=1",
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one layer."""

    heads: int = 6
    key_heads: int = 3
    d_v: int = 8
    d_k: int = 32


GROUPED = Shape()
NARROW = Shape(key_heads=2, d_v=5, d_k=16)
UNGROUPED = Shape(heads=2, key_heads=2, d_v=32, d_k=16)


def make_inputs(recurrence: Recurrence, shape: Shape, tokens: int, *, seed: int = 0) -> oracle.Inputs:
    """Draw one sequence whose state lives for tens of tokens, so that an error in a store is seen long after it."""
    rng = np.random.default_rng([seed, RECURRENCES.index(recurrence)])
    query = rng.standard_normal((tokens, shape.key_heads, shape.d_k))
    key = rng.standard_normal((tokens, shape.key_heads, shape.d_k))
    value = rng.standard_normal((tokens, shape.heads, shape.d_v))
    step = rng.exponential(0.05, (tokens, shape.heads))
    if recurrence is Recurrence.MAMBA2:
        return oracle.Inputs(query=query, key=key, value=step[:, :, None] * value, log_decay=-step, beta=None)
    if recurrence is Recurrence.KDA:
        step = rng.exponential(0.05, (tokens, shape.heads, shape.d_k))
    return oracle.Inputs(
        query=oracle.unit(query) * shape.d_k**-0.5,
        key=oracle.unit(key),
        value=value,
        log_decay=-step,
        beta=rng.uniform(0.05, 0.95, (tokens, shape.heads)),
    )


def to_torch(rows: Sequence[oracle.Inputs], dtype: torch.dtype = torch.float64) -> TokenInputs:
    """Stack sequences of equal length into the rows of one call."""

    def stack(get: Callable[[oracle.Inputs], oracle.Array]) -> torch.Tensor:
        return torch.from_numpy(np.stack([get(row) for row in rows])).to(dtype)

    return TokenInputs(
        query=stack(lambda row: row.query),
        key=stack(lambda row: row.key),
        value=stack(lambda row: row.value),
        log_decay=stack(lambda row: row.log_decay),
        beta=None if rows[0].beta is None else stack(lambda row: _beta(row)),
    )


def _beta(row: oracle.Inputs) -> oracle.Array:
    if row.beta is None:
        raise ValueError("expected beta in every row, got a row without it")
    return row.beta


def cut(inputs: TokenInputs, start: int, stop: int) -> TokenInputs:
    """Return a span of tokens of every row."""
    return TokenInputs(
        query=inputs.query[:, start:stop],
        key=inputs.key[:, start:stop],
        value=inputs.value[:, start:stop],
        log_decay=inputs.log_decay[:, start:stop],
        beta=None if inputs.beta is None else inputs.beta[:, start:stop],
    )


@dataclass(frozen=True, kw_only=True)
class ProjectStore:
    """The oracle's store, made of the formats under test elsewhere and the random bits that the address asks for."""

    policy: Policy
    sequence: int = 0
    layer: int = LAYER
    seed: int = SEED
    token_offset: int = 0
    layer_offset: int = 0
    swap_copies: bool = False
    calls: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def __call__(self, state: oracle.Array, *, token_index: int, copy: int) -> oracle.Array:
        """Store through `replayssm.formats`."""
        self.calls.append((token_index, copy))
        fmt = self.policy.read_format if copy == oracle.READ_COPY else self.policy.recurrence_format
        return cast(
            state,
            fmt,
            token_index=token_index + self.token_offset,
            copy=1 - copy if self.swap_copies else copy,
            sequence=self.sequence,
            layer=self.layer + self.layer_offset,
            seed=self.seed,
        )


def cast(
    state: oracle.Array, fmt: Format, *, token_index: int, copy: int, sequence: int, layer: int, seed: int
) -> oracle.Array:
    """Store one state in `fmt` and load it back; to a float64 state, fp32 is a rounding format like the others."""
    bits = None
    if fmt.rounding is Rounding.STOCHASTIC:
        bits = _bits(seed, layer, copy, sequence, token_index, state.size)
    return store_and_load(torch.from_numpy(state)[None], fmt, bits=bits)[0].numpy()


@cache
def _bits(seed: int, layer: int, copy: int, sequence: int, token_index: int, elements: int) -> torch.Tensor:
    """Draw the bits of one store; many arms and tests ask for the same ones."""
    return random_bits(
        seed=seed,
        layer=layer,
        copy=copy,
        sequences=torch.tensor([sequence]),
        tokens=torch.tensor([token_index]),
        elements=elements,
        device=torch.device("cpu"),
    )


def expected(inputs: oracle.Inputs, policy: Policy, store: oracle.Store, *, prompt_tokens: int = 0) -> oracle.Trace:
    """Walk one sequence under a policy in the oracle."""
    if policy.sharing is CheckpointSharing.CONVENTIONAL:
        return oracle.conventional(inputs, store, prompt_tokens=prompt_tokens)
    walk = oracle.shared if policy.sharing is CheckpointSharing.SHARED else oracle.separate
    return walk(inputs, store, window_tokens=policy.window_tokens, prompt_tokens=prompt_tokens)


def run_bank(
    bank: StateBank,
    recurrence: Recurrence,
    inputs: TokenInputs,
    *,
    chunk: int | None = None,
    valid: torch.Tensor | None = None,
    layer: int = LAYER,
) -> oracle.Array:
    """Feed all tokens to the bank in calls of `chunk` tokens and return the outputs, `[rows, time, heads, d_v]`."""
    tokens = inputs.value.shape[1]
    step = tokens if chunk is None else chunk
    pieces = [
        bank.advance(
            layer,
            recurrence,
            cut(inputs, start, start + step),
            valid=None if valid is None else valid[:, start : start + step],
        )
        for start in range(0, tokens, step)
    ]
    return torch.cat(pieces, dim=1).numpy()


def relative_error(actual: oracle.Array, truth: oracle.Array) -> float:
    """Return the largest difference over the largest magnitude of the truth. NaN in either never passes for equal."""
    if actual.shape != truth.shape:
        raise ValueError(f"expected outputs of shape {truth.shape}, got {actual.shape}")
    return float(np.max(np.abs(actual - truth)) / np.max(np.abs(truth)))


def agrees(actual: oracle.Array, truth: oracle.Array, *, tolerance: float = RELATIVE_TOLERANCE) -> bool:
    """Say whether two walks agree. False when anything is not finite."""
    return relative_error(actual, truth) <= tolerance


def disagreements(
    arms: Sequence[str],
    actual: Sequence[oracle.Array],
    truth: Sequence[oracle.Array],
    *,
    tolerance: float = RELATIVE_TOLERANCE,
) -> dict[str, float]:
    """Return the arms that disagree with their truth and by how much, so that a test can report them all at once."""
    errors = {
        f"row {row}: {arm}": relative_error(got, want)
        for row, (arm, got, want) in enumerate(zip(arms, actual, truth, strict=True))
    }
    return {arm: error for arm, error in errors.items() if not error <= tolerance}
