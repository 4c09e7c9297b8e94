"""Whole answers against answers that are generated one at a time, and the parts that only a whole answer has."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from replayeval.engine import generation
from replayeval.engine.generation import Finish, Generation, Generator, Request, StopText
from replayeval.engine.generation_batch import PolicyDecoder
from replayeval.engine.generation_sampling import Prediction, Sampling, distribution, next_tokens, uniforms
from replayeval.errors import ConfigError, NumericsError
from replayeval.models.head import OutputHead
from replayssm.policy import Policy
from replayssm.replay import StateBank
from tests.engine import generation_oracle as oracle
from tests.models import tiny

POLICY = Policy.parse("separate:nvfp4/fp16+sr@L=3")
pytestmark = pytest.mark.usefixtures("one_quiet_thread")

REFERENCE = Policy.parse("conventional:fp32")
SEED = 2**40 + 9
DRAWN = Sampling(temperature=1.3, top_k=40, top_p=0.9)


def requests(sampling: Sampling, *, stops: frozenset[int] = frozenset()) -> list[Request]:
    lengths, most = (5, 11, 3, 1, 11), (4, 2, 7, 6, 3)
    return [
        Request(
            prompt=tiny.token_ids(1, n, seed=i)[0].tolist(),
            sequence=900 + i,
            max_tokens=m,
            sampling=sampling,
            stop_tokens=stops,
        )
        for i, (n, m) in enumerate(zip(lengths, most, strict=True))
    ]


def alone(head: OutputHead, policy: Policy, request: Request) -> list[int]:
    s = request.sampling
    choose = (
        oracle.largest
        if s.greedy
        else oracle.sampler(
            seed=SEED, sequence=request.sequence, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p
        )
    )
    tokens, _ = oracle.generated(
        head,
        policy,
        request.prompt,
        sequence=request.sequence,
        seed=SEED,
        max_tokens=request.max_tokens,
        choose=choose,
        stops=sorted(request.stop_tokens),
    )
    return tokens


@pytest.mark.parametrize(
    ("name", "sampling"),
    [("qwen3_5", Sampling()), ("kimi_linear", DRAWN), pytest.param("zamba2", DRAWN, marks=pytest.mark.slow)],
    ids=["greedy", "sampled", "sampled, shared attention"],
)
def test_answers_equal_those_of_one_sequence_at_a_time_for_any_number_of_slots(name: str, sampling: Sampling) -> None:
    head = OutputHead(tiny.shared(name))
    asked = requests(sampling)
    truth = [alone(head, POLICY, r) for r in asked]
    for slots in (1, 3):
        answers = Generator(head, POLICY, seed=SEED, slots=slots).generate(asked)
        assert [list(a.tokens) for a in answers] == truth, slots
        assert {a.finish for a in answers} == {Finish.LENGTH}


def test_sampled_answers_follow_sequence_and_seed_and_nothing_else() -> None:
    head = OutputHead(tiny.shared("qwen3_5"))
    asked = requests(DRAWN)[:2]
    first = Generator(head, REFERENCE, seed=1, slots=2).generate(asked)
    backwards = Generator(head, REFERENCE, seed=1, slots=2).generate(asked[::-1])
    assert backwards[::-1] == first
    assert Generator(head, REFERENCE, seed=2, slots=2).generate(asked) != first
    moved = [Request(**{**vars(r), "sequence": r.sequence + 1}) for r in asked]
    assert Generator(head, REFERENCE, seed=1, slots=2).generate(moved) != first


def test_a_stop_token_ends_its_row_alone_and_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    head = OutputHead(tiny.shared("qwen3_5"))
    free = [alone(head, REFERENCE, r) for r in requests(Sampling())]
    stop = free[2][3]
    asked = requests(Sampling(), stops=frozenset([stop]))
    wanted = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in free]
    widths: list[int] = []
    extend = PolicyDecoder.extend

    def watched(self: PolicyDecoder, batch: Any, tokens: Tensor, **kwargs: Any) -> Any:
        if tokens.shape[1] == 1 and not kwargs:
            widths.append(tokens.shape[0])
        return extend(self, batch, tokens, **kwargs)

    monkeypatch.setattr(PolicyDecoder, "extend", watched)
    seen: list[tuple[int, Generation]] = []
    answers = Generator(head, REFERENCE, seed=SEED, slots=2).generate(asked, progress=lambda i, a: seen.append((i, a)))
    assert [list(a.tokens) for a in answers] == wanted
    assert [a.finish for a in answers] == [Finish.EOS if t[-1] == stop else Finish.LENGTH for t in wanted]
    assert dict(seen) == dict(enumerate(answers))
    # Every token but the first of each answer took one row of one pass; a slot was empty only at the very end.
    assert sum(widths) == sum(len(t) - 1 for t in wanted)
    assert max(widths) == 2 and widths == sorted(widths, reverse=True)


def test_a_policy_that_diverges_ends_its_row_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    head = OutputHead(tiny.shared("qwen3_5"))
    asked = requests(Sampling())
    truth = [alone(head, POLICY, r) for r in asked]
    advance = StateBank.advance
    ill = asked[0].sequence

    def broken(self: StateBank, layer: int, recurrence: Any, inputs: Any, **kwargs: Any) -> Tensor:
        outputs = advance(self, layer, recurrence, inputs, **kwargs)
        seen = self.checkpoints[layer].cursors.seen
        for row in range(self.rows):
            if int(self._sequences[row]) == ill and int(seen[row]) == len(asked[0].prompt) + 2:
                outputs[row] = torch.nan
        return outputs

    monkeypatch.setattr(StateBank, "advance", broken)
    answers = Generator(head, POLICY, seed=SEED, slots=3).generate(asked)
    assert answers[0] == Generation(tokens=tuple(truth[0][:2]), finish=Finish.DIVERGED)
    assert [list(a.tokens) for a in answers[1:]] == truth[1:]
    with pytest.raises(NumericsError, match="although no state was rounded"):
        Generator(head, REFERENCE, seed=SEED, slots=3).generate(asked)


@pytest.mark.parametrize(("prompt", "most"), [([], 3), ([1], 0)])
def test_requests_without_tokens_are_refused(prompt: list[int], most: int) -> None:
    head = OutputHead(tiny.shared("mamba2"))
    with pytest.raises(ConfigError, match="request 0: expected a prompt and an answer of at least 1 token"):
        Generator(head, REFERENCE).generate([Request(prompt=prompt, sequence=0, max_tokens=most)])
    with pytest.raises(ConfigError, match="at least 1 sequence"):
        Generator(head, REFERENCE, slots=0)


def test_generating_nothing_is_possible() -> None:
    assert Generator(OutputHead(tiny.shared("mamba2")), REFERENCE).generate([]) == []


@pytest.mark.parametrize(
    ("sampling", "vocabulary"),
    [
        (Sampling(temperature=0.7), 9),
        (Sampling(temperature=2.0, top_k=4), 30),
        (Sampling(temperature=1.0, top_p=0.5), 30),
        (Sampling(temperature=1.0, top_p=1e-9), 30),
        (Sampling(temperature=0.5, top_k=7, top_p=0.8), 300),
    ],
    ids=str,
)
def test_draws_equal_those_of_plain_lists(sampling: Sampling, vocabulary: int) -> None:
    rows = 12
    logits = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    sequences, steps = [2**32 - 1 - 7 * r for r in range(rows)], list(range(0, 3 * rows, 3))
    drawn, finite = next_tokens(Prediction.of(logits), [sampling] * rows, seed=SEED, sequences=sequences, steps=steps)
    assert all(finite)
    wanted = [
        oracle.sampler(
            seed=SEED,
            sequence=sequences[r],
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )(logits[r].tolist(), steps[r])
        for r in range(rows)
    ]
    assert drawn == wanted
    order = list(range(rows))[::-1]
    turned, _ = next_tokens(
        Prediction.of(logits).take(torch.tensor(order)),
        [sampling] * rows,
        seed=SEED,
        sequences=[sequences[r] for r in order],
        steps=[steps[r] for r in order],
    )
    assert turned == drawn[::-1]


def test_rows_may_draw_in_different_ways() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.5]] * 3)
    ways = [Sampling(), Sampling(temperature=100.0), Sampling(temperature=1.0, top_k=1)]
    prediction = Prediction.of(logits)
    seen = [next_tokens(prediction, ways, seed=s, sequences=[0, 1, 2], steps=[0, 0, 0])[0] for s in range(40)]
    assert {row[0] for row in seen} == {1}
    assert {row[1] for row in seen} == {0, 1, 2}
    assert {row[2] for row in seen} == {1}


@pytest.mark.parametrize("ill", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_told_and_disturb_no_other_row(ill: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 0.5], [0.0, ill, 0.5], [0.0, 1.0, 2.0]])
    ways = [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=1)]
    tokens, finite = next_tokens(Prediction.of(logits), ways, seed=0, sequences=[0, 1, 2], steps=[0, 0, 0])
    assert finite == [True, False, True]
    assert (tokens[0], tokens[2]) == (1, 2)


def test_frequencies_are_those_of_the_distribution() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.3, 1.2, -3.0, 0.0]])
    sampling = Sampling(temperature=0.8, top_k=5)
    expected = distribution(logits, sampling)[0]
    count = 20_000
    drawn, _ = next_tokens(
        Prediction.of(logits.expand(count, -1)),
        [sampling] * count,
        seed=0,
        sequences=list(range(count)),
        steps=[3] * count,
    )
    seen = torch.bincount(torch.tensor(drawn), minlength=6)
    assert int(seen[4]) == 0  # outside the five most probable tokens
    kept = expected > 0
    statistic = float((((seen - count * expected) ** 2)[kept] / (count * expected[kept])).sum())
    assert statistic < 23.5  # chi-square with 4 degrees of freedom: exceeded once in 10,000 seeds
    assert abs(float(uniforms(seed=0, sequences=range(count), steps=[0] * count, device="cpu").mean()) - 0.5) < 0.01


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ],
    ids=str,
)
def test_values_that_are_no_distribution_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**{"temperature": 1.0, **wrong})


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("text", "stops", "end"),
    [
        ("one\n\ntwo", ["\n\n"], 5),
        ("a stop in the middle", ["stop", "middle"], 6),
        ("naïve – and ∞ more", ["∞"], len("naïve – and ∞".encode())),
        ("nothing here", ["\n"], None),
        ("x" * 500 + "Question:", ["Question:"], 509),
        ("anything", ["", "!"], None),
        ("no stops", [], None),
    ],
)
def test_a_stop_string_is_found_when_it_is_complete(text: str, stops: list[str], end: int | None) -> None:
    found = StopText(decode, stops)
    tokens = list(text.encode())
    first = next((n for n in range(1, len(tokens) + 1) if found(tokens[:n])), None)
    assert first == end


def test_a_stop_string_that_only_the_tail_seems_to_hold_is_none() -> None:
    # A decoder that strips a leading space, as some tokenizers do, makes a new text out of a tail.
    def strips(tokens: Sequence[int]) -> str:
        text = decode(tokens)
        return text if len(tokens) > 30 else "STOP" + text

    assert not StopText(strips, ["STOP"])(list(b"x" * 40))
    assert generation.StopText(strips, ["xSTOP"])(list(b"x" * 40 + b"STOP"))


def test_counter_of_answers_is_complete() -> None:
    head = OutputHead(tiny.shared("mamba2"))
    asked = [Request(prompt=[1, 2], sequence=i, max_tokens=1 + i % 3) for i in range(7)]
    answers = Generator(head, REFERENCE, slots=3).generate(asked)
    assert Counter(len(a.tokens) for a in answers) == {1: 3, 2: 2, 3: 2}
