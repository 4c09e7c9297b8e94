"""`measure_tasks`: every arm answers the documents that the reference answers, and is compared with it."""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

import replayssm
from replayeval.errors import ConfigError, StoreError
from replayeval.policies import parse_policies
from replayeval.report.tasks_schema import TasksReport
from replayeval.store import provenance
from replayeval.store._atomic import write_text_atomically
from replayeval.store.provenance import PACKAGES
from replayeval.subject import Subject, check_formats, device_name, load_subject, parse_seed
from replayeval.tasks.answering import Arm, LocalArm, Response
from replayeval.tasks.catalog import check_names
from replayeval.tasks.documents import EvalTask, TaskDocument, TaskList, load_tasks
from replayeval.tasks.records import AnswerFolder, AnswerLog, AnswerRecord, SampleRecord
from replayeval.tasks.scoring import Score, score
from replayeval.tasks.tally import tally
from replayssm.policy import DEFAULT_WINDOW, REFERENCE, Policy

DEFAULT_MODEL = "builtin:gdn"
DEFAULT_TASKS = ("smoke",)
REPORT = "report.json"
CHATS = {"auto": None, "on": True, "off": False}

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class _Answerers:
    """Who answers, and what the record says about them."""

    arms: Sequence[Arm]
    model: str
    window: int | None
    conditions: Mapping[str, Any]
    device: str
    details: Mapping[str, Any]


def measure_tasks(
    model: PreTrainedModel | str = DEFAULT_MODEL,
    tasks: Sequence[str] = DEFAULT_TASKS,
    *,
    arms: Sequence[Policy | str] | None = None,
    precision: str | None = None,
    endpoints: Mapping[str, str] | None = None,
    window: int = DEFAULT_WINDOW,
    limit: int | None = None,
    samples: int | None = None,
    gen_kwargs: Mapping[str, Any] | None = None,
    task_data: Mapping[str, str] | None = None,
    chat_template: str = "auto",
    context: str = "prompt",
    batch_size: int | str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    progress: Progress | None = None,
) -> TasksReport:
    """Measure what state policies cost on downstream tasks.

    Args:
        model: A hub id, a directory, `builtin:NAME`, or a loaded model; for endpoints the name that they serve.
        tasks: Short names (`mmlu_pro`, `gpqa_diamond`, `math_l5`, `ruler_4k`, `smoke`) or names of lm-eval.
        arms: Policies, as values or text.
        precision: A format that stands for its five default arms; `nvfp4` when neither this nor `arms` is given.
        endpoints: Servers instead of policies: URL by name; the first is the reference.
        window: Replay window in tokens of policies that name none.
        limit: Most documents per task; see `load_tasks` for which.
        samples: Answers per document; each task's own number by default.
        gen_kwargs: Replace single generation settings of the tasks.
        task_data: Local files by short name of the task.
        chat_template: `on`, `off`, or `auto`: where the task wants a chat and the model has a template.
        context: What the context of a likelihood counts as: `prompt` or `decoded`.
        batch_size: Rows decoded side by side, or `auto`.
        dtype: Dtype of the weights when a model is loaded here.
        device: Where it is loaded.
        seed: Seed of sampling, of stochastic rounding and of the bootstrap.
        out: Directory that keeps every answer.
        resume: Reuse the answers in `out`.
        revision: Branch, tag or commit of a hub model.
        trust_remote_code: Let a tokenizer run code from its repository.
        tokenizer: Tokenizer of a loaded model; for endpoints its hub id or directory.
        progress: Called with the answered documents and their total, all arms together.

    Returns:
        The record.

    Raises:
        ConfigError: Input that cannot be used.
        StoreError: A directory that cannot be used.
        NumericsError: The model's own logits are not reproduced.
    """
    arguments = _arguments(locals())
    if chat_template not in CHATS:
        raise ConfigError(f"expected chat_template to be one of {', '.join(CHATS)}, got {chat_template!r}")
    check_names(tasks)
    if resume and out is None:
        raise ConfigError("expected a directory to resume, got resume without out")
    options: dict[str, Any] = {"limit": limit, "samples": samples, "gen_kwargs": gen_kwargs, "task_data": task_data}
    options["chat"] = CHATS[chat_template]
    if endpoints is not None:
        if arms is not None or precision is not None:
            raise ConfigError("expected either endpoints or state policies, got both; a server has its own state")
        who, listed = _servers(endpoints, model, tokenizer, tasks=tasks, options=options, seed=parse_seed(seed))
    else:
        policies = parse_policies(arms, precision, window)
        subject = load_subject(
            model,
            None if isinstance(tokenizer, str) else tokenizer,
            dtype=dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        check_formats(policies, subject.layers)
        listed = load_tasks(tasks, tokenizer=_tokenizer_source(model), chat_template=_chat_template(subject), **options)
        how = {"window": window, "seed": parse_seed(seed), "context": context, "batch_size": batch_size}
        who = _local(subject, policies, how=how, hashed=out is not None)
    made = provenance(
        device=who.device,
        given=arguments["given"],
        defaulted=arguments["defaulted"],
        packages=(*PACKAGES, "lm_eval"),
    )
    with AnswerFolder(None if out is None else Path(out), resume=resume) as folder:
        logs = _answer_all(who, listed, folder, progress=progress)
        report = tally(
            listed,
            logs,
            arms=[arm.name for arm in who.arms],
            model=who.model,
            window=who.window,
            seed=seed,
            made={**made, "model": dict(who.details)},
        )
        if out is not None:
            write_text_atomically(Path(out) / REPORT, report.to_json() + "\n")
    return report


def _local(subject: Subject, policies: Sequence[Policy], *, how: Mapping[str, Any], hashed: bool) -> _Answerers:
    from replayeval.tasks.lm import ReplayLM

    if subject.tokenizer is None:
        raise ConfigError(f"expected a model with a tokenizer, got {subject.name} without one; tasks are texts")
    arms = [
        LocalArm(ReplayLM(subject.head.model, policy=str(policy), tokenizer=subject.tokenizer, **how))
        for policy in (REFERENCE, *policies)
    ]
    return _Answerers(
        arms=arms,
        model=subject.name,
        window=how["window"],
        conditions={
            "model": subject.name,
            "revision": subject.revision,
            "weights_sha256": subject.weights_sha256() if hashed else None,
            "dtype": str(subject.head.model.dtype).removeprefix("torch."),
            "seed": how["seed"],
            "likelihood_context": how["context"],
            "numerics": replayssm.NUMERICS_VERSION,
        },
        device=device_name(subject.head),
        details=subject.details,
    )


def _servers(
    endpoints: Mapping[str, str],
    model: Any,
    tokenizer: Any,
    *,
    tasks: Sequence[str],
    options: Mapping[str, Any],
    seed: int,
) -> tuple[_Answerers, TaskList]:
    from replayeval.models.sources import resolve
    from replayeval.tasks.endpoint import EndpointArm

    if len(endpoints) < 1 or not isinstance(model, str):
        raise ConfigError("expected endpoints by name and the name of the model that they serve")
    source = None if tokenizer is None else str(resolve(str(tokenizer)).directory)
    arms = [EndpointArm(name, url, model=model, tokenizer=source, seed=seed) for name, url in endpoints.items()]
    listed = load_tasks(tasks, tokenizer=source, chat_template=arms[0].chat_template, **options)
    who = _Answerers(
        arms=arms,
        model=model,
        window=None,
        conditions={"model": model, "seed": seed},
        device="server",
        details={"endpoints": {arm.name: arm.url for arm in arms}},
    )
    return who, listed


def _answer_all(
    who: _Answerers, listed: TaskList, folder: AnswerFolder, *, progress: Progress | None
) -> dict[tuple[str, str], AnswerLog]:
    """Ask every arm what is missing, the reference first."""
    logs: dict[tuple[str, str], AnswerLog] = {}
    total = len(who.arms) * sum(len(task.documents) for task in listed.tasks.values())
    done = 0

    def one_more() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    for task in listed.tasks.values():
        for arm in who.arms:
            identity = {
                **who.conditions,
                "task": task.name,
                "arm": arm.name,
                "settings": task.settings,
                "lm_eval": version("lm_eval"),
            }
            log = logs[task.name, arm.name] = folder.log(task.name, arm.name, identity)
            missing = _missing(task, log)
            done += len(task.documents) - len(missing)
            if progress is not None:
                progress(done, total)
            for part in _portions(missing, task, requests=arm.portion(task)):
                _answer(task, part, arm, log, done=one_more)
    return logs


def _missing(task: EvalTask, log: AnswerLog) -> list[TaskDocument]:
    missing: list[TaskDocument] = []
    for document in task.documents:
        record = log.records.get(document.doc_id)
        if record is None:
            missing.append(document)
        elif record.prompt_sha256 != document.prompt_sha256:
            raise StoreError(
                f"{log.path}: document {document.doc_id} was asked in other words then; the task or its data changed, "
                "so choose another directory"
            )
    return missing


def _portions(documents: Sequence[TaskDocument], task: EvalTask, *, requests: int) -> Iterator[list[TaskDocument]]:
    """Cut into portions of so many requests. None holds a prompt twice: that would make it another sample."""
    rest = list(documents)
    while rest:
        part: list[TaskDocument] = []
        later: list[TaskDocument] = []
        prompts: set[str] = set()
        taken = 0
        for document in rest:
            if taken < requests and document.prompt_sha256 not in prompts:
                part.append(document)
                prompts.add(document.prompt_sha256)
                taken += task.samples * len(document.instances)
            else:
                later.append(document)
        yield part
        rest = later


def _answer(
    task: EvalTask, documents: Sequence[TaskDocument], arm: Arm, log: AnswerLog, *, done: Callable[[], None]
) -> None:
    """Ask one arm, and keep each document as soon as it is answered."""
    since = time.monotonic()

    def finished(index: int, by_sample: list[list[Response]]) -> None:
        nonlocal since
        document, now = documents[index], time.monotonic()
        samples = tuple(
            _sample(task, responses, score(task, document, [response.value for response in responses]))
            for responses in by_sample
        )
        log.write(
            AnswerRecord(
                doc_id=document.doc_id, prompt_sha256=document.prompt_sha256, samples=samples, seconds=now - since
            )
        )
        since = now
        done()

    arm.answer(task, documents, finished)


def _sample(task: EvalTask, responses: Sequence[Response], scored: Score) -> SampleRecord:
    first = responses[0]
    return SampleRecord(
        output=str(first.value) if task.generates else None,
        output_tokens=first.output_tokens,
        length=first.length,
        truncated=first.truncated,
        loglikelihoods=None
        if task.generates
        else tuple(cast(tuple[float, bool], response.value) for response in responses),
        extracted=scored.extracted,
        unextracted=scored.unextracted,
        score=scored.value,
        metric=scored.metric,
        seed=first.seed,
    )


def _tokenizer_source(model: PreTrainedModel | str) -> str | None:
    from replayeval.models.sources import resolve

    if isinstance(model, str):
        return str(resolve(model).directory)
    return str(getattr(model.config, "name_or_path", "")) or None


def _chat_template(subject: Subject) -> Callable[..., Any] | None:
    tokenizer = cast(Any, subject.tokenizer)
    if tokenizer is None or getattr(tokenizer, "chat_template", None) is None:
        return None

    def apply(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    return apply


def _arguments(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Which arguments were passed and which took their default, as JSON values."""
    defaults = {n: p.default for n, p in inspect.signature(measure_tasks).parameters.items()}
    shown = {n: _shown(v) for n, v in values.items() if n not in ("progress", "tokenizer")}
    given = {n: v for n, v in shown.items() if v != _shown(defaults[n])}
    return {"given": given, "defaulted": {n: v for n, v in shown.items() if n not in given}}


def _shown(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_shown(v) for v in cast(Sequence[Any], value)]
    if isinstance(value, Mapping):
        return {str(k): _shown(v) for k, v in cast(Mapping[Any, Any], value).items()}
    return str(value) if isinstance(value, Policy | Path) else type(value).__name__
