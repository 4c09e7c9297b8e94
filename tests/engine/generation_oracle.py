"""One sequence at a time, one token per pass, by the plainest means: what batched generation and scoring must equal.

It shares the state bank, the hook and the output head with what is under test, each of which has oracles of its own. It
shares nothing that batches: no padding, no masks, no rows that come and go, no sampling code.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from replayeval.models.head import OutputHead
from replayeval.models.hook import hooked
from replayssm.policy import Policy
from replayssm.replay import StateBank
from tests.oracles.formats import philox

Choose = Callable[[list[float], int], int]


def largest(logits: list[float], step: int) -> int:
    del step
    return max(range(len(logits)), key=lambda i: logits[i])


def sampler(*, seed: int, sequence: int, temperature: float, top_k: int, top_p: float) -> Choose:
    """Draws by sorted lists and plain sums."""

    def choose(logits: list[float], step: int) -> int:
        words = philox((0, step, sequence, 255 << 24), (seed % 2**32, seed >> 32))
        number = ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53
        largest_logit = max(logits)
        weights = [math.exp((x - largest_logit) / temperature) for x in logits]
        if top_k:
            least = sorted(weights, reverse=True)[:top_k][-1]
            weights = [w if w >= least else 0.0 for w in weights]
        if top_p < 1:
            total, kept, reached = math.fsum(weights), set[int](), 0.0
            for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
                if reached >= top_p * total:
                    break
                kept.add(i)
                reached += weights[i]
            weights = [w if i in kept else 0.0 for i, w in enumerate(weights)]
        wanted, reached = number * math.fsum(weights), 0.0
        for i, weight in enumerate(weights):
            reached += weight
            if reached > wanted:
                return i
        raise AssertionError("unreachable")

    return choose


def forced(
    head: OutputHead,
    policy: Policy,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    sequence: int,
    seed: int,
    decoded_prompt: bool = False,
) -> Tensor:
    """Logits `[len(tokens), vocabulary]` that predict each of `tokens` behind the prompt."""
    bank = StateBank([policy], sequences=[sequence], seed=seed, prompt=not decoded_prompt, merge_lossless=False)
    cache = head.new_cache(1)
    found: list[Tensor] = []
    with hooked(head.model, bank):
        position = 0
        for part in [list(prompt)] if not decoded_prompt else [[t] for t in prompt]:
            hidden = head.hidden(torch.tensor([part]), cache, position)
            position += len(part)
        if not decoded_prompt:
            bank.hand_over()
        for token in tokens:
            found.append(head.logits(hidden)[0, -1])  # pyright: ignore[reportPossiblyUnboundVariable]
            hidden = head.hidden(torch.tensor([[token]]), cache, position)
            position += 1
    return torch.stack(found)


def generated(
    head: OutputHead,
    policy: Policy,
    prompt: Sequence[int],
    *,
    sequence: int,
    seed: int,
    max_tokens: int,
    choose: Choose = largest,
    stops: Sequence[int] = (),
) -> tuple[list[int], Tensor]:
    """Generated tokens, and the logits that each was chosen from."""
    bank = StateBank([policy], sequences=[sequence], seed=seed, prompt=True, merge_lossless=False)
    cache = head.new_cache(1)
    tokens: list[int] = []
    seen: list[Tensor] = []
    with hooked(head.model, bank):
        hidden = head.hidden(torch.tensor([list(prompt)]), cache, 0)
        bank.hand_over()
        while True:
            seen.append(head.logits(hidden)[0, -1])
            tokens.append(choose(seen[-1].tolist(), len(tokens)))
            if len(tokens) == max_tokens or tokens[-1] in stops:
                return tokens, torch.stack(seen)
            hidden = head.hidden(torch.tensor([[tokens[-1]]]), cache, len(prompt) + len(tokens) - 1)
