"""`measure_kl` as a whole, on tiny models."""

import io
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from replayeval.errors import ConfigError, NumericsError, ReplayEvalError, StoreError, UnsupportedArmError
from replayeval.measure import measure_kl
from replayeval.report.result import KLResult
from replayeval.store import RunDirectory
from tests.models import tiny

ARMS = ("shared:fp32", "shared:fp8", "shared:fp8+sr", "separate:fp8/fp16+sr@L=5")
LENGTHS = (16, 48)


def documents(count: int = 3, *, tokens: int = 60) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, tokens).tolist() for _ in range(count)]


def measure(model: Any = None, docs: Sequence[Any] | None = None, **kwargs: Any) -> KLResult:
    chosen = {"arms": ARMS, "lengths": LENGTHS, "window": 8, "chunk": 16, **kwargs}
    texts = documents() if docs is None and "data" not in kwargs else docs
    return measure_kl(tiny.shared("qwen3_5") if model is None else model, texts, **chosen)


def numbers(result: KLResult) -> dict[str, Any]:
    """Everything measured, without what it cost and where it ran."""
    return {k: v for k, v in json.loads(result.to_json()).items() if k not in ("timing", "provenance")}


def assert_identical(first: KLResult, second: KLResult) -> None:
    """Bit by bit."""
    assert len(first.scores) == len(second.scores)
    for a, b in zip(first.scores, second.scores, strict=True):
        assert (a.doc_index, a.doc_id, a.arms, a.diverged_at) == (b.doc_index, b.doc_id, b.arms, b.diverged_at)
        for name in ("kl_nats", "nll_nats", "nll_reference_nats", "top1_agrees"):
            assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name
    assert numbers(first) == numbers(second)


@pytest.fixture(scope="module")
def undisturbed() -> KLResult:
    torch.set_num_threads(1)
    return measure()


def test_a_loaded_model_and_token_ids(undisturbed: KLResult) -> None:
    assert [d.doc_index for d in undisturbed.scores] == [0, 1, 2]
    assert undisturbed.scores[0].arms == ("shared:fp32@L=8", "shared:fp8@L=8", "shared:fp8+sr@L=8", ARMS[3])
    # 48 of 60 tokens are read; the 49th is still known as the target of the last.
    for scores in undisturbed.scores:
        assert scores.kl_nats.shape == (4, 48)
        assert np.isfinite(scores.nll_nats).all() and np.isfinite(scores.nll_reference_nats).all()
        assert scores.diverged_at == (None,) * 4
    means = {arm.policy: arm.kl.mean for arm in undisturbed.report.arms}
    pooled = np.concatenate([s.kl_nats for s in undisturbed.scores], axis=1).mean(axis=1)
    assert list(means.values()) == pytest.approx(pooled.tolist(), rel=1e-12)
    assert pooled[0] < 1e-10 < 1e-5 < pooled[1:].min()
    assert undisturbed.passed
    assert [check.passed for check in undisturbed.report.checks] == [True] * 4


def test_likelihoods_are_those_of_the_model_itself(undisturbed: KLResult) -> None:
    model = tiny.shared("qwen3_5")
    for ids, scores in zip(documents(), undisturbed.scores, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids[:48]])).logits[0].double()
        own = -logits.log_softmax(-1)[torch.arange(48), torch.tensor(ids[1:49])]
        # Float32 logits of another kernel: 1e-5 of the largest, on either side.
        limit = 2e-5 * float(logits.abs().max())
        np.testing.assert_allclose(scores.nll_reference_nats, own.numpy(), rtol=0, atol=limit)


def test_two_runs_are_identical(undisturbed: KLResult) -> None:
    assert_identical(measure(), undisturbed)


@pytest.mark.parametrize("change", [{"seed": 1}, {"docs": documents(3, tokens=60)[::-1]}])
def test_the_comparison_of_runs_sees_another_run(undisturbed: KLResult, change: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        assert_identical(measure(**change), undisturbed)


def test_a_directory_gives_what_the_loaded_model_gives(tmp_path: Path, undisturbed: KLResult) -> None:
    saved = tiny.save("qwen3_5", tmp_path / "model")
    result = measure(str(saved), device="cpu")
    for a, b in zip(result.scores, undisturbed.scores, strict=True):
        assert a.kl_nats.tobytes() == b.kl_nats.tobytes()


def test_texts_are_tokenized_with_the_tokenizer_of_the_directory(tmp_path: Path) -> None:
    saved = tiny.save("mamba2", tmp_path / "model")
    text = "The quick brown fox jumps over the lazy dog. " * 2
    from_text = measure(str(saved), [text], device="cpu")
    ids = tiny.tokenizer()(text)["input_ids"]
    expected = [s.kl_nats.tobytes() for s in measure(tiny.build("mamba2"), [ids]).scores]
    assert [s.kl_nats.tobytes() for s in from_text.scores] == expected
    given = measure(tiny.build("mamba2"), [text], tokenizer=tiny.tokenizer())
    assert [s.kl_nats.tobytes() for s in given.scores] == expected


def test_documents_may_end_before_the_longest_length() -> None:
    docs = [documents()[0], documents()[1][:30]]
    result = measure(docs=docs)
    assert [s.tokens for s in result.scores] == [48, 30]
    assert np.isnan(result.scores[1].nll_reference_nats[-1])
    by_length = {x.n: x.documents for x in result.report.arms[1].by_length}
    assert by_length == {16: 2, 48: 1}


def test_the_views_of_a_result(tmp_path: Path, undisturbed: KLResult) -> None:
    shown = _text(undisturbed)
    assert "shared:fp8+sr" in shown and "separate:fp8/fp16+sr" in shown
    frame = undisturbed.to_pandas()
    assert isinstance(frame, pd.DataFrame) and len(frame) == 3 * 4 * 48
    assert frame[frame.arm == "shared:fp8@L=8"].kl_nats.mean() == pytest.approx(undisturbed.report.arms[1].kl.mean)
    figure = undisturbed.plot()
    figure.savefig(tmp_path / "kl.png")
    assert (tmp_path / "kl.png").stat().st_size > 1000
    record = json.loads(undisturbed.to_json())
    assert record["model"] == "Qwen3_5ForCausalLM"
    assert record["provenance"]["arguments"]["given"]["arms"] == list(ARMS)
    assert "seed" in record["provenance"]["arguments"]["defaulted"]


class Stop:
    """Interrupts a run in the middle of its second document."""

    def __init__(self, *, after: int) -> None:
        self.calls: list[tuple[int, int]] = []
        self._after = after

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))
        if done >= self._after:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("engine", "tokens"), [("chunk", 48), ("step", 16)])
def test_an_interrupted_run_goes_on_to_identical_numbers(tmp_path: Path, engine: str, tokens: int) -> None:
    given: dict[str, Any] = {"engine": engine, "lengths": (tokens,), "chunk": 8}
    whole = measure(out=tmp_path / "whole", **given)
    stop = Stop(after=tokens + 8)
    with pytest.raises(KeyboardInterrupt):
        measure(out=tmp_path / "run", progress=stop, **given)
    assert stop.calls[-1] == (tokens + 8, 3 * tokens)
    assert RunDirectory.open(tmp_path / "run").done() == [0]
    seen: list[tuple[int, int]] = []
    resumed = measure(out=tmp_path / "run", resume=True, progress=lambda *x: seen.append(x), **given)
    assert_identical(resumed, whole)
    assert seen[0] == (tokens, 3 * tokens)
    assert seen[-1] == (3 * tokens, 3 * tokens)
    assert [d for d, _ in seen] == sorted({d for d, _ in seen})
    assert RunDirectory.open(tmp_path / "run").is_complete
    # Nothing is left to be measured, and the numbers are the same again.
    assert_identical(measure(out=tmp_path / "run", resume=True, **given), whole)


_KILLED = """
import os, signal, sys
import numpy as np, torch
torch.set_num_threads(1)
from tests.models import tiny
from replayeval.measure import measure_kl
rng = np.random.default_rng(0)
docs = [rng.integers(0, 256, 60).tolist() for _ in range(3)]
def progress(done, total):
    if done >= 80:
        os.kill(os.getpid(), signal.SIGKILL)
measure_kl(tiny.build("qwen3_5"), docs, arms=sys.argv[2].split(), lengths=(16, 48), window=8, chunk=16,
           out=sys.argv[1], progress=progress)
"""


def test_a_killed_run_goes_on_to_identical_numbers(tmp_path: Path, undisturbed: KLResult) -> None:
    root = Path(__file__).parents[1]
    paths = os.pathsep.join([str(root / "kernels"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path / "run"), " ".join(ARMS)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    assert RunDirectory.open(tmp_path / "run").done() == [0]
    assert_identical(measure(out=tmp_path / "run", resume=True), undisturbed)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    torch.set_num_threads(1)
    measure(out=path)
    return path


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed"),
        ({"arms": ARMS[:3]}, "arms"),
        ({"lengths": (16,)}, "lengths"),
        ({"prefill": 4}, "prefill"),
        ({"engine": "step"}, "engine"),
        ({"docs": documents(3)[::-1]}, "documents"),
        ({"model": "other weights"}, "weights"),
    ],
)
def test_a_run_of_other_arguments_is_not_resumed(finished: Path, change: dict[str, Any], named: str) -> None:
    if "model" in change:
        change = {"model": tiny.build("qwen3_5", seed=5)}
    with pytest.raises(StoreError, match=named):
        measure(out=finished, resume=True, **change)


def test_a_finished_run_is_not_overwritten(finished: Path) -> None:
    with pytest.raises(StoreError, match="resume"):
        measure(out=finished)


def test_the_chunk_is_no_part_of_a_run(finished: Path, undisturbed: KLResult) -> None:
    assert_identical(measure(out=finished, resume=True, chunk=7), undisturbed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arms": ["conventional:fp32"]}, "differ from the reference, got conventional:fp32"),
        ({"arms": []}, "at least one arm"),
        ({"arms": ["shared:fp9"]}, "did you mean"),
        ({"arms": ["share:fp8"]}, "did you mean `shared`"),
        ({"arms": None, "precision": "fp8+sr"}, "without `\\+sr`"),
        ({"arms": None, "precision": "fp7"}, "expected one of"),
        ({"window": 0}, "window of 1 to 128 tokens, got 0"),
        ({"window": 129}, "window of 1 to 128 tokens, got 129"),
        ({"data": "builtin", "docs_and_data": True}, "either documents or data, got both"),
        ({"lengths": ()}, "generation lengths of at least 1 token"),
        ({"lengths": (0, 16)}, "generation lengths of at least 1 token"),
        ({"lengths": (16, 500)}, "500"),
        ({"chunk": 0}, "chunk of at least 1 token, got 0"),
        ({"prefill": -1}, "prompt of 0 or more tokens, got -1"),
        ({"prefill": 60}, "60"),
        ({"prefill": 1000}, "1000"),
        ({"engine": "chunks"}, "one of chunk, step, got 'chunks'"),
        ({"seed": -1}, "seed of 0 to 2"),
        ({"seed": 1 << 64}, "seed of 0 to 2"),
        ({"resume": True}, "resume without out"),
        ({"docs": []}, "expected a list of documents, got none"),
        ({"docs": [[1, 2, 300]]}, "300"),
        ({"docs": ["a text"]}, "tokenizer"),
        ({"docs": [[]]}, "documents"),
        ({"model": "/no/such/directory"}, "/no/such/directory"),
    ],
)
def test_input_that_cannot_be_used_is_refused_with_words_that_help(change: dict[str, Any], words: str) -> None:
    if change.pop("docs_and_data", False):
        change["docs"] = documents()
    with pytest.raises(ConfigError, match=words) as caught:
        measure(**change)
    assert caught.value.exit_code == 2


def test_repeated_arms_are_measured_once() -> None:
    result = measure(docs=documents(1), arms=["shared:fp8", "SHARED:e4m3@L=8", "shared:fp8"])
    assert result.scores[0].arms == ("shared:fp8@L=8",)
    assert next(c for c in result.report.checks if "control" in c.name).passed is None


def test_a_format_that_does_not_fit_the_states_is_refused_before_anything_runs() -> None:
    calls: list[int] = []
    with pytest.raises(UnsupportedArmError, match="blocks of 12 keys need d_k to be a multiple of 12") as caught:
        measure(arms=["shared:fp8", "shared:nvfp4[block=12]"], progress=lambda done, _: calls.append(done))
    assert (caught.value.exit_code, calls) == (2, [])
    assert "shared:fp8@L=8:" not in str(caught.value)


def test_a_model_without_recurrent_layers_is_refused_with_what_is_supported() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    with pytest.raises(ReplayEvalError, match="(?i)mamba2"):
        measure(LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).eval())


def test_precision_stands_for_its_arms_and_adds_to_those_given() -> None:
    result = measure(docs=documents(1), arms=["conventional:bf16"], precision="fp8", lengths=(16,))
    assert result.scores[0].arms == (
        "shared:fp32@L=8",
        "shared:fp8@L=8",
        "shared:fp8+sr@L=8",
        "separate:fp8/fp32@L=8",
        "separate:fp8/fp16+sr@L=8",
        "conventional:bf16",
    )


def test_progress_counts_the_tokens_of_documents() -> None:
    seen: list[tuple[int, int]] = []
    measure(docs=documents(2), progress=lambda *x: seen.append(x), prefill=10, chunk=20, lengths=(16, 48))
    # 58 tokens each: the prompt of 10, then 20, 20 and 8.
    assert [d for d, _ in seen] == [10, 30, 50, 58, 68, 88, 108, 116]
    assert {t for _, t in seen} == {116}


# beartype draws the list item that it checks from `random`, so annotations go unchecked here.
@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("fails", [False, True])
def test_global_settings_and_random_states_are_left_alone(fails: bool) -> None:
    model = tiny.build("qwen3_5").train()
    before = (torch.get_rng_state(), str(np.random.get_state()), random.getstate())  # noqa: NPY002
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    inside: list[tuple[str, bool]] = []

    def progress(done: int, total: int) -> None:
        inside.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
        if fails:
            raise KeyboardInterrupt

    try:
        if fails:
            with pytest.raises(KeyboardInterrupt):
                measure(model, documents(1), progress=progress)
        else:
            measure(model, documents(1), progress=progress)
        assert set(inside) == {("highest", False)}
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32 is True
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32
    assert torch.equal(torch.get_rng_state(), before[0])
    assert str(np.random.get_state()) == before[1]  # noqa: NPY002
    assert random.getstate() == before[2]
    assert model.training
    assert torch.is_grad_enabled()


def test_a_failed_self_check_stops_the_run_before_its_first_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise NumericsError("self-check failed")

    monkeypatch.setattr("replayeval.subject.check_forcing_is_live", failing)
    with pytest.raises(NumericsError):
        measure(out=tmp_path / "run")
    assert RunDirectory.open(tmp_path / "run").done() == []


def test_a_control_arm_above_the_floor_stops_after_its_first_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("replayeval.engine.checks.FLOOR_LIMIT_NATS", {torch.float32: 0.0, torch.bfloat16: 0.0})
    with pytest.raises(NumericsError, match="algebraically equal"):
        measure(out=tmp_path / "run")
    assert RunDirectory.open(tmp_path / "run").done() == [0]


def test_an_arm_that_diverges_early_is_a_result(tmp_path: Path) -> None:
    model = tiny.build("qwen3_5")
    mixer = model.model.layers[0].linear_attn
    with torch.no_grad():
        mixer.conv1d.weight[2 * mixer.key_dim :] *= 1e7
    result = measure(model, arms=["shared:fp32", "shared:fp16", "shared:fp8"], out=tmp_path / "run")
    assert [s.diverged_at for s in result.scores] == [(None, 9, None)] * 3
    assert np.isnan(result.scores[0].kl_nats[1, 8:]).all()
    assert np.isfinite(result.scores[0].kl_nats[2]).all()
    assert "div" in _text(result)
    json.loads(result.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def _text(result: KLResult) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(result.table())
    return console.export_text()
