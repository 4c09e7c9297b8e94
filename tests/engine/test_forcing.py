"""The chunked engine against its token-by-token oracle, and what must not change a result."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import replayeval.models.builtin
import replayssm.checkpoint
import replayssm.lanes
from replayeval.data import load_documents
from replayeval.engine.forcing import DocumentTokens, Engine, Forcing, score_document
from replayeval.errors import ConfigError, NumericsError
from replayeval.models.head import OutputHead
from replayeval.models.loading import load_model
from replayssm.checkpoint import Checkpoint
from replayssm.lanes import Lanes
from replayssm.policy import Policy
from tests.engine.forced import NOISE, compare_row, document, faults, policies, run, run_side_by_side
from tests.models import tiny

ARCHITECTURES = (
    "mamba2",
    "nemotron_h",
    "nemotron_h_moe",
    "zamba2",
    "falcon_h1",
    "qwen3_5",
    "qwen3_5_moe",
    "olmo_hybrid",
    "kimi_linear",
)
ARMS = policies(
    [
        "shared:fp32",
        "conventional:bf16",
        "shared:fp8",
        "shared:fp8+sr",
        "shared:nvfp4",
        "separate:fp8/fp16+sr@L=5",
        "separate:int8/fp32@L=7",
    ]
)

# One flipped element of a tiny state (512 to 1024 elements per layer and row) is seen in every one of the few tokens
# that follow: a change of 1 / sqrt(512 * 3) of the quantization error that makes the KL, and less as it decays.
TINY_KL = 2.5e-2

# In a trained model a few surprising tokens make most of a mean KL, and after the first flip two runs of one document
# are two draws of that noise: up to a third apart in 300 tokens of these models. Up to the first flip logits are equal.
TRAINED_KL = 0.6


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_chunks_agree_with_single_tokens(name: str) -> None:
    tokens = document(40).tokens
    by_chunk = run(tiny.shared(name), tokens, ARMS, chunk=16)
    by_step = run(tiny.shared(name), tokens, ARMS, engine=Engine.STEP)
    assert faults(by_chunk, by_step, ARMS, kl_tolerance=TINY_KL) == []


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5", "kimi_linear"])
@pytest.mark.parametrize("prefill", [1, 13])
def test_chunks_agree_with_single_tokens_after_a_prompt(name: str, prefill: int) -> None:
    tokens = document(34, seed=2).tokens
    by_chunk = run(tiny.shared(name), tokens, ARMS, chunk=11, prefill=prefill)
    by_step = run(tiny.shared(name), tokens, ARMS, engine=Engine.STEP, prefill=prefill)
    assert faults(by_chunk, by_step, ARMS, kl_tolerance=TINY_KL, prefill=prefill) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gdn", "mamba2"])
def test_chunks_agree_with_single_tokens_on_a_trained_model(name: str) -> None:
    weights = Path(replayeval.models.builtin.__file__).parent / "weights"
    if not weights.is_dir():
        pytest.skip("the built-in models have no weights in this installation")
    loaded = load_model(f"builtin:{name}", device="cpu", dtype="float32")
    vocabulary = OutputHead(loaded.model).vocabulary
    text = load_documents(
        "builtin", loaded.tokenizer, docs=1, seed=0, tokens=256, lengths=(256,), vocab_size=vocabulary
    )
    tokens = text[0].token_ids
    arms = policies([str(arm).partition("@")[0] for arm in ARMS[:5]] + [str(arm) for arm in ARMS[5:]], window=16)
    by_chunk = run(loaded.model, tokens, arms, chunk=128)
    by_step = run(loaded.model, tokens, arms, engine=Engine.STEP)
    assert faults(by_chunk, by_step, arms, kl_tolerance=TRAINED_KL) == []


@contextmanager
def unrounded_hand_over() -> Iterator[None]:
    original = Checkpoint.hand_over

    def hand_over(self: Checkpoint, lanes: Lanes, **kwargs: Any) -> None:
        original(self, replace(lanes, formats=(None,) * len(lanes.formats)), **kwargs)
        self._lanes = lanes  # pyright: ignore[reportPrivateUsage]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "hand_over", hand_over)
        yield


@contextmanager
def prompt_that_shifts_the_window() -> Iterator[None]:
    original = Checkpoint.hand_over

    def hand_over(self: Checkpoint, lanes: Lanes, **kwargs: Any) -> None:
        original(self, lanes, **kwargs)
        used = self.cursors.seen % lanes.windows
        self.cursors = replace(self.cursors, remaining=lanes.windows - used)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "hand_over", hand_over)
        yield


@contextmanager
def bits_of_the_next_token() -> Iterator[None]:
    original = replayssm.lanes.random_bits

    def random_bits(*, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return original(tokens=tokens + 1, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replayssm.lanes, "random_bits", random_bits)
        yield


@contextmanager
def output_of_the_flush_token_after_the_store() -> Iterator[None]:
    def no_flush(slab: Any, lanes: Any) -> Any:
        return original(slab, lanes) & False

    original = replayssm.checkpoint._flush_mask  # pyright: ignore[reportPrivateUsage]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replayssm.checkpoint, "_flush_mask", no_flush)
        yield


@pytest.mark.parametrize(
    ("fault", "seen_in"),
    [
        (unrounded_hand_over, {str(arm) for arm in ARMS[1:]}),
        (prompt_that_shifts_the_window, {str(arm) for arm in ARMS if arm.window_tokens != 1}),
        (bits_of_the_next_token, {str(arm) for arm in ARMS if arm.is_stochastic}),
        (output_of_the_flush_token_after_the_store, {str(ARMS[5]), str(ARMS[6])}),
    ],
)
@pytest.mark.parametrize("name", ["mamba2", "qwen3_5"])
def test_a_fault_in_one_engine_is_seen(name: str, fault: Callable[[], Any], seen_in: set[str]) -> None:
    tokens = document(30, seed=3).tokens
    by_step = run(tiny.shared(name), tokens, ARMS, engine=Engine.STEP, prefill=13)
    with fault():
        by_chunk = run(tiny.shared(name), tokens, ARMS, chunk=16, prefill=13)
    assert {line.partition(": ")[0] for line in faults(by_chunk, by_step, ARMS, kl_tolerance=TINY_KL, prefill=13)} == {
        arm for arm in seen_in
    }


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5"])
def test_chunk_size_changes_nothing(name: str) -> None:
    tokens = document(66, seed=4).tokens
    whole = run(tiny.shared(name), tokens, ARMS, chunk=1000)
    for chunk in (1, 7, 64):
        cut = run(tiny.shared(name), tokens, ARMS, chunk=chunk)
        assert faults(cut, whole, ARMS, kl_tolerance=TINY_KL) == []
        # KL of noise: half the squared difference of the logits, which is at most NOISE of the largest on either side.
        limit = 0.5 * (2 * NOISE * float(whole.logits.abs().max())) ** 2
        assert float((cut.kl()[0] - whole.kl()[0]).abs().max()) <= limit


def score(model: PreTrainedModel, doc: DocumentTokens, arms: tuple[Policy, ...], **kwargs: Any) -> Any:
    return score_document(OutputHead(model), doc, Forcing(arms=arms, **kwargs))


@pytest.mark.parametrize(("engine", "chunk"), [(Engine.CHUNK, 5), (Engine.CHUNK, 64), (Engine.STEP, 5)])
def test_prompt_tokens_are_not_scored_and_the_state_is_stored_once_after_them(engine: Engine, chunk: int) -> None:
    model, doc, prompt = tiny.shared("qwen3_5"), document(31, seed=5), 13
    scores = score(model, doc, ARMS, engine=engine, chunk_tokens=chunk, prefill_tokens=prompt)
    assert scores.prefill_tokens == prompt
    assert scores.kl_nats.shape == (len(ARMS), 31 - prompt)
    assert math.isnan(scores.nll_reference_nats[-1])
    assert np.isfinite(scores.nll_reference_nats[:-1]).all()
    # The first decoded token already reads the stored state; what float32 keeps stays at the floor.
    assert scores.kl_nats[0].max() < 1e-10
    first = scores.kl_nats[:, 0]
    assert (first[1:-1] > 1e-9).all()
    plain = score(model, doc, ARMS, chunk_tokens=chunk)
    np.testing.assert_allclose(scores.nll_reference_nats[:-1], plain.nll_reference_nats[prompt:-1], rtol=1e-4)

    stores = run(model, doc.tokens, ARMS, engine=engine, chunk=chunk, prefill=prompt).stores
    for row, arm in enumerate(ARMS, start=1):
        for copy in range(len(arm.copies)):
            when = {
                layer: [t for (x, r, c, t) in sorted(stores) if (x, r, c) == (layer, row, copy)] for layer in (0, 2)
            }
            assert when[0] == when[2] == list(range(prompt - 1, 31, arm.window_tokens)), (str(arm), copy)


def test_without_rounding_at_the_hand_over_the_first_token_is_at_the_floor() -> None:
    model, doc = tiny.shared("qwen3_5"), document(31, seed=5)
    with unrounded_hand_over():
        assert score(model, doc, ARMS, prefill_tokens=13).kl_nats[:, 0].max() < 1e-9


@pytest.mark.parametrize("prompt", [63, 64, 65, 70])
def test_a_long_prompt_leaves_no_trace_of_its_own_windows(prompt: int) -> None:
    arms = policies(["shared:fp32", "shared:nvfp4", "separate:nvfp4/fp32"])
    model, doc = tiny.shared("mamba2"), document(80, seed=6)
    by_chunk = score(model, doc, arms, chunk_tokens=9, prefill_tokens=prompt)
    by_step = score(model, doc, arms, engine=Engine.STEP, chunk_tokens=1000, prefill_tokens=prompt)
    assert by_chunk.kl_nats[0].max() < 1e-10
    np.testing.assert_allclose(by_chunk.kl_nats[1:], by_step.kl_nats[1:], rtol=2e-2)
    assert (by_chunk.kl_nats[1:, 0] > 1e-6).all()


def test_a_document_that_is_all_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="all of which belong to the prompt"):
        score(tiny.shared("mamba2"), document(10), ARMS, prefill_tokens=10)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5_moe", "kimi_linear"])
def test_documents_side_by_side_are_as_each_alone(name: str) -> None:
    documents = [document(n, seed=n).tokens for n in (21, 40, 33)]
    together = run_side_by_side(tiny.shared(name), documents, ARMS, sequences=[4, 0, 9], chunk=16)
    for tokens, sequence, beside in zip(documents, (4, 0, 9), together, strict=True):
        alone = run(tiny.shared(name), tokens, ARMS, sequence=sequence, chunk=16)
        assert faults(beside, alone, ARMS, kl_tolerance=TINY_KL) == []
    wrong = run(tiny.shared(name), documents[0], ARMS, sequence=5, chunk=16)
    seen = {line.partition(": ")[0] for line in faults(together[0], wrong, ARMS, kl_tolerance=TINY_KL)}
    assert seen == {str(arm) for arm in ARMS if arm.is_stochastic}


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5_moe"])
def test_the_order_and_number_of_arms_change_nothing(name: str) -> None:
    tokens = document(40, seed=7).tokens
    every = run(tiny.shared(name), tokens, ARMS)
    control = compare_row(every, run(tiny.shared(name), tokens, ARMS[:1]), 1, ARMS[0])
    assert control.logits <= NOISE
    for chosen in ([6, 2, 0], [5], [3, 1], list(range(len(ARMS)))[::-1]):
        some = run(tiny.shared(name), tokens, [ARMS[i] for i in chosen])
        for place, i in enumerate(chosen, start=1):
            c = compare_row(every, some, i + 1, ARMS[i], row_of_second=place)
            assert not c.missing
            assert c.flipped <= 16 + c.expected
            assert c.logits <= NOISE, str(ARMS[i])
            if ARMS[i].is_lossless:
                assert c.flipped == 0


def large_states(name: str) -> PreTrainedModel:
    """A model whose first state exceeds what float16 holds; a norm behind it hides that from the rest."""
    model = tiny.build(name)
    mixer = model.model.layers[0].linear_attn
    with torch.no_grad():
        mixer.conv1d.weight[2 * mixer.key_dim :] *= 1e7
    return model


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("engine", list(Engine))
def test_an_arm_that_diverges_is_marked_and_the_others_go_on(name: str, engine: Engine) -> None:
    model, doc = large_states(name), document(30, seed=8)
    fine = policies(["shared:fp32", "shared:fp8", "separate:fp8/fp32@L=5"])
    bad = policies(["shared:fp16", "conventional:fp16", "separate:fp16/fp32@L=5"])
    scores = score(model, doc, (*bad, *fine), engine=engine)
    # A store at token t is read by token t + 1, whose generation length is t + 2.
    assert scores.diverged_at == (9, 2, 6, None, None, None)
    for arm, at in zip(scores.kl_nats[:3], (9, 2, 6), strict=True):
        assert np.isnan(arm[at - 1 :]).all()
        assert np.isfinite(arm[: at - 1]).all()
    assert np.isnan(scores.nll_nats[0, 8:]).all()
    assert not scores.top1_agrees[0, 8:].any()
    alone = score(model, doc, fine, engine=engine)
    assert alone.diverged_at == (None, None, None)
    np.testing.assert_allclose(scores.kl_nats[4:], alone.kl_nats[1:], rtol=0.1, atol=1e-10)
    np.testing.assert_allclose(scores.kl_nats[4:].mean(1), alone.kl_nats[1:].mean(1), rtol=TINY_KL)


def test_divergence_after_a_prompt_counts_decoded_tokens() -> None:
    scores = score(large_states("qwen3_5"), document(30, seed=8), policies(["shared:fp16"]), prefill_tokens=5)
    assert scores.diverged_at == (1,)


@pytest.mark.parametrize("engine", list(Engine))
def test_a_reference_that_diverges_stops_the_run_and_names_the_tokens(engine: Engine) -> None:
    model, doc = tiny.build("mamba2"), document(30, seed=9)
    with torch.no_grad():
        model.get_parameter("backbone.embeddings.weight")[int(doc.tokens[17])] = torch.inf
    assert 17 == int(np.flatnonzero(doc.tokens == doc.tokens[17])[0])
    where = "tokens 16 to 23" if engine is Engine.CHUNK else "tokens 17 to 17"
    with pytest.raises(NumericsError, match=f"in {where} of document 0"):
        score(model, doc, ARMS, engine=engine, chunk_tokens=8)


def test_random_bits_follow_the_seed_and_the_document() -> None:
    model = tiny.shared("mamba2")
    arms = policies(["shared:fp8", "shared:fp8+sr"])
    base = score(model, document(30), arms, seed=1)
    assert np.array_equal(base.kl_nats, score(model, document(30), arms, seed=1).kl_nats)
    for other in (score(model, document(30), arms, seed=2), score(model, document(30, index=1), arms, seed=1)):
        assert np.array_equal(base.kl_nats[0], other.kl_nats[0])
        assert not np.array_equal(base.kl_nats[1], other.kl_nats[1])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"arms": ()}, "at least one arm"),
        ({"arms": policies(["shared:fp8", "shared:fp8"])}, "shared:fp8@L=8 more than once"),
        ({"chunk_tokens": 0}, "chunk of at least 1 token, got 0"),
        ({"prefill_tokens": -1}, "prompt of 0 or more tokens, got -1"),
    ],
)
def test_forcing_refuses_what_cannot_be_run(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Forcing(**{"arms": ARMS, **values})
