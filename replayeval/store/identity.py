"""What decides the numbers of a run, and the fingerprint over it."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from replayeval.errors import ConfigError

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".json")


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """Everything that changes the numbers of a run; two runs of equal identity may share a directory.

    The chunk length and the device are left out: they regroup the same computation. They belong in the provenance.

    Attributes:
        kind: What was measured, for example "kl".
        model: Source of the model as given: hub id, directory or "builtin:NAME".
        revision: Commit of the model on its hub, or None for local weights.
        weights_sha256: Digest of local weights (see `weights_sha256`), or None where `revision` pins them.
        reference: Canonical policy text of the reference.
        arms: Canonical policy texts.
        data: Source of the documents as given.
        documents: Identities of the documents' token ids, in order.
        lengths: Generation lengths reported, in tokens.
        prefill_tokens: Prompt tokens that precede decoding.
        seed: Seed of stochastic rounding and of the bootstrap.
        engine: "chunk" or "step".
        dtype: Type that the model computes in.
        window_tokens: Replay window.
        extra: Whatever else changes numbers, such as the version of the numerical core.
    """

    kind: str
    model: str
    revision: str | None
    weights_sha256: str | None
    reference: str
    arms: tuple[str, ...]
    data: str
    documents: tuple[str, ...]
    lengths: tuple[int, ...]
    prefill_tokens: int
    seed: int
    engine: str
    dtype: str
    window_tokens: int
    extra: Mapping[str, str | int | float | bool | None] = field(
        default_factory=dict[str, str | int | float | bool | None]
    )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return cast(dict[str, Any], json.loads(_canonical(asdict(self))))

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all fields, in hexadecimal."""
        return fingerprint(self.to_json())


def fingerprint(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values, independent of the order of their keys.

    Raises:
        ConfigError: A value is not JSON, or is a NaN or an infinity, which no JSON can hold.
    """
    return hashlib.sha256(_canonical(values).encode()).hexdigest()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line for each value that differs: its name, the value before and the value now."""
    flat_before, flat_now = dict(_flat(before)), dict(_flat(now))
    lines: list[str] = []
    for name in [*flat_before, *(name for name in flat_now if name not in flat_before)]:
        old, new = flat_before.get(name, "absent"), flat_now.get(name, "absent")
        if old != new:
            lines.append(f"{name}: {_contrast(old, new)}")
    return lines


def weights_sha256(directory: Path) -> str:
    """Return a digest of a local model: the names and contents of its weight and configuration files.

    Raises:
        ConfigError: The directory holds no such file.
    """
    files = sorted(path for path in directory.iterdir() if path.suffix in _WEIGHT_SUFFIXES and path.is_file())
    if not files:
        raise ConfigError(f"expected model files ({', '.join(_WEIGHT_SUFFIXES)}) in {directory}, found none")
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as stream:
            total.update(f"{path.name}\0{hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def _canonical(values: Any) -> str:
    try:
        return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a run's arguments must be finite JSON values: {error}") from error


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(cast(Mapping[str, Any], value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _contrast(old: Any, new: Any) -> str:
    before, now = (value if value == "absent" else json.dumps(value) for value in (old, new))
    if len(before) + len(now) <= 240:
        return f"{before} in the directory, {now} now"
    if isinstance(old, list) and isinstance(new, list):
        before_entries, now_entries = cast(list[Any], old), cast(list[Any], new)
        same = sum(a == b for a, b in zip(before_entries, now_entries, strict=False))
        return f"{len(before_entries)} in the directory, {len(now_entries)} now, of which {same} are the same"
    return f"{before[:100]}… in the directory, {now[:100]}… now"
