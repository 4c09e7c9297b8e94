"""Four sequences of different lengths that come and go in a batch, and what the oracle says of each alone."""

import torch
from torch import Tensor

from replayeval.models.head import OutputHead
from replayssm.policy import Policy
from tests.engine import generation_oracle as oracle
from tests.models import tiny

LENGTHS = (7, 4, 1, 12)
SEQUENCES = (70, 3, 4_000_000_000, 0)
STEPS = 7


def texts() -> list[list[int]]:
    """Prompts of different lengths and what comes behind each."""
    return [tiny.token_ids(1, n + STEPS, seed=i)[0].tolist() for i, n in enumerate(LENGTHS)]


def truth(head: OutputHead, policy: Policy, counts: dict[int, int], *, seed: int) -> dict[int, Tensor]:
    """What the oracle says of each sequence alone."""
    ids = texts()
    return {
        m: oracle.forced(
            head, policy, ids[m][: LENGTHS[m]], ids[m][LENGTHS[m] :][:count], sequence=SEQUENCES[m], seed=seed
        )
        for m, count in counts.items()
    }


def gaps(found: dict[int, Tensor], wanted: dict[int, Tensor]) -> dict[int, float]:
    """Largest difference of each sequence's logits, relative to the largest logit; infinite where one is no number."""
    return {m: float((found[m] - wanted[m]).abs().max().nan_to_num(torch.inf) / wanted[m].abs().max()) for m in wanted}
