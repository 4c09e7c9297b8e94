"""Check the files of a checkpoint before anything is loaded from them."""

import hashlib
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from replayeval.errors import ConfigError
from replayeval.models.architectures import supported_model_types
from replayeval.models.sources import Checkpoint, check_file_names, read_json

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SAMPLE_BYTES = 1 << 20


def check_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read and check `config.json`.

    Returns:
        Its content.

    Raises:
        ConfigError: If it is missing, not valid, or of a model type that is not supported.
    """
    names = [p.name for p in checkpoint.directory.iterdir()]
    check_file_names(checkpoint.source, names)
    return check_model_type(checkpoint)


def check_model_type(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read `config.json` and check that its architecture is known here.

    Returns:
        Its content.

    Raises:
        ConfigError: If it is not valid, or of a model type that is not supported.
    """
    config = read_json(checkpoint.directory / "config.json")
    model_type = config.get("model_type")
    supported = supported_model_types()
    if model_type not in supported:
        raise ConfigError(
            f"model type {model_type!r} of {checkpoint.source} is not supported: it has no Mamba-2, Gated DeltaNet or "
            f"Kimi Delta Attention layers that are known here; supported: {', '.join(supported)}"
        )
    return config


def weight_files(checkpoint: Checkpoint) -> list[Path]:
    """The safetensors files that hold the weights, each with a readable header and its full length.

    Raises:
        ConfigError: If files are missing, cut off or damaged; all that are bad are named.
    """
    directory = checkpoint.directory
    index = directory / _INDEX
    if index.exists():
        table: object = read_json(index).get("weight_map")
        if not isinstance(table, dict) or not table:
            raise ConfigError(f"expected {index} to hold a weight_map, found none")
        files = [directory / name for name in sorted({str(x) for x in cast(dict[str, object], table).values()})]
        missing = [path.name for path in files if not path.exists()]
        if missing:
            raise ConfigError(
                f"{checkpoint.source} is incomplete: {len(missing)} of {len(files)} weight files named by {_INDEX} "
                f"are missing: {', '.join(missing[:5])}; download it again"
            )
    else:
        files = [directory / _SINGLE]
        if not files[0].exists():
            found = ", ".join(sorted(p.name for p in directory.glob("*.safetensors"))[:5])
            raise ConfigError(f"expected {checkpoint.source} to hold {_SINGLE} or {_INDEX}, found {found}")
    damaged: list[str] = []
    for path in files:
        try:
            with cast(Any, safe_open)(str(path), framework="np") as opened:
                if not list(cast(list[str], opened.keys())):
                    damaged.append(f"{path.name} (holds no tensors)")
        except (SafetensorError, OSError) as error:
            damaged.append(f"{path.name} ({error})")
    if damaged:
        raise ConfigError(
            f"weights of {checkpoint.source} are damaged or cut off: {'; '.join(damaged)}; download or save them again"
        )
    return files


def fingerprint(checkpoint: Checkpoint, files: list[Path]) -> str:
    """A hash that changes when the configuration or the weights do.

    Small files are read whole. Of each weight file it takes the name, the length, and a mebibyte at the start, the
    middle and the end; the start holds the table of tensors.
    """
    digest = hashlib.sha256()
    digest.update((checkpoint.directory / "config.json").read_bytes())
    for path in files:
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as opened:
            for start in (0, max(size // 2 - _SAMPLE_BYTES // 2, 0), max(size - _SAMPLE_BYTES, 0)):
                opened.seek(start)
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()
