"""Resolve what a user calls a model to a directory with its files."""

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from replayeval.errors import ConfigError
from replayeval.models.builtin.catalog import builtin_path

BUILTIN_PREFIX = "builtin:"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py"]
_HUB_TIMEOUT_SECONDS = 20


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model on disk.

    Attributes:
        source: What the user called it.
        directory: Where its files are.
        revision: Commit of the hub repository, or `None` for files that have none.
    """

    source: str
    directory: Path
    revision: str | None


def resolve(source: str, revision: str | None = None, *, weights: bool = True) -> Checkpoint:
    """Find the files of `builtin:NAME`, of a local directory, or of a hub repository (downloading what is needed).

    Args:
        source: What the user called the model.
        revision: Branch, tag or commit of a hub repository.
        weights: Download the weights of a hub repository too.

    Raises:
        ConfigError: If there is no such model, it cannot be reached, or a revision is asked of files that have none.
    """
    if not source.strip():
        raise ConfigError("expected a model: a hub id, a local directory or builtin:NAME, got an empty name")
    if source.startswith(BUILTIN_PREFIX):
        _no_revision(source, revision)
        directory = builtin_path(source.removeprefix(BUILTIN_PREFIX))
        return Checkpoint(source=source, directory=directory, revision=None)
    path = Path(source).expanduser()
    if path.is_dir():
        _no_revision(source, revision)
        return Checkpoint(source=source, directory=path, revision=None)
    if path.exists():
        raise ConfigError(f"expected a model directory, got the file {source}; give the directory that holds it")
    if not _HUB_ID.fullmatch(source) or source.startswith("."):
        raise ConfigError(f"model directory {source} does not exist{_near_directories(path)}")
    return _from_hub(source, revision, path, weights=weights)


def suggestion(word: str, known: Iterable[str]) -> str:
    """A hint that names the known words nearest to `word`, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _no_revision(source: str, revision: str | None) -> None:
    if revision is not None:
        raise ConfigError(f"revision {revision} was given, but {source} is not on the hub; leave the revision out")


def _near_directories(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f"; neither does {parent}"
    return suggestion(path.name, (p.name for p in parent.iterdir() if p.is_dir())) or f" in {parent.resolve()}"


def _from_hub(source: str, revision: str | None, path: Path, *, weights: bool) -> Checkpoint:
    try:
        info = huggingface_hub.HfApi().model_info(source, revision=revision, timeout=_HUB_TIMEOUT_SECONDS)
    except GatedRepoError as error:
        raise ConfigError(f"access to {source} on the hub needs to be granted; log in with `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"model {source} has no revision {revision} on the hub; check the name") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"{source} is neither a local directory{_near_directories(path) if path.parent.is_dir() else ''} nor a "
            "model on the hub; check the name, and log in with `hf auth login` if it is private"
        ) from error
    except HfHubHTTPError as error:
        raise ConfigError(f"the hub did not answer for {source}: {error}; try again later") from error
    except Exception as error:  # no connection: the error types are those of the client's transport
        try:
            directory = _download(source, revision, weights=weights, local_files_only=True)
        except OSError:
            raise ConfigError(
                f"{source} is not a local directory{_near_directories(path) if path.parent.is_dir() else ''}, is not "
                f"in the local hub cache, and the hub cannot be reached ({type(error).__name__}: {error}); check the "
                "name, or the connection"
            ) from None
        return Checkpoint(source=source, directory=directory, revision=directory.name)
    check_file_names(source, [s.rfilename for s in info.siblings or []])
    try:
        directory = _download(source, info.sha, weights=weights)
    except Exception as error:  # the transport's errors, or those of the disk
        raise ConfigError(
            f"the files of {source} could not be downloaded: {error}; check the connection and the free space"
        ) from error
    return Checkpoint(source=source, directory=directory, revision=info.sha)


def _download(source: str, revision: str | None, *, weights: bool, local_files_only: bool = False) -> Path:
    download = cast(Any, huggingface_hub).snapshot_download  # its types are not complete
    directory: str = download(
        source,
        revision=revision,
        allow_patterns=_FILES if weights else [x for x in _FILES if x != "*.safetensors"],
        # Files in subfolders are other exports of the same weights.
        ignore_patterns=["*/*", "consolidated*"],
        local_files_only=local_files_only,
    )
    return Path(directory)


def check_file_names(source: str, names: Iterable[str]) -> None:
    """Check that a model has a configuration and weights in the safetensors format.

    Raises:
        ConfigError: Naming what is missing.
    """
    top = {name for name in names if "/" not in name}
    if "config.json" not in top:
        found = ", ".join(sorted(top)[:8]) or "nothing"
        raise ConfigError(f"expected {source} to hold config.json, found {found}; give the directory of a model")
    if any(name.endswith(".safetensors") for name in top) or "model.safetensors.index.json" in top:
        return
    pickled = sorted(name for name in top if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
    if pickled:
        raise ConfigError(
            f"expected {source} to hold weights as safetensors, found only {', '.join(pickled[:3])}; pickled weights "
            "are not loaded because they can run code; convert them with `save_pretrained`"
        )
    raise ConfigError(f"expected {source} to hold weights (*.safetensors) beside config.json, found none")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConfigError: If the file is not valid JSON or holds something else than an object.
    """
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"expected {path} to hold a JSON object, got {type(value).__name__}")
    return cast(dict[str, Any], value)
