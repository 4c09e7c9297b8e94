"""Who answers: one arm of a local model, or one server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from replayeval.tasks.documents import EvalTask, TaskDocument

EVERYTHING = 1 << 62
_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class Response:
    """What came back for one request.

    Attributes:
        value: The text of an output, or the log-likelihood of a choice in nats with whether it is the greedy one.
        output_tokens: Token ids of an output, where they are known.
        length: Their number, where it is known.
        truncated: Whether the output was cut off at the token limit, where that is known.
        seed: What an output was drawn with: the address of its random bits under the run's seed, or a server's seed.
    """

    value: str | tuple[float, bool]
    output_tokens: tuple[int, ...] | None = None
    length: int | None = None
    truncated: bool | None = None
    seed: int | None = None


Finished = Callable[[int, list[list[Response]]], None]
"""Takes the index of a document and its responses, by sample and request."""


class Arm(Protocol):
    """One arm: it answers requests, always the same way."""

    @property
    def name(self) -> str:
        """State policy in its canonical text, or the name of an endpoint."""
        ...

    def portion(self, task: EvalTask) -> int:
        """Return how many requests to hand over together."""
        ...

    def answer(self, task: EvalTask, documents: Sequence[TaskDocument], finished: Finished) -> None:
        """Answer documents whose prompts all differ.

        Args:
            task: The task.
            documents: Some of its documents.
            finished: Called once for each document, in any order, as soon as all of it is answered.
        """
        ...


class LocalArm:
    """One policy on a local model, through the model class that lm-eval itself would use."""

    def __init__(self, lm: Any) -> None:
        """Answer with a `ReplayLM`."""
        self._lm = lm

    @property
    def name(self) -> str:
        """State policy in its canonical text."""
        return str(self._lm.policy)

    def portion(self, task: EvalTask) -> int:
        """Return how many requests to hand over together: all where answers come back one by one."""
        return EVERYTHING if task.generates else _ROUNDS * max(1, int(self._lm.batch_size))

    def answer(self, task: EvalTask, documents: Sequence[TaskDocument], finished: Finished) -> None:
        """Answer documents whose prompts all differ.

        Args:
            task: The task.
            documents: Some of its documents.
            finished: Called once for each document as soon as all of it is answered.
        """
        if not task.generates:
            requests = [instance for document in documents for instance in document.instances]
            scores = iter(self._lm.loglikelihood(requests, disable_tqdm=True))
            for index, document in enumerate(documents):
                finished(index, [[Response(value=next(scores)) for _ in document.instances]])
            return
        answers: list[dict[int, list[Response]]] = [{} for _ in documents]
        whole: set[int] = set()

        def answered(request: int, text: str) -> None:
            index, sample = divmod(request, task.samples)
            answers[index][sample] = [self._response(documents[index], sample, text)]
            if len(answers[index]) == task.samples and index not in whole:
                whole.add(index)
                finished(index, [answers[index][sample] for sample in range(task.samples)])

        self._lm.on_answer = answered
        try:
            self._lm.generate_until(
                [document.instances[0] for document in documents for _ in range(task.samples)], disable_tqdm=True
            )
        finally:
            self._lm.on_answer = None

    def _response(self, document: TaskDocument, sample: int, text: str) -> Response:
        from replayeval.tasks.lm_requests import prompt_hash

        first: Any = document.instances[0]
        record = self._lm.generation_records[prompt_hash(first.args[0]), sample]
        return Response(
            value=text,
            output_tokens=tuple(record.output_tokens),
            length=len(record.output_tokens),
            truncated=record.truncated,
            seed=record.sequence,
        )
