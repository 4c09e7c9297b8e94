"""Log-likelihoods of continuations against one sequence at a time."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from replayeval.engine import generation_scoring
from replayeval.engine.generation_batch import PolicyDecoder
from replayeval.engine.generation_scoring import Context, Continuation, Likelihood, LikelihoodScorer
from replayeval.errors import ConfigError, NumericsError
from replayeval.models.head import OutputHead
from replayssm.policy import Policy
from replayssm.replay import StateBank
from tests.engine import generation_oracle as oracle
from tests.models import tiny

POLICY = Policy.parse("shared:nvfp4+sr@L=2")
pytestmark = pytest.mark.usefixtures("one_quiet_thread")

REFERENCE = Policy.parse("conventional:fp32")
SEED = 3
LIMIT = 2e-3
"""Nats, of sums of up to six log-probabilities, each the difference of two logits of up to 20 known to 1e-5 of that."""


def ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(tiny.token_ids(1, count, seed=seed)[0].tolist())


SHARED, OTHER = ids(7, 1), ids(3, 2)
CASES = [
    Continuation(context=SHARED, tokens=ids(4, 3), sequence=50),
    Continuation(context=OTHER, tokens=ids(6, 4), sequence=51),
    Continuation(context=SHARED, tokens=ids(1, 5), sequence=50),
    Continuation(context=SHARED, tokens=ids(3, 6), sequence=50),
    Continuation(context=OTHER, tokens=ids(2, 7), sequence=99),
]


def truth(head: OutputHead, policy: Policy, context: Context, cases: list[Continuation]) -> list[tuple[float, bool]]:
    found: list[tuple[float, bool]] = []
    for case in cases:
        logits = oracle.forced(
            head,
            policy,
            case.context,
            case.tokens,
            sequence=case.sequence,
            seed=SEED,
            decoded_prompt=context is Context.DECODED,
        ).double()
        logs = logits.log_softmax(-1)[range(len(case.tokens)), list(case.tokens)]
        found.append((float(logs.sum()), logits.argmax(-1).tolist() == list(case.tokens)))
    return found


def gap(scores: list[Likelihood], wanted: list[tuple[float, bool]]) -> float:
    assert [s.greedy for s in scores] == [greedy for _, greedy in wanted]
    return max(abs(s.log_probability - value) for s, (value, _) in zip(scores, wanted, strict=True))


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
@pytest.mark.parametrize("context", list(Context))
def test_scores_equal_those_of_one_sequence_at_a_time(name: str, context: Context) -> None:
    head = OutputHead(tiny.shared(name))
    wanted = truth(head, POLICY, context, CASES)
    for rows in (1, 3):
        scores = LikelihoodScorer(head, POLICY, context=context, seed=SEED, rows=rows).score(CASES)
        assert gap(scores, wanted) <= LIMIT, rows
    # What the switch changes is seen, and so is a policy that acts on nothing.
    for other_policy, other in ((POLICY, next(c for c in Context if c is not context)), (REFERENCE, context)):
        scores = LikelihoodScorer(head, other_policy, context=other, seed=SEED).score(CASES)
        assert max(abs(s.log_probability - w) for s, (w, _) in zip(scores, wanted, strict=True)) > 5 * LIMIT


def test_a_continuation_of_one_token_behind_a_prompt_is_not_touched_by_the_policy() -> None:
    head = OutputHead(tiny.shared("qwen3_5"))
    one = [CASES[2]]
    assert LikelihoodScorer(head, POLICY, seed=SEED).score(one) == LikelihoodScorer(head, REFERENCE).score(one)


def test_greedy_continuations_are_recognised_and_the_order_of_requests_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    head = OutputHead(tiny.shared("qwen3_5"))
    best, _ = oracle.generated(head, POLICY, SHARED, sequence=50, seed=SEED, max_tokens=4)
    cases = [*CASES, Continuation(context=SHARED, tokens=tuple(best), sequence=50)]
    reads: list[int] = []
    prefill = PolicyDecoder.prefill

    def counted(self: PolicyDecoder, prompts: Any, **kwargs: Any) -> Any:
        reads.extend(len(p) for p in prompts)
        return prefill(self, prompts, **kwargs)

    monkeypatch.setattr(PolicyDecoder, "prefill", counted)
    finished: list[int] = []
    scores = LikelihoodScorer(head, POLICY, seed=SEED, rows=16).score(
        cases, progress=lambda index, _: finished.append(index)
    )
    assert scores[-1].greedy and not any(s.greedy for s in scores[:-1])
    assert sorted(finished) == list(range(6))
    assert sorted(reads) == [3, 3, 7]  # each context once per sequence number, whatever the number of choices
    for order in itertools.islice(itertools.permutations(range(6)), 0, 720, 300):
        turned = LikelihoodScorer(head, POLICY, seed=SEED, rows=16).score([cases[i] for i in order])
        assert all(
            abs(turned[place].log_probability - scores[i].log_probability) <= LIMIT for place, i in enumerate(order)
        )


def test_few_logits_at_a_time_and_few_tokens_per_pass_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    head = OutputHead(tiny.shared("qwen3_5"))
    wanted = truth(head, POLICY, Context.PROMPT, CASES)
    monkeypatch.setattr(generation_scoring, "_LOGIT_ELEMENTS", 2 * tiny.VOCABULARY)
    scorer = LikelihoodScorer(head, POLICY, seed=SEED, rows=8)
    scorer._decoder.pass_tokens = 8
    assert gap(scorer.score(CASES), wanted) <= LIMIT


def test_a_policy_that_diverges_scores_minus_infinity_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    head = OutputHead(tiny.shared("qwen3_5"))
    wanted = truth(head, POLICY, Context.PROMPT, CASES)
    advance = StateBank.advance

    def broken(self: StateBank, *args: Any, **kwargs: Any) -> Tensor:
        outputs = advance(self, *args, **kwargs)
        if not self._prompt:
            outputs[[row for row in range(self.rows) if int(self._sequences[row]) == 51]] = torch.nan
        return outputs

    monkeypatch.setattr(StateBank, "advance", broken)
    scores = LikelihoodScorer(head, POLICY, seed=SEED, rows=8).score(CASES)
    assert [s.diverged for s in scores] == [False, True, False, False, False]
    assert scores[1].log_probability == -math.inf and not scores[1].greedy
    assert gap([scores[0], *scores[2:]], [wanted[0], *wanted[2:]]) <= LIMIT
    with pytest.raises(NumericsError, match="continuation of request 1"):
        LikelihoodScorer(head, REFERENCE, seed=SEED, rows=8).score(CASES)


def test_empty_texts_are_refused() -> None:
    head = OutputHead(tiny.shared("mamba2"))
    for case in (
        Continuation(context=(), tokens=(1,), sequence=0),
        Continuation(context=(1,), tokens=(), sequence=0),
    ):
        with pytest.raises(ConfigError, match="request 0: expected a context and a continuation"):
            LikelihoodScorer(head, REFERENCE).score([case])
    with pytest.raises(ConfigError, match="at least 1 continuation"):
        LikelihoodScorer(head, REFERENCE, rows=0)
    assert LikelihoodScorer(head, REFERENCE).score([]) == []
