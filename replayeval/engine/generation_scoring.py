"""Log-likelihood of known continuations under a state policy, many at once, contexts read once each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from replayeval.engine.generation_batch import Batch, PolicyDecoder
from replayeval.errors import ConfigError, NumericsError
from replayeval.models.head import OutputHead
from replayssm.backend import Execution
from replayssm.checkpoint import StoreObserver
from replayssm.policy import Policy

__all__ = ["Context", "Continuation", "Likelihood", "LikelihoodScorer"]

_LOGIT_ELEMENTS = 2**26


class Context(StrEnum):
    """What the tokens before a continuation count as.

    `prompt`: they are read by the reference recurrence and their state is handed over once; the policy acts on the
    continuation alone, and not at all on one of a single token. `decoded`: they follow the policy from the first token
    on, as if the model had written them.
    """

    PROMPT = "prompt"
    DECODED = "decoded"


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A continuation to score.

    Attributes:
        context: Token ids before it, at least one.
        tokens: Its token ids, at least one.
        sequence: Number below 2**32 that addresses the random bits of its states. Continuations of one context share
            the reading of it if they share this number too.
    """

    context: tuple[int, ...]
    tokens: tuple[int, ...]
    sequence: int


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """The score of a continuation.

    Attributes:
        log_probability: Sum over its tokens, in nats; minus infinity when the policy diverged.
        greedy: Whether each of its tokens had the largest logit.
        diverged: Whether some logit was not finite.
    """

    log_probability: float
    greedy: bool
    diverged: bool


class LikelihoodScorer:
    """Scores continuations under one policy.

    Args:
        head: The model.
        policy: What decoded states follow.
        context: What the tokens before a continuation count as.
        seed: Seed of stochastic rounding.
        rows: Continuations side by side. Scores depend on it by float rounding alone, as `Generator` describes.
        observer: Called after each store.
        execution: What advances the states.

    Raises:
        UnsupportedArmError: When this execution cannot advance the policy on this model and device.
        ConfigError: When there is no row.
    """

    def __init__(
        self,
        head: OutputHead,
        policy: Policy,
        *,
        context: Context = Context.PROMPT,
        seed: int = 0,
        rows: int = 8,
        observer: StoreObserver | None = None,
        execution: Execution | None = None,
    ) -> None:
        if rows < 1:
            raise ConfigError(f"expected at least 1 continuation side by side, got {rows}")
        self._head = head
        self._context = context
        self._rows = rows
        self._lossless = policy.is_lossless
        self._decoder = PolicyDecoder(
            head, policy, seed=seed, merge_lossless=True, observer=observer, execution=execution
        )

    def score(
        self,
        continuations: Sequence[Continuation],
        *,
        progress: Callable[[int, Likelihood], None] | None = None,
    ) -> list[Likelihood]:
        """Score all continuations, in their order.

        Args:
            continuations: In any order; the longest contexts are read first.
            progress: Called with the index of each finished continuation and its score.

        Raises:
            ConfigError: When a context or a continuation is empty.
            NumericsError: When a logit is not finite although no state was rounded.
        """
        for index, one in enumerate(continuations):
            if not one.context or not one.tokens:
                raise ConfigError(
                    f"request {index}: expected a context and a continuation of at least 1 token, got "
                    f"{len(one.context)} and {len(one.tokens)}"
                )
        by_context: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for index, one in enumerate(continuations):
            by_context.setdefault((one.sequence, one.context), []).append(index)
        order = sorted(by_context, key=lambda key: -len(key[1]))
        members = [index for key in order for index in by_context[key]]
        scores: dict[int, Likelihood] = {}
        with self._decoder.running():
            for start in range(0, len(members), self._rows):
                chosen = members[start : start + self._rows]
                for index, score in zip(chosen, self._score(continuations, chosen), strict=True):
                    scores[index] = score
                    if progress is not None:
                        progress(index, score)
        return [scores[index] for index in range(len(continuations))]

    def _score(self, continuations: Sequence[Continuation], chosen: list[int]) -> list[Likelihood]:
        ones = [continuations[index] for index in chosen]
        contexts = list(dict.fromkeys((one.sequence, one.context) for one in ones))
        parts: list[Batch] = []
        place: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        firsts: list[Tensor] = []
        for group in self._decoder.groups([len(context) for _, context in contexts]):
            batch, last = self._decoder.prefill(
                [contexts[i][1] for i in group],
                sequences=[contexts[i][0] for i in group],
                decoded=self._context is Context.DECODED,
            )
            for row, i in enumerate(group):
                place[contexts[i]] = (len(parts), row)
            parts.append(batch)
            firsts.append(last)

        tally = _Tally(len(ones))
        for number, last in enumerate(firsts):
            here = [i for i, one in enumerate(ones) if place[one.sequence, one.context][0] == number]
            rows = torch.tensor([place[ones[i].sequence, ones[i].context][1] for i in here], device=last.device)
            targets = np.array([[ones[i].tokens[0]] for i in here], dtype=np.int64)
            self._judge(last.index_select(0, rows)[:, None], targets, here, tally)

        # The first token was judged behind the context; the last one is never read.
        longer = [
            [i for i, one in enumerate(ones) if len(one.tokens) > 1 and place[one.sequence, one.context][0] == number]
            for number in range(len(parts))
        ]
        present = [(part, wanted) for part, wanted in zip(parts, longer, strict=True) if wanted]
        if present:
            rows = [[place[ones[i].sequence, ones[i].context][1] for i in wanted] for _, wanted in present]
            self._force(
                Batch.join([part for part, _ in present], rows), [i for _, w in present for i in w], ones, tally
            )
        return [self._likelihood(chosen[i], i, tally) for i in range(len(ones))]

    def _force(self, batch: Batch, members: list[int], ones: list[Continuation], tally: "_Tally") -> None:
        """Feed all but the last token of each continuation and judge what follows each."""
        longest = max(len(ones[i].tokens) for i in members) - 1
        ids = np.zeros((len(members), longest), dtype=np.int64)
        targets = np.full((len(members), longest), -1, dtype=np.int64)
        for row, i in enumerate(members):
            tokens = ones[i].tokens
            ids[row, : len(tokens) - 1] = tokens[:-1]
            targets[row, : len(tokens) - 1] = tokens[1:]
        device = self._head.input_device
        size = max(1, self._decoder.pass_tokens // len(members))
        for start in range(0, longest, size):
            part = slice(start, start + size)
            batch, hidden = self._decoder.extend(
                batch,
                torch.as_tensor(ids[:, part], device=device),
                valid=torch.as_tensor(targets[:, part] >= 0, device=device),
            )
            self._judge(hidden, targets[:, part], members, tally)

    def _judge(self, hidden: Tensor, targets: np.ndarray, members: list[int], tally: "_Tally") -> None:
        """Add the log-probability of each target, with few logits in memory at a time."""
        rows, times = np.nonzero(targets >= 0)
        size = max(1, _LOGIT_ELEMENTS // self._head.vocabulary)
        for start in range(0, len(rows), size):
            r, t = rows[start : start + size], times[start : start + size]
            picked = hidden[torch.as_tensor(r, device=hidden.device), torch.as_tensor(t, device=hidden.device)]
            logits = self._head.logits(picked)
            wanted = torch.as_tensor(targets[r, t], device=logits.device)
            logs = logits.log_softmax(-1).gather(-1, wanted[:, None]).squeeze(-1).to(torch.float64)
            finite = logits.isfinite().all(-1)
            agrees = logits.argmax(-1) == wanted
            index = np.array(members, dtype=np.int64)[r]
            np.add.at(tally.logs, index, logs.masked_fill(~finite, 0).cpu().numpy())
            np.logical_and.at(tally.greedy, index, (agrees & finite).cpu().numpy())
            np.logical_and.at(tally.finite, index, finite.cpu().numpy())

    def _likelihood(self, request: int, i: int, tally: "_Tally") -> Likelihood:
        if tally.finite[i]:
            return Likelihood(log_probability=float(tally.logs[i]), greedy=bool(tally.greedy[i]), diverged=False)
        if self._lossless:
            raise NumericsError(
                f"expected finite logits in the continuation of request {request}, got NaN or infinity, although no "
                "state was rounded; the weights or the dtype of the model cannot carry this text"
            )
        return Likelihood(log_probability=-np.inf, greedy=False, diverged=True)


class _Tally:
    def __init__(self, count: int) -> None:
        self.logs = np.zeros(count)
        self.greedy = np.ones(count, dtype=np.bool_)
        self.finite = np.ones(count, dtype=np.bool_)
