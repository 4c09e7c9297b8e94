"""Speed of generation against the `generate` of transformers, in one run on the same prompts, once answers agree."""

# transformers' `generate` is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from transformers import GenerationConfig

from replayeval.engine.generation import Generator as Engine
from replayeval.engine.generation import Graphs, Request
from replayeval.engine.memory import peak_memory_bytes
from replayeval.engine.precision import exact_float32
from replayeval.errors import ConfigError, NumericsError
from replayeval.models.head import OutputHead
from replayeval.models.quiet import quiet
from replayssm.backend import Execution
from replayssm.policy import REFERENCE, Policy

SCHEMA = "replayeval.bench.generate/1"

PEER = "transformers generate"

FLOAT32_TIE = 1e-4
"""Gap of two logits, relative to the largest, within which two engines in float32 may choose differently.

Sums in another order move a logit by about 1e-5 of the largest one, see `Generator`.
"""


@dataclass(frozen=True, kw_only=True)
class GenerateTiming:
    """One contestant.

    Attributes:
        name: What ran.
        seconds: Median over the repeats, prompts included.
        prompt_seconds: Median for the prompts and one token each.
        tokens_per_s: Generated tokens of all rows per second, prompts included.
        ratio: `tokens_per_s` over that of transformers' `generate` in the same run.
        step_ms: Milliseconds of each token after the first, all rows together; none when one token was generated.
        step_ratio: `step_ms` of `generate` over this one.
        steps: How tokens after the first were computed.
    """

    name: str
    seconds: float
    prompt_seconds: float
    tokens_per_s: float
    ratio: float
    step_ms: float | None
    step_ratio: float | None
    steps: str


@dataclass(frozen=True, kw_only=True)
class GenerateBench:
    """The outcome of `bench_generate`.

    Attributes:
        timings: transformers' `generate` first, then the float32 policy, then the arms.
        rows: Sequences side by side.
        prompt_tokens: Tokens of each prompt.
        new_tokens: Tokens generated behind each.
        compared_tokens: Greedy tokens of the float32 policy that were compared with those of `generate`.
        ties: Rows that went apart where two logits were closer than rounding.
        backend: What advanced the states.
        device: Where the model lay.
        peak_memory_bytes: Of the process or the devices, over everything that ran.
    """

    timings: tuple[GenerateTiming, ...]
    rows: int
    prompt_tokens: int
    new_tokens: int
    compared_tokens: int
    ties: int
    backend: str
    device: str
    peak_memory_bytes: int

    def to_json(self) -> dict[str, Any]:
        """JSON values, with the schema."""
        return {"schema": SCHEMA, **asdict(self)}


def bench_generate(
    head: OutputHead,
    prompts: Sequence[np.ndarray],
    arms: Sequence[Policy],
    *,
    new_tokens: int,
    repeats: int = 3,
    execution: Execution | None = None,
    graphs: Graphs = Graphs.AUTO,
    say: Callable[[str], None] = lambda _: None,
) -> GenerateBench:
    """Time generation of all prompts side by side.

    Before anything is timed, the greedy tokens of the float32 policy must equal those of transformers' `generate`,
    except from where two logits were closer than rounding. Contestants take turns, so that a machine that slows down
    does so for all of them.

    Args:
        head: The model.
        prompts: Token ids of equal length.
        arms: Policies to time beside the float32 one.
        new_tokens: Tokens to generate; no token ends a text early.
        repeats: Timed repetitions after one untimed.
        execution: What advances the states.
        graphs: Whether steps are replayed as CUDA graphs.
        say: Told what is running.

    Raises:
        ConfigError: When prompts differ in length, or nothing is to be generated.
        UnsupportedArmError: When an arm cannot be generated under in this way.
        NumericsError: When answers differ; nothing is timed then.
    """
    execution = Execution() if execution is None else execution
    lengths = {len(prompt) for prompt in prompts}
    if len(lengths) != 1 or 0 in lengths or new_tokens < 1:
        raise ConfigError(
            f"expected prompts of one length and at least 1 token to generate, got lengths {sorted(lengths)} and "
            f"{new_tokens} tokens"
        )
    rows = len(prompts)
    ids = torch.as_tensor(np.stack(list(prompts)).astype(np.int64), device=head.input_device)
    words = [[int(t) for t in prompt] for prompt in prompts]

    def peer(tokens: int) -> list[list[int]]:
        with torch.inference_mode(), quiet():
            found = cast(Any, head.model).generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
            )
        return found[:, ids.shape[1] :].tolist()

    # One engine for all turns: what it records of a step in its first is what it replays in the others.
    policies = tuple(dict.fromkeys((REFERENCE, *arms)))
    engines = {p: Engine(head, p, slots=rows, execution=execution, graphs=graphs) for p in policies}

    def ours(policy: Policy, tokens: int) -> list[list[int]]:
        requests = [Request(prompt=prompt, sequence=row, max_tokens=tokens) for row, prompt in enumerate(words)]
        return [list(answer.tokens) for answer in engines[policy].generate(requests)]

    contestants: list[tuple[str, Callable[[int], object]]] = [(PEER, peer)]
    contestants += [(str(policy), partial(ours, policy)) for policy in policies]
    with exact_float32(), _endless(head):
        say(f"comparing greedy tokens with {PEER}")
        compared, ties = _check(head, ids, peer(new_tokens), ours(REFERENCE, new_tokens))
        whole: dict[str, list[float]] = {name: [] for name, _ in contestants}
        first: dict[str, list[float]] = {name: [] for name, _ in contestants}
        for turn in range(repeats + 1):
            for name, work in contestants:
                say(f"{name}, {'warming up' if turn == 0 else f'{turn} of {repeats}'}")
                seconds = _seconds(partial(work, new_tokens))
                prompt_seconds = _seconds(partial(work, 1))
                if turn:
                    whole[name].append(seconds)
                    first[name].append(prompt_seconds)
    steps = {PEER: "transformers"} | {str(policy): str(engine.steps) for policy, engine in engines.items()}
    return GenerateBench(
        timings=_timings(
            {name: (statistics.median(whole[name]), statistics.median(first[name])) for name, _ in contestants},
            steps=steps,
            rows=rows,
            new_tokens=new_tokens,
        ),
        rows=rows,
        prompt_tokens=ids.shape[1],
        new_tokens=new_tokens,
        compared_tokens=compared,
        ties=ties,
        backend=str(execution),
        device=_device_name(head.input_device),
        peak_memory_bytes=peak_memory_bytes(),
    )


def _timings(
    medians: dict[str, tuple[float, float]], *, steps: dict[str, str], rows: int, new_tokens: int
) -> tuple[GenerateTiming, ...]:
    """The contestants, from the seconds of whole answers and of their first tokens."""

    def step_ms(name: str) -> float | None:
        seconds, prompt_seconds = medians[name]
        # On a machine that stumbles, the first token alone can seem to take longer than all.
        return None if new_tokens == 1 else 1e3 * max(seconds - prompt_seconds, 0.0) / (new_tokens - 1)

    peer = step_ms(PEER)

    def step_ratio(name: str) -> float | None:
        own = step_ms(name)
        return None if peer is None or not own else peer / own

    return tuple(
        GenerateTiming(
            name=name,
            seconds=seconds,
            prompt_seconds=prompt_seconds,
            tokens_per_s=rows * new_tokens / seconds,
            ratio=medians[PEER][0] / seconds,
            step_ms=step_ms(name),
            step_ratio=step_ratio(name),
            steps=steps[name],
        )
        for name, (seconds, prompt_seconds) in medians.items()
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _tie(head: OutputHead) -> float:
    """How close two logits have to be, relative to the largest, to be a tie between the two engines.

    In half precision each of two blocks of a layer rounds what it adds to the residual stream, which adds up like the
    root of their number. Both logits may be off by that, in both engines. With 32 layers of random weights in bfloat16
    logits are 3% to 5% of the largest one from those of the same weights in float32, in transformers as here.
    """
    dtype = head.model.dtype
    roundoff = torch.finfo(dtype).eps / 2
    if dtype == torch.float32:
        if head.input_device.type != "cuda" or importlib.util.find_spec("fla") is None:
            return FLOAT32_TIE
        # What transformers then runs multiplies in TF32.
        roundoff = 2.0**-11
    return 4 * roundoff * math.sqrt(2 * head.config.num_hidden_layers)


def _check(head: OutputHead, prompts: torch.Tensor, peer: list[list[int]], ours: list[list[int]]) -> tuple[int, int]:
    """Compare answers and return how many tokens were compared and how many rows went apart at a tie."""
    limit = _tie(head)
    compared = ties = 0
    for row, (theirs, own) in enumerate(zip(peer, ours, strict=True)):
        apart = next((i for i, pair in enumerate(zip(theirs, own, strict=True)) if pair[0] != pair[1]), None)
        if apart is None:
            compared += len(own)
            continue
        prefix = torch.cat([prompts[row], torch.tensor(own[:apart], dtype=torch.int64, device=prompts.device)])
        with torch.inference_mode():
            logits = head.logits(head.hidden(prefix[None]))[0, -1]
        gap = float((logits[theirs[apart]] - logits[own[apart]]).abs() / logits.abs().max())
        if not gap <= limit:
            raise NumericsError(
                f"expected the greedy tokens of conventional:fp32 to be those of transformers generate, but in row "
                f"{row} they differ at token {apart} (generate {theirs[apart]}, here {own[apart]}), whose logits are "
                f"{gap:.2g} of the largest one apart (limit {limit:.2g}); nothing was timed"
            )
        compared += apart
        ties += 1
    return compared, ties


@contextmanager
def _endless(head: OutputHead) -> Generator[None]:
    """Let `generate` go on behind the end of a text, and without anything that its configuration would do to logits."""
    before = head.model.generation_config
    head.model.generation_config = GenerationConfig(pad_token_id=0, use_cache=True)
    try:
        yield
    finally:
        head.model.generation_config = before


def _seconds(work: Callable[[], object]) -> float:
    _synchronise()
    started = time.perf_counter()
    work()
    _synchronise()
    return time.perf_counter() - started


def _synchronise() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
