"""Names of the built-in models and where their directories are."""

import difflib
from pathlib import Path

from replayeval.errors import ConfigError

BUILTIN_MODELS: tuple[str, ...] = ("gdn", "mamba2")


def builtin_path(name: str) -> Path:
    """Return the directory of a built-in model, in Hugging Face format.

    Args:
        name: One of `BUILTIN_MODELS`.

    Returns:
        The directory with config, weights and tokenizer.

    Raises:
        ConfigError: For an unknown name, or an installation without the weights.
    """
    if name not in BUILTIN_MODELS:
        close = difflib.get_close_matches(name, BUILTIN_MODELS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"expected a built-in model out of {', '.join(BUILTIN_MODELS)}, got {name!r}{hint}")
    directory = Path(__file__).parent / "weights" / name
    if not (directory / "model.safetensors").is_file():
        raise ConfigError(
            f"expected the weights of builtin:{name} in {directory}, found none: reinstall replayeval with its "
            f"package data, or train them with `python -m replayeval.models.builtin.train`"
        )
    return directory
