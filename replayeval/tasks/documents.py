"""The documents of a task, as the requests that every arm answers."""

# lm-eval is untyped.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from lm_eval.api.instance import Instance

from replayeval.errors import ConfigError
from replayeval.tasks.catalog import hushed, load, short_name
from replayeval.tasks.lm_requests import check_kinds
from replayeval.tasks.shards import Outline, ShardDocument, TaskOutline

FEWSHOT_SEED = 1234
"""Seed of few-shot examples: lm-eval's own default."""


@dataclass(frozen=True, kw_only=True)
class TaskDocument:
    """One document as lm-eval asks it.

    Attributes:
        doc_id: Index in the task.
        doc: lm-eval's document.
        instances: Its requests: one, or one per choice.
        prompt_sha256: SHA-256 over prompts and choices.
    """

    doc_id: int
    doc: Mapping[str, Any]
    instances: tuple[Instance, ...]
    prompt_sha256: str


@dataclass(frozen=True, kw_only=True)
class EvalTask:
    """One task with the documents that are asked.

    Attributes:
        name: Its name on the command line.
        task: lm-eval's task.
        documents: The documents, in the order of their indices.
        samples: Answers per document.
        generates: Whether answers are generated; otherwise choices are compared by likelihood.
        chat: Whether prompts are chats.
    """

    name: str
    task: Any
    documents: tuple[TaskDocument, ...]
    samples: int
    generates: bool
    chat: bool

    @property
    def settings(self) -> dict[str, Any]:
        """How documents are asked, as JSON values."""
        config = self.task.config
        return {
            "output_type": str(self.task.OUTPUT_TYPE),
            "num_fewshot": config.num_fewshot or 0,
            "samples_per_document": self.samples,
            "chat_template": self.chat,
            "generation": _json(config.generation_kwargs) if self.generates else None,
            "version": _json((config.metadata or {}).get("version")),
        }

    @property
    def source(self) -> dict[str, Any]:
        """Where the documents came from, as JSON values."""
        metadata: Mapping[str, Any] = self.task.config.metadata or {}
        own: Mapping[str, Any] | None = metadata.get("dataset")
        local = (metadata.get("data") or {}).get("ruler" if self.name.startswith("ruler") else self.name)
        source: dict[str, Any] = (
            {"files": str(local)}
            if local is not None
            else dict(own)
            if own is not None
            else {"path": self.task.DATASET_PATH or None, "name": self.task.DATASET_NAME or None}
        )
        return _json(source)

    @property
    def outline(self) -> TaskOutline:
        """What the record says about it."""
        return TaskOutline(
            name=self.name,
            documents=tuple((document.doc_id, document.prompt_sha256) for document in self.documents),
            samples=self.samples,
            source=self.source,
            settings=self.settings,
        )


@dataclass(frozen=True, kw_only=True)
class TaskList:
    """The tasks asked for, and how their results are grouped.

    Attributes:
        tasks: Every task, each once, by its short name.
        entries: What was asked for, in order: a name and the names of its tasks; none for a single task.
    """

    tasks: Mapping[str, EvalTask]
    entries: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def outline(self) -> Outline:
        """What the record says about them."""
        return Outline(tasks={name: task.outline for name, task in self.tasks.items()}, entries=self.entries)

    def shard(self, documents: Sequence[ShardDocument]) -> "TaskList":
        """Return the list with these documents alone; tasks that have none of them are left out.

        Raises:
            ConfigError: A document is not there, or is asked in other words.
        """
        wanted: dict[str, set[int]] = {}
        for document in documents:
            wanted.setdefault(document.task, set()).add(document.doc_id)
        tasks = {
            name: replace(task, documents=tuple(d for d in task.documents if d.doc_id in wanted[name]))
            for name, task in self.tasks.items()
            if name in wanted
        }
        found = Outline(tasks={name: task.outline for name, task in tasks.items()}, entries=()).documents
        missing = sorted(set(documents) - set(found))
        if missing:
            raise ConfigError(
                f"expected the documents of the tasks as they were when the sweep was planned, but {len(missing)} of "
                f"{len(documents)} are missing here or asked in other words, the first being document "
                f"{missing[0].doc_id} of {missing[0].task}; give every worker the same data and versions, and plan "
                "again if they were changed on purpose"
            )
        return replace(self, tasks=tasks)


def load_tasks(
    names: Sequence[str],
    *,
    limit: int | None = None,
    samples: int | None = None,
    gen_kwargs: Mapping[str, Any] | None = None,
    task_data: Mapping[str, str] | None = None,
    tokenizer: Any = None,
    chat_template: Callable[..., Any] | None = None,
    chat: bool | None = None,
) -> TaskList:
    """Load tasks and build what is asked of the model.

    With a limit, the documents are those whose hash of task and index comes first: a fixed sample over the whole
    task, of which a smaller limit takes a part. Tasks that generate documents independently make only that many.

    Args:
        names: Names as the command line takes them.
        limit: Most documents per task.
        samples: Answers per document; each task's own number by default.
        gen_kwargs: Replace single generation settings of the tasks.
        task_data: Local files by short name of the task.
        tokenizer: The model's tokenizer, or a name for it; RULER measures lengths with it.
        chat_template: Turns messages into a prompt; None where the model has no template.
        chat: Whether prompts are chats; None leaves it to the task.

    Raises:
        ConfigError: A task does not exist, cannot be loaded, or is of a kind that has no right answers.
    """
    metadata: dict[str, Any] = {"tokenizer": tokenizer}
    if limit is not None:
        metadata["samples"] = limit
    if task_data:
        _check_data(task_data)
        metadata["data"] = dict(task_data)
    loaded = load(names, metadata=metadata)
    tasks: dict[str, EvalTask] = {}
    for lm_name, task in loaded["tasks"].items():
        name = short_name(lm_name)
        wanted = bool((task.config.metadata or {}).get("chat")) if chat is None else chat
        template = chat_template if wanted else None
        tasks[name] = _prepared(name, task, limit=limit, samples=samples, gen_kwargs=gen_kwargs, chat_template=template)
    entries: list[tuple[str, tuple[str, ...]]] = []
    in_groups: set[str] = set()
    groups: Mapping[str, Any] = loaded.get("groups") or {}
    for group in groups.values():
        members = tuple(short_name(task.task_name) for task in group.get_all_tasks())
        entries.append((short_name(group.name), members))
        in_groups.update(members)
    entries.extend((name, ()) for name in tasks if name not in in_groups)
    return TaskList(tasks=tasks, entries=tuple(entries))


def _check_data(task_data: Mapping[str, str]) -> None:
    known = ("mmlu_pro", "gpqa_diamond", "math_l5", "ruler")
    unknown = [name for name in task_data if name not in known]
    if unknown:
        raise ConfigError(f"--task-data: expected a name among {', '.join(known)}, got {', '.join(unknown)}.")


def _prepared(
    name: str,
    task: Any,
    *,
    limit: int | None,
    samples: int | None,
    gen_kwargs: Mapping[str, Any] | None,
    chat_template: Callable[..., Any] | None,
) -> EvalTask:
    kind = str(task.OUTPUT_TYPE)
    if kind not in ("generate_until", "multiple_choice", "loglikelihood"):
        raise ConfigError(f"--tasks: {name} is of the kind {kind}, whose answers are neither right nor wrong.")
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigError(f"--tasks: {name} runs code that the model wrote; run it with `replayeval lm-eval run`.")
    if getattr(task, "MULTIMODAL", False):
        raise ConfigError(f"--tasks: {name} asks about images or sound, which these models do not take.")
    generates = kind == "generate_until"
    if generates and gen_kwargs:
        task.set_config(key="generation_kwargs", value=dict(gen_kwargs), update=True)
    if task.config.num_fewshot is None:
        task.set_config(key="num_fewshot", value=0)
    # Likelihoods are not drawn, so further samples of them would be copies.
    repeats = (samples or int(task.config.repeats or 1)) if generates else 1
    if generates:
        _check_sampling(name, task.config.generation_kwargs or {}, repeats)
    task.set_config(key="repeats", value=repeats)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    with hushed():
        task.build_all_requests(
            apply_chat_template=chat_template is not None,
            fewshot_as_multiturn=chat_template is not None,
            chat_template=chat_template,
        )
    by_document: dict[int, list[Instance]] = {}
    for instance in cast(list[Instance], task.instances):
        by_document.setdefault(cast(int, instance.doc_id), []).append(instance)
    return EvalTask(
        name=name,
        task=task,
        documents=tuple(_document(doc_id, by_document[doc_id]) for doc_id in _chosen(name, task, by_document, limit)),
        samples=repeats,
        generates=generates,
        chat=chat_template is not None,
    )


def _check_sampling(name: str, settings: Mapping[str, Any], samples: int) -> None:
    """Refuse settings that lm-eval would quietly override, and samples that would be copies."""
    check_kinds(settings)
    if settings.get("do_sample"):
        return
    if float(settings.get("temperature") or 0) > 0:
        raise ConfigError(
            f"--gen-kwargs: {name} would not sample at temperature {settings['temperature']}, because its do_sample is "
            "false; add do_sample=true, or leave the temperature out."
        )
    if samples > 1:
        raise ConfigError(
            f"--samples: {name} is answered greedily, so that {samples} samples would be copies; ask for one, or "
            "sample with --gen-kwargs do_sample=true,temperature=0.6."
        )


def _chosen(name: str, task: Any, by_document: Mapping[int, Any], limit: int | None) -> list[int]:
    if limit is None or limit >= len(by_document):
        return sorted(by_document)
    if (task.config.metadata or {}).get("generated"):
        return sorted(by_document)[:limit]
    ranked = sorted(by_document, key=lambda doc_id: hashlib.sha256(f"{name}/{doc_id}".encode()).digest())
    return sorted(ranked[:limit])


def _document(doc_id: int, instances: list[Instance]) -> TaskDocument:
    ordered = sorted(instances, key=lambda instance: instance.idx)
    texts: list[Any] = []
    for instance in ordered:
        # A chat for an API is a record of its own that holds the messages as text.
        parts = cast(tuple[Any, ...], instance.args)
        texts.append([getattr(part, "prompt", part) for part in parts if not isinstance(part, dict)])
    digest = hashlib.sha256(json.dumps(texts, ensure_ascii=True).encode()).hexdigest()
    return TaskDocument(doc_id=doc_id, doc=cast(Any, ordered[0]).doc, instances=tuple(ordered), prompt_sha256=digest)


def _json(values: Any) -> Any:
    return json.loads(json.dumps(values, default=str))
