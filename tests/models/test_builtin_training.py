"""How the built-in models are trained: configurations, batches, runs and cards."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from replayeval.errors import ConfigError
from replayeval.models.builtin.batches import training_batch
from replayeval.models.builtin.catalog import BUILTIN_MODELS, builtin_path
from replayeval.models.builtin.config import load_config, parse_config
from replayeval.models.builtin.export import training_runs
from replayeval.models.builtin.text import English, held_out_english
from replayeval.models.builtin.train import build_model, main

CONFIGS = Path(__file__).parents[2] / "replayeval" / "models" / "builtin" / "configs"
TINY: dict[str, dict[str, Any]] = {
    "gdn": {"hidden_size": 32, "intermediate_size": 32, "layers": 2, "d_k": 8, "d_v": 8, "attention_head_dim": 16},
    "mamba2": {"hidden_size": 32, "intermediate_size": 32, "mamba_blocks": 1, "head_dim": 8, "d_state": 8},
}


def _tiny_config(path: Path, architecture: str) -> Path:
    config = {
        "architecture": architecture,
        "shape": TINY[architecture],
        "seed": 3,
        "stages": [{"tokens": 128, "rows": 2, "steps": 1}, {"tokens": 192, "rows": 1, "steps": 1}],
        "compile": False,
        "workers": 0,
        "log_every": 1,
        "warmup_steps": 1,
    }
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.fixture
def _small_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train on the packaged English, so that the test needs no other package."""
    english: English = held_out_english()
    monkeypatch.setattr("replayeval.models.builtin.batches.training_english", lambda: english)


@pytest.mark.usefixtures("_small_text")
@pytest.mark.parametrize("architecture", BUILTIN_MODELS)
def test_training_is_reproducible_and_resumes(tmp_path: Path, architecture: str) -> None:
    config = _tiny_config(tmp_path / "config.json", architecture)
    common = ["--config", str(config), "--device", "cpu", "--final-docs", "128:2"]
    main([*common, "--out", str(tmp_path / "a")])
    main([*common, "--out", str(tmp_path / "b"), "--max-seconds", "0"])
    interrupted = (tmp_path / "b" / "model" / "model.safetensors").read_bytes()
    assert [run["last_step"] for run in training_runs(tmp_path / "b" / "model")] == [1]
    assert "256 tokens in 1 steps" in (tmp_path / "b" / "model" / "README.md").read_text(encoding="utf-8")
    main([*common, "--out", str(tmp_path / "b"), "--resume"])
    weights = (tmp_path / "a" / "model" / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "b" / "model" / "model.safetensors").read_bytes()
    assert weights != interrupted
    assert "bits/byte" in (tmp_path / "a" / "model" / "README.md").read_text(encoding="utf-8")
    AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "model")


@pytest.mark.usefixtures("_small_text")
def test_a_card_names_the_runs_that_came_before(tmp_path: Path) -> None:
    config = json.loads(_tiny_config(tmp_path / "config.json", "gdn").read_text(encoding="utf-8"))
    config |= {"stages": config["stages"][:1], "initial_weights": str(tmp_path / "a" / "model")}
    (tmp_path / "more.json").write_text(json.dumps(config), encoding="utf-8")
    for name, out in (("config", "a"), ("more", "b")):
        common = ["--device", "cpu", "--final-docs", "128:2", "--out", str(tmp_path / out)]
        main(["--config", str(tmp_path / f"{name}.json"), *common])
    assert [len(run["stages"]) for run in training_runs(tmp_path / "b" / "model")] == [2, 1]
    card = (tmp_path / "b" / "model" / "README.md").read_text(encoding="utf-8")
    assert card.index("448 tokens in 2 steps") < card.index("256 tokens in 1 steps")


@pytest.mark.parametrize("architecture", BUILTIN_MODELS)
def test_shipped_weights_came_from_the_packaged_configurations(architecture: str) -> None:
    runs = training_runs(builtin_path(architecture))
    packaged = [load_config(CONFIGS / f"{architecture}{suffix}.json") for suffix in ("", "-adapt")]
    assert [parse_config(run, CONFIGS) for run in runs] == packaged


@pytest.mark.parametrize("architecture", BUILTIN_MODELS)
def test_packaged_configurations_build_their_models(architecture: str) -> None:
    config = load_config(CONFIGS / f"{architecture}.json")
    assert config.stages[-1].tokens == 8192
    assert sum(parameter.numel() for parameter in build_model(config).parameters()) * 2 < 12_000_000


def test_unknown_configuration_keys_are_refused(tmp_path: Path) -> None:
    path = _tiny_config(tmp_path / "config.json", "gdn")
    path.write_text(path.read_text(encoding="utf-8").replace("warmup_steps", "warm_up"), encoding="utf-8")
    with pytest.raises(ConfigError, match="warm_up"):
        load_config(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": -1}, "seed has to be"),
        ({"seed": "x"}, "seed has to be"),
        ({"rate": "fast"}, "rate has to be"),
        ({"english_share": 1.5}, "english_share has to be"),
        ({"log_every": 0}, "log_every has to be"),
        ({"last_step": 0}, "last_step has to be"),
        ({"stages": []}, "stages is empty"),
        ({"stages": [{"tokens": 0, "rows": 1, "steps": 1}]}, "tokens, rows and steps"),
        ({"stages": [{"tokens": 8}]}, "rows"),
        ({"architecture": "kda"}, "kda"),
    ],
)
def test_unusable_configurations_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = _tiny_config(tmp_path / "config.json", "gdn")
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_configuration_that_is_no_object_or_lacks_a_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match="JSON object"):
        load_config(path)
    path.write_text('{"architecture": "gdn", "shape": {}, "seed": 1}', encoding="utf-8")
    with pytest.raises(ConfigError, match="'stages' is missing"):
        load_config(path)


def test_a_shape_that_cannot_be_built_is_refused(tmp_path: Path) -> None:
    config = load_config(_tiny_config(tmp_path / "config.json", "gdn"))
    with pytest.raises(ConfigError, match="unusable shape"):
        build_model(dataclasses.replace(config, shape={"layers": "many"}))


@pytest.mark.parametrize(
    ("script", "arguments"), [("train", ["--config", "missing.json", "--out", "out"]), ("measure", ["missing"])]
)
def test_scripts_end_on_bad_input_with_one_message(tmp_path: Path, script: str, arguments: list[str]) -> None:
    command = [sys.executable, "-m", f"replayeval.models.builtin.{script}", *arguments]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith(f"{script}: error: expected")
    assert "missing" in run.stderr and "Traceback" not in run.stderr


def test_batches_mark_answers(tmp_path: Path) -> None:
    config = load_config(_tiny_config(tmp_path / "config.json", "gdn"))
    first = training_batch(config, 0, held_out_english())
    assert first.ids.shape == first.is_answer.shape == (2, 128)
    assert np.array_equal(first.ids, training_batch(config, 0, held_out_english()).ids)
    assert not np.array_equal(first.ids[0], training_batch(config, 1, held_out_english()).ids[0, :128])
