"""The record that `replayeval kl` writes: schema `replayeval.kl/1`.

A value that is undefined is null, and the `notes` beside it say why, under the name of the field.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from replayeval.errors import ConfigError
from replayeval.report.text import printable

KL_SCHEMA = "replayeval.kl/1"


def ordered(interval: tuple[float, float]) -> tuple[float, float]:
    """Return an interval, or refuse one whose ends are the wrong way round."""
    if interval[0] > interval[1]:
        raise ValueError(f"expected the low end of an interval first, got {list(interval)}")
    return interval


Interval: TypeAlias = Annotated[tuple[float, float], AfterValidator(ordered)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Record(BaseModel):
    """A part of the record: frozen, and closed to unknown fields, NaN and infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    notes: dict[str, str] = Field(default_factory=dict)
    """Why a field of this part is null, by field name; left out of the JSON where every field has a value."""

    @model_serializer(mode="wrap")
    def _notes_last(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        notes = fields.pop("notes")
        return fields | ({"notes": notes} if notes else {})


class Report(Record):
    """A whole record: one JSON document whose field `schema`, `schema_name` in Python, says what it holds."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_by_name=True, serialize_by_alias=True
    )

    def to_json(self) -> str:
        """Return the record as indented JSON without NaN or infinities."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str, *, where: str = "the text") -> Self:
        """Read a record back.

        Args:
            text: What `to_json` returned.
            where: How messages call the source of the text.

        Raises:
            ConfigError: The text is no JSON, or not a record of this schema.
        """
        schema: str = cls.model_fields["schema_name"].default
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{printable(where)} is not JSON: {error}. Expected a {schema} record.") from None
        if not isinstance(data, dict) or data.get("schema") != schema:  # pyright: ignore[reportUnknownMemberType]
            raise ConfigError(f"{printable(where)} is not a {schema} record: its `schema` field does not say so.")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            problems = "; ".join(
                f"{printable('.'.join(str(part) for part in problem['loc']))}: {problem['msg']}"
                for problem in error.errors(include_url=False, include_input=False)[:5]
            )
            raise ConfigError(f"{printable(where)} does not fit {schema}: {problems}") from None

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a record from a file.

        Raises:
            ConfigError: The file cannot be read, or holds no record of this schema.
        """
        schema: str = cls.model_fields["schema_name"].default
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read {printable(str(path))}: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{printable(str(path))} is not UTF-8 text. Expected a {schema} record.") from None
        return cls.from_json(text, where=str(path))


class KLStatistics(Record):
    """KL per token of one arm, in nats, over the tokens of all documents."""

    mean: float | None
    """Mean over tokens."""
    ci95: Interval | None
    """95% bootstrap interval of the mean."""
    p50: float | None
    """Median."""
    p90: float | None
    """90th percentile."""
    p99: float | None
    """99th percentile."""
    p999: float | None
    """99.9th percentile."""
    max: float | None
    """Largest KL of any token."""


class KLAtLength(Record):
    """One arm up to one generation length, over the documents that reach it."""

    n: Positive
    """Generation length N in tokens."""
    documents: Count
    """Documents that decode at least N tokens; only these count here."""
    tokens: Count
    """Tokens that the means run over."""
    mean: float | None
    """Mean KL in nats over the tokens up to N."""
    ci95: Interval | None
    """95% bootstrap interval of `mean`."""
    local_mean: float | None
    """Mean KL in nats over the octave (N/2, N]."""
    local_ci95: Interval | None
    """95% bootstrap interval of `local_mean`."""
    top1_agreement: Fraction | None
    """Fraction of tokens up to N whose most probable next token is that of the reference."""
    top1_agreement_ci95: Interval | None
    """95% bootstrap interval of `top1_agreement`."""
    nll_delta: float | None
    """Mean NLL of the arm minus that of the reference up to N, in nats per token; positive is worse."""
    nll_delta_ci95: Interval | None
    """95% bootstrap interval of `nll_delta`, paired by token."""
    ratio_to_floor: float | None
    """`mean` divided by that of the control arm."""


class RatioAtLength(Record):
    """Rounding to nearest against stochastic rounding at one generation length."""

    n: Positive
    """Generation length N in tokens."""
    documents: Count
    """Documents that decode at least N tokens."""
    ratio: float | None
    """Mean KL up to N, rounding to nearest over stochastic rounding; above 1, stochastic is better."""
    ci95: Interval | None
    """95% bootstrap interval of `ratio`, paired."""
    local_ratio: float | None
    """The same over the octave (N/2, N]."""
    local_ci95: Interval | None
    """95% bootstrap interval of `local_ratio`, paired."""


class RoundingRatio(Record):
    """Two arms that differ in nothing but stochastic rounding."""

    nearest: str
    """Policy of the arm that rounds to nearest."""
    stochastic: str
    """Policy of the arm that rounds stochastically."""
    by_length: tuple[RatioAtLength, ...]
    """Their ratio by generation length."""


class Intervals(Record):
    """How the intervals came about."""

    level: Fraction
    """Coverage that they aim at."""
    method: str
    """Bootstrap over documents, or over blocks of tokens inside a single document."""
    resamples: Count
    """Resamples per interval."""
    seed: Count
    """Seed of the resamples."""
    caution: str | None
    """Why to distrust them, if there is a reason."""


class ArmReport(Record):
    """Everything reported about one arm."""

    policy: str
    """State policy in its canonical text."""
    bits_per_element: float | None
    """Stored bits per state element, scales and every copy included."""
    kl: KLStatistics
    """KL per token over all documents."""
    by_length: tuple[KLAtLength, ...]
    """KL by generation length."""
    top1_agreement: Fraction | None
    """Fraction of tokens whose most probable next token is that of the reference."""
    top1_agreement_ci95: Interval | None
    """95% bootstrap interval of `top1_agreement`."""
    nll_delta: float | None
    """Mean negative log-likelihood of the arm minus that of the reference, in nats per token."""
    nll_delta_ci95: Interval | None
    """95% bootstrap interval of `nll_delta`."""
    ppl: float | None
    """Perplexity of the arm."""
    ppl_reference: float | None
    """Perplexity of the reference on the same tokens."""
    diverged_at: Positive | None
    """Smallest generation length at which an output was not finite; null when all were."""
    diverged_documents: tuple[str, ...] = ()
    """Documents in which the arm diverged."""
    ratio_to_floor: float | None
    """Mean KL divided by the mean KL of the control arm."""
    ratio_to_floor_ci95: Interval | None
    """95% bootstrap interval of `ratio_to_floor`, paired."""


def refuse_repeated(policies: Iterable[str]) -> None:
    """Refuse two arms of one policy: nothing tells them apart.

    Raises:
        ValueError: A policy is there twice.
    """
    seen: set[str] = set()
    for policy in policies:
        if policy in seen:
            raise ValueError(f"expected each policy once, got two arms of {printable(policy)}")
        seen.add(policy)


class Check(Record):
    """One check that the apparatus ran on itself."""

    name: str
    """What was checked."""
    passed: bool | None
    """Whether `value` kept to `limit`; null when the check could not be run."""
    value: float | None
    """What was measured."""
    limit: float | None
    """The bound it had to keep."""


class Timing(Record):
    """What the measurement cost."""

    seconds: Annotated[float, Field(ge=0)]
    """Wall-clock time of scoring, without loading the model."""
    tokens_per_s: float | None
    """Tokens of text per second, all arms together."""
    tokens_per_s_per_arm: float | None
    """Tokens per second and arm: `tokens_per_s` times the number of arms with the reference."""
    peak_memory_bytes: Count | None
    """Peak memory of the device, or of the process on a CPU."""


class KLReport(Report):
    """One measurement of `replayeval kl`."""

    schema_name: Literal["replayeval.kl/1"] = Field(default=KL_SCHEMA, alias="schema")
    """Name and version of this schema."""
    model: str
    """Where the weights came from: hub id, directory or built-in name."""
    reference: str
    """Policy of the reference arm: P in KL(P || Q)."""
    window: Positive
    """Default replay window in tokens; a policy that names its own uses that."""
    docs: Count
    """Documents scored."""
    tokens: Count
    """Tokens scored per arm, all documents together, prompts excluded."""
    arms: tuple[ArmReport, ...]
    """The arms, in the order asked for."""
    rounding_ratios: tuple[RoundingRatio, ...] = ()
    """Every pair of arms that differ in nothing but stochastic rounding."""
    intervals: Intervals | None = None
    """How the intervals came about."""
    checks: tuple[Check, ...]
    """Checks that the apparatus ran on itself."""
    timing: Timing
    """What the measurement cost."""
    provenance: dict[str, JsonValue]
    """Versions, device, commit, arguments and seed that produced the numbers."""

    @model_validator(mode="after")
    def _no_policy_twice(self) -> Self:
        refuse_repeated(arm.policy for arm in self.arms)
        return self
