"""The comparison with transformers' generate: what it reports, and that nothing is timed when answers differ."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from replayeval.engine import bench_generate as module
from replayeval.engine.bench_generate import bench_generate
from replayeval.engine.generation import Generation
from replayeval.engine.generation import Generator as Engine
from replayeval.errors import ConfigError, NumericsError
from replayeval.models.head import OutputHead
from replayssm.policy import Policy
from tests.models import tiny


def prompts(rows: int = 2, tokens: int = 5) -> list[np.ndarray]:
    return list(tiny.token_ids(rows, tokens).numpy())


def test_every_contestant_is_timed_and_the_ratio_is_that_of_tokens_per_second() -> None:
    model = tiny.shared("qwen3_5")
    before = model.generation_config
    arm = Policy.parse("shared:bf16@L=2")
    outcome = bench_generate(OutputHead(model), prompts(), [arm], new_tokens=3, repeats=1)
    assert [t.name for t in outcome.timings] == ["transformers generate", "conventional:fp32", str(arm)]
    peer = outcome.timings[0]
    for timing in outcome.timings:
        assert timing.tokens_per_s == pytest.approx(2 * 3 / timing.seconds)
        assert timing.ratio == pytest.approx(timing.tokens_per_s / peer.tokens_per_s)
    assert (outcome.rows, outcome.prompt_tokens, outcome.new_tokens) == (2, 5, 3)
    assert (outcome.compared_tokens, outcome.ties, outcome.backend) == (6, 0, "torch")
    assert outcome.to_json()["schema"] == "replayeval.bench.generate/1"
    assert model.generation_config is before


def test_steps_are_what_prompts_leave_of_the_time() -> None:
    medians = {module.PEER: (5.0, 1.0), "a": (3.0, 1.0), "b": (0.5, 1.0)}
    steps = {name: "" for name in medians}
    peer, a, b = module._timings(medians, steps=steps, rows=2, new_tokens=5)
    assert (peer.step_ms, a.step_ms, b.step_ms) == (1000.0, 500.0, 0.0)
    assert (peer.step_ratio, a.step_ratio, b.step_ratio) == (1.0, 2.0, None)
    assert (a.tokens_per_s, a.ratio) == (10 / 3, 5 / 3)
    assert all(t.step_ms is t.step_ratio is None for t in module._timings(medians, steps=steps, rows=2, new_tokens=1))


def test_answers_that_differ_stop_the_run_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = Engine.generate

    def wrong(self: Engine, requests: Any, **kwargs: Any) -> list[Generation]:
        answers = generate(self, requests, **kwargs)
        last = answers[-1]
        tokens = (*last.tokens[:-1], (last.tokens[-1] + 1) % tiny.VOCABULARY)
        return [*answers[:-1], Generation(tokens=tokens, finish=last.finish)]

    monkeypatch.setattr(Engine, "generate", wrong)
    monkeypatch.setattr(module, "_seconds", lambda _: pytest.fail("something was timed"))
    with pytest.raises(NumericsError, match="in row 1 they differ at token 2"):
        bench_generate(OutputHead(tiny.shared("qwen3_5")), prompts(), [], new_tokens=3, repeats=1)


def test_a_tie_within_rounding_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    head = OutputHead(tiny.shared("qwen3_5"))
    ids = tiny.token_ids(1, 5)
    order = head.logits(head.hidden(ids))[0, -1].argsort(descending=True).tolist()
    with torch.inference_mode():
        with pytest.raises(NumericsError, match="differ at token 0"):
            module._check(head, ids, [[order[0], 7]], [[order[-1], 7]])
        monkeypatch.setattr(module, "_tie", lambda _: 10.0)
        assert module._check(head, ids, [[order[0], 7]], [[order[-1], 7]]) == (0, 1)


def test_the_bound_of_half_precision_grows_with_depth_and_holds_rounding() -> None:
    """Logits of a model in bfloat16 are well within it from those of the same weights in float32."""
    ids = tiny.token_ids(4, 20)
    rounded: Any = tiny.build("qwen3_5", dtype=torch.bfloat16)
    exact: Any = copy.deepcopy(rounded).float()
    with torch.inference_mode():
        heads = [OutputHead(exact), OutputHead(rounded)]
        truth, found = (head.logits(head.hidden(ids)) for head in heads)
    error = float(((found - truth).abs().amax(-1) / truth.abs().amax(-1)).median())
    tie = module._tie(heads[1])
    assert tie / 40 < error < tie / 2
    rounded.config.num_hidden_layers *= 4
    assert module._tie(heads[1]) == 2 * tie
    assert module._tie(heads[0]) == module.FLOAT32_TIE


def test_prompts_of_different_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="one length"):
        bench_generate(OutputHead(tiny.shared("mamba2")), [*prompts(1, 4), *prompts(1, 5)], [], new_tokens=2)
