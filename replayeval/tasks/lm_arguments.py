"""Model arguments of `replayssm`: read, checked, and refused where lm-eval's `hf` model would do something else."""

import difflib
import os
from typing import Any

from replayeval.engine.generation_scoring import Context
from replayeval.errors import ConfigError
from replayssm.backend import Execution
from replayssm.policy import Policy

__all__ = ["check_arguments", "context_of", "execution_of", "integer", "policy_of", "rows_of", "split_arguments"]

_KNOWN = ("add_bos_token", "prefix_token_id", "think_end_token", "enable_thinking", "chat_template_args")
_REFUSED = (
    *("subfolder", "max_memory_per_gpu", "max_cpu_memory", "offload_folder", "tp_plan", "peft", "delta", "autogptq"),
    *("gptqmodel", "gguf_file", "softmax_dtype", "mixed_precision_dtype", "truncation", "use_fast_tokenizer"),
)
_OWN = (
    "pretrained",
    "policy",
    "window",
    "seed",
    "context",
    "revision",
    "tokenizer",
    "dtype",
    "device",
    "max_length",
    "state_backend",
)


def split_arguments(text: str) -> list[str]:
    """Split `key=value,key=value` at commas that are not inside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part.strip()]


def policy_of(text: object, window: object) -> Policy:
    """The policy that a text names.

    Raises:
        ConfigError: If it names none, or the window is out of range.
    """
    size = integer("window", window, least=1, most=10**9)
    try:
        return Policy.parse(str(text), default_window=size)
    except ValueError as error:
        raise ConfigError(f"model arguments: {error}") from None


def context_of(text: object) -> Context:
    """What contexts of log-likelihoods count as.

    Raises:
        ConfigError: If the text is neither `prompt` nor `decoded`.
    """
    try:
        return Context(str(text).lower())
    except ValueError:
        raise ConfigError(f"model arguments: expected context=prompt or context=decoded, got {text!r}") from None


def execution_of(text: object) -> Execution:
    """What advances the states.

    Raises:
        ConfigError: If the text names none.
    """
    try:
        return Execution.parse(str(text).lower())
    except ValueError as error:
        raise ConfigError(f"model arguments: state_backend: {error}") from None


def integer(name: str, value: object, *, least: int, most: int) -> int:
    """A whole number within bounds.

    Raises:
        ConfigError: If the value is none.
    """
    try:
        number = int(str(value))
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise ConfigError(f"model arguments: expected {name} from {least} to {most}, got {value!r}")
    return number


def rows_of(batch_size: object, largest: object) -> tuple[int, bool]:
    """Rows side by side, and whether they may be halved where memory does not suffice (`auto`)."""
    if str(batch_size).startswith("auto"):
        return integer("max_batch_size", 64 if largest is None else largest, least=1, most=2**20), True
    return integer("batch_size", 1 if batch_size is None else batch_size, least=1, most=2**20), False


def check_arguments(arguments: dict[str, Any], backend: str) -> dict[str, Any]:
    """The arguments that lm-eval's `hf` model takes for what it still does here.

    Raises:
        ConfigError: For arguments that have no meaning here, instead of ignoring them, and for unknown ones.
    """
    if backend not in ("causal", "default"):
        raise ConfigError(f"model arguments: expected a causal language model, got backend={backend!r}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("expected one process, got WORLD_SIZE above 1; start without `accelerate launch` or torchrun")
    refused = [name for name in arguments if name in _REFUSED and arguments[name] not in (None, False, "")]
    if refused:
        raise ConfigError(
            f"model arguments: {', '.join(refused)} is not supported by the model `replayssm`; leave it out"
        )
    unknown = [name for name in arguments if name not in (*_KNOWN, *_REFUSED)]
    if unknown:
        names = sorted((*_KNOWN, *_OWN))
        near = difflib.get_close_matches(unknown[0], names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
        raise ConfigError(f"model arguments: unknown {', '.join(unknown)}; {hint}")
    return {name: value for name, value in arguments.items() if name in _KNOWN}
