"""Who answers: one arm of a local model, or one server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from replayeval.tasks.documents import EvalTask, TaskDocument


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


class Arm(Protocol):
    """One arm: it answers requests, always the same way."""

    @property
    def name(self) -> str:
        """State policy in its canonical text, or the name of an endpoint."""
        ...

    @property
    def rows(self) -> int:
        """Requests that are worth handing over together."""
        ...

    def answer(self, task: EvalTask, documents: Sequence[TaskDocument]) -> list[list[list[Response]]]:
        """Answer documents whose prompts all differ.

        Returns:
            By document, sample and request of the document, the response.
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

    @property
    def rows(self) -> int:
        """Rows that the model decodes side by side."""
        return max(1, int(self._lm.batch_size))

    def answer(self, task: EvalTask, documents: Sequence[TaskDocument]) -> list[list[list[Response]]]:
        """Answer documents whose prompts all differ.

        Returns:
            By document, sample and request of the document, the response.
        """
        if not task.generates:
            requests = [instance for document in documents for instance in document.instances]
            scores = iter(self._lm.loglikelihood(requests, disable_tqdm=True))
            return [[[Response(value=next(scores)) for _ in document.instances]] for document in documents]
        requests = [document.instances[0] for document in documents for _ in range(task.samples)]
        texts = self._lm.generate_until(requests, disable_tqdm=True)
        return [
            [[self._response(document, sample, texts[index * task.samples + sample])] for sample in range(task.samples)]
            for index, document in enumerate(documents)
        ]

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
