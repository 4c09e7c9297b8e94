"""Checks that the apparatus runs on itself; one that fails stops the run, because its numbers would mean nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from replayeval.engine.forcing import DocumentTokens, Forcing, forced_hidden_states
from replayeval.errors import NumericsError
from replayeval.models.head import OutputHead
from replayeval.models.hook import ssm_layers
from replayeval.store.scores import DocumentScores
from replayssm.policy import Policy
from replayssm.replay import StateBank

FLOOR_LIMIT_NATS = {torch.float32: 1e-10, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Largest mean KL of the float32 control arm, by dtype of the model.

The control arm differs from the reference in the order of sums alone, about 1e-7 relative in the output of a layer. In
a float32 model that stays near its own rounding noise, and KL is the square of it. In a half-precision model the
rounding of the next activation turns it, rarely, into one unit in the last place, 1e-3 (float16) or 8e-3 (bfloat16).
"""

_PROBE_TOKENS = 96


@dataclass(frozen=True, kw_only=True)
class Check:
    """The outcome of one self-check.

    Attributes:
        name: What was checked.
        passed: The outcome, or `None` when it could not be run; `reason` then says why.
        value: What was measured.
        limit: What it was held against.
        reason: Why there is no outcome.
    """

    name: str
    passed: bool | None
    value: float | None
    limit: float | None
    reason: str | None = None


def control_arm(arms: Sequence[Policy]) -> Policy | None:
    """The arm that keeps its state in float32 and is algebraically the reference, if there is one."""
    return next((a for a in arms if a.is_lossless), None)


def check_floor(scores: Sequence[DocumentScores], control: Policy | None, *, dtype: torch.dtype) -> Check:
    """Hold the control arm against the floor of the model's dtype; exactly zero is reported as such.

    Raises:
        NumericsError: When its mean KL is above the limit, or it diverged.
    """
    limit = FLOOR_LIMIT_NATS.get(dtype, FLOOR_LIMIT_NATS[torch.bfloat16])
    name = "control arm agrees with the reference"
    if control is None:
        return Check(name=name, passed=None, value=None, limit=limit, reason="no arm keeps its state in float32")
    row = scores[0].arms.index(str(control))
    values = np.concatenate([s.kl_nats[row] for s in scores])
    mean = float(values.mean())
    if not mean <= limit:
        raise NumericsError(
            f"self-check failed: expected a mean KL of at most {limit:g} nats between {control} and the reference, "
            f"which are algebraically equal, got {mean:.3g}; the engine or the model's kernels do not compute what "
            "they should, so no arm of this run can be trusted. `replayeval doctor` looks for the usual causes"
        )
    return Check(name=name, passed=True, value=mean, limit=limit)


def check_forcing_is_live(head: OutputHead, document: DocumentTokens, forcing: Forcing) -> Check:
    """Corrupt a token in the middle of a probe: outputs after it must change, outputs before it must not.

    The outputs before may differ by the rounding of the model where it groups tokens by their content (mixtures of
    experts), so they are held to the epsilon of its dtype, not to zero; those after have to move clearly further.

    Raises:
        NumericsError: When the past changes or the future does not.
    """
    name = "forcing is live and causal"
    tokens = document.tokens[: min(document.read_tokens, _PROBE_TOKENS)]
    if len(tokens) < 3:
        return Check(
            name=name, passed=None, value=None, limit=None, reason="the first document is shorter than 3 tokens"
        )
    middle = len(tokens) // 2
    other = tokens.copy()
    other[middle] = (other[middle] + 1) % head.vocabulary
    short = replace(forcing, prefill_tokens=min(forcing.prefill_tokens, middle // 2))
    original, corrupted = (_hidden(head, ids, short) for ids in (tokens, other))
    finite = (original.isfinite() & corrupted.isfinite()).flatten(1).all(1).cpu()
    if not bool(finite[0]):
        raise NumericsError(
            f"self-check failed: expected finite outputs of the float32 reference in {len(tokens)} tokens, got NaN or "
            "infinity; the weights or the dtype of the model cannot carry this text"
        )
    # An arm that diverges this early is a result of the run; nothing can be said here about its tokens.
    original, corrupted = original[finite], corrupted[finite]
    policies = [p for row, p in enumerate(forcing.policies) if bool(finite[row])]
    scale = float(original.abs().max())
    before = float((original[:, :middle] - corrupted[:, :middle]).abs().max()) / scale
    after = (original[:, middle:] - corrupted[:, middle:]).abs().amax((1, 2)) / scale
    eps = float(torch.finfo(head.model.dtype).eps)
    limit = 8 * eps
    clear = max(eps, 4 * before)
    if not before <= limit:
        raise NumericsError(
            f"self-check failed: a corrupted token at position {middle} changed outputs before it by {before:.3g} "
            f"(limit {limit:.3g}); the model is not causal under the engine, or its cache leaks between passes"
        )
    dead = [str(p) for p, moved in zip(policies, after, strict=True) if not bool(moved > clear)]
    if dead:
        raise NumericsError(
            f"self-check failed: a corrupted token at position {middle} left all later outputs as they were under "
            f"{', '.join(dead)}; these rows are not reading the tokens that they are given"
        )
    return Check(name=name, passed=True, value=before, limit=limit)


def check_every_layer_stores(head: OutputHead, document: DocumentTokens, forcing: Forcing) -> Check:
    """Every SSM layer must store at least one state per window of every arm.

    Raises:
        NumericsError: Naming the layers that did not.
    """
    name = "every SSM layer is hooked and stores once per window"
    tokens = document.tokens[
        : min(document.read_tokens, max(_PROBE_TOKENS, *(2 * p.window_tokens for p in forcing.arms)))
    ]
    short = replace(forcing, prefill_tokens=0)
    banks: list[StateBank] = []
    _hidden(head, tokens, short, banks=banks)
    wanted = sum(len(p.copies) * (len(tokens) // p.window_tokens) for p in forcing.arms)
    checkpoints = banks[0].checkpoints
    layers = ssm_layers(head.model)
    silent = [x.name for x in layers if x.layer_idx not in checkpoints or checkpoints[x.layer_idx].stores < wanted]
    if silent:
        raise NumericsError(
            f"self-check failed: expected at least {wanted} stores in {len(tokens)} tokens in each of {len(layers)} "
            f"SSM layers, got fewer in {', '.join(silent)}; these layers were not reached by the hook"
        )
    return Check(name=name, passed=True, value=float(min(c.stores for c in checkpoints.values())), limit=float(wanted))


def _hidden(head: OutputHead, tokens: np.ndarray, forcing: Forcing, *, banks: list[StateBank] | None = None) -> Tensor:
    parts: list[Tensor] = []
    forced_hidden_states(
        head, [tokens], forcing, sequences=[0], banks=banks, chunk_done=lambda _, hidden: parts.append(hidden.float())
    )
    return torch.cat(parts, dim=1)
