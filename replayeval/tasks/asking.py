"""Asking one arm the documents that it has not answered, and keeping each answer as soon as it is there."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from replayeval.errors import StoreError
from replayeval.tasks.answering import Arm, Response
from replayeval.tasks.documents import EvalTask, TaskDocument
from replayeval.tasks.records import AnswerLog, AnswerRecord, SampleRecord
from replayeval.tasks.scoring import Score, score


def missing_documents(task: EvalTask, log: AnswerLog) -> list[TaskDocument]:
    """Return the documents whose answers are not in the log.

    Raises:
        StoreError: One was asked in other words then.
    """
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


def ask(
    task: EvalTask, documents: Sequence[TaskDocument], arm: Arm, log: AnswerLog, *, done: Callable[[], None]
) -> None:
    """Ask one arm, and keep each document as soon as it is answered.

    Args:
        task: The task.
        documents: Documents of it that the log does not hold.
        arm: Who answers.
        log: Where answers are kept.
        done: Called after each document.
    """
    for part in _portions(documents, task, requests=arm.portion(task)):
        _answer(task, part, arm, log, done=done)


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
