"""Float64 truth for the recurrences and the state policies: token by token, head by head, one sequence.

The state is always advanced by its definition, never by the window formula, so an error in a window rewrite cannot be
shared with this file. How a state is rounded when it is stored is not decided here: every policy takes a `store`
function, so the casts are a separate concern. `no_store` is the store that changes nothing.

Axes: time heads key_heads d_v d_k, as everywhere; a state is `[heads, d_v, d_k]`.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from jaxtyping import Float64

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Mask = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

RECURRENCE_COPY = 0
READ_COPY = 1


class Store(Protocol):
    """Stores a state in some format and loads it back."""

    def __call__(
        self, state: Float64[np.ndarray, "heads d_v d_k"], *, token_index: int, copy: int
    ) -> Float64[np.ndarray, "heads d_v d_k"]:
        """Return what is read back after `state` was stored into `copy` when the state covers `token_index`."""
        ...


def no_store(
    state: Float64[np.ndarray, "heads d_v d_k"], *, token_index: int, copy: int
) -> Float64[np.ndarray, "heads d_v d_k"]:
    """Store without any rounding: exact in float64."""
    del token_index, copy
    return state.copy()


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a recurrence consumes for one sequence.

    `log_decay` is `[time, heads]` for Mamba-2 and GDN, `[time, heads, d_k]` for KDA. `beta` is None for Mamba-2, whose
    write is `value` itself; otherwise the write is the delta rule.
    """

    query: Float64[np.ndarray, "time key_heads d_k"]
    key: Float64[np.ndarray, "time key_heads d_k"]
    value: Float64[np.ndarray, "time heads d_v"]
    log_decay: Float64[np.ndarray, "time heads"] | Float64[np.ndarray, "time heads d_k"]
    beta: Float64[np.ndarray, "time heads"] | None

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.value.shape[0]

    @property
    def heads(self) -> int:
        """Number of value heads."""
        return self.value.shape[1]

    def key_head(self, head: int) -> int:
        """Return the key head that serves value head `head`: consecutive value heads share one."""
        return head // (self.heads // self.key.shape[1])

    def zero_state(self) -> Float64[np.ndarray, "heads d_v d_k"]:
        """Return the state before the first token."""
        return np.zeros((self.heads, self.value.shape[2], self.key.shape[2]))

    def select(self, tokens: Mask | slice) -> "Inputs":
        """Return the inputs of some of the tokens only."""
        return replace(
            self,
            query=self.query[tokens],
            key=self.key[tokens],
            value=self.value[tokens],
            log_decay=self.log_decay[tokens],
            beta=None if self.beta is None else self.beta[tokens],
        )


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One walk over a sequence.

    `copies` is what is stored at the end (one array, or recurrence copy and read copy), `working` the state that the
    recurrence copy has reached with the tokens since its last store folded in, and `stores` every
    `(token_index, copy)` in the order of the stores.
    """

    outputs: Float64[np.ndarray, "time heads d_v"]
    copies: tuple[Float64[np.ndarray, "heads d_v d_k"], ...]
    working: Float64[np.ndarray, "heads d_v d_k"]
    stores: tuple[tuple[int, int], ...]


def advance(
    state: Float64[np.ndarray, "heads d_v d_k"], inputs: Inputs, token: int
) -> Float64[np.ndarray, "heads d_v d_k"]:
    """Fold one token into the state: decay, then write. Nothing is rounded."""
    advanced = np.empty_like(state)
    for head in range(inputs.heads):
        key = inputs.key[token, inputs.key_head(head)]
        # A scalar decays the whole matrix; a vector over d_k decays each key column.
        decayed = state[head] * np.exp(inputs.log_decay[token, head])
        write = inputs.value[token, head]
        if inputs.beta is not None:
            write = inputs.beta[token, head] * (write - decayed @ key)
        advanced[head] = decayed + np.outer(write, key)
    return advanced


def read(state: Float64[np.ndarray, "heads d_v d_k"], inputs: Inputs, token: int) -> Float64[np.ndarray, "heads d_v"]:
    """Return the output of one token from the state that already contains it."""
    return np.stack([state[head] @ inputs.query[token, inputs.key_head(head)] for head in range(inputs.heads)])


def plain(inputs: Inputs, *, state: Float64[np.ndarray, "heads d_v d_k"] | None = None) -> Trace:
    """Walk the recurrence without any store."""
    state = inputs.zero_state() if state is None else state
    outputs = np.zeros(inputs.value.shape)
    for token in range(inputs.tokens):
        state = advance(state, inputs, token)
        outputs[token] = read(state, inputs, token)
    return Trace(outputs=outputs, copies=(state,), working=state, stores=())


def conventional(inputs: Inputs, store: Store, *, prompt_tokens: int = 0) -> Trace:
    """Walk with a store after every token. Each output is taken before its store.

    The first `prompt_tokens` tokens follow the plain recurrence; the state they reach is stored once.
    """
    checkpoint = inputs.zero_state()
    outputs = np.zeros(inputs.value.shape)
    stores: list[tuple[int, int]] = []
    for token in range(inputs.tokens):
        working = advance(checkpoint, inputs, token)
        outputs[token] = read(working, inputs, token)
        if token < prompt_tokens - 1:
            checkpoint = working
        else:
            checkpoint = store(working, token_index=token, copy=RECURRENCE_COPY)
            stores.append((token, RECURRENCE_COPY))
    return Trace(outputs=outputs, copies=(checkpoint,), working=checkpoint, stores=tuple(stores))


def shared(inputs: Inputs, store: Store, *, window_tokens: int, prompt_tokens: int = 0) -> Trace:
    """Walk with one copy that is stored on the last token of every full window.

    Inside a window nothing is rounded: the working state starts from the stored copy and serves every output, that of
    the storing token included. The prompt is stored once at its end, and the first window starts after it.
    """
    checkpoint = inputs.zero_state()
    working = checkpoint
    outputs = np.zeros(inputs.value.shape)
    stores: list[tuple[int, int]] = []
    tokens_in_window = 0
    for token in range(inputs.tokens):
        working = advance(working, inputs, token)
        outputs[token] = read(working, inputs, token)
        if token < prompt_tokens:
            store_now = token == prompt_tokens - 1
        else:
            tokens_in_window += 1
            store_now = tokens_in_window == window_tokens
        if store_now:
            checkpoint = store(working, token_index=token, copy=RECURRENCE_COPY)
            stores.append((token, RECURRENCE_COPY))
            working = checkpoint
            tokens_in_window = 0
    return Trace(outputs=outputs, copies=(checkpoint,), working=working, stores=tuple(stores))


def separate(inputs: Inputs, store: Store, *, window_tokens: int, prompt_tokens: int = 0) -> Trace:
    """Walk with two copies: one carries the recurrence, the other serves the outputs inside a window.

    Each window is walked twice, from either copy, with its own writes where the delta rule makes them depend on the
    state. The storing token's output, and both stores, come from the walk that began at the recurrence copy.
    """
    recurrence_copy = inputs.zero_state()
    read_copy = inputs.zero_state()
    recurrence_working = recurrence_copy
    read_working = read_copy
    outputs = np.zeros(inputs.value.shape)
    stores: list[tuple[int, int]] = []
    tokens_in_window = 0
    for token in range(inputs.tokens):
        recurrence_working = advance(recurrence_working, inputs, token)
        read_working = advance(read_working, inputs, token)
        if token < prompt_tokens:
            # Nothing was stored yet, so the two walks are one.
            store_now = token == prompt_tokens - 1
        else:
            tokens_in_window += 1
            store_now = tokens_in_window == window_tokens
        outputs[token] = read(recurrence_working if store_now else read_working, inputs, token)
        if store_now:
            recurrence_copy = store(recurrence_working, token_index=token, copy=RECURRENCE_COPY)
            stores.append((token, RECURRENCE_COPY))
            read_copy = store(recurrence_working, token_index=token, copy=READ_COPY)
            stores.append((token, READ_COPY))
            recurrence_working = recurrence_copy
            read_working = read_copy
            tokens_in_window = 0
    return Trace(outputs=outputs, copies=(recurrence_copy, read_copy), working=recurrence_working, stores=tuple(stores))


def softplus(x: Array) -> Array:
    """Return `log(1 + exp(x))`, exact to rounding for any `x`."""
    return np.logaddexp(0.0, x)


def unit(x: Float64[np.ndarray, "time key_heads d_k"]) -> Float64[np.ndarray, "time key_heads d_k"]:
    """Divide by the L2 norm along the last axis, with 1e-6 added to the sum of squares."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def mamba2_inputs(
    *,
    x: Float64[np.ndarray, "time heads d_v"],
    dt: Float64[np.ndarray, "time heads"],
    dt_bias: Float64[np.ndarray, " heads"],
    a_log: Float64[np.ndarray, " heads"],
    b: Float64[np.ndarray, "time key_heads d_k"],
    c: Float64[np.ndarray, "time key_heads d_k"],
    d: Float64[np.ndarray, " heads"],
    time_step_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Inputs, Float64[np.ndarray, "time heads d_v"]]:
    """Turn the parameters of a Mamba-2 layer into recurrence inputs and the skip term that is added to the outputs.

    The time step is `softplus(dt + dt_bias)` clamped to `time_step_limit`; the decay is `exp(step * -exp(a_log))`.
    """
    step = np.clip(softplus(dt + dt_bias), time_step_limit[0], time_step_limit[1])
    inputs = Inputs(query=c, key=b, value=step[:, :, None] * x, log_decay=step * -np.exp(a_log), beta=None)
    return inputs, d[None, :, None] * x


def delta_inputs(
    *,
    query: Float64[np.ndarray, "time key_heads d_k"],
    key: Float64[np.ndarray, "time key_heads d_k"],
    value: Float64[np.ndarray, "time heads d_v"],
    a: Float64[np.ndarray, "time heads"] | Float64[np.ndarray, "time heads d_k"],
    dt_bias: Float64[np.ndarray, " heads"] | Float64[np.ndarray, "heads d_k"],
    a_log: Float64[np.ndarray, " heads"],
    b: Float64[np.ndarray, "time heads"],
    beta_scale: float = 1.0,
) -> Inputs:
    """Turn the raw parameters of a GDN layer (or, with `a` and `dt_bias` per key channel, KDA) into recurrence inputs.

    Keys and queries are L2-normalised, queries then scaled by `d_k ** -0.5`. The log decay is
    `-exp(a_log) * softplus(a + dt_bias)` and `beta` is `beta_scale * sigmoid(b)`; models that allow negative
    eigenvalues use a scale of 2.
    """
    rate = np.exp(a_log) if a.ndim == 2 else np.exp(a_log)[:, None]
    return Inputs(
        query=unit(query) * query.shape[-1] ** -0.5,
        key=unit(key),
        value=value,
        log_decay=-rate * softplus(a + dt_bias),
        beta=beta_scale / (1.0 + np.exp(-b)),
    )
