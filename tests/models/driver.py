"""A state driver written straight from the definition: one token at a time, in float64, nothing under test imported."""

from typing import Any

import torch
from torch import Tensor


class TokenByToken:
    """Keeps one state per layer and row and follows the recurrence exactly.

    `spoil` is called with the recurrence and the inputs as a dictionary before they are used; tests plant mistakes
    with it.
    """

    def __init__(self, spoil: Any = None) -> None:
        self.states: dict[int, Tensor] = {}
        self.calls: list[tuple[int, str, int]] = []
        self.valid: list[Tensor | None] = []
        self.spoil = spoil

    def advance(self, layer: int, recurrence: Any, inputs: Any, *, valid: Tensor | None = None) -> Tensor:
        names = ("query", "key", "value", "log_decay", "beta")
        given = {name: getattr(inputs, name) for name in names}
        assert all(x is None or x.dtype == torch.float32 for x in given.values())
        if self.spoil is not None:
            given = self.spoil(str(recurrence), given)
        query, key, value, log_decay, beta = (None if x is None else x.double() for x in given.values())
        assert query is not None and key is not None and value is not None and log_decay is not None
        rows, time, heads, d_v = value.shape
        d_k = key.shape[-1]
        assert query.shape == key.shape == (rows, time, key.shape[2], d_k)
        assert log_decay.shape == ((rows, time, heads, d_k) if str(recurrence) == "kda" else (rows, time, heads))
        assert (beta is None) == (str(recurrence) == "mamba2")
        group = heads // key.shape[2]
        of_head = [h // group for h in range(heads)]
        query, key = query[:, :, of_head], key[:, :, of_head]
        state = self.states.get(layer, torch.zeros(rows, heads, d_v, d_k, dtype=torch.float64))
        outputs = torch.zeros(rows, time, heads, d_v, dtype=torch.float64)
        for t in range(time):
            decay = log_decay[:, t].exp().reshape(rows, heads, 1, -1)  # KDA: one per key column
            old = state * decay
            write = value[:, t]
            if beta is not None:
                write = beta[:, t, :, None] * (write - (old @ key[:, t, :, :, None]).squeeze(-1))
            new = old + write.unsqueeze(-1) * key[:, t].unsqueeze(-2)
            real = torch.ones(rows, dtype=torch.bool) if valid is None else valid[:, t]
            state = torch.where(real[:, None, None, None], new, state)
            outputs[:, t] = (new @ query[:, t, :, :, None]).squeeze(-1) * real[:, None, None]
        self.states[layer] = state
        self.calls.append((layer, str(recurrence), time))
        self.valid.append(valid)
        return outputs.to(inputs.value.dtype)
