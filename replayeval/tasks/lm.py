"""The model class `replayssm` of lm-eval: any of its tasks, answered under a state policy."""

# lm-eval and the model classes that it builds on are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.utils import postprocess_generated_text
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from replayeval.engine.generation import Finish, Generation, Request, StopText
from replayeval.engine.generation import Generator as Engine
from replayeval.engine.generation_batch import check_execution
from replayeval.engine.generation_scoring import Continuation, LikelihoodScorer
from replayeval.engine.precision import exact_float32
from replayeval.errors import ConfigError
from replayeval.models.head import OutputHead, check_head
from replayeval.models.loading import LoadedModel, load_model
from replayeval.tasks.lm_arguments import (
    check_arguments,
    context_of,
    execution_of,
    integer,
    policy_of,
    rows_of,
    split_arguments,
)
from replayeval.tasks.lm_base import HFLM
from replayeval.tasks.lm_requests import GenerationRecord, Wanted, occurrences, prompt_hash, stream, wanted
from replayssm.policy import DEFAULT_WINDOW

__all__ = ["ReplayLM"]

NO_LIMIT = 2**31 - 1
"""Longest text of a model whose configuration names no longest one."""

_DEFAULT_ANSWER_TOKENS = 256

_Result = TypeVar("_Result")


class ReplayLM(HFLM):
    """A Hugging Face model under a state policy.

    Answers are generated as `replayeval.engine.generation` describes: the prompt is read by the reference recurrence,
    its state handed over once, and each generated token follows the policy. Neither an answer nor a score depends on
    the batch size, up to float rounding. With `policy=conventional:fp32` it is lm-eval's own `hf` model. Nothing is
    ever truncated: a text that is longer than the model takes is an error.

    Args:
        pretrained: Hub id, directory, `builtin:NAME`, or a model that is loaded already.
        policy: A state policy, such as `separate:nvfp4/fp16+sr`.
        window: Replay window of policies that do not name one.
        seed: Seed of stochastic rounding and of sampling.
        context: What the context of a log-likelihood counts as: `prompt` (read by the reference recurrence; the policy
            acts on the continuation) or `decoded` (everything follows the policy).
        revision: Branch, tag or commit of a hub model.
        tokenizer: Another tokenizer than that of the model.
        max_length: Most tokens of a text; the model's own limit by default.
        device: `cpu`, `cuda`, `cuda:N`; by default all GPUs, or the CPU if there is none.
        dtype: `float32`, `bfloat16`, `float16`, or `auto`: as the checkpoint says.
        batch_size: Rows side by side, or `auto`: `max_batch_size`, halved as long as memory does not suffice.
        max_batch_size: Rows that `auto` starts with.
        trust_remote_code: Let the tokenizer run code from its repository.
        parallelize: Spread the model over all GPUs, which is what no `device` means.
        backend: Kind of model, as in `hf`; only `causal` is supported.
        state_backend: What advances the states, `torch` or `triton`.
        logits_cache: Has no meaning here: contexts that repeat are read once in any case.
        kwargs: `add_bos_token`, `prefix_token_id`, `think_end_token`, `enable_thinking` and `chat_template_args`
            of lm-eval's `hf` model.

    Attributes:
        generation_records: How each answer of the last `generate_until` came about, by SHA-256 of the prompt and number
            of the repeat.
        generation_steps: How the tokens of the last `generate_until` were computed.
        on_answer: Called with index and text of each answer once it ends; again where memory ran out meanwhile.
        diverged: Continuations of the last log-likelihoods whose logits were not finite under the policy; they score
            minus infinity.

    Raises:
        ConfigError: For arguments that are unknown or not supported, and for models that cannot be loaded.
        NumericsError: When the model's own logits are not reproduced.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        policy: str = "conventional:fp32",
        window: int | str = DEFAULT_WINDOW,
        seed: int | str = 0,
        context: str = "prompt",
        *,
        revision: str | None = None,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        max_length: int | str | None = None,
        device: str | None = None,
        dtype: str | torch.dtype | None = "auto",
        batch_size: int | str | None = 1,
        max_batch_size: int | None = 64,
        trust_remote_code: bool | None = False,
        parallelize: bool | None = False,
        backend: str = "causal",
        state_backend: str = "torch",
        logits_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        del logits_cache
        self.policy = policy_of(policy, window)
        self.seed = integer("seed", seed, least=0, most=2**64 - 1)
        self.context = context_of(context)
        self.execution = execution_of(state_backend)
        kwargs = check_arguments(kwargs, backend)
        limit = None if max_length is None else integer("max_length", max_length, least=1, most=NO_LIMIT)
        rows, automatic = rows_of(batch_size, max_batch_size)
        self.loaded: LoadedModel | None = None
        if isinstance(pretrained, str):
            self.loaded = load_model(
                pretrained,
                revision=None if revision in (None, "main") else str(revision),
                dtype=None if dtype is None else str(dtype),
                device=None if parallelize else device,
                trust_remote_code=bool(trust_remote_code),
                need_tokenizer=tokenizer is None,
            )
        model = pretrained if self.loaded is None else self.loaded.model
        with _silence("lm_eval.models.huggingface"):
            super().__init__(
                pretrained=model,
                backend="causal",
                tokenizer=tokenizer or (None if self.loaded is None else self.loaded.tokenizer),
                revision=str(revision or "main"),
                max_length=limit,
                batch_size=rows,
                max_batch_size=max_batch_size or rows,
                trust_remote_code=bool(trust_remote_code),
                **kwargs,
            )
        self.source = pretrained if isinstance(pretrained, str) else str(pretrained.name_or_path)
        self._automatic = automatic
        self._device = self.model.device if self.loaded is None else self.loaded.device
        self._head = OutputHead(self.model)
        check_head(self._head)
        check_execution(self._head, self.policy, self.execution)
        self.generation_records: dict[tuple[str, int], GenerationRecord] = {}
        self.generation_steps: str | None = None
        self.on_answer: Callable[[int, str], None] | None = None
        self.diverged = 0

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> "ReplayLM":
        """Create the model from `key=value,key=value`; commas inside brackets belong to a policy."""
        arguments: dict[str, Any] = {}
        for part in split_arguments(arg_string or ""):
            key, equals, value = part.partition("=")
            if not equals:
                raise ConfigError(f"model arguments: expected key=value, got {part!r} in {arg_string!r}")
            arguments[key.strip()] = utils.handle_arg_string(value)
        return cls.create_from_arg_obj(arguments, additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "ReplayLM":
        """Create the model from a dictionary; `additional_config` are lm-eval's own options."""
        given = {key: value for key, value in (additional_config or {}).items() if value is not None}
        if "pretrained" not in arg_dict:
            raise ConfigError(
                "model arguments: expected pretrained=MODEL (hub id, directory or builtin:NAME), got none"
            )
        return cls(**{**given, **arg_dict})

    @property
    def max_length(self) -> int:
        """Most tokens of a text: what was asked for, else what the model says, else no limit."""
        if self._max_length:
            return int(self._max_length)
        config = getattr(self.model.config, "text_config", None) or self.model.config
        names = ("n_positions", "max_position_embeddings", "n_ctx")
        found = next((getattr(config, n) for n in names if getattr(config, n, None) is not None), NO_LIMIT)
        return int(found)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results about the model."""
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": str(self.model.dtype).removeprefix("torch."),
            "model_revision": None if self.loaded is None else self.loaded.revision,
            "model_sha": None if self.loaded is None else self.loaded.fingerprint,
            "policy": str(self.policy),
            "policy_seed": self.seed,
            "loglikelihood_context": str(self.context),
            "state_backend": str(self.execution),
            "generation_steps": self.generation_steps,
        }

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer prompts.

        Raises:
            ConfigError: For a prompt that leaves no room for the answer, or arguments that are not supported.
        """
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        own = self._own_generation_settings()
        wishes = [wanted(_arguments(r)[1], model=own, eos=eos, default_tokens=_DEFAULT_ANSWER_TOKENS) for r in requests]
        prompts = [self._encode_prompt(_arguments(r)[0]) for r in requests]
        self._check_room(
            [len(p) + w.max_tokens for p, w in zip(prompts, wishes, strict=True)],
            lambda i: f"a prompt of {len(prompts[i])} tokens and an answer of up to {wishes[i].max_tokens}",
            "shorten the answer with --gen_kwargs max_gen_toks=N",
        )
        hashes = [prompt_hash(_arguments(r)[0]) for r in requests]
        repeats = occurrences(hashes)
        sequences = [stream(h, r) for h, r in zip(hashes, repeats, strict=True)]
        asked = [
            Request(
                prompt=prompt,
                sequence=sequence,
                max_tokens=wish.max_tokens,
                sampling=wish.sampling,
                stop_tokens=self._stop_tokens(),
                stop_text=StopText(lambda tokens: self.tok_decode(tokens, skip_special_tokens=False), wish.until),
            )
            for prompt, sequence, wish in zip(prompts, sequences, wishes, strict=True)
        ]
        self.generation_records = {}
        texts: dict[int, str] = {}

        def work(rows: int, tick: Callable[[int, Any], None]) -> None:
            def finished(i: int, answer: Generation) -> None:
                texts[i] = self._text(answer, wishes[i])
                self.generation_records[hashes[i], repeats[i]] = GenerationRecord(
                    output_tokens=answer.tokens,
                    truncated=answer.finish is Finish.LENGTH,
                    finish=str(answer.finish),
                    prompt_tokens=len(prompts[i]),
                    seed=self.seed,
                    sequence=sequences[i],
                    sampling=wishes[i].sampling,
                )
                # As soon as it is there, so that whoever keeps answers loses none.
                self.cache_hook.add_partial("generate_until", _arguments(requests[i]), texts[i])
                if self.on_answer is not None:
                    self.on_answer(i, texts[i])
                tick(i, answer)

            engine = Engine(self._head, self.policy, seed=self.seed, slots=rows, execution=self.execution)
            engine.generate(asked, progress=finished)
            self.generation_steps = str(engine.steps)

        self._run(work, len(requests), "generating" if not disable_tqdm else None)
        return [texts[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of `max_length` that lm-eval defines."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            pairs = utils.get_rolling_token_windows(
                token_list=self.tok_encode(_arguments(request)[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for pair in pairs:
                windows.append((None, *utils.make_disjoint_window(pair)))
                owners.append(index)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for owner, (score, _) in zip(owners, scores, strict=True):
            totals[owner] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", _arguments(request), total)
        return totals

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Score continuations."""
        del override_bs
        self._check_room(
            [len(context) + len(tokens) - 1 for _, context, tokens in requests],
            lambda i: f"a context of {len(requests[i][1])} tokens and a continuation of {len(requests[i][2])}",
            "use fewer examples with --num_fewshot",
        )
        # Choices of one question share the reading of it. Texts that are scored whole all begin with the same token,
        # and would share random bits from there on, so these are addressed by all of their tokens.
        asked = [
            Continuation(
                context=tuple(context),
                tokens=tuple(tokens),
                sequence=stream(*context) if text is not None else stream(*context, "then", *tokens),
            )
            for text, context, tokens in requests
        ]
        scores = self._run(
            lambda rows, tick: LikelihoodScorer(
                self._head, self.policy, context=self.context, seed=self.seed, rows=rows, execution=self.execution
            ).score(asked, progress=tick),
            len(requests),
            "scoring" if not disable_tqdm else None,
        )
        self.diverged = sum(score.diverged for score in scores)
        found: list[tuple[float, bool]] = [(score.log_probability, score.greedy) for score in scores]
        for (text, _, _), score in zip(requests, found, strict=True):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, score)
        return found

    def _model_call(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Refused: a plain forward pass would not follow the policy."""
        raise NotImplementedError("this model answers under a state policy; plain forward passes are lm-eval's `hf`")

    def _model_generate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Refused: plain generation would not follow the policy."""
        raise NotImplementedError("this model answers under a state policy; plain generation is lm-eval's `hf`")

    def _run(self, work: Callable[[int, Callable[[int, Any], None]], _Result], total: int, name: str | None) -> _Result:
        """Do the work with as many rows as memory allows; it starts anew when there are fewer."""
        rows = int(self.batch_size_per_gpu)
        while True:
            try:
                with exact_float32(), tqdm(total=total, desc=name, disable=name is None) as bar:

                    def tick(index: int, result: object) -> None:
                        del index, result
                        bar.update(1)

                    result = work(rows, tick)
                self.batch_sizes = {0: rows}
                return result
            except torch.OutOfMemoryError:
                if not self._automatic or rows == 1:
                    raise
                rows //= 2
                self.batch_size_per_gpu = rows

    def _check_room(self, lengths: Sequence[int], describe: Callable[[int], str], remedy: str) -> None:
        limit = self.max_length
        long = [i for i, length in enumerate(lengths) if length > limit]
        if long:
            worst = max(long, key=lambda i: lengths[i])
            raise ConfigError(
                f"expected texts of at most {limit} tokens, got {len(long)} of {len(lengths)} requests above it; the "
                f"longest, request {worst}, has {describe(worst)}. Nothing is truncated here: {remedy}, or raise the "
                "limit with the model argument max_length=N if the model can take it"
            )

    def _encode_prompt(self, text: str) -> list[int]:
        ids, _ = self.tok_batch_encode([text])
        return ids[0].tolist() if ids.numel() else []

    def _stop_tokens(self) -> frozenset[int]:
        config = getattr(self.model, "generation_config", None)
        named: Any = getattr(config, "eos_token_id", None)
        several = list(cast(list[Any], named)) if isinstance(named, (list, tuple)) else [named]
        return frozenset(int(t) for t in cast(list[Any], [*several, self.tokenizer.eos_token_id]) if t is not None)

    def _own_generation_settings(self) -> dict[str, Any]:
        config = getattr(self.model, "generation_config", None)
        return {} if config is None else {k: v for k, v in vars(config).items() if v is not None}

    def _text(self, answer: Generation, wish: Wanted) -> str:
        tokens = list(answer.tokens)
        marker = self.think_end_token
        if isinstance(marker, int) and marker in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(marker) :]
        text = self.tok_decode(tokens)
        return postprocess_generated_text(
            text.lstrip() if isinstance(marker, int) else text,
            list(wish.until),
            marker if isinstance(marker, str) else None,
        )


def _arguments(request: Instance) -> tuple[Any, ...]:
    return request.args


@contextmanager
def _silence(name: str) -> Generator[None]:
    """Keep lm-eval from remarking on a model that is loaded already: this class loads it so on purpose."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


register_model("replayssm")(ReplayLM)
