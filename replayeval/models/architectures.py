"""Which model architectures are supported, as data.

transformers writes every state-space mixer as projections, a convolution and gates around one *core* function of its
modeling module. Architectures that share a core differ, for this project, only in the entries of the table below.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from torch import nn

from replayeval.errors import ConfigError
from replayssm.records import Recurrence


@dataclass(frozen=True, kw_only=True)
class Core:
    """One module-level function through which mixers reach their state.

    Attributes:
        name: Its name in the modeling module.
        parameters: Names of its parameters in positional order. They are written here because the function cannot
            always be asked: installed kernel packages put callables in its place that take any arguments.
    """

    name: str
    parameters: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Cores:
    """The functions through which the mixers of one recurrence reach their state.

    Attributes:
        chunk: Consumes many tokens.
        step: Consumes one token.
        shortcut: A fused training function that goes around both, if there is one.
    """

    chunk: Core
    step: Core
    shortcut: Core | None = None

    @property
    def all(self) -> tuple[Core, ...]:
        """Every function that has to be replaced."""
        return (self.chunk, self.step) if self.shortcut is None else (self.chunk, self.step, self.shortcut)


@dataclass(frozen=True, kw_only=True)
class MixerShape:
    """Names of the mixer attributes that give the shape of the state."""

    heads: str
    key_heads: str
    d_v: str
    d_k: str


_DELTA_RULE = ("query", "key", "value", "g", "beta")
_DELTA_STATE = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")

CORES: dict[Recurrence, Cores] = {
    Recurrence.MAMBA2: Cores(
        chunk=Core(
            name="mamba2_chunk_scan",
            parameters=("hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states")
            + ("dt_softplus", "dt_limit", "return_final_states"),
        ),
        step=Core(
            name="mamba2_selective_state_update",
            parameters=("state", "hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "z"),
        ),
        shortcut=Core(name="mamba2_split_conv1d_scan_combined", parameters=()),
    ),
    Recurrence.GDN: Cores(
        chunk=Core(name="torch_chunk_gated_delta_rule", parameters=(*_DELTA_RULE, "chunk_size", *_DELTA_STATE)),
        step=Core(name="torch_recurrent_gated_delta_rule", parameters=(*_DELTA_RULE, *_DELTA_STATE)),
    ),
    Recurrence.KDA: Cores(
        chunk=Core(name="chunk_kimi_delta_attention", parameters=(*_DELTA_RULE, "chunk_size", *_DELTA_STATE)),
        step=Core(name="recurrent_kimi_delta_attention", parameters=(*_DELTA_RULE, *_DELTA_STATE)),
    ),
}

MIXER_SHAPES: dict[Recurrence, MixerShape] = {
    Recurrence.MAMBA2: MixerShape(heads="num_heads", key_heads="n_groups", d_v="head_dim", d_k="ssm_state_size"),
    Recurrence.GDN: MixerShape(heads="num_v_heads", key_heads="num_k_heads", d_v="head_v_dim", d_k="head_k_dim"),
    Recurrence.KDA: MixerShape(heads="num_heads", key_heads="num_heads", d_v="head_dim", d_k="head_dim"),
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One supported model architecture.

    Attributes:
        name: Name of the architecture; its modeling module is `transformers.models.NAME.modeling_NAME`.
        mixer: Class of the state-space mixer in that module.
        recurrence: Which recurrence its core computes.
        model_types: The `model_type` values of configurations that use it; the name itself when empty.
    """

    name: str
    mixer: str
    recurrence: Recurrence
    model_types: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Import path of the modeling module that holds the mixer and its cores."""
        return f"transformers.models.{self.name}.modeling_{self.name}"

    @property
    def cores(self) -> Cores:
        """The functions to replace in that module."""
        return CORES[self.recurrence]


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(name="mamba2", mixer="Mamba2Mixer", recurrence=Recurrence.MAMBA2),
    Architecture(name="bamba", mixer="BambaMixer", recurrence=Recurrence.MAMBA2),
    Architecture(name="nemotron_h", mixer="NemotronHMamba2Mixer", recurrence=Recurrence.MAMBA2),
    Architecture(name="granitemoehybrid", mixer="GraniteMoeHybridMambaLayer", recurrence=Recurrence.MAMBA2),
    Architecture(name="falcon_h1", mixer="FalconH1Mixer", recurrence=Recurrence.MAMBA2),
    Architecture(name="zamba2", mixer="Zamba2MambaMixer", recurrence=Recurrence.MAMBA2),
    Architecture(name="qwen3_next", mixer="Qwen3NextGatedDeltaNet", recurrence=Recurrence.GDN),
    Architecture(
        name="qwen3_5",
        mixer="Qwen3_5GatedDeltaNet",
        recurrence=Recurrence.GDN,
        model_types=("qwen3_5", "qwen3_5_text"),
    ),
    Architecture(
        name="qwen3_5_moe",
        mixer="Qwen3_5MoeGatedDeltaNet",
        recurrence=Recurrence.GDN,
        model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    ),
    Architecture(name="olmo_hybrid", mixer="OlmoHybridGatedDeltaNet", recurrence=Recurrence.GDN),
    Architecture(name="lara_mini", mixer="LaraMiniGatedDeltaNet", recurrence=Recurrence.GDN),
    Architecture(name="kimi_linear", mixer="KimiLinearDeltaAttention", recurrence=Recurrence.KDA),
    Architecture(name="bailing_hybrid", mixer="BailingHybridDeltaAttention", recurrence=Recurrence.KDA),
)

_BY_MIXER: dict[tuple[str, str], Architecture] = {(a.module, a.mixer): a for a in ARCHITECTURES}


def supported_model_types() -> tuple[str, ...]:
    """Every `model_type` that is supported, in the order of the table."""
    return tuple(t for a in ARCHITECTURES for t in (a.model_types or (a.name,)))


@dataclass(frozen=True, kw_only=True)
class SsmLayer:
    """One state-space layer of a model.

    Attributes:
        name: Dotted name of the mixer inside the model.
        layer_idx: Index of the layer in the model, as the model counts.
        recurrence: Which recurrence it computes.
        heads: Number of value heads, each with a state of its own.
        key_heads: Number of key heads; each serves `heads / key_heads` consecutive value heads.
        d_v: Value rows of a state.
        d_k: Key columns of a state.
        time_step_limit: Range to which the layer clamps its time step (Mamba-2), else `None`.
        architecture: Entry of the table that recognised it.
    """

    name: str
    layer_idx: int
    recurrence: Recurrence
    heads: int
    key_heads: int
    d_v: int
    d_k: int
    time_step_limit: tuple[float, float] | None
    architecture: Architecture

    @property
    def state_elements(self) -> int:
        """Elements of the state that this layer keeps for one sequence."""
        return self.heads * self.d_v * self.d_k


def find_mixers(model: nn.Module) -> list[tuple[SsmLayer, nn.Module]]:
    """Find the state-space mixers of `model`, with the modules themselves, in the order of their layers.

    Raises:
        ConfigError: If there is none, or if two of them claim the same layer.
    """
    found: list[tuple[SsmLayer, nn.Module]] = []
    for name, module in cast(Iterator[tuple[str, nn.Module]], model.named_modules()):
        architecture = _BY_MIXER.get((type(module).__module__, type(module).__name__))
        if architecture is not None:
            found.append((_describe(name, module, architecture), module))
    if not found:
        raise ConfigError(
            f"expected a model with state-space layers, got {type(model).__name__}, in which none is recognised; "
            f"supported architectures: {', '.join(a.name for a in ARCHITECTURES)}"
        )
    found.sort(key=lambda pair: pair[0].layer_idx)
    indices = [layer.layer_idx for layer, _ in found]
    twice = sorted({i for i in indices if indices.count(i) > 1})
    if twice:
        raise ConfigError(
            f"expected one state-space mixer per layer, got several for layer {twice} of {type(model).__name__}: "
            f"{', '.join(layer.name for layer, _ in found if layer.layer_idx in twice)}"
        )
    return found


def ssm_layers(model: nn.Module) -> list[SsmLayer]:
    """List the state-space layers of a model in the order of their layers.

    Raises:
        ConfigError: If the model has none that is recognised.
    """
    return [layer for layer, _ in find_mixers(model)]


def _describe(name: str, module: nn.Module, architecture: Architecture) -> SsmLayer:
    shape = MIXER_SHAPES[architecture.recurrence]
    limit: tuple[float, float] | None = None
    if architecture.recurrence is Recurrence.MAMBA2:
        low, high = getattr(module, "time_step_limit", None) or (0.0, float("inf"))
        limit = (float(low), float(high))
    return SsmLayer(
        name=name,
        layer_idx=int(getattr(module, "layer_idx")),  # noqa: B009
        recurrence=architecture.recurrence,
        heads=int(getattr(module, shape.heads)),
        key_heads=int(getattr(module, shape.key_heads)),
        d_v=int(getattr(module, shape.d_v)),
        d_k=int(getattr(module, shape.d_k)),
        time_step_limit=limit,
        architecture=architecture,
    )
