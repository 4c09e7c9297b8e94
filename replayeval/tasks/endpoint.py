"""Arms that are servers: OpenAI-compatible endpoints, asked through lm-eval's API models."""

# lm-eval is untyped.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from replayeval.errors import ConfigError
from replayeval.report.text import printable
from replayeval.tasks.answering import Finished, Response
from replayeval.tasks.catalog import hushed
from replayeval.tasks.documents import EvalTask, TaskDocument

if TYPE_CHECKING:
    _Completions: Any = object
    _Chat: Any = object
else:
    try:
        from lm_eval.models.openai_completions import LocalChatCompletion as _Chat
        from lm_eval.models.openai_completions import LocalCompletionsAPI as _Completions
    except ImportError as error:
        raise ConfigError(f"--endpoint: {error}; install it with `pip install aiohttp tenacity`.") from None

CONCURRENT = 32
"""Requests that a server gets at a time."""
_ROUNDS = 2
_TIMEOUT_SECONDS = 6 * 3600
_CHECK_SECONDS = 20
_MOST_CHAT_STOPS = 4


class _Output(str):
    """An output that knows why it ended and how long it is: lm-eval's API models keep nothing but the text."""

    finish: str | None
    tokens: int | None


def _outputs(answer: Mapping[str, Any], text_of: Callable[[Mapping[str, Any]], str | None]) -> list[_Output]:
    choices: Sequence[Mapping[str, Any]] = sorted(answer["choices"], key=lambda choice: choice["index"])
    usage: Mapping[str, Any] = answer.get("usage") or {}
    found: list[_Output] = []
    for choice in choices:
        output = _Output(text_of(choice) or "")
        output.finish = choice.get("finish_reason")
        # The usage is that of the whole answer, so it tells the length of a single choice only.
        output.tokens = _length(usage.get("completion_tokens")) if len(choices) == 1 else None
        found.append(output)
    return found


def _length(tokens: Any) -> int | None:
    if tokens is None:
        return None
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise ConfigError(
            f"--endpoint: expected a whole number of completion_tokens in the server's answer, got {tokens!r}; "
            "its answer was not kept."
        )
    return tokens


class _CompletionsAPI(_Completions):
    """lm-eval's completions API, keeping what the server says about each output."""

    @staticmethod
    def parse_generations(outputs: Any, **kwargs: Any) -> list[str]:
        del kwargs
        answers: list[Any] = outputs if isinstance(outputs, list) else [outputs]
        return [text for answer in answers for text in _outputs(answer, lambda choice: choice["text"])]


class _ChatAPI(_Chat):
    """lm-eval's chat API, keeping what the server says about each output."""

    def parse_generations(self, outputs: Any, **kwargs: Any) -> list[str]:
        del kwargs
        answers: list[Any] = outputs if isinstance(outputs, list) else [outputs]
        return [text for answer in answers for text in _outputs(answer, lambda choice: choice["message"]["content"])]


class EndpointArm:
    """One server as an arm.

    Args:
        name: How reports call it.
        url: Its base, such as `http://localhost:8000/v1`.
        model: The name under which it serves the model.
        tokenizer: Hub id or directory of the model's tokenizer, for choices by likelihood and lengths.
        seed: Seed sent with the first sample of each document; further samples get the numbers after it.

    Raises:
        ConfigError: No such server, or it does not serve the model.
    """

    def __init__(self, name: str, url: str, *, model: str, tokenizer: str | None, seed: int) -> None:
        self.name = name
        self.url = _base(url)
        self.model = model
        self._tokenizer = tokenizer
        self._seed = seed
        self._apis: dict[bool, Any] = {}
        _check_server(name, self.url, model)

    @property
    def chat_template(self) -> Callable[..., Any]:
        """Turns messages into the form that a chat request takes; the template itself is the server's."""
        return self._api(chat=True).apply_chat_template

    def portion(self, task: EvalTask) -> int:
        """Return how many requests to hand over together."""
        return _ROUNDS * CONCURRENT * task.samples

    def answer(self, task: EvalTask, documents: Sequence[TaskDocument], finished: Finished) -> None:
        """Answer documents whose prompts all differ.

        Args:
            task: The task.
            documents: Some of its documents.
            finished: Called once for each document.

        Raises:
            ConfigError: The server fails, or cannot answer such a task.
        """
        if task.generates:
            by_sample = [self._generate(task, documents, self._seed + sample) for sample in range(task.samples)]
            for index in range(len(documents)):
                finished(index, [[outputs[index]] for outputs in by_sample])
            return
        if self._tokenizer is None:
            raise ConfigError(
                f"--endpoint: {task.name} compares likelihoods of choices, which takes the model's tokenizer; name it "
                "with --tokenizer, or ask a task that generates its answers."
            )
        requests = [instance for document in documents for instance in document.instances]
        scores = iter(self._ask(lambda: self._api(chat=False).loglikelihood(requests)))
        for index, document in enumerate(documents):
            finished(index, [[Response(value=tuple(next(scores))) for _ in document.instances]])

    def _generate(self, task: EvalTask, documents: Sequence[TaskDocument], seed: int) -> list[Response]:
        api = self._api(chat=task.chat)
        stops = task.settings["generation"].get("until") or []
        if task.chat and len(stops) > _MOST_CHAT_STOPS:
            raise ConfigError(
                f"--endpoint: {task.name} has {len(stops)} stop strings and a chat request takes {_MOST_CHAT_STOPS}; "
                "use --chat-template off."
            )
        api._seed = seed
        outputs = self._ask(lambda: api.generate_until([document.instances[0] for document in documents]))
        return [
            Response(
                value=str(output),
                length=output.tokens,
                truncated=None if output.finish is None else output.finish == "length",
                seed=seed,
            )
            for output in cast(list[_Output], outputs)
        ]

    def _ask(self, request: Callable[[], list[Any]]) -> list[Any]:
        try:
            with hushed():
                return request()
        except Exception as error:  # of two HTTP clients, and of answers that are not as the protocol says
            raise ConfigError(
                f"--endpoint: {self.name} at {printable(self.url)} does not answer as an OpenAI-compatible server "
                f"does ({type(error).__name__}: {printable(str(error)[:200])}). Answers so far are kept in --out; go "
                "on with --resume."
            ) from None

    def _api(self, *, chat: bool) -> Any:
        if chat not in self._apis:
            options: dict[str, Any] = {
                "model": self.model,
                "num_concurrent": CONCURRENT,
                "batch_size": 1,
                # Nothing is ever cut on this side.
                "max_length": 1 << 30,
                "timeout": _TIMEOUT_SECONDS,
                "seed": self._seed,
            }
            with hushed():
                if chat:
                    self._apis[chat] = _ChatAPI(base_url=f"{self.url}/chat/completions", **options)
                else:
                    backend = "none" if self._tokenizer is None else "huggingface"
                    self._apis[chat] = _CompletionsAPI(
                        base_url=f"{self.url}/completions",
                        tokenizer=self._tokenizer,
                        tokenizer_backend=backend,
                        tokenized_requests=False,
                        **options,
                    )
        return self._apis[chat]


def parse_endpoint(text: str) -> tuple[str, str]:
    """Return name and URL of `NAME=URL`, or of a URL alone, whose name is host and port.

    Raises:
        ConfigError: No http or https URL.
    """
    name, equals, url = text.partition("=")
    if not equals or "/" in name:
        name, url = "", text
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"--endpoint: expected NAME=URL such as fp8=http://localhost:8000/v1, got {printable(text)!r}."
        )
    return name or parts.netloc, url


def _base(url: str) -> str:
    base = url.rstrip("/")
    for ending in ("/chat/completions", "/completions"):
        base = base.removesuffix(ending)
    return base


def _check_server(name: str, url: str, model: str) -> None:
    import requests

    headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}"}
    try:
        answer = requests.get(f"{url}/models", headers=headers, timeout=_CHECK_SECONDS)
        served = [str(entry["id"]) for entry in answer.json()["data"]] if answer.ok else []
    except requests.ConnectionError:
        raise ConfigError(
            f"--endpoint: nothing answers at {printable(url)} ({name}); start the server first, and give the URL up to "
            "/v1."
        ) from None
    except (requests.RequestException, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--endpoint: {printable(url)}/models ({name}) is no list of models ({type(error).__name__}); give the URL "
            "up to /v1."
        ) from None
    if served and model not in served:
        raise ConfigError(
            f"--endpoint: {name} serves {', '.join(printable(entry) for entry in served[:5])}, not "
            f"{printable(model)!r}; name the model as the server does with --model, and its tokenizer with --tokenizer."
        )
