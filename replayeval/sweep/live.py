"""The real measurer: models from the hub or from disk, texts as documents, one loaded model per worker."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import replayssm
from replayeval.errors import ConfigError, ReplayEvalError, StoreError
from replayeval.report.text import printable
from replayeval.store.identity import fingerprint
from replayeval.store.parquet import numbers_sha256, scores_to_parquet
from replayeval.store.provenance import provenance
from replayeval.sweep.grid import Cell, KLCell, TaskCell
from replayeval.sweep.jobs import Advanced, Answer, Job, KLJob, ModelPin, PreparedCell, TaskJob, Worker
from replayeval.sweep.plan import ModelEntry
from replayeval.tasks.shards import Outline, cut, numbers_of
from replayssm.policy import MAX_WINDOW, REFERENCE, Policy

_PROBE_TOKENS = max(256, 2 * MAX_WINDOW)
"""No self-check reads more of the first document than this."""

_LISTING = ("samples", "gen_kwargs", "task_data", "chat_template")
"""Options of a task grid that decide what is asked; the others decide how it is answered."""


class LiveMeasurer:
    """Pins models and texts where the sweep is started, and makes workers that load and measure them."""

    def prepare(self, cells: Sequence[Cell]) -> list[PreparedCell]:
        """Pin models and texts; each model's tokenizer and each text are read once.

        Raises:
            ConfigError: Naming every cell that cannot be measured.
        """
        pins: dict[tuple[Any, ...], Any] = {}
        texts: dict[tuple[Any, ...], Any] = {}
        outlines: dict[tuple[Any, ...], Any] = {}
        offences: list[str] = []
        prepared: list[PreparedCell] = []
        for cell in cells:
            try:
                pinned = _once(pins, _model_key(cell.model), lambda m=cell.model: _pin(m))
                pin = ModelPin(revision=pinned.revision, weights_sha256=pinned.weights_sha256)
                if isinstance(cell, TaskCell):
                    key = (*_model_key(cell.model), *_task_key(cell))
                    outline = _once(
                        outlines, key, lambda c=cell, p=pinned: _task_list(c, p.tokenizer, p.revision).outline
                    )
                    prepared.append(PreparedCell(cell=cell, jobs=task_jobs(cell, pin, outline)))
                    continue
                key = (*_model_key(cell.model), cell.data, cell.docs, cell.lengths, cell.prefill, cell.seed)
                documents = _once(texts, key, lambda c=cell, p=pinned: _documents(c, p.tokenizer))
                prepared.append(PreparedCell(cell=cell, jobs=kl_jobs(cell, pin, documents)))
            except ReplayEvalError as error:
                offences.append(str(error))
        if offences:
            raise ConfigError("\n  - ".join(["the plan cannot be measured here:", *dict.fromkeys(offences)]))
        return prepared

    def worker(self) -> Worker:
        """Return a worker without a model; it loads one with its first unit."""
        return LiveWorker()


def kl_jobs(cell: KLCell, pin: ModelPin, documents: Sequence[Any]) -> tuple[KLJob, ...]:
    """Return the units of a cell: one for each document.

    Args:
        cell: The cell.
        pin: The weights.
        documents: Its documents, of `replayeval.data.Document`, each with the tokens that are read and one more.
    """
    first = documents[0].token_ids
    common = {
        "kind": "kl",
        "model": pin.identity(cell.model.id),
        "dtype": cell.model.dtype,
        "reference": str(REFERENCE),
        "arms": list(cell.arms),
        "prefill_tokens": cell.prefill,
        "seed": cell.seed,
        "engine": cell.engine,
        "backend": cell.backend,
        "numerics": replayssm.NUMERICS_VERSION,
    }
    jobs: list[KLJob] = []
    for index, document in enumerate(documents):
        read = min(len(document), cell.tokens)
        identity = common | {"document": {"index": index, "id": document.doc_id, "read_tokens": read}}
        jobs.append(
            KLJob(
                key=fingerprint(identity),
                identity=identity,
                cell=cell,
                pin=pin,
                doc_index=index,
                doc_id=document.doc_id,
                tokens=document.token_ids,
                read_tokens=read,
                probe=first[: _PROBE_TOKENS + 1],
                probe_read=min(len(first), cell.tokens, _PROBE_TOKENS),
            )
        )
    return tuple(jobs)


def task_jobs(cell: TaskCell, pin: ModelPin, outline: Outline) -> tuple[TaskJob, ...]:
    """Return the units of a cell: one for each shard of documents.

    Args:
        cell: The cell.
        pin: The weights.
        outline: The documents of its task.
    """
    common = {
        "kind": "tasks",
        "model": pin.identity(cell.model.id),
        "dtype": cell.model.dtype,
        "reference": str(REFERENCE),
        "arms": list(cell.arms),
        "task": cell.task,
        "seed": cell.seed,
        "window": cell.window,
        "options": dict(cell.options),
        "numerics": replayssm.NUMERICS_VERSION,
    }
    jobs: list[TaskJob] = []
    for documents in cut(outline, cell.shard):
        identity = common | {
            "settings": {d.task: dict(outline.tasks[d.task].settings) for d in documents},
            "documents": [list(document) for document in documents],
        }
        jobs.append(TaskJob(key=fingerprint(identity), identity=identity, cell=cell, pin=pin, documents=documents))
    return tuple(jobs)


class LiveWorker:
    """Holds one model at a time; units that follow each other on the same model find it loaded."""

    def __init__(self) -> None:
        """Load nothing yet."""
        self._subject: Any = None
        self._loaded: tuple[Any, ...] | None = None
        self._checked: dict[str, list[dict[str, Any]]] = {}
        self._listed: tuple[tuple[Any, ...], Any] | None = None
        self._provenance: dict[str, Any] | None = None

    def run(self, job: Job, advanced: Advanced) -> Answer:
        """Work on one unit.

        Raises:
            ReplayEvalError: It cannot be done; so with the other units of its cell.
        """
        if isinstance(job, TaskJob):
            return self._measure_task(job)
        return self._measure_kl(job, advanced)

    def _measure_kl(self, job: KLJob, advanced: Advanced) -> Answer:
        from replayeval.engine.checks import check_floor, control_arm
        from replayeval.engine.fitting import Fitting
        from replayeval.engine.forcing import DocumentTokens, Engine, Forcing
        from replayeval.engine.precision import exact_float32
        from replayeval.models.attention import attention_name
        from replayeval.subject import bits_per_element, check_execution, check_formats, execution_record
        from replayssm.backend import Execution

        cell = job.cell
        subject = self._load(job)
        policies = tuple(Policy.parse(text) for text in cell.arms)
        check_formats(policies, subject.layers)
        _check_vocabulary(job, subject.head.vocabulary)
        forcing = Forcing(
            arms=policies,
            engine=Engine(cell.engine),
            chunk_tokens=cell.chunk,
            prefill_tokens=cell.prefill,
            seed=cell.seed,
            execution=Execution.parse(cell.backend),
        )
        check_execution(forcing.execution, forcing.policies, subject)
        document = DocumentTokens(
            index=job.doc_index, doc_id=job.doc_id, tokens=job.tokens, read_tokens=job.read_tokens
        )
        with exact_float32():
            checks = self._checks(job, forcing)
            # Anew for each unit: its numbers must not depend on which units the same worker did before.
            scores = Fitting().score(subject.head, document, forcing, progress=advanced)
            floor = check_floor([scores], control_arm(policies), dtype=subject.head.model.dtype)
        result = {
            "checks": [*checks, asdict(floor)],
            "bits_per_element": {str(p): bits_per_element(p, subject.layers) for p in policies},
            "model": dict(subject.details),
            "counters": dict(scores.counters),
            "chunk": cell.chunk,
            "states": execution_record(forcing.execution),
            "attention": attention_name(subject.head.config, subject.head.input_device),
        }
        return Answer(
            content_sha256=numbers_sha256(scores),
            result=result,
            provenance=self._provenance or {},
            seconds=scores.counters["seconds"],
            table=scores_to_parquet(scores, extra_metadata={"unit": job.key}),
        )

    def _measure_task(self, job: TaskJob) -> Answer:
        from replayeval.tasks.measure import answer_shard

        cell = job.cell
        subject = self._load(job)
        key = _task_key(cell)
        if self._listed is None or self._listed[0] != key:
            # Long prompts are many gigabytes, so those of one task alone are kept.
            self._listed = None
            self._listed = key, _task_list(cell, subject.tokenizer, job.pin.revision)
        # On another node the store may not be there; the answers are then in memory alone.
        kept = job.answers if job.answers is not None and Path(job.answers).parents[1].is_dir() else None
        found = answer_shard(
            subject,
            self._listed[1],
            job.documents,
            arms=cell.arms,
            window=cell.window,
            seed=cell.seed,
            out=kept,
            **{name: cast(Any, value) for name, value in cell.options.items() if name not in _LISTING},
        )
        made = self._provenance or {}
        seconds = sum(arm["seconds"] for answer in found["answers"] for arm in answer["by_arm"])
        return Answer(
            content_sha256=fingerprint(numbers_of(found)),
            result={"shard": found, "model": dict(subject.details)},
            provenance=made | {"versions": {**made.get("versions", {}), "lm_eval": version("lm_eval")}},
            seconds=seconds,
        )

    def _checks(self, job: KLJob, forcing: Any) -> list[dict[str, Any]]:
        """The self-checks of a cell, made once per worker on the same tokens everywhere."""
        from replayeval.engine.forcing import DocumentTokens
        from replayeval.subject import self_checks

        cell = job.cell
        key = fingerprint({**job.identity, "document": None, "probe": job.probe.tolist(), "chunk": cell.chunk})
        if key not in self._checked:
            probe = DocumentTokens(index=0, doc_id="probe", tokens=job.probe, read_tokens=job.probe_read)
            self._checked[key] = [asdict(c) for c in self_checks(self._subject.head, probe, forcing)]
        return self._checked[key]

    def _load(self, job: Job) -> Any:
        from replayeval.subject import device_name, load_subject

        model = job.cell.model
        wanted = (*_model_key(model), model.dtype, model.device)
        if self._loaded == wanted:
            return self._subject
        self._unload()
        subject = load_subject(
            model.id,
            None,
            dtype=model.dtype,
            device=model.device,
            revision=job.pin.revision,
            trust_remote_code=model.trust_remote_code,
        )
        digest = job.pin.weights_sha256
        if digest is not None and subject.weights_sha256() != digest:
            raise StoreError(
                f"the weights of {printable(model.id)} are not those that the sweep was planned with: expected SHA-256 "
                f"{digest}, got {subject.weights_sha256()}; give every worker the same files, and plan again if they "
                "were changed on purpose"
            )
        self._subject, self._loaded = subject, wanted
        self._provenance = _worker_provenance(device_name(subject.head))
        return subject

    def _unload(self) -> None:
        if self._subject is None:
            return
        self._subject, self._loaded, self._checked, self._listed = None, None, {}, None
        gc.collect()
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _worker_provenance(device: str) -> dict[str, Any]:
    import socket

    import torch

    return provenance(device=device) | {"host": socket.gethostname(), "threads": torch.get_num_threads()}


def _check_vocabulary(job: KLJob, vocabulary: int) -> None:
    largest = int(job.tokens.max())
    if int(job.tokens.min()) < 0 or largest >= vocabulary:
        raise ConfigError(
            f"document {job.doc_index} of {job.cell.label}: expected token ids of 0 to {vocabulary - 1}, got up to "
            f"{largest}; use ids of this model's tokenizer"
        )


def _model_key(model: ModelEntry) -> tuple[Any, ...]:
    return model.id, model.revision, model.trust_remote_code


def _once(made: dict[tuple[Any, ...], Any], key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Make a thing once; a failure is remembered too, so that it is not waited for again."""
    if key not in made:
        try:
            made[key] = make()
        except ReplayEvalError as error:
            made[key] = error
    if isinstance(made[key], ReplayEvalError):
        raise made[key]
    return made[key]


def _pin(model: ModelEntry) -> Any:
    from replayeval.models.pinning import pin_model

    return pin_model(model.id, revision=model.revision, trust_remote_code=model.trust_remote_code)


def _documents(cell: KLCell, tokenizer: Any) -> Any:
    from replayeval.data import load_documents

    return load_documents(
        cell.data,
        tokenizer,
        docs=cell.docs,
        tokens=cell.tokens + 1,
        lengths=cell.lengths,
        prefill_tokens=cell.prefill,
        seed=cell.seed,
    )


def _task_key(cell: TaskCell) -> tuple[Any, ...]:
    return cell.task, cell.limit, fingerprint({name: cell.options[name] for name in _LISTING if name in cell.options})


def _task_list(cell: TaskCell, tokenizer: Any, revision: str | None) -> Any:
    from replayeval.tasks.measure import list_documents

    if tokenizer is None:
        raise ConfigError(f"expected a model with a tokenizer, got {cell.model.id} without one; tasks are texts")
    asked = {name: cast(Any, value) for name, value in cell.options.items() if name in _LISTING}
    listed = list_documents(cell.model.id, tokenizer, cell.task, revision=revision, limit=cell.limit, **asked)
    if not listed.outline.documents:
        raise ConfigError(f"{cell.label}: expected a task with documents, got one without any")
    return listed
