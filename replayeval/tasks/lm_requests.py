"""What lm-eval asks of a generation, understood in full or refused."""

# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from replayeval.engine.generation_sampling import Sampling
from replayeval.errors import ConfigError

__all__ = ["GenerationRecord", "Wanted", "check_kinds", "occurrences", "prompt_hash", "stream", "wanted"]

# What transformers would do to the logits, and the value at which it does nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": (),
    "watermarking_config": (),
    "assistant_early_exit": (),
    "prompt_lookup_num_tokens": (),
}
# Settings of beam search, and of a cache that is always used.
_HARMLESS = ("early_stopping", "length_penalty", "use_cache")
_KNOWN = ("until", "do_sample", "temperature", "top_k", "top_p", "max_gen_toks")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How one request is to be answered.

    Attributes:
        until: Stop strings, the text of the end-of-text token among them.
        max_tokens: Most tokens to generate.
        sampling: How tokens are drawn.
    """

    until: tuple[str, ...]
    max_tokens: int
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class GenerationRecord:
    """How one answer came about.

    Attributes:
        output_tokens: Generated token ids, the one that ended the text included.
        truncated: Whether the answer spent all its tokens, so that it may be cut off.
        finish: Why it ended: `eos`, `stop`, `length` or `diverged`.
        prompt_tokens: Number of tokens of the prompt.
        seed: Seed of the run.
        sequence: Number that addresses the random bits of this answer, made of prompt and repeat.
        sampling: Temperature, top-k and top-p.
    """

    output_tokens: tuple[int, ...]
    truncated: bool
    finish: str
    prompt_tokens: int
    seed: int
    sequence: int
    sampling: Sampling


def prompt_hash(text: str) -> str:
    """SHA-256 of a prompt in UTF-8, as lm-eval's samples have it."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def stream(*parts: object) -> int:
    """A number below 2**32 that depends on all parts: the address of the random bits of one answer."""
    digest = hashlib.sha256("\x00".join(str(part) for part in parts).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:4], "little")


def wanted(asked: Mapping[str, Any], *, model: Mapping[str, Any], eos: str, default_tokens: int) -> Wanted:
    """Read the generation arguments of a request.

    Args:
        asked: From the task, or from `--gen_kwargs`.
        model: What the model's own generation configuration sets; used where the request says nothing.
        eos: Text of the token that ends a text.
        default_tokens: Most tokens where the request says nothing.

    Raises:
        ConfigError: For arguments that would change the answer and are not supported, and for values out of range.
    """
    check_kinds(asked)
    try:
        values: dict[str, Any] = dict(cast(Mapping[str, Any], normalize_gen_kwargs(dict(asked), default_tokens)))
        until: list[Any] = cast(list[Any], handle_stop_sequences(copy.copy(values["until"]), eos=eos))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"generation arguments {dict(asked)}: {error}") from error
    if not all(isinstance(text, str) for text in until):
        raise ConfigError(f"generation arguments: expected stop strings in `until`, got {until}")
    unsupported = [
        f"{name}={value!r}" for name, value in values.items() if name not in _KNOWN and not _is_neutral(name, value)
    ]
    inherited = {
        name: value
        for name, value in model.items()
        if name in _NEUTRAL and name not in values and not _is_neutral(name, value)
    }
    if unsupported:
        raise ConfigError(
            f"generation arguments: expected {', '.join(_KNOWN)}, got {', '.join(sorted(unsupported))}, which this "
            "engine does not apply; leave them out"
        )
    if inherited:
        off = ",".join(f"{name}={_NEUTRAL[name][0] if _NEUTRAL[name] else None}" for name in inherited)
        raise ConfigError(
            f"the generation configuration of this model asks for {inherited}, which this engine does not apply; go "
            f"without by --gen_kwargs {off}"
        )
    return Wanted(until=tuple(until), max_tokens=_whole(values, "max_gen_toks"), sampling=_sampling(values, model))


def check_kinds(settings: Mapping[str, Any]) -> None:
    """Refuse generation settings of the wrong kind: a text such as `off` would count as true.

    Raises:
        ConfigError: Naming all of them.
    """
    kinds = {"do_sample": "true or false", "temperature": "a number", "top_p": "a number", "top_k": "a whole number"}
    wrong: list[str] = []
    for name, kind in kinds.items():
        value = settings.get(name)
        flag = isinstance(value, bool)
        fits = {
            "true or false": flag,
            "a number": isinstance(value, int | float) and not flag,
            "a whole number": isinstance(value, int) and not flag,
        }[kind]
        if value is not None and not fits:
            wrong.append(f"{name}={value!r} ({kind})")
    if wrong:
        raise ConfigError(f"generation arguments: expected other kinds of values, got {', '.join(wrong)}")


def _is_neutral(name: str, value: Any) -> bool:
    return name in _HARMLESS or (name in _NEUTRAL and (value is None or value in _NEUTRAL[name]))


def _sampling(values: Mapping[str, Any], model: Mapping[str, Any]) -> Sampling:
    if not values["do_sample"]:
        return Sampling()
    temperature = values.get("temperature", model.get("temperature"))
    sampling = {
        "temperature": 1.0 if temperature is None else temperature,
        "top_k": values.get("top_k", model.get("top_k")) or 0,
        "top_p": values.get("top_p", model.get("top_p")) or 1.0,
    }
    try:
        found = Sampling(
            temperature=float(sampling["temperature"]), top_k=int(sampling["top_k"]), top_p=float(sampling["top_p"])
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"generation arguments {sampling}: {error}") from error
    if found.greedy:
        raise ConfigError("generation arguments: expected a temperature above 0 with do_sample=True, got 0")
    return found


def _whole(values: Mapping[str, Any], name: str) -> int:
    if values[name] < 1:
        raise ConfigError(f"generation arguments: expected {name} of at least 1, got {values[name]}")
    return int(values[name])


def occurrences(keys: Sequence[str]) -> list[int]:
    """How often each key occurred before, in order: the repeat index of each prompt."""
    seen: dict[str, int] = {}
    found: list[int] = []
    for key in keys:
        found.append(seen.get(key, 0))
        seen[key] = found[-1] + 1
    return found
