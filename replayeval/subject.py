"""The model under test, the policies asked of it, and the checks that come before any number."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from replayeval.engine.checks import Check, check_every_layer_stores, check_forcing_is_live
from replayeval.engine.forcing import DocumentTokens, Engine, Forcing
from replayeval.errors import ConfigError, UnsupportedArmError
from replayeval.models.architectures import SsmLayer
from replayeval.models.head import OutputHead, check_head
from replayeval.models.hook import ssm_layers
from replayeval.models.loading import load_model
from replayssm.backend import Backend, Execution
from replayssm.launch import is_interpreted, triton_problem
from replayssm.policy import Policy
from replayssm.triton_walk import check_supported


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model under test and how it is called.

    Attributes:
        head: The model, with its output head.
        tokenizer: Its tokenizer, or None.
        name: Where the weights came from.
        revision: Commit of the hub repository, or None.
        weights_sha256: Returns a digest of the weights, made when it is asked for.
        layers: The state-space layers.
        details: What the record says about the model, as JSON values.
    """

    head: OutputHead
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    revision: str | None
    weights_sha256: Callable[[], str]
    layers: tuple[SsmLayer, ...]
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


def load_subject(
    model: PreTrainedModel | str,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    dtype: str,
    device: str,
    revision: str | None,
    trust_remote_code: bool,
) -> Subject:
    """Load a model by name, or take one that is already loaded.

    Raises:
        ConfigError: There is no such model, or it cannot be used as asked.
    """
    if isinstance(model, str):
        loaded = load_model(
            model,
            revision=revision,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            need_tokenizer=False,
        )
        return Subject(
            head=OutputHead(loaded.model),
            tokenizer=tokenizer or loaded.tokenizer,
            name=model,
            revision=loaded.revision,
            weights_sha256=lambda: loaded.fingerprint,
            layers=loaded.layers,
            details={
                "model_type": loaded.model_type,
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "quantization": loaded.quantization,
                "revision": loaded.revision,
                "ignored_keys": list(loaded.ignored_keys),
            },
        )
    name = str(getattr(model.config, "name_or_path", "") or type(model).__name__)
    return Subject(
        head=OutputHead(model),
        tokenizer=tokenizer,
        name=name,
        revision=None,
        weights_sha256=lambda: _hash_parameters(model),
        layers=tuple(ssm_layers(model)),
        details={"model_type": model.config.model_type, "dtype": str(model.dtype).removeprefix("torch.")},
    )


def _hash_parameters(model: PreTrainedModel) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def check_formats(policies: Sequence[Policy], layers: Sequence[SsmLayer]) -> None:
    """Refuse formats whose blocks do not fit the model's states, before anything runs.

    Raises:
        UnsupportedArmError: Naming every such policy.
    """
    offences: list[str] = []
    for policy in policies:
        try:
            for layer in layers:
                policy.bits_per_element(heads=layer.heads, d_v=layer.d_v, d_k=layer.d_k)
        except ValueError as error:
            offences.append(f"{policy}: {error}")
    if offences:
        raise UnsupportedArmError("this model's states do not fit " + "; ".join(offences))


def check_execution(execution: Execution, policies: Sequence[Policy], subject: Subject) -> None:
    """Refuse a backend that cannot advance the model's states under these policies, before anything runs.

    Raises:
        ConfigError: The backend cannot run where the model is.
        UnsupportedArmError: It cannot store what a policy asks for.
    """
    if execution.backend is Backend.TORCH:
        return
    problem = triton_problem(subject.head.input_device)
    if problem is not None:
        raise ConfigError(f"backend {execution}: {problem}")
    try:
        for layer in subject.layers:
            check_supported(policies, heads=layer.heads, d_v=layer.d_v, d_k=layer.d_k)
    except ValueError as error:
        raise UnsupportedArmError(f"backend {execution}: {error}") from None


def bits_per_element(policy: Policy, layers: Sequence[SsmLayer]) -> float:
    """Stored bits per element over all states of the model."""
    sizes = [x.heads * x.d_v * x.d_k for x in layers]
    bits = [policy.bits_per_element(heads=x.heads, d_v=x.d_v, d_k=x.d_k) for x in layers]
    return sum(s * b for s, b in zip(sizes, bits, strict=True)) / sum(sizes)


def self_checks(head: OutputHead, document: DocumentTokens, forcing: Forcing) -> list[Check]:
    """Check the apparatus on one document before it is used; the checks cost a few short passes.

    Args:
        head: The model under test.
        document: The first document of the measurement.
        forcing: How documents are forced.

    Raises:
        NumericsError: A check failed, so that no number would mean anything.
    """
    return [
        Check(name="output head reproduces the model's own logits", passed=True, value=check_head(head), limit=None),
        check_every_layer_stores(head, document, forcing),
        check_forcing_is_live(head, document, forcing),
    ]


def parse_engine(name: str) -> Engine:
    """Return the engine of that name.

    Raises:
        ConfigError: There is none.
    """
    try:
        return Engine(name)
    except ValueError:
        raise ConfigError(f"expected the engine to be one of {', '.join(Engine)}, got {name!r}") from None


def parse_execution(text: str) -> Execution:
    """Return the backend, and its products if any are named.

    Raises:
        ConfigError: There is none of that name.
    """
    try:
        return Execution.parse(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def execution_record(execution: Execution) -> dict[str, Any]:
    """Return, as JSON values, what advanced the states: for the provenance of a result."""
    return {
        "backend": str(execution.backend),
        "products": str(execution.products),
        "interpreted": execution.backend is Backend.TRITON and is_interpreted(),
    }


def parse_seed(seed: int) -> int:
    """Return the seed if Philox can take it as its key.

    Raises:
        ConfigError: It is not in 0 to 2**64 - 1.
    """
    if not 0 <= seed < 1 << 64:
        raise ConfigError(f"expected a seed of 0 to 2**64 - 1, got {seed}")
    return seed


def device_name(head: OutputHead) -> str:
    """Return the name of the device that computes, or of all GPUs that share the model."""
    device = head.input_device
    if device.type != "cuda":
        return str(device)
    return ", ".join(torch.cuda.get_device_name(d) for d in range(torch.cuda.device_count()))
