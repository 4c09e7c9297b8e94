"""Load the weights and the tokenizer of a model, or say exactly why that cannot be done."""

import re
import warnings
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from replayeval.errors import ConfigError
from replayeval.models.architectures import SsmLayer, ssm_layers
from replayeval.models.quiet import quiet
from replayeval.models.sources import Checkpoint, resolve, suggestion
from replayeval.models.weights import check_config, fingerprint, weight_files

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}

# Heads for multi-token prediction do not take part in the model's own logits.
_HARMLESS_KEYS = re.compile(r"(^|\.)mtp(\.|_)|rotary_emb\.inv_freq$")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model that is ready to be measured.

    Attributes:
        model: The model, in evaluation mode.
        tokenizer: Its tokenizer, or `None` if it has none.
        tokenizer_reason: Why there is no tokenizer, else `None`.
        source: What the user called the model.
        revision: Commit of the hub repository, or `None` for files that have none.
        model_type: The `model_type` of its configuration.
        fingerprint: Hash of configuration and weights.
        dtype: Dtype of its weights (of most of them, where an architecture keeps some in float32).
        device: Where it takes its tokens.
        layers: Its state-space layers.
        quantization: Name of the weight quantization of the checkpoint, if any.
        ignored_keys: Weights of the checkpoint that the model has no place for.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    tokenizer_reason: str | None
    source: str
    revision: str | None
    model_type: str
    fingerprint: str
    dtype: torch.dtype
    device: torch.device
    layers: tuple[SsmLayer, ...]
    quantization: str | None
    ignored_keys: tuple[str, ...] = field(default=())


def load_model(
    source: str,
    *,
    revision: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    need_tokenizer: bool = True,
    allow_unexpected: bool = False,
    verbose: bool = False,
) -> LoadedModel:
    """Load a model with a supported architecture.

    The model code is always that of transformers. A checkpoint that brings quantized weights is loaded as such.

    Args:
        source: A hub id, a local directory, or `builtin:NAME`.
        revision: Branch, tag or commit of a hub repository.
        dtype: `float32`, `bfloat16`, `float16`, or `auto` (the default): as the checkpoint says.
        device: `cpu`, `cuda`, `cuda:N`, or `auto` (the default): all GPUs, or the CPU if there is none.
        trust_remote_code: Allow the tokenizer of the repository to run code from it.
        need_tokenizer: False if the data are token ids; a missing tokenizer is then no error.
        allow_unexpected: Accept weights that the model has no place for.
        verbose: Let messages and progress bars of transformers through.

    Raises:
        ConfigError: If any of this cannot be done as asked; the message says why and what to do.
    """
    wanted_dtype = parse_dtype(dtype)
    device_map = parse_device(device)
    with quiet(not verbose), warnings.catch_warnings():
        if not verbose:
            warnings.simplefilter("ignore")
        checkpoint = resolve(source, revision)
        raw = check_config(checkpoint)
        files = weight_files(checkpoint)
        config = _read_config(checkpoint)
        model_class = _model_class(checkpoint, config)
        tokenizer, reason = load_tokenizer(checkpoint, trust_remote_code=trust_remote_code, needed=need_tokenizer)
        model, ignored = _load_weights(
            checkpoint, model_class, config, wanted_dtype, device_map, allow_unexpected=allow_unexpected
        )
    _check_vocabulary(checkpoint, model, tokenizer)
    quantization = raw.get("quantization_config")
    method = cast(dict[str, Any], quantization).get("quant_method") if isinstance(quantization, dict) else None
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        tokenizer_reason=reason,
        source=source,
        revision=checkpoint.revision,
        model_type=str(raw["model_type"]),
        fingerprint=fingerprint(checkpoint, files),
        dtype=model.dtype,
        device=cast(Tensor, model.get_input_embeddings().weight).device,
        layers=tuple(ssm_layers(model)),
        quantization=None if method is None else str(method),
        ignored_keys=ignored,
    )


def parse_dtype(text: str | None) -> torch.dtype | None:
    """The dtype that a text names; `None` for `auto`, which follows the checkpoint.

    Raises:
        ConfigError: If it names none that models can be loaded in.
    """
    if text is None or text.lower() == "auto":
        return None
    found = DTYPES.get(text.lower().removeprefix("torch."))
    if found is None:
        raise ConfigError(
            f"expected dtype auto, {', '.join(DTYPES)}, got {text!r}{suggestion(text.lower(), ['auto', *DTYPES])}"
        )
    return found


def parse_device(text: str | None) -> str | dict[str, str]:
    """The device map that a text names.

    Raises:
        ConfigError: If the text is not understood or this machine has no such device.
    """
    wanted = (text or "auto").lower()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        return "auto" if gpus > 1 else {"": "cuda:0" if gpus else "cpu"}
    if wanted == "cpu":
        return {"": "cpu"}
    match = re.fullmatch(r"cuda(?::(\d+))?", wanted)
    if match is None:
        raise ConfigError(f"expected device auto, cpu, cuda or cuda:N, got {text!r}")
    if not gpus:
        raise ConfigError(f"device {text} was asked for, but PyTorch {torch.__version__} finds no CUDA GPU; use cpu")
    number = int(match[1] or 0)
    if number >= gpus:
        raise ConfigError(f"device {text} was asked for, but there are only {gpus} GPUs, cuda:0 to cuda:{gpus - 1}")
    return {"": f"cuda:{number}"}


def _read_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    try:
        found: Any = cast(Any, AutoConfig).from_pretrained(checkpoint.directory, local_files_only=True)
        return cast(PreTrainedConfig, found)
    except Exception as error:  # the validation of each architecture raises what it likes
        raise ConfigError(f"config.json of {checkpoint.source} is not usable: {_one_line(error)}") from error


def _model_class(checkpoint: Checkpoint, config: PreTrainedConfig) -> type[PreTrainedModel]:
    names: list[str] = list(config.architectures or [])
    for name in names:
        found: object = getattr(transformers, name, None)
        if name.endswith(("ForCausalLM", "ForConditionalGeneration")) and found is not None:
            return cast(type[PreTrainedModel], found)
    raise ConfigError(
        f"expected config.json of {checkpoint.source} to name a language model in `architectures` "
        f"(...ForCausalLM or ...ForConditionalGeneration), got {names or 'none'}"
    )


def _load_weights(
    checkpoint: Checkpoint,
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    dtype: torch.dtype | None,
    device_map: str | dict[str, str],
    *,
    allow_unexpected: bool,
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    try:
        loaded = cast(Any, model_class).from_pretrained(
            checkpoint.directory,
            config=config,
            dtype="auto" if dtype is None else dtype,
            device_map=device_map,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            local_files_only=True,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{checkpoint.source} does not fit on {device_map}: {_one_line(error)}; use more GPUs or a smaller dtype"
        ) from error
    except ImportError as error:
        raise ConfigError(f"loading {checkpoint.source} needs a package: {_one_line(error)}") from error
    except Exception as error:  # transformers reports mismatched shapes and broken files as several error types
        raise ConfigError(
            f"the weights of {checkpoint.source} do not fit its config.json: {_one_line(error)}"
        ) from error
    model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    missing = sorted(info["missing_keys"])
    mismatched = sorted(
        f"{key}: {tuple(saved)} saved, {tuple(expected)} expected" for key, saved, expected in info["mismatched_keys"]
    )
    ignored = sorted(info["unexpected_keys"])
    unexpected = [] if allow_unexpected else [key for key in ignored if not _HARMLESS_KEYS.search(key)]
    problems = [
        f"{len(keys)} {what} ({', '.join(keys[:4])}{', ...' if len(keys) > 4 else ''})"
        for keys, what in (
            (missing, "weights are missing and would be random"),
            (mismatched, "weights have another shape"),
            (unexpected, "weights have no place in the model"),
            (list(info.get("error_msgs") or []), "errors were reported"),
        )
        if keys
    ]
    if problems:
        raise ConfigError(
            f"the weights of {checkpoint.source} do not match {model_class.__name__}: {'; '.join(problems)}; "
            "check that config.json and the weights belong together"
        )
    placed: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    if any(str(where) in ("cpu", "disk") for where in placed.values()) and device_map == "auto":
        raise ConfigError(
            f"{checkpoint.source} does not fit on the {torch.cuda.device_count()} GPUs of this machine and would be "
            "offloaded; use more GPUs or a smaller dtype, or device cpu"
        )
    return model.eval(), tuple(ignored)


def load_tokenizer(
    checkpoint: Checkpoint, *, trust_remote_code: bool, needed: bool
) -> tuple[PreTrainedTokenizerBase | None, str | None]:
    """Load the tokenizer of a checkpoint.

    Returns:
        The tokenizer, or None and the reason why there is none.

    Raises:
        ConfigError: There is none although it is needed.
    """
    present = [name for name in _TOKENIZER_FILES if (checkpoint.directory / name).exists()]
    has_code = trust_remote_code and any(checkpoint.directory.glob("tokeniz*.py"))
    reason: str
    if not present and not has_code:
        reason = f"{checkpoint.source} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})"
    else:
        try:
            found = cast(Any, AutoTokenizer).from_pretrained(
                checkpoint.directory, local_files_only=True, trust_remote_code=trust_remote_code
            )
            return cast(PreTrainedTokenizerBase, found), None
        except Exception as error:  # tokenizers raise bare Exception for a damaged file
            reason = f"the tokenizer of {checkpoint.source} cannot be loaded: {_one_line(error)}"
    if needed:
        raise ConfigError(f"{reason}; add the tokenizer's files, or give the data as token ids")
    return None, reason


def _check_vocabulary(
    checkpoint: Checkpoint, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    if tokenizer is None:
        return
    rows = int(cast(Tensor, model.get_input_embeddings().weight).shape[0])
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise ConfigError(
            f"tokenizer and model of {checkpoint.source} do not belong together: the tokenizer "
            f"({type(tokenizer).__name__}) has token ids up to {largest}, the model ({type(model).__name__}) has an "
            f"embedding of {rows} rows; use the tokenizer that the model was trained with"
        )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
