"""Provenance and digests of weights."""

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from replayeval.errors import ConfigError
from replayeval.store import provenance, weights_sha256
from replayeval.store.identity import fingerprint
from replayeval.store.provenance import git_state


def test_fields() -> None:
    started = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    values = provenance(device="NVIDIA H200", given={"seed": 1}, defaulted={"window": 16}, started=started)
    assert values["device"] == "NVIDIA H200"
    assert values["started"] == "2026-01-02T03:04:05+00:00"
    assert values["arguments"] == {"given": {"seed": 1}, "defaulted": {"window": 16}}
    assert values["versions"]["numpy"] and "torch" in values["versions"]
    json.dumps(values, allow_nan=False)


def test_absent_package_is_none() -> None:
    assert provenance(device="cpu", packages=("no-such-distribution",))["versions"] == {"no-such-distribution": None}


def _git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    done = subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, capture_output=True, text=True)
    return done.stdout


def test_git_state(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-q")
    package = tmp_path / "package"
    package.mkdir()
    (package / "other.py").write_text("x")
    (package / "provenance.py").write_text("x")
    _git(tmp_path, "add", "package/other.py")
    _git(tmp_path, "commit", "-q", "-m", "x")
    # Installed into an environment inside somebody's repository: its commit says nothing about this package.
    assert git_state(package) is None
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-q", "-m", "y")
    assert git_state(package) == {"commit": _git(tmp_path, "rev-parse", "HEAD").strip(), "dirty": False}
    (package / "other.py").write_text("y")
    state = git_state(package)
    assert state is not None and state["dirty"] is True


def test_no_git_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None


def test_weights_digest_follows_names_and_contents(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found none"):
        weights_sha256(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"1")
    first = weights_sha256(tmp_path)
    (tmp_path / "README.md").write_text("says nothing about numbers")
    assert weights_sha256(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"2")
    second = weights_sha256(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert len({first, second, weights_sha256(tmp_path)}) == 3


def test_fingerprint_ignores_order_and_refuses_nan() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    with pytest.raises(ConfigError, match="finite JSON"):
        fingerprint({"a": float("nan")})
