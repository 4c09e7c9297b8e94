"""Which token comes next: the largest logit, or a draw whose random number depends on sequence and step alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from replayeval.errors import ConfigError
from replayssm.formats import random_bits

SAMPLING_COPY = 255
"""Last number that a copy of a state can have in the address of random bits; no store uses it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

    The order is that of transformers: the temperature divides, `top_k` keeps the most probable tokens (and ties with
    the last of them), then `top_p` the fewest of these whose probability reaches it.

    Attributes:
        temperature: Divides the logits; 0 takes the largest logit and draws nothing.
        top_k: How many tokens stay; 0 keeps all.
        top_p: How much probability stays; 1 keeps all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is no distribution."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature: expected a number of 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise ConfigError(f"top_k: expected a whole number of 0 (all tokens) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: expected a number above 0 and at most 1, got {self.top_p}")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


GREEDY = Sampling()


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What comes next in each row, and all that a greedy choice needs of it in one small tensor.

    Attributes:
        logits: As the model gives them.
        choices: The token with the largest logit, and whether all logits of the row are finite.
    """

    logits: Float[Tensor, "rows vocabulary"]
    choices: Int64[Tensor, "two rows"]

    @classmethod
    def of(cls, logits: Float[Tensor, "rows vocabulary"]) -> "Prediction":
        """The prediction of these logits; nothing is waited for."""
        return cls(logits=logits, choices=torch.stack([logits.argmax(-1), logits.isfinite().all(-1).to(torch.int64)]))

    def take(self, rows: Int64[Tensor, " rows"]) -> "Prediction":
        """That of chosen rows."""
        return Prediction(logits=self.logits.index_select(0, rows), choices=self.choices.index_select(1, rows))


def uniforms(
    *, seed: int, sequences: Sequence[int], steps: Sequence[int], device: torch.device | str
) -> Float64[Tensor, " rows"]:
    """One number in [0, 1) per row, with 53 random bits, from the address (seed, sequence, step).

    Args:
        seed: 64-bit seed of the run.
        sequences: Sequence number of each row, below 2**32.
        steps: How many tokens each row has generated.
        device: Where the numbers are made.

    Source: Philox4x32-10, see `replayssm.formats`; the high 27 and 26 bits of two words.
    """
    words = random_bits(
        seed=seed,
        layer=0,
        copy=SAMPLING_COPY,
        sequences=torch.tensor(list(sequences)),
        tokens=torch.tensor(list(steps)),
        elements=2,
        device=device,
    )
    return ((words[:, 0] >> 5) * 2**26 + (words[:, 1] >> 6)).to(torch.float64) * 2.0**-53


def next_tokens(
    prediction: Prediction,
    samplings: Sequence[Sampling],
    *,
    seed: int,
    sequences: Sequence[int],
    steps: Sequence[int],
) -> tuple[list[int], list[bool]]:
    """The next token of each row, and whether its logits are finite; without that the token means nothing.

    A draw inverts the cumulative distribution in the order of the vocabulary. So a change of the logits by rounding
    moves the ends of each token's interval by no more than it moves the probabilities, and rarely changes the draw.

    Args:
        prediction: Of each row.
        samplings: How each row draws.
        seed: Seed of the run.
        sequences: Sequence number of each row.
        steps: How many tokens each row has generated.
    """
    logits = prediction.logits
    chosen = prediction.choices
    for sampling in dict.fromkeys(samplings):
        if sampling.greedy:
            continue
        rows = [row for row, own in enumerate(samplings) if own == sampling]
        index = torch.tensor(rows, device=logits.device)
        numbers = uniforms(
            seed=seed,
            sequences=[sequences[row] for row in rows],
            steps=[steps[row] for row in rows],
            device=logits.device,
        )
        drawn = _draw(distribution(logits.index_select(0, index).nan_to_num(0.0, 0.0, 0.0), sampling), numbers)
        chosen = torch.stack([chosen[0].index_copy(0, index, drawn), chosen[1]])
    # The only time that a step waits for the device.
    tokens, finite = cast(list[list[int]], chosen.tolist())  # pyright: ignore[reportUnknownMemberType]
    return tokens, [bool(x) for x in finite]


def distribution(logits: Float[Tensor, "rows vocabulary"], sampling: Sampling) -> Float64[Tensor, "rows vocabulary"]:
    """Probabilities of the next token, renormalised over those that stay."""
    scores = logits.to(torch.float64) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        # A token stays while those before it have not yet reached `top_p`.
        dropped = probabilities.cumsum(-1) - probabilities >= sampling.top_p
        scores = scores.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)
    return scores.softmax(-1)


def _draw(probabilities: Tensor, numbers: Tensor) -> Tensor:
    ends = probabilities.cumsum(-1)
    total = ends[:, -1:]
    wanted = torch.minimum(numbers[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(ends, wanted, right=True).squeeze(-1)
