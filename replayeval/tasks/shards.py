"""Shards of tasks: which documents each one holds, what it keeps of them, and how all become whole again.

A shard is some consecutive documents of the tasks of one measurement, in the order in which they are listed: what it
holds depends on its size alone. It keeps what each arm scored on each of its documents, and the statistics are made
once, over all documents together. Nothing here loads torch.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from replayeval.errors import StoreError
from replayeval.tasks.records import AnswerRecord, SampleRecord

Records = Mapping[tuple[str, str], Mapping[int, AnswerRecord]]
"""Answers by task and arm, and then by index of the document."""

_KEPT = ("score", "metric", "length", "truncated", "unextracted", "seed")
_DIGESTED = ("output", "output_tokens", "loglikelihoods", "extracted")


class ShardDocument(NamedTuple):
    """A document of a shard."""

    task: str
    """Short name of its task."""
    doc_id: int
    """Its index in the task."""
    prompt_sha256: str
    """SHA-256 over prompts and choices."""


@dataclass(frozen=True, kw_only=True)
class TaskOutline:
    """What the record says about a task, apart from how it was answered.

    Attributes:
        name: Its short name.
        documents: Index and `prompt_sha256` of each document that is asked, in the order of the indices.
        samples: Answers per document.
        source: Where the documents came from, as JSON values.
        settings: How they are asked, as JSON values.
    """

    name: str
    documents: tuple[tuple[int, str], ...]
    samples: int
    source: Mapping[str, Any]
    settings: Mapping[str, Any]

    @property
    def dataset(self) -> dict[str, Any]:
        """Where the documents came from and which they are, as JSON values."""
        digest = hashlib.sha256("\n".join(prompt for _, prompt in self.documents).encode())
        return dict(self.source) | {"documents": len(self.documents), "prompts_sha256": digest.hexdigest()}


@dataclass(frozen=True, kw_only=True)
class Outline:
    """The tasks of a measurement, and how their results are grouped.

    Attributes:
        tasks: Every task, each once, by its short name.
        entries: What was asked for, in order: a name and the names of its tasks; none for a single task.
    """

    tasks: Mapping[str, TaskOutline]
    entries: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def documents(self) -> tuple[ShardDocument, ...]:
        """All documents, task by task."""
        return tuple(ShardDocument(t.name, *document) for t in self.tasks.values() for document in t.documents)


def cut(outline: Outline, size: int) -> list[tuple[ShardDocument, ...]]:
    """Return the documents in shards of `size`; the last one may be smaller."""
    documents = outline.documents
    return [documents[start : start + size] for start in range(0, len(documents), size)]


def shard_result(
    outline: Outline, documents: Sequence[ShardDocument], records: Records, *, arms: Sequence[str]
) -> dict[str, Any]:
    """Return what a shard keeps, as JSON values; texts of answers are left to the answer logs.

    Args:
        outline: The whole measurement.
        documents: The documents of the shard.
        records: How they were answered.
        arms: Names of the arms, the reference first.
    """
    return {
        "entries": [[name, list(members)] for name, members in outline.entries],
        "tasks": [
            {"name": t.name, "samples": t.samples, "source": dict(t.source), "settings": dict(t.settings)}
            for t in outline.tasks.values()
        ],
        "arms": list(arms),
        "answers": [
            {
                "task": document.task,
                "doc_id": document.doc_id,
                "prompt_sha256": document.prompt_sha256,
                "by_arm": [_kept(records[document.task, arm][document.doc_id]) for arm in arms],
            }
            for document in documents
        ],
    }


def numbers_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a shard keeps, without what it cost."""
    return {
        **result,
        "answers": [
            {**a, "by_arm": [{k: v for k, v in arm.items() if k != "seconds"} for arm in a["by_arm"]]}
            for a in result["answers"]
        ],
    }


def merge(results: Sequence[Mapping[str, Any]]) -> tuple[Outline, Records, list[str]]:
    """Put shards of one measurement together again, in any order and whether or not all are there.

    Args:
        results: What `shard_result` returned for each.

    Returns:
        The tasks with the documents that are there, the answers, and the names of the arms. Tasks of which no document
        is there are left out.

    Raises:
        StoreError: The shards are not of one measurement, hold a document twice, or are no shards.
    """
    try:
        return _merged(results)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise StoreError(
            f"expected the answers of a shard of tasks, got what this version cannot read ({type(error).__name__}: "
            f"{error})"
        ) from None


def _merged(results: Sequence[Mapping[str, Any]]) -> tuple[Outline, Records, list[str]]:
    first = results[0]
    arms: list[str] = list(first["arms"])
    prompts: dict[str, dict[int, str]] = {task["name"]: {} for task in first["tasks"]}
    records: dict[tuple[str, str], dict[int, AnswerRecord]] = {(task, arm): {} for task in prompts for arm in arms}
    for result in results:
        different = [name for name in ("arms", "tasks", "entries") if result[name] != first[name]]
        if different:
            raise StoreError(
                f"expected shards of one measurement, got other {' and '.join(different)} in one of them; "
                "measure them anew with one version, in another store"
            )
        for answered in result["answers"]:
            task, doc_id, prompt = answered["task"], answered["doc_id"], answered["prompt_sha256"]
            if doc_id in prompts[task]:
                raise StoreError(f"expected each document in one shard, got document {doc_id} of {task} in two")
            prompts[task][doc_id] = prompt
            for arm, kept in zip(arms, answered["by_arm"], strict=True):
                records[task, arm][doc_id] = _record(doc_id, prompt, kept)
    tasks = {
        task["name"]: TaskOutline(
            name=task["name"],
            documents=tuple(sorted(prompts[task["name"]].items())),
            samples=task["samples"],
            source=task["source"],
            settings=task["settings"],
        )
        for task in first["tasks"]
        if prompts[task["name"]]
    }
    entries: list[tuple[str, tuple[str, ...]]] = []
    for name, listed in first["entries"]:
        members = tuple(member for member in listed if member in tasks)
        if members or name in tasks:
            entries.append((name, members))
    return Outline(tasks=tasks, entries=tuple(entries)), records, arms


def _kept(record: AnswerRecord) -> dict[str, Any]:
    samples = [asdict(sample) for sample in record.samples]
    # Two machines that score alike may still have answered differently; the digest shows it.
    texts = json.dumps([{name: sample[name] for name in _DIGESTED} for sample in samples])
    return {
        "seconds": record.seconds,
        "answers_sha256": hashlib.sha256(texts.encode()).hexdigest(),
        "samples": [{name: sample[name] for name in _KEPT} for sample in samples],
    }


def _record(doc_id: int, prompt_sha256: str, kept: Mapping[str, Any]) -> AnswerRecord:
    texts: dict[str, Any] = dict.fromkeys(_DIGESTED)
    samples = tuple(SampleRecord(**{**texts, **sample}) for sample in kept["samples"])
    return AnswerRecord(doc_id=doc_id, prompt_sha256=prompt_sha256, samples=samples, seconds=kept["seconds"])
