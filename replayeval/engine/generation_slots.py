"""States of sequences that decode in fixed places: slots of every layer, advanced by the decode kernels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from replayeval.errors import UnsupportedArmError
from replayeval.models.architectures import Core, SsmLayer
from replayeval.models.inputs import mamba2_finish
from replayssm.decode import DecodeToken, advance, decode_step
from replayssm.policy import Policy
from replayssm.records import Recurrence
from replayssm.replay import StateBank
from replayssm.slots import DecodeCursors, DecodeSlots, LayerShape, Mamba2Constants

__all__ = ["SlotStates"]


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What a layer hands to its core, as far as slots depend on it.

    Attributes:
        shape: Sizes of its states.
        dtype: Dtype of its keys and values.
        normalise: Whether the core normalises keys and queries of a delta rule.
        constants: Parameters of a Mamba-2 layer.
    """

    shape: LayerShape
    dtype: torch.dtype
    normalise: bool
    constants: Mamba2Constants | None


class SlotStates:
    """States and records of all layers under one policy, one slot per place, and the cursors of the places.

    While prompts are read it notes what each layer looks like and lets a bank advance the unrounded state; `admit`
    then stores that state in slots. While `decoding`, it answers the cores with the decode kernels, whose products and
    sums are float32. Everything that changes from token to token lies on the device.

    Args:
        policy: How states are stored.
        places: Sequences that can decode at a time.
        seed: Seed of stochastic rounding.
        device: Where the model lies.

    Attributes:
        decoding: Whether the next pass of the model is one token for every place.
        slot_index: The slot of each place, or -1 where no sequence is.
        cursors: How far each place has come.
    """

    def __init__(self, policy: Policy, *, places: int, seed: int, device: torch.device) -> None:
        self.policy = policy
        self.decoding = False
        self.slot_index: Int32[Tensor, " places"] = torch.full((places,), -1, dtype=torch.int32, device=device)
        self.cursors = DecodeCursors(slots=places, device=device)
        self._places = places
        self._seed = seed
        self._seen: dict[int, _Seen] = {}
        self._slots: dict[int, DecodeSlots] = {}

    def answer(self, layer: SsmLayer, core: Core, arguments: Mapping[str, Any]) -> Any | None:
        """What the core of a layer returns for one token per place, while `decoding`."""
        if not self.decoding:
            if layer.layer_idx not in self._seen:
                self._seen[layer.layer_idx] = _look(layer, core, arguments)
            return None
        slots = self._slots[layer.layer_idx]
        if layer.recurrence is Recurrence.MAMBA2:
            return self._mamba2(slots, layer, core, arguments)
        query, key, value = (arguments[name][:, 0] for name in ("query", "key", "value"))
        if not slots.normalise:
            query = query.to(torch.float32) * slots.shape.d_k**-0.5
        token = DecodeToken(
            query=query, key=key, value=value, log_decay=arguments["g"][:, 0], beta=arguments["beta"][:, 0]
        )
        outputs = self._step(slots, token, arguments["query"].dtype)
        return outputs.unsqueeze(1), arguments["initial_state"] if arguments["output_final_state"] else None

    def _mamba2(self, slots: DecodeSlots, layer: SsmLayer, core: Core, arguments: Mapping[str, Any]) -> Tensor:
        wanted = layer.architecture.cores.step
        if core != wanted:
            raise UnsupportedArmError(
                f"layer {layer.layer_idx} ({layer.name}): expected a call of {wanted.name} for a single token behind a "
                f"cache, got {core.name}; use backend torch"
            )
        hidden, gate = arguments["hidden_states"], arguments.get("z")
        token = DecodeToken(query=arguments["C"], key=arguments["B"], value=hidden, dt=arguments["dt"][..., 0])
        outputs = self._step(slots, token, hidden.dtype if gate is None else torch.float32)
        # The skip term is in it already.
        return outputs if gate is None else mamba2_finish(outputs, hidden, None, gate)

    def _step(self, slots: DecodeSlots, token: DecodeToken, dtype: torch.dtype) -> Float[Tensor, "places heads d_v"]:
        # The kernels leave rows of empty places as they are, and what is left there goes through the model.
        outputs = torch.zeros(token.value.shape, dtype=dtype, device=token.value.device)
        decode_step(slots, self.cursors, token, self.slot_index, out=outputs)
        return outputs

    def advance(self) -> None:
        """Move the cursors past the token that all layers have read."""
        advance(self.cursors, self.slot_index, window=self.policy.window_tokens)

    def admit(
        self,
        bank: StateBank,
        rows: Sequence[int],
        places: Int64[Tensor, " rows"],
        *,
        sequences: Sequence[int],
        tokens: Int64[Tensor, " rows"],
    ) -> None:
        """Hand the states behind prompts over, once, in the formats of the policy.

        Args:
            bank: Holds the unrounded states of one copy per row.
            rows: Rows of the bank.
            places: Where each of them goes.
            sequences: What their random bits depend on.
            tokens: Tokens of their prompts.

        Rounding: at this store.
        """
        device = self.slot_index.device
        self.cursors.tokens[places] = tokens
        self.cursors.sequences[places] = torch.tensor(list(sequences), dtype=torch.int64, device=device)
        self.slot_index[places] = places.to(torch.int32)
        picked = torch.tensor(list(rows), dtype=torch.int64, device=device)
        for index, checkpoint in bank.checkpoints.items():
            if index not in self._slots:
                self._slots[index] = self._make(index)
            self._slots[index].admit(places, checkpoint.states.index_select(0, picked), self.cursors)

    def release(self, places: Int64[Tensor, " rows"]) -> None:
        """Empty places; their slots are left as they are until somebody is admitted to them."""
        self.slot_index[places] = -1

    def _make(self, layer: int) -> DecodeSlots:
        seen = self._seen[layer]
        try:
            return DecodeSlots(
                seen.shape,
                self.policy,
                slots=self._places,
                input_dtype=seen.dtype,
                normalise=seen.normalise,
                constants=seen.constants,
                seed=self._seed,
                layer=layer,
                device=self.slot_index.device,
            )
        except ValueError as error:
            raise UnsupportedArmError(f"layer {layer}: {error}; use backend torch") from error


def _look(layer: SsmLayer, core: Core, arguments: Mapping[str, Any]) -> _Seen:
    """Note a layer at its first tokens, which come through the core for many."""
    if core != layer.architecture.cores.chunk:
        raise UnsupportedArmError(
            f"layer {layer.layer_idx} ({layer.name}): expected its first tokens in a call of "
            f"{layer.architecture.cores.chunk.name}, got {core.name}; use backend torch"
        )
    mamba = layer.recurrence is Recurrence.MAMBA2
    key, value = (arguments["B"], arguments["hidden_states"]) if mamba else (arguments["key"], arguments["value"])
    if key.dtype != value.dtype:
        raise UnsupportedArmError(
            f"layer {layer.layer_idx} ({layer.name}): expected keys and values of one dtype, got {key.dtype} and "
            f"{value.dtype}; use backend torch"
        )
    shape = LayerShape(
        recurrence=layer.recurrence,
        key_heads=key.shape[-2],
        heads=value.shape[-2],
        d_k=key.shape[-1],
        d_v=value.shape[-1],
    )
    return _Seen(
        shape=shape,
        dtype=value.dtype,
        normalise=not mamba and bool(arguments["use_qk_l2norm_in_kernel"]),
        constants=_mamba2_constants(layer, arguments) if mamba else None,
    )


def _mamba2_constants(layer: SsmLayer, arguments: Mapping[str, Any]) -> Mamba2Constants:
    rate, bias, skip = (arguments[name] for name in ("A", "dt_bias", "D"))
    odd = [n for n, x in (("A", rate), ("dt_bias", bias), ("D", skip)) if x is not None and x.dim() != 1]
    if odd or not arguments["dt_softplus"]:
        raise UnsupportedArmError(
            f"layer {layer.layer_idx} ({layer.name}): expected one number per head as {', '.join(odd) or 'parameters'} "
            "and steps that go through a softplus; use backend torch"
        )
    assert layer.time_step_limit is not None

    def float32(x: Tensor | None) -> Tensor:
        # Contiguous and on its own: kernels read it by its address.
        return torch.zeros_like(rate, dtype=torch.float32) if x is None else x.detach().to(torch.float32, copy=True)

    return Mamba2Constants(
        decay_rate=float32(rate), dt_bias=float32(bias), skip=float32(skip), dt_limit=layer.time_step_limit
    )
