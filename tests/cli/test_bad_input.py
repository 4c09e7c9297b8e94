"""Input that cannot be used: exit code 2, one message that says what to do, no traceback."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from replayeval.cli import main
from tests.models import tiny

Captured = pytest.CaptureFixture[str]
Words = list[str]


class Place:
    """A folder with a tiny model, a text, and whatever else a case needs."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.text = self.write("text.txt", b"the quick brown fox jumps over the lazy dog. " * 20)

    def write(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        return path

    def copy_of_model(self) -> Path:
        return Path(shutil.copytree(self.model, self.folder / "model"))

    def kl(self, *words: str, model: Path | str | None = None, data: Path | str | None = None) -> Words:
        lengths = [] if "--lengths" in words else ["--lengths", "32"]
        arms = [] if {"--arm", "--precision"} & set(words) else ["--arm", "shared:fp8"]
        return ["kl", "--model", str(model or self.model), "--data", str(data or self.text), *lengths, *arms, *words]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("qwen3_5", tmp_path_factory.mktemp("model"))


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Place:
    return Place(tmp_path, model)


def run(words: Words, capsys: Captured) -> tuple[int, str, str]:
    code = main(words)
    output = capsys.readouterr()
    return code, output.out, output.err


def without_config(place: Place) -> Words:
    (place.folder / "empty").mkdir()
    return place.kl(model=place.folder / "empty")


def broken_config(place: Place) -> Words:
    folder = place.copy_of_model()
    (folder / "config.json").write_text("{")
    return place.kl(model=folder)


def without_ssm_layer(place: Place) -> Words:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(place.folder / "llama")
    tiny.tokenizer().save_pretrained(place.folder / "llama")
    return place.kl(model=place.folder / "llama")


def corrupted_weights(place: Place) -> Words:
    folder = place.copy_of_model()
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(b"\xff" * 16 + content[16:])
    return place.kl(model=folder)


def truncated_weights(place: Place) -> Words:
    folder = place.copy_of_model()
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    return place.kl(model=folder)


def without_weights(place: Place) -> Words:
    folder = place.copy_of_model()
    (folder / "model.safetensors").unlink()
    return place.kl(model=folder)


def larger_vocabulary(place: Place) -> Words:
    ids = place.folder / "ids.npy"
    np.save(ids, np.array([1, 2, tiny.VOCABULARY + 5] * 20))
    return place.kl(data=ids)


def foreign_directory(place: Place) -> Words:
    (place.folder / "run").mkdir()
    (place.folder / "run" / "thesis.tex").write_text("")
    return place.kl("--out", str(place.folder / "run"))


def file_as_directory(place: Place) -> Words:
    return place.kl("--out", str(place.text))


CASES: list[tuple[str, Callable[[Place], Words], tuple[str, ...]]] = [
    ("unknown model", lambda p: p.kl(model=p.folder / "nowhere"), ("nowhere",)),
    ("unknown built-in", lambda p: p.kl(model="builtin:gdm"), ("gdm", "did you mean 'gdn'", "mamba2")),
    ("no config", without_config, ("config.json",)),
    ("broken config", broken_config, ("config",)),
    ("no SSM layer", without_ssm_layer, ("llama", "supported", "qwen3_5")),
    ("corrupted weights", corrupted_weights, ("safetensors",)),
    ("truncated weights", truncated_weights, ("safetensors",)),
    ("no weights", without_weights, ("weights",)),
    ("unknown format", lambda p: p.kl("--precision", "nvpf4"), ("--precision", "nvpf4", "did you mean 'nvfp4'")),
    ("unknown policy", lambda p: p.kl("--arm", "shred:fp8"), ("--arm", "did you mean `shared`")),
    ("unknown option in brackets", lambda p: p.kl("--arm", "shared:fp8[tyle=3]"), ("--arm", "tyle", "tile")),
    ("policy without format", lambda p: p.kl("--arm", "shared:"), ("--arm", "expected a format")),
    ("reference as arm", lambda p: p.kl("--arm", "conventional:fp32"), ("reference",)),
    ("blocks that do not fit", lambda p: p.kl("--arm", "shared:int8[block=7]"), ("block", "multiple of 7")),
    ("sr in precision", lambda p: p.kl("--precision", "fp8+sr"), ("--precision", "without `+sr`")),
    ("window of its own", lambda p: p.kl("--arm", "shared:fp8@L=129"), ("--arm", "1 to 128")),
    ("window 0", lambda p: p.kl("--window", "0"), ("--window", "1 to 128", "'0'")),
    ("window 129", lambda p: p.kl("--window", "129"), ("--window", "1 to 128")),
    ("window word", lambda p: p.kl("--window", "ten"), ("--window", "whole number", "'ten'")),
    ("length 0", lambda p: p.kl("--lengths", "0"), ("--lengths", "at least 1")),
    ("negative length", lambda p: p.kl("--lengths", "-5"), ("--lengths", "'-5'")),
    ("length word", lambda p: p.kl("--lengths", "1K,long"), ("--lengths", "'long'")),
    ("unreachable length", lambda p: p.kl("--lengths", "32,64K"), ("no document reaches", "64K")),
    ("long prompt", lambda p: p.kl("--prefill", "100K"), ("prompt",)),
    ("docs 0", lambda p: p.kl("--docs", "0"), ("--docs", "from 1")),
    ("chunk 0", lambda p: p.kl("--chunk", "0"), ("--chunk", "at least 1")),
    ("seed", lambda p: p.kl("--seed", "-1"), ("--seed", "from 0")),
    ("engine", lambda p: p.kl("--engine", "stepp"), ("--engine", "Did you mean 'step'")),
    ("dtype", lambda p: p.kl("--dtype", "float8"), ("--dtype", "bfloat16")),
    ("device", lambda p: p.kl("--device", "gpu"), ("--device", "cuda:N")),
    ("missing data", lambda p: p.kl(data=p.folder / "none.txt"), ("none.txt",)),
    ("empty data", lambda p: p.kl(data=p.write("empty.txt", b"")), ("empty",)),
    ("binary data", lambda p: p.kl(data=p.write("noise.txt", bytes(range(256)) * 9)), ("noise.txt", "binary")),
    ("data of unknown kind", lambda p: p.kl(data=p.write("talk.mp3", b"ID3")), ("talk.mp3", ".txt")),
    ("broken JSON lines", lambda p: p.kl(data=p.write("a.jsonl", b'{"text": 1}\n{')), ("a.jsonl",)),
    ("tokens beyond the vocabulary", larger_vocabulary, ("305", "300")),
    ("directory of another program", foreign_directory, ("thesis.tex",)),
    ("file as directory", file_as_directory, ("text.txt",)),
    ("unwritable directory", lambda p: p.kl("--out", "/proc/run"), ("/proc/run",)),
    ("resume without a directory", lambda p: p.kl("--resume"), ("--resume", "--out")),
    ("JSON into a missing folder", lambda p: p.kl("--json", str(p.folder / "no" / "a.json")), ("--json", "not exist")),
    ("plot without a suffix", lambda p: p.kl("--plot", str(p.folder / "figure")), ("--plot", ".png")),
    ("unknown option", lambda p: p.kl("--windw", "3"), ("--windw", "Did you mean --window")),
    ("unknown command", lambda _: ["modls"], ("modls", "Did you mean 'models'")),
    ("escape codes", lambda p: p.kl("--engine", "\x1b[2Jstep"), (r"\x1b[2J",)),
    ("formats", lambda _: ["formats", "np4"], ("nvfp4",)),
    ("shape", lambda _: ["formats", "--shape", "1,2"], ("--shape", "heads,d_v,d_k")),
]


@pytest.mark.parametrize(("name", "case", "words"), CASES, ids=[name for name, _, _ in CASES])
def test_bad_input_is_one_message(
    name: str, case: Callable[[Place], Words], words: tuple[str, ...], place: Place, capsys: Captured
) -> None:
    command = case(place)
    capsys.readouterr()
    code, out, err = run(command, capsys)
    assert code == 2, err
    assert out == ""
    assert err.count("replayeval: error: ") == 1
    assert "Traceback" not in err
    assert "\x1b" not in err
    assert len(err) < 1500
    assert not [word for word in words if word not in err], err


def test_a_device_that_is_not_there(place: Place, capsys: Captured) -> None:
    device, words = ("cuda:99", "only") if torch.cuda.is_available() else ("cuda", "no CUDA GPU")
    code, _, err = run(place.kl("--device", device), capsys)
    assert code == 2
    assert words in err


def test_a_directory_with_another_run_is_refused_and_left_alone(place: Place, capsys: Captured) -> None:
    out = place.folder / "run"
    code, _, err = run(place.kl("--out", str(out)), capsys)
    assert code == 0, err
    before = {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".lock"}
    for more, words in ((["--seed", "1", "--resume"], "seed"), ([], "--resume")):
        code, _, err = run(place.kl("--out", str(out), *more), capsys)
        assert code == 2
        assert words in err
    after = {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before


def test_a_resumed_run_gives_the_same_record(place: Place, capsys: Captured) -> None:
    words = place.kl("--out", str(place.folder / "run"), "--json", "-")
    code, first, err = run(words, capsys)
    assert code == 0, err
    code, second, err = run([*words, "--resume"], capsys)
    assert code == 0, err
    assert json.loads(first)["arms"] == json.loads(second)["arms"]


def test_a_whole_run_passes_its_checks(place: Place, capsys: Captured) -> None:
    code, out, err = run(place.kl("--precision", "fp8", "--lengths", "32,64", "--json", "-"), capsys)
    assert code == 0, err
    record = json.loads(out)
    assert err == ""
    means = {arm["policy"]: arm["kl"]["mean"] for arm in record["arms"]}
    assert len(means) == 5
    assert means["shared:fp32@L=16"] < 1e-6 < means["shared:fp8@L=16"]
    assert record["docs"] == 1
    assert all(check["passed"] for check in record["checks"])
    assert [point["n"] for point in record["arms"][0]["by_length"]] == [32, 64]
