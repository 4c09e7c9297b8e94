"""What is kept of a night: schema `replayeval.night/1`, and the directory that holds all nights."""

import re
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import IO, Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from replayeval.errors import ConfigError, StoreError
from replayeval.report.schema import Count, Interval, Record, Report
from replayeval.report.text import printable
from replayeval.stats.history import Method
from replayeval.store.files import Folder

NIGHT_SCHEMA = "replayeval.night/1"
NIGHTS = "nights"
RECORD = "night.json"
RUN = "run"
LOOK_BACK = 60
"""Nights that are read: a baseline, and as many more for regressions that stay open."""
_NAME = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ")

Fraction = Annotated[float, Field(ge=0, le=1)]


class Metric(StrEnum):
    """A quantity that is followed over nights; a higher value is worse."""

    KL = "kl"
    """Mean KL to N, in nats; changes are ratios."""
    FLIPS = "flips"
    """Share of tokens up to N ranked first by one of both only."""
    NLL = "nll_delta"
    """Mean NLL above the reference up to N, in nats."""
    DROP = "accuracy_drop"
    """Accuracy below the reference in percentage points."""


class Kind(StrEnum):
    """What became of a series tonight."""

    REGRESSION = "regression"
    """It got worse."""
    OPEN = "open"
    """It got worse on an earlier night and still is."""
    RESOLVED = "resolved"
    """It got worse on an earlier night and is back."""
    IMPROVEMENT = "improvement"
    """It got better; later nights are held against the new level."""


class Series(Record):
    """Which number is followed."""

    cell: str
    """Key of the cell."""
    policy: str
    """State policy."""
    metric: Metric
    """What is followed."""
    where: str
    """Generation length in tokens, or task."""

    @property
    def id(self) -> tuple[str, str, str, str]:
        """Hashable identity."""
        return self.cell, self.policy, str(self.metric), self.where


class Finding(Record):
    """One series that changed, or stays changed."""

    series: Series
    """Which one."""
    label: str
    """What people call its cell."""
    kind: Kind
    """What became of it."""
    since: str
    """First night of the change."""
    method: Method | None
    """What its p-value rests on; null for a divergence, which needs no test."""
    before: float | None
    """Mean over nights and documents of the baseline: geometric for KL, in the unit of the metric."""
    now: float | None
    """The same tonight; null where the arm diverged."""
    change: float | None
    """Tonight's ratio to the baseline for KL, else the difference; for new findings over all nights since."""
    ci95: Interval | None
    """95% interval of `change` over documents, paired."""
    p_value: float | None
    """Two-sided p of no change, corrected for the scales looked at."""
    p_holm: float | None
    """The same after Holm's correction over all series of the night."""
    nights_before: Count
    """Nights of the baseline."""
    documents: Count
    """Documents compared."""
    text: str = ""
    """What a number cannot say."""


class NightCell(Record):
    """One cell of a night: the numbers of every document. Its record can be computed again from the night's run."""

    key: str
    """Digest of what has to agree for two nights to be comparable."""
    label: str
    """What people call it."""
    identity: dict[str, JsonValue]
    """What the key was made of."""
    window: int | None
    """Default replay window in tokens."""
    diverged: dict[str, int] = Field(default_factory=dict)
    """By policy: smallest generation length at which an output was not finite."""
    documents: tuple[str, ...] = ()
    """Identities of the documents."""
    values: dict[str, dict[str, tuple[float | None, ...]]] = Field(default_factory=dict)
    """By policy and `metric/where`: one number per document; null where it does not reach N or the arm diverged."""
    exact: dict[str, str] = Field(default_factory=dict)
    """By policy: digest of numbers that two nights share only when they agree bit by bit."""

    @model_validator(mode="after")
    def _one_number_per_document(self) -> Self:
        for policy, numbers in self.values.items():
            for name, values in numbers.items():
                if len(values) != len(self.documents):
                    raise ValueError(
                        f"expected one number for each of {len(self.documents)} documents, got {len(values)} for "
                        f"{printable(name)} of {printable(policy)}"
                    )
        return self


class NightRecord(Report):
    """One finished night."""

    schema_name: Literal["replayeval.night/1"] = Field(default=NIGHT_SCHEMA, alias="schema")
    """Name and version of this schema."""
    night: str
    """Its name: UTC time of its start."""
    plan: str
    """Name of the plan."""
    cells: tuple[NightCell, ...]
    """What was measured."""
    findings: tuple[Finding, ...]
    """What changed."""
    tested: Count
    """Series that were tested tonight."""
    untested: Count
    """Series that could not be tested: too few earlier nights share enough documents."""
    restarted: tuple[str, ...] = ()
    """Cells that an earlier night measured under another identity, with what differs."""
    alpha: Fraction
    """Chance of any false finding in a night without a change."""
    tolerance: Annotated[float, Field(ge=0)]
    """Relative change of KL that is of no interest."""
    accepted: tuple[Series, ...] = ()
    """Regressions that were declared the new level after this night."""
    provenance: dict[str, JsonValue]
    """Versions, commit and time."""

    @property
    def regressions(self) -> tuple[Finding, ...]:
        """Regressions that are there tonight, new and open ones, without the accepted."""
        accepted = {series.id for series in self.accepted}
        kinds = (Kind.REGRESSION, Kind.OPEN)
        return tuple(f for f in self.findings if f.kind in kinds and f.series.id not in accepted)


class History:
    """A directory of nights: `nights/NAME/night.json`, written last, and `nights/NAME/run/`, the sweep's store."""

    def __init__(self, path: Path) -> None:
        """Name the directory; nothing is touched."""
        self.path = path
        self._folder = Folder(path)

    def names(self) -> list[str]:
        """Return the names of all nights begun, oldest first."""
        folder = self.path / NIGHTS
        if not folder.is_dir():
            return []
        return sorted(entry.name for entry in folder.iterdir() if _NAME.fullmatch(entry.name))

    def finished(self) -> list[str]:
        """Return the names of the finished nights, oldest first."""
        return [name for name in self.names() if self._folder.exists(f"{NIGHTS}/{name}/{RECORD}")]

    def future(self, now: datetime) -> list[str]:
        """Return the names of the finished nights that are dated later than a moment in UTC, oldest first."""
        return [name for name in self.finished() if name > night_name(now)]

    def load(self, names: Iterable[str] | None = None) -> list[NightRecord]:
        """Return finished nights, oldest first: those named, or the last 60.

        Raises:
            StoreError: One of them cannot be read or is damaged.
        """
        records: list[NightRecord] = []
        for name in self.finished()[-LOOK_BACK:] if names is None else names:
            where = f"{NIGHTS}/{name}/{RECORD}"
            try:
                text = self._folder.read(where).decode()
                record = NightRecord.from_json(text, where=self._folder.show(where))
                if record.night != name:
                    raise ConfigError(f"{self._folder.show(where)} is that of the night {printable(record.night)}.")
            except (ConfigError, FileNotFoundError, UnicodeDecodeError) as error:
                raise StoreError(
                    f"a night of the history is damaged: {error} Move {self.night(name)} elsewhere to go on without it."
                ) from None
            records.append(record)
        return records

    def save(self, record: NightRecord) -> None:
        """Write a night, whole or not at all.

        Raises:
            StoreError: The disk refuses.
        """
        self._folder.write(f"{NIGHTS}/{record.night}/{RECORD}", (record.to_json() + "\n").encode())

    def night(self, name: str) -> Path:
        """Return the directory of a night."""
        return self.path / NIGHTS / name

    def lock(self) -> IO[str] | None:
        """Keep other processes from running a night here until the returned object is closed or forgotten.

        Raises:
            StoreError: Another process does, or the directory cannot be written.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"--history: expected a directory, got the file {printable(str(self.path))}.")
        return self._folder.lock(NIGHTS)


def night_name(moment: datetime) -> str:
    """Return the name of a night that starts at a moment in UTC."""
    return moment.strftime("%Y-%m-%dT%H-%M-%SZ")
