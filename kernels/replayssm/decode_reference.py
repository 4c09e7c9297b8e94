"""Decoding by its definition, in PyTorch: keep the inputs of the window, replay them on what is stored.

Slow and obvious: it is what the kernels are checked against. In float64 it shows what float32 kernels lose.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from replayssm.decode_arguments import EPSILON, DecodeToken
from replayssm.formats import PackedState, Rounding, pack, random_bits
from replayssm.gdn.reference import reference as gdn_reference
from replayssm.kda.reference import reference as kda_reference
from replayssm.mamba2.reference import reference as mamba2_reference
from replayssm.records import Recurrence, TokenInputs
from replayssm.slots import DecodeSlots, Mamba2Constants

_FORMS = {Recurrence.MAMBA2: mamba2_reference, Recurrence.GDN: gdn_reference, Recurrence.KDA: kda_reference}


class ReferenceDecoder:
    """The sequences of one layer, each with its stored copies and the inputs of its window.

    Args:
        slots: Shape, policy, constants and seed; its tensors are read once, as the states to begin with.
        dtype: Working precision.
        tokens: Tokens that each slot has consumed.
    """

    def __init__(self, slots: DecodeSlots, *, dtype: torch.dtype = torch.float64, tokens: list[int]) -> None:
        self._slots = slots
        self._dtype = dtype
        self.tokens = list(tokens)
        self.copies: list[list[PackedState]] = [[c.packed(s) for c in slots.copies] for s in range(len(tokens))]
        self._states = [[p.unpack().to(dtype) for p in packed] for packed in self.copies]
        self._windows: list[TokenInputs | None] = [None] * len(tokens)

    def state(self, slot: int) -> Float[Tensor, "heads d_v d_k"]:
        """What the copy that carries the recurrence loads back as."""
        return self._states[slot][0]

    def step(self, token: DecodeToken, slot_index: list[int]) -> Float[Tensor, "rows heads d_v"]:
        """Take the sequences in some slots through one token; rows of negative slots come out as zeros.

        Rounding: at the stores of the policy, from the working state of the window's last token.
        """
        slots, policy = self._slots, self._slots.policy
        inputs, skipped = token_inputs(slots, token, self._dtype)
        outputs = torch.zeros(token.value.shape, dtype=self._dtype, device=token.value.device)
        form = _FORMS[slots.shape.recurrence]
        for row, slot in enumerate(slot_index):
            if slot < 0:
                continue
            one = inputs.map(lambda x, r=row: x[r : r + 1])
            before = self._windows[slot]
            window = one if before is None else before.then(one)
            full = window.time == policy.window_tokens
            # A flush is read from the state that carries the recurrence, everything else from the copy for reading.
            source = self._states[slot][0 if full else -1]
            replayed, working = form(window, source.unsqueeze(0))
            outputs[row] = replayed[0, -1] + skipped[row]
            if full:
                self._store(slot, working)
            self._windows[slot] = None if full else window
            self.tokens[slot] += 1
        return outputs

    def _store(self, slot: int, working: Tensor) -> None:
        slots = self._slots
        for number, copy in enumerate(slots.copies):
            bits = None
            if copy.format.rounding is Rounding.STOCHASTIC:
                bits = random_bits(
                    seed=slots.seed,
                    layer=slots.layer,
                    copy=number,
                    sequences=torch.tensor([slot]),
                    tokens=torch.tensor([self.tokens[slot]]),
                    elements=working[0].numel(),
                    device=working.device,
                )
            packed = pack(working, copy.format, bits=bits)
            self.copies[slot][number] = packed
            # In float64 a float32 store is the identity that it is in float32.
            exact = copy.format.is_identity
            self._states[slot][number] = working[0] if exact else packed.unpack()[0].to(self._dtype)


def token_inputs(slots: DecodeSlots, token: DecodeToken, dtype: torch.dtype) -> tuple[TokenInputs, Tensor]:
    """What the recurrence consumes, `[rows, 1, …]`, and what is added to its output (the skip term of Mamba-2).

    Args:
        slots: Normalisation and constants of the layer.
        token: As the kernels take it.
        dtype: Working precision.
    """
    query, key, value = (x.to(dtype).unsqueeze(1) for x in (token.query, token.key, token.value))
    if slots.constants is not None and token.dt is not None:
        step, skipped = _mamba2_step(slots.constants, token.dt.to(dtype), token.value.to(dtype))
        log_decay = step * slots.constants.decay_rate.to(dtype)
        inputs = TokenInputs(
            query=query,
            key=key,
            value=value * step[:, None, :, None],
            log_decay=log_decay.unsqueeze(1),
            beta=None,
        )
        return inputs, skipped
    if token.log_decay is None or token.beta is None:
        raise ValueError(f"{slots.shape.recurrence} decode: expected `log_decay` and `beta`, got none")
    if slots.normalise:
        query, key = (x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() for x in (query, key))
        query = query * slots.shape.d_k**-0.5
    inputs = TokenInputs(
        query=query,
        key=key,
        value=value,
        log_decay=token.log_decay.to(dtype).unsqueeze(1),
        beta=token.beta.to(dtype).unsqueeze(1),
    )
    return inputs, torch.zeros_like(value[:, 0])


def _mamba2_step(constants: Mamba2Constants, dt: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    smallest, largest = constants.dt_limit
    step = functional.softplus(dt + constants.dt_bias.to(dt.dtype), threshold=40.0).clamp(smallest, largest)
    return step, constants.skip.to(dt.dtype)[:, None] * value
