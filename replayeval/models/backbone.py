"""Find the part of a model that maps tokens to final hidden states."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from replayeval.errors import ConfigError


def find_backbone(model: PreTrainedModel, mixers: Sequence[nn.Module]) -> PreTrainedModel:
    """The innermost model inside `model` that holds every mixer: the text model, without output projection.

    Raises:
        ConfigError: If no model inside holds them all.
    """
    wanted = set(mixers)
    best: PreTrainedModel | None = None
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and wanted <= set(module.modules()):
            best = module
    if best is None:
        raise ConfigError(
            f"expected a transformers model that holds its state-space layers, got {type(model).__name__}"
        )
    return best
