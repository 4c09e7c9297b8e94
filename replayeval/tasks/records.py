"""Answers on disk: one line per document, safe against a kill at any moment, reused by later runs.

`answers/TASK/ARM.jsonl` begins with what decides the answers (`identity`) and holds one line per document. A line
carries the start of its own SHA-256. It is appended whole and forced to disk; a line that a kill cut off is dropped on
the next start, and its document asked again. Nothing is ever rewritten, so arms and documents can be added later.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

from replayeval.errors import StoreError
from replayeval.store._lock import lock_directory
from replayeval.store.identity import differences

SCHEMA = "replayeval.answers/1"
FOLDER = "answers"
_DIGEST_CHARACTERS = 16


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """One answer.

    Attributes:
        output: Text of the output, or None for a choice by likelihood.
        output_tokens: Its token ids, or None where only text is known.
        length: Length of the output in tokens, or None where it is unknown or there is no output.
        truncated: Whether it was cut off at the token limit, or None where that is unknown.
        loglikelihoods: Log-likelihood in nats of each choice and whether it is the greedy continuation.
        extracted: What was scored: the extracted answer, the output, or the chosen letter or index.
        unextracted: Whether nothing could be extracted, or None where nothing is extracted.
        score: Score between 0 and 1.
        metric: Which score, with the filter before it.
        seed: Seed that the answer was drawn with, or None where the server chose.
    """

    output: str | None
    output_tokens: tuple[int, ...] | None
    length: int | None
    truncated: bool | None
    loglikelihoods: tuple[tuple[float, bool], ...] | None
    extracted: str | None
    unextracted: bool | None
    score: float
    metric: str
    seed: int | None


@dataclass(frozen=True, kw_only=True)
class AnswerRecord:
    """All answers of one arm to one document.

    Attributes:
        doc_id: Index of the document in its task.
        prompt_sha256: SHA-256 of the prompt, chat template included, and of the choices where there are any.
        samples: The answers.
        seconds: Wall-clock time from the answers to the document before, so that they add up.
    """

    doc_id: int
    prompt_sha256: str
    samples: tuple[SampleRecord, ...]
    seconds: float


class AnswerLog:
    """The answers of one arm to one task, on disk or, without a folder, in memory."""

    def __init__(self, path: Path | None, identity: Mapping[str, Any]) -> None:
        """Read what is there, and drop a last line that was cut off.

        Args:
            path: The file, or None to keep everything in memory.
            identity: What decides the answers, as JSON values.

        Raises:
            StoreError: The file holds answers of another identity, is damaged, or cannot be read or written.
        """
        self.path = path
        # As JSON gives it back, so that it compares equal with what was written.
        self.identity: dict[str, Any] = json.loads(json.dumps(dict(identity)))
        self._stream: IO[bytes] | None = None
        self.records: dict[int, AnswerRecord] = {}
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._load(path)
            self._stream = path.open("ab")
            if path.stat().st_size == 0:
                self._append({"schema": SCHEMA, "identity": self.identity})
        except OSError as error:
            raise _unusable(path, error) from None

    def write(self, record: AnswerRecord) -> None:
        """Add the answers to one document; they are on disk when this returns.

        Raises:
            StoreError: The document is there already, or the disk refuses.
        """
        if record.doc_id in self.records:
            raise StoreError(f"{self.path}: document {record.doc_id} is there already; an answer is never replaced")
        if self._stream is not None:
            try:
                self._append(asdict(record))
            except OSError as error:
                raise _unusable(cast(Path, self.path), error) from None
        self.records[record.doc_id] = record

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _append(self, values: Mapping[str, Any]) -> None:
        stream = cast(IO[bytes], self._stream)
        stream.write(_line(values))
        stream.flush()
        os.fsync(stream.fileno())

    def _load(self, path: Path) -> None:
        if not path.exists():
            return
        content = path.read_bytes()
        lines = content.split(b"\n")
        if lines.pop() != b"":  # what follows the last line end was cut off
            content = content[: content.rfind(b"\n") + 1]
            with path.open("r+b") as stream:
                stream.truncate(len(content))
        for number, line in enumerate(lines, start=1):
            values = _parsed(path, number, line)
            if number == 1:
                self._check_header(path, values)
            else:
                record = _record(path, number, values)
                self.records[record.doc_id] = record

    def _check_header(self, path: Path, values: Mapping[str, Any]) -> None:
        if values.get("schema") != SCHEMA:
            raise StoreError(
                f"{path}: expected schema {SCHEMA}, got {values.get('schema')!r}; use another directory, or the "
                "version of replayeval that wrote this one"
            )
        changed = differences(values["identity"], self.identity)
        if changed:
            listed = "\n  ".join(changed)
            raise StoreError(
                f"{path} holds answers given under other conditions:\n  {listed}\n"
                "choose another directory, or give the arguments of the answers that lie there"
            )


class AnswerFolder:
    """The answers of a run: one log per task and arm. A process that writes holds a lock on the directory."""

    def __init__(self, path: Path | None, *, resume: bool) -> None:
        """Take a new or empty directory, or go on with answers that lie there.

        Args:
            path: Directory, created with its parents where missing; None keeps everything in memory.
            resume: Reuse the answers that are there.

        Raises:
            StoreError: The directory cannot be written, is in use, holds foreign files, or holds answers although
                `resume` was not given.
        """
        self.path = path
        self._lock: IO[str] | None = None
        self._logs: dict[tuple[str, str], AnswerLog] = {}
        if path is None:
            return
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._check(path, resume=resume)
            self._lock = lock_directory(path)
        except OSError as error:
            raise _unusable(path, error) from None

    def log(self, task: str, arm: str, identity: Mapping[str, Any]) -> AnswerLog:
        """Return the log of one arm and task, opened on first use.

        Raises:
            StoreError: See `AnswerLog`.
        """
        if (task, arm) not in self._logs:
            path = None if self.path is None else self.path / FOLDER / _slug(task) / f"{_slug(arm)}.jsonl"
            self._logs[task, arm] = AnswerLog(path, identity)
        return self._logs[task, arm]

    def close(self) -> None:
        """Close all logs and let other processes write to the directory."""
        for log in self._logs.values():
            log.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "AnswerFolder":
        """Return the folder itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the folder."""
        self.close()

    def _check(self, path: Path, *, resume: bool) -> None:
        found = sorted(entry.name for entry in path.iterdir())
        foreign = [name for name in found if name not in {".lock", FOLDER, "report.json", "report.json.tmp"}]
        if foreign:
            raise StoreError(
                f"expected a new, an empty or an answers directory, but {path} holds {', '.join(foreign[:5])}; choose "
                "another directory"
            )
        if FOLDER in found and not resume:
            raise StoreError(f"{path} already holds answers; reuse them with --resume, or choose another directory")


def read_answers(path: Path) -> Iterator[tuple[Mapping[str, Any], Sequence[AnswerRecord]]]:
    """Yield the identity of every log of a run and its answers by document, for reading.

    Raises:
        StoreError: There is no such run, or a log is damaged.
    """
    if not (path / FOLDER).is_dir():
        raise StoreError(f"expected a directory of answers at {path}, got none; give the --out of an earlier run")
    for file in sorted((path / FOLDER).glob("*/*.jsonl")):
        lines = file.read_bytes().split(b"\n")[:-1]
        values = [_parsed(file, number, line) for number, line in enumerate(lines, start=1)]
        if values:
            records = [_record(file, number, value) for number, value in enumerate(values[1:], start=2)]
            # They were written as they were finished.
            yield values[0]["identity"], sorted(records, key=lambda record: record.doc_id)


def _slug(name: str) -> str:
    """Return a file name for any text, readable and unique."""
    readable = re.sub(r"[^A-Za-z0-9.+-]+", "_", name)[:60]
    return readable if readable == name else f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _line(values: Mapping[str, Any]) -> bytes:
    body = json.dumps(values, separators=(",", ":"), allow_nan=True)
    digest = hashlib.sha256(body.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{digest} {body}\n".encode()


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    digest, _, body = line.partition(b" ")
    if hashlib.sha256(body).hexdigest()[:_DIGEST_CHARACTERS].encode() != digest:
        raise StoreError(
            f"{path} is damaged in line {number}: its content does not fit its digest; delete the file, then run again "
            "with --resume"
        )
    return cast(dict[str, Any], json.loads(body))


def _record(path: Path, number: int, values: Mapping[str, Any]) -> AnswerRecord:
    try:
        samples = tuple(_sample(cast(dict[str, Any], sample)) for sample in values["samples"])
        return AnswerRecord(
            doc_id=values["doc_id"],
            prompt_sha256=values["prompt_sha256"],
            samples=samples,
            seconds=values["seconds"],
        )
    except (KeyError, TypeError) as error:
        raise StoreError(
            f"{path}: line {number} is no answer of this version: {error}; use another directory"
        ) from None


def _sample(values: dict[str, Any]) -> SampleRecord:
    tokens, likelihoods = values["output_tokens"], values["loglikelihoods"]
    lists: dict[str, Any] = {
        "output_tokens": None if tokens is None else tuple(tokens),
        "loglikelihoods": None if likelihoods is None else tuple((pair[0], pair[1]) for pair in likelihoods),
    }
    return SampleRecord(**{**values, **lists})


def _unusable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot use {path}: {error.strerror or error}; choose a directory that exists or can be created, with space "
        "and permission to write"
    )
