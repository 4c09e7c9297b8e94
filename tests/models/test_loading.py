"""Loading: what is loaded is what was saved, and every bad input is refused with a message that names it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from replayeval.errors import ConfigError
from replayeval.models.head import OutputHead, check_head
from replayeval.models.loading import load_model, parse_device, parse_dtype
from tests.models import tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("mamba2", tmp_path_factory.mktemp("models") / "tiny-mamba2")


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint that the test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_architecture_loads_with_all_its_weights(name: str, tmp_path: Path) -> None:
    loaded = load_model(str(tiny.save(name, tmp_path / name)))
    expected = tiny.build(name)
    assert type(loaded.model) is type(expected)
    assert not loaded.model.training
    got, wanted = loaded.model.state_dict(), expected.state_dict()
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[key], wanted[key]) for key in wanted)
    assert loaded.tokenizer is not None
    text = "Ask Gopoze: 8394."
    assert loaded.tokenizer.decode(loaded.tokenizer(text)["input_ids"]) == text
    assert (loaded.dtype, loaded.device, loaded.revision) == (torch.float32, torch.device("cpu"), None)
    assert loaded.layers
    check_head(OutputHead(loaded.model))


def test_dtype_and_fingerprint(copy: Path) -> None:
    first = load_model(str(copy))
    assert load_model(str(copy), dtype="bf16").dtype == torch.bfloat16
    assert load_model(str(copy)).fingerprint == first.fingerprint
    tensors = load_file(copy / "model.safetensors")
    key = sorted(tensors)[0]
    tensors[key] = tensors[key] + 1.0
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert load_model(str(copy)).fingerprint != first.fingerprint


def test_loading_is_silent_and_leaves_the_settings_of_transformers(
    saved: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        load_model(str(saved))
        assert logging.get_verbosity() == 20
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def without(*names: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        for name in names:
            (path / name).unlink()

    return damage


def with_config(**changes: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **changes}))

    return damage


def with_text(name: str, text: str) -> Callable[[Path], None]:
    return lambda path: None if (path / name).write_text(text) else None


def only_pickled(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin")


def cut_off(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def overwritten_header(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:8] + b"x" * 64 + data[72:])


def edit_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    return damage


KEY = "backbone.layers.1.mixer.dt_bias"


def drop_weight(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[KEY]


def add_weight(tensors: dict[str, torch.Tensor]) -> None:
    tensors["backbone.layers.9.mixer.dt_bias"] = torch.zeros(4)


def reshape_weight(tensors: dict[str, torch.Tensor]) -> None:
    tensors[KEY] = torch.zeros(5)


def missing_shard(path: Path) -> None:
    index = {"metadata": {}, "weight_map": {KEY: "model-00002-of-00002.safetensors", "x": "model.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def larger_tokenizer(path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([f"<extra{i}>" for i in range(tiny.VOCABULARY)])
    tokenizer.save_pretrained(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("config.json"), r"expected .*model to hold config\.json, found .*model\.safetensors"),
        (with_text("config.json", '{"model_type": "mamba2",'), r"config\.json is not valid JSON: .* line 1"),
        (with_text("config.json", "[1]"), r"JSON object, got list"),
        (
            with_config(model_type="mamba"),
            r"'mamba' of .* not supported: it has no Mamba-2.*supported: .*kimi_linear",
        ),
        (with_config(model_type=None), r"None of .* not supported"),
        (with_config(num_heads=3), r"config\.json of .* is not usable: .*num_heads"),
        (with_config(architectures=["Mamba2Model"]), r"language model in `architectures`.*Mamba2Model"),
        (with_config(architectures=None), r"language model in `architectures`.*none"),
        (with_config(num_hidden_layers=4), r"missing and would be random.*layers\.3"),
        (with_config(num_hidden_layers=2), r"no place in the model.*layers\.2"),
        (with_config(vocab_size=301), r"another shape \(.*\(300, 32\) saved, \(301, 32\) expected"),
        (without("model.safetensors"), r"weights \(\*\.safetensors\) beside config\.json, found none"),
        (only_pickled, r"safetensors, found only pytorch_model\.bin.*run code"),
        (cut_off, r"damaged or cut off: model\.safetensors"),
        (overwritten_header, r"damaged or cut off: model\.safetensors"),
        (with_text("model.safetensors", ""), r"damaged or cut off: model\.safetensors"),
        (missing_shard, r"incomplete: 1 of 2 weight files .*model-00002-of-00002"),
        (with_text("model.safetensors.index.json", "{}"), r"weight_map, found none"),
        (edit_weights(drop_weight), rf"1 weights are missing and would be random \({KEY}\)"),
        (edit_weights(add_weight), r"1 weights have no place in the model \(backbone\.layers\.9"),
        (edit_weights(reshape_weight), rf"another shape \({KEY}: \(5,\) saved, \(4,\) expected\)"),
        (without("tokenizer.json"), r"has no tokenizer .*give the data as token ids"),
        (with_text("tokenizer.json", "{"), r"tokenizer of .* cannot be loaded"),
        (larger_tokenizer, r"do not belong together.*ids up to 5\d\d.*Mamba2ForCausalLM.*300 rows"),
    ],
)
def test_bad_checkpoints_are_refused(copy: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(copy)
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(str(copy))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_missing_tokenizer_is_no_error_for_token_ids(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    loaded = load_model(str(copy), need_tokenizer=False)
    assert loaded.tokenizer is None
    assert loaded.tokenizer_reason is not None and "has no tokenizer" in loaded.tokenizer_reason


def test_weights_without_a_place_can_be_accepted_and_are_recorded(copy: Path) -> None:
    edit_weights(add_weight)(copy)
    assert load_model(str(copy), allow_unexpected=True).ignored_keys == ("backbone.layers.9.mixer.dt_bias",)


def test_heads_for_multi_token_prediction_are_no_error(copy: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["mtp.layers.0.weight"] = torch.zeros(4)

    edit_weights(add)(copy)
    assert load_model(str(copy)).model_type == "mamba2"


def test_a_missing_directory_names_near_ones(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; did you mean tiny-mamba2\?"):
        load_model(str(saved.parent / "tiny-mamba"))
    with pytest.raises(ConfigError, match="neither does"):
        load_model(str(saved.parent / "nowhere" / "tiny-mamba"))
    with pytest.raises(ConfigError, match="got the file"):
        load_model(str(saved / "config.json"))
    with pytest.raises(ConfigError, match="empty name"):
        load_model(" ")
    with pytest.raises(ConfigError, match="not on the hub"):
        load_model(str(saved), revision="main")
    monkeypatch.chdir(saved.parent)
    with pytest.raises(ConfigError, match=r"\./tiny-mamba does not exist; did you mean"):
        load_model("./tiny-mamba")


def test_a_hub_id_that_cannot_be_reached_is_told_from_a_missing_directory(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    monkeypatch.chdir(saved.parent)
    with pytest.raises(ConfigError, match=r"some-org/some-model .*hub cache.*cannot be reached.*no route to host"):
        load_model("some-org/some-model")
    with pytest.raises(ConfigError, match=r"did you mean tiny-mamba2.*cannot be reached"):
        load_model("tiny-mamba")


def test_an_unknown_builtin_model_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="gdn, mamba2"):
        load_model("builtin:gdm")


@pytest.mark.parametrize(
    ("text", "dtype"), [(None, None), ("auto", None), ("BF16", torch.bfloat16), ("torch.float32", torch.float32)]
)
def test_dtypes(text: str | None, dtype: torch.dtype | None) -> None:
    assert parse_dtype(text) is dtype


def test_bad_dtypes_and_devices_are_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'bfloat1'.*did you mean .*bfloat16"):
        load_model("nowhere", dtype="bfloat1")
    with pytest.raises(ConfigError, match="expected device auto, cpu, cuda or cuda:N, got 'gpu'"):
        load_model("nowhere", device="gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA GPU"):
        load_model("nowhere", device="cuda")
    assert parse_device(None) == {"": "cpu"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="only 2 GPUs, cuda:0 to cuda:1"):
        load_model("nowhere", device="cuda:2")
    assert parse_device("cuda:1") == {"": "cuda:1"}
    assert parse_device("auto") == "auto"
