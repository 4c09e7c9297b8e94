"""Out of memory: what is halved, what is said, and that the numbers are those of a run begun that way."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from replayeval.engine import fitting
from replayeval.engine.fitting import Fitting
from replayeval.engine.forcing import Engine, Forcing, score_document
from replayeval.models.head import OutputHead
from replayeval.store.scores import DocumentScores
from tests.engine.forced import document, policies
from tests.models import tiny

ARMS = policies(["shared:fp32", "shared:nvfp4@L=3", "shared:int8@L=4", "separate:fp8/fp32@L=5"])
# Libraries may add in another order when memory lies elsewhere: logits of order one, sums of 64 terms, 64 * 2**-24.
NLL_NATS = 1e-5
KL_RELATIVE = 1e-2


class SmallDevice(OutputHead):
    """A head on a device that holds a limited number of tokens at a time, and fails late in a document."""

    def __init__(self, model: Any, *, most: int, after: int = 0) -> None:
        super().__init__(model)
        self.most = most
        self.after = after
        self.refused: list[tuple[int, int]] = []

    def hidden(self, input_ids: Tensor, cache: Any = None, start_position: int = 0, *args: Any, **named: Any) -> Tensor:
        if input_ids.numel() > self.most and start_position >= self.after:
            self.refused.append((input_ids.shape[0], input_ids.shape[1]))
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return super().hidden(input_ids, cache, start_position, *args, **named)


def assert_same(a: DocumentScores, b: DocumentScores, arms: slice = slice(None)) -> None:
    """`b` has the numbers of these arms of `a`; the arms differ from each other by far more than the tolerance."""
    assert a.arms[arms] == b.arms
    np.testing.assert_allclose(a.nll_reference_nats, b.nll_reference_nats, rtol=0, atol=NLL_NATS)
    np.testing.assert_allclose(a.nll_nats[arms], b.nll_nats, rtol=0, atol=NLL_NATS)
    np.testing.assert_allclose(a.kl_nats[arms].mean(1), b.kl_nats.mean(1), rtol=KL_RELATIVE, atol=1e-10)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "SMALL_CHUNK", 8)


def test_the_chunk_is_halved_and_the_document_scored_as_if_begun_that_way() -> None:
    model, doc = tiny.shared("qwen3_5"), document(32)
    said: list[str] = []
    told: list[int] = []
    head = SmallDevice(model, most=5 * 8, after=16)
    scores = Fitting(said.append).score(head, doc, Forcing(arms=ARMS, chunk_tokens=16), progress=told.append)
    assert_same(scores, score_document(OutputHead(model), doc, Forcing(arms=ARMS, chunk_tokens=8)))
    assert said == ["out of memory in document 0: 8 tokens per pass instead of 16; the document begins again"]
    assert head.refused == [(5, 16)]
    assert told == [16, -16, 8, 8, 8, 8]
    assert scores.counters["chunk_tokens"] == 8


def test_when_the_chunk_is_small_arms_are_halved_and_joined_in_order() -> None:
    model, doc = tiny.shared("mamba2"), document(12)
    said: list[str] = []
    told: list[int] = []
    head = SmallDevice(model, most=3 * 8)
    scores = Fitting(said.append).score(head, doc, Forcing(arms=ARMS, chunk_tokens=8), progress=told.append)
    parts = [score_document(OutputHead(model), doc, Forcing(arms=a, chunk_tokens=8)) for a in (ARMS[:2], ARMS[2:])]
    assert scores.arms == tuple(str(a) for a in ARMS)
    assert_same(scores, parts[0], slice(0, 2))
    assert_same(scores, parts[1], slice(2, 4))
    means = sorted(scores.kl_nats.mean(1))
    assert all(b > 1.1 * a for a, b in zip(means, means[1:], strict=False)), "arms that could not be told apart"
    assert said == ["out of memory in document 0: 2 of 4 arms per pass instead of 4; the document begins again"]
    assert sum(told) == 12 and min(told) > 0
    assert scores.counters["passes"] == 2 and scores.counters["rows"] == 6


def test_what_was_lowered_stays_lowered() -> None:
    model = tiny.shared("mamba2")
    said: list[str] = []
    head = SmallDevice(model, most=5 * 8)
    fit = Fitting(said.append)
    for index in range(3):
        fit.score(head, document(10, index=index), Forcing(arms=ARMS, chunk_tokens=16))
    assert len(said) == 1 and len(head.refused) == 1


@pytest.mark.parametrize("engine", list(Engine))
def test_what_cannot_be_halved_any_more_is_raised(engine: Engine) -> None:
    head = SmallDevice(tiny.shared("mamba2"), most=0)
    said: list[str] = []
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        Fitting(said.append).score(head, document(12), Forcing(arms=ARMS[:2], chunk_tokens=16, engine=engine))
    assert len(said) == (5 if engine is Engine.CHUNK else 1)


def test_other_errors_pass_through() -> None:
    class Broken(OutputHead):
        hidden: Callable[..., Tensor]

    head = Broken(tiny.shared("mamba2"))

    def fail(*_: Any) -> Tensor:
        raise RuntimeError("broken")

    head.hidden = fail
    said: list[str] = []
    with pytest.raises(RuntimeError, match="broken"):
        Fitting(said.append).score(head, document(12), Forcing(arms=ARMS))
    assert not said
