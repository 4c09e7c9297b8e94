"""`measure_tasks`: every arm answers the documents that the reference answers, and is compared with it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

import replayssm
from replayeval.errors import ConfigError
from replayeval.policies import parse_policies
from replayeval.report.tasks_schema import TasksReport
from replayeval.store import provenance
from replayeval.store._atomic import write_text_atomically
from replayeval.store.provenance import PACKAGES
from replayeval.subject import Subject, check_formats, device_name, load_subject, parse_seed
from replayeval.tasks.answering import Arm, LocalArm
from replayeval.tasks.arguments import call_arguments
from replayeval.tasks.asking import ask, missing_documents
from replayeval.tasks.catalog import check_names
from replayeval.tasks.documents import TaskList, load_tasks
from replayeval.tasks.records import AnswerFolder, AnswerLog
from replayeval.tasks.shards import ShardDocument, shard_result
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
    arguments = call_arguments(measure_tasks, locals())
    check_names(tasks)
    if resume and out is None:
        raise ConfigError("expected a directory to resume, got resume without out")
    options: dict[str, Any] = {"limit": limit, "samples": samples, "gen_kwargs": gen_kwargs, "task_data": task_data}
    options["chat"] = _chat(chat_template)
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
        listed = load_tasks(
            tasks,
            tokenizer=_tokenizer_source(model, revision),
            chat_template=_chat_template(subject.tokenizer),
            **options,
        )
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
            listed.outline,
            {key: log.records for key, log in logs.items()},
            arms=[arm.name for arm in who.arms],
            model=who.model,
            window=who.window,
            seed=seed,
            made={**made, "model": dict(who.details)},
        )
        if out is not None:
            write_text_atomically(Path(out) / REPORT, report.to_json() + "\n")
    return report


def list_documents(
    model: str,
    tokenizer: PreTrainedTokenizerBase | None,
    task: str,
    *,
    revision: str | None = None,
    limit: int | None = None,
    samples: int | None = None,
    gen_kwargs: Mapping[str, Any] | None = None,
    task_data: Mapping[str, str] | None = None,
    chat_template: str = "auto",
) -> TaskList:
    """Return the documents that `measure_tasks` would ask of a local model, without loading its weights.

    Args:
        model: A hub id, a directory, or `builtin:NAME`.
        tokenizer: Its tokenizer.
        task: Name of the task or group.
        revision: Commit of a hub model.
        limit: As in `measure_tasks`, like all that follow.
        samples: Answers per document.
        gen_kwargs: Replaced generation settings.
        task_data: Local files.
        chat_template: `on`, `off`, or `auto`.

    Raises:
        ConfigError: Input that cannot be used.
    """
    return load_tasks(
        [task],
        limit=limit,
        samples=samples,
        gen_kwargs=gen_kwargs,
        task_data=task_data,
        tokenizer=_tokenizer_source(model, revision),
        chat_template=_chat_template(tokenizer),
        chat=_chat(chat_template),
    )


def answer_shard(
    subject: Subject,
    listed: TaskList,
    documents: Sequence[ShardDocument],
    *,
    arms: Sequence[str],
    window: int,
    seed: int,
    context: str = "prompt",
    batch_size: int | str = "auto",
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Let every arm answer some of the documents; answers that lie in `out` are reused.

    Args:
        subject: The model.
        listed: What `list_documents` returned.
        documents: The ones to answer.
        arms: Policies.
        window: Replay window in tokens of policies that name none.
        seed: Seed of sampling and of stochastic rounding.
        context: As in `measure_tasks`.
        batch_size: Rows decoded side by side, or `auto`.
        out: Directory that keeps every answer.

    Returns:
        What `replayeval.tasks.shards.merge` takes.

    Raises:
        ConfigError: Input that cannot be used, or documents that are not as they were.
        StoreError: A directory that cannot be used.
        NumericsError: The model's own logits are not reproduced.
    """
    policies = parse_policies(arms, None, window)
    check_formats(policies, subject.layers)
    shard = listed.shard(documents)
    how = {"window": window, "seed": parse_seed(seed), "context": context, "batch_size": batch_size}
    who = _local(subject, policies, how=how, hashed=out is not None)
    with AnswerFolder(None if out is None else Path(out), resume=out is not None) as folder:
        logs = _answer_all(who, shard, folder, progress=None)
    records = {key: log.records for key, log in logs.items()}
    return shard_result(listed.outline, documents, records, arms=[arm.name for arm in who.arms])


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
            missing = missing_documents(task, log)
            done += len(task.documents) - len(missing)
            if progress is not None:
                progress(done, total)
            ask(task, missing, arm, log, done=one_more)
    return logs


def _tokenizer_source(model: PreTrainedModel | str, revision: str | None = None) -> str | None:
    from replayeval.models.sources import resolve

    if isinstance(model, str):
        return str(resolve(model, revision, weights=False).directory)
    return str(getattr(model.config, "name_or_path", "")) or None


def _chat(chat_template: str) -> bool | None:
    if chat_template not in CHATS:
        raise ConfigError(f"expected chat_template to be one of {', '.join(CHATS)}, got {chat_template!r}")
    return CHATS[chat_template]


def _chat_template(tokenizer: Any) -> Callable[..., Any] | None:
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
