"""Put a state driver under the state-space layers of one model, for a while."""

import importlib
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from replayeval.errors import NumericsError
from replayeval.models.architectures import Core, SsmLayer, find_mixers, ssm_layers
from replayeval.models.inputs import delta_rule_inputs, mamba2_chunk_inputs, mamba2_finish, mamba2_step_inputs
from replayeval.models.masks import MaskTracker
from replayeval.models.quiet import quiet
from replayssm.records import Recurrence, TokenInputs

__all__ = ["CoreDriver", "HookReport", "SsmLayer", "StateDriver", "hooked", "ssm_layers"]


class StateDriver(Protocol):
    """What advances the states of a model: `replayssm.replay.StateBank`, or a test's own."""

    def advance(
        self,
        layer: int,
        recurrence: Recurrence,
        inputs: TokenInputs,
        *,
        valid: Bool[Tensor, "rows time"] | None = None,
    ) -> Float[Tensor, "rows time heads d_v"]:
        """Consume `inputs` in `layer` and return the reads; rows are untouched by tokens that are not valid."""
        ...


@runtime_checkable
class CoreDriver(Protocol):
    """A driver that sees the calls of the cores as the mixers make them, and may answer some of them itself."""

    def answer(self, layer: SsmLayer, core: Core, arguments: Mapping[str, Any]) -> Any | None:
        """What the core returns for one token per row, or None to be asked through `advance`."""
        ...


@dataclass(kw_only=True)
class HookReport:
    """What happened under the hook, per layer index.

    Attributes:
        layers: The layers that are hooked.
        forwards: How often the mixer of a layer ran to its end.
        calls: How often its core was served by the driver.
        tokens: How many tokens per row it consumed, padding included.
    """

    layers: tuple[SsmLayer, ...]
    forwards: dict[int, int] = field(default_factory=dict[int, int])
    calls: dict[int, int] = field(default_factory=dict[int, int])
    tokens: dict[int, int] = field(default_factory=dict[int, int])

    def bypassed(self) -> list[SsmLayer]:
        """Layers whose mixer ran without asking the driver each time."""
        return [x for x in self.layers if self.calls[x.layer_idx] != self.forwards[x.layer_idx]]

    def verify(self) -> None:
        """Check that every layer was hooked for real.

        Raises:
            NumericsError: If a layer never ran, if one ran without the driver, or if layers ran unequally often.
        """
        _refuse_bypass(self)
        idle = [x for x in self.layers if self.calls[x.layer_idx] == 0]
        if idle:
            raise NumericsError(
                f"expected every state-space layer to run, but layers {_names(idle)} never did; "
                "run at least one forward pass of the whole model under the hook"
            )
        if len(set(self.tokens.values())) > 1:
            raise NumericsError(
                f"expected every state-space layer to consume the same tokens, got per layer {self.tokens}; "
                "a forward pass was interrupted or ran only a part of the model"
            )


@dataclass(kw_only=True)
class _Session:
    """One model under one driver."""

    driver: StateDriver
    report: HookReport
    masks: MaskTracker

    def serve(self, layer: SsmLayer, core: Core, arguments: Mapping[str, Any]) -> Any:
        if core == layer.architecture.cores.shortcut:
            # None is how the shortcut says that it is not available: the mixer then calls the cores.
            return None
        if arguments.get("cu_seqlens") is not None or arguments.get("seq_idx") is not None:
            raise NumericsError(
                f"layer {layer.layer_idx} ({layer.name}): expected one sequence per row, got packed sequences; "
                "pass one sequence per row, padded where lengths differ"
            )
        if isinstance(self.driver, CoreDriver):
            answered = self.driver.answer(layer, core, arguments)
            if answered is not None:
                self._count(layer, 1)
                return answered
        if layer.recurrence is Recurrence.MAMBA2:
            return self._serve_mamba2(layer, core, arguments)
        _check_state(layer, arguments["initial_state"])
        inputs = delta_rule_inputs(arguments)
        outputs = self._advance(layer, inputs).to(arguments["query"].dtype)
        return outputs, _placeholder(outputs) if arguments["output_final_state"] else None

    def _serve_mamba2(self, layer: SsmLayer, core: Core, arguments: Mapping[str, Any]) -> Any:
        limit = cast(tuple[float, float], layer.time_step_limit)
        hidden_states, skip, gate = arguments["hidden_states"], arguments["D"], arguments.get("z")
        if core == layer.architecture.cores.step:
            _check_state(layer, arguments["state"])
            outputs = self._advance(layer, mamba2_step_inputs(arguments, limit))
            gate = None if gate is None else gate.unsqueeze(1)
            return mamba2_finish(outputs, hidden_states.unsqueeze(1), skip, gate).squeeze(1)
        _check_state(layer, arguments["initial_states"])
        outputs = self._advance(layer, mamba2_chunk_inputs(arguments, limit))
        outputs = mamba2_finish(outputs, hidden_states, skip, gate).contiguous()
        return (outputs, _placeholder(outputs)) if arguments["return_final_states"] else outputs

    def _advance(self, layer: SsmLayer, inputs: TokenInputs) -> Tensor:
        tokens = inputs.value.shape[1]
        valid = self.masks.valid(rows=inputs.value.shape[0], tokens=tokens, device=inputs.value.device)
        outputs = self.driver.advance(layer.layer_idx, layer.recurrence, inputs, valid=valid)
        self._count(layer, tokens)
        return outputs

    def _count(self, layer: SsmLayer, tokens: int) -> None:
        self.report.calls[layer.layer_idx] += 1
        self.report.tokens[layer.layer_idx] += tokens


@contextmanager
def hooked(model: PreTrainedModel, driver: StateDriver, *, verbose: bool = False) -> Generator[HookReport]:
    """Let `driver` keep the states of every state-space layer of `model` inside the block.

    Only calls that come from the mixers of this very model are served; any other model, of the same class too, runs
    as before. Inside, the model is in evaluation mode and gradients are off. Everything is put back on exit, also
    after an exception. A cache that was used inside holds placeholders instead of states, so it is of no use outside.

    A driver keeps the states of one set of sequences. Forward passes without a cache start at no state only if the
    driver is new.

    Args:
        model: A model with state-space layers.
        driver: Keeps the states and answers the reads.
        verbose: Let transformers' own warnings through.

    Yields:
        A report that counts per layer; its `verify` says whether every layer was really hooked.

    Raises:
        ConfigError: If the model has no state-space layer that is recognised.
        NumericsError: If a mixer ran without asking the driver, for example through a kernel that replaces it, or if
            the model is hooked already.
    """
    mixers = find_mixers(model)
    layers = tuple(layer for layer, _ in mixers)
    if any(mixer in _HOOKED for _, mixer in mixers):
        raise NumericsError("expected a model that is not hooked yet, got one inside another `hooked` block")
    zeros = {layer.layer_idx: 0 for layer in layers}
    report = HookReport(layers=layers, forwards=dict(zeros), calls=dict(zeros), tokens=dict(zeros))
    session = _Session(driver=driver, report=report, masks=MaskTracker())
    handles = session.masks.attach(model, [mixer for _, mixer in mixers])
    modes = {module: module.training for module in model.modules()}
    replaced: list[tuple[str, Core]] = []
    try:
        for layer, mixer in mixers:
            handles.extend(_follow(mixer, layer, session))
            _HOOKED.add(mixer)
        for architecture in {x.architecture for x in layers}:
            for core in architecture.cores.all:
                _PATCHES.acquire(architecture.module, core)
                replaced.append((architecture.module, core))
        model.eval()
        with torch.no_grad(), quiet(not verbose):
            yield report
        _refuse_bypass(report)
    finally:
        for module, core in replaced:
            _PATCHES.release(module, core)
        for handle in handles:
            handle.remove()
        for _, mixer in mixers:
            _HOOKED.discard(mixer)
        for module, training in modes.items():
            module.training = training


def _follow(mixer: nn.Module, layer: SsmLayer, session: _Session) -> list[RemovableHandle]:
    """Note when the mixer is running, so that its calls of the core are known to be its own."""
    outer: list[_Running | None] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        outer.append(_RUNNING.get())
        _RUNNING.set(_Running(session=session, layer=layer))
        return args, session.masks.with_padding(module, args, kwargs)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del module, args
        # The framework also calls this, without output, when the pass failed, and even when a hook before it did.
        if output is not None:
            session.report.forwards[layer.layer_idx] += 1
        if outer:
            _RUNNING.set(outer.pop())

    return [
        mixer.register_forward_pre_hook(enter, with_kwargs=True),
        mixer.register_forward_hook(leave, always_call=True),
    ]


@dataclass(frozen=True, kw_only=True)
class _Running:
    session: _Session
    layer: SsmLayer


_RUNNING: ContextVar[_Running | None] = ContextVar("running_mixer", default=None)
_HOOKED: set[nn.Module] = set()


class _Patches:
    """Replaced module functions, shared by all hooked models: the first brings a function in, the last takes it out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._originals: dict[tuple[str, str], Callable[..., Any]] = {}
        self._users: dict[tuple[str, str], int] = {}

    def acquire(self, module: str, core: Core) -> None:
        key = (module, core.name)
        with self._lock:
            if self._users.get(key, 0) == 0:
                target = importlib.import_module(module)
                original = getattr(target, core.name)
                self._originals[key] = original
                setattr(target, core.name, _dispatcher(original, core))
            self._users[key] = self._users.get(key, 0) + 1

    def release(self, module: str, core: Core) -> None:
        key = (module, core.name)
        with self._lock:
            self._users[key] -= 1
            if self._users[key] == 0:
                setattr(importlib.import_module(module), core.name, self._originals.pop(key))


_PATCHES = _Patches()


def _dispatcher(original: Callable[..., Any], core: Core) -> Callable[..., Any]:
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        running = _RUNNING.get()
        if running is None:
            return original(*args, **kwargs)
        # Parameters that the mixer leaves out are off or absent by default, in every core.
        arguments = dict.fromkeys(core.parameters) | dict(zip(core.parameters, args, strict=False)) | kwargs
        return running.session.serve(running.layer, core, arguments)

    return dispatch


def _placeholder(outputs: Tensor) -> Tensor:
    """Stands in the cache for a state that the driver keeps: the cache then knows that there is a past."""
    return torch.zeros((outputs.shape[0], 1), dtype=torch.float32, device=outputs.device)


def _check_state(layer: SsmLayer, state: Tensor | None) -> None:
    if state is not None and state.dim() != 2:
        raise NumericsError(
            f"layer {layer.layer_idx} ({layer.name}): expected a cache that was filled under this hook, got one with a "
            f"state of shape {tuple(state.shape)}; start with a new cache inside the `hooked` block"
        )


def _refuse_bypass(report: HookReport) -> None:
    bypassed = report.bypassed()
    if bypassed:
        counts = ", ".join(f"{report.calls[x.layer_idx]} of {report.forwards[x.layer_idx]}" for x in bypassed)
        raise NumericsError(
            f"expected every forward pass of a state-space layer to go through the driver, but layers "
            f"{_names(bypassed)} were served in {counts} passes; something replaces their core: load the model "
            "without `use_kernels=True`"
        )


def _names(layers: list[SsmLayer]) -> str:
    return ", ".join(f"{x.layer_idx} ({x.name})" for x in layers)
