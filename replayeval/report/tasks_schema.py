"""The record that `replayeval tasks` writes: schema `replayeval.tasks/1`.

Accuracy of every arm on the same documents as the reference, with paired statistics. A value that is undefined is null,
and the `notes` beside it say why, under the name of the field. Everything pooled weighs documents alike.
"""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, JsonValue, model_validator

from replayeval.report.schema import (
    Check,
    Count,
    Fraction,
    Intervals,
    Positive,
    Record,
    Report,
    Timing,
    ordered,
    refuse_repeated,
)

TASKS_SCHEMA = "replayeval.tasks/1"

Points: TypeAlias = Annotated[float, Field(ge=-100, le=100)]
PointsInterval: TypeAlias = Annotated[tuple[Points, Points], AfterValidator(ordered)]
FractionInterval: TypeAlias = Annotated[tuple[Fraction, Fraction], AfterValidator(ordered)]
Probability: TypeAlias = Fraction
TestName: TypeAlias = Literal["mcnemar_exact", "sign_flip_exact", "sign_flip_monte_carlo"]


class Answers(Record):
    """How one arm, or the reference, answered the documents of one task."""

    policy: str
    """State policy in its canonical text, or the name of an endpoint."""
    n: Count
    """Documents answered."""
    samples: Count
    """Answers, all samples of all documents."""
    accuracy: Fraction | None
    """Mean score: first over the samples of a document, then over documents."""
    accuracy_ci95: FractionInterval | None
    """95% bootstrap interval of `accuracy`, over documents."""
    output_tokens_mean: Annotated[float, Field(ge=0)] | None
    """Mean length of an output in tokens."""
    output_tokens_p90: Annotated[float, Field(ge=0)] | None
    """90th percentile of the length of an output in tokens."""
    extraction_failures: Count | None
    """Answers that ended by themselves and held nothing that the task could extract; truncated ones not included."""
    truncations: Count | None
    """Outputs that were cut off at the token limit, whether or not an answer was found in them."""


class QuartileAccuracy(Record):
    """Accuracy over the documents of one quartile of the reference's output length."""

    quartile: Annotated[int, Field(ge=1, le=4)]
    """1 holds the documents that the reference answered shortest."""
    n: Count
    """Documents in it. Documents of equal length are never separated, so that quartiles may differ in size."""
    reference_tokens: tuple[float, float] | None
    """Shortest and longest mean output of the reference in it, in tokens."""
    accuracy_reference: Fraction | None
    """Accuracy of the reference on these documents."""
    accuracy: Fraction | None
    """Accuracy of the arm on these documents."""
    delta_pp: Points | None
    """`accuracy` minus `accuracy_reference` in percentage points."""
    ci95: PointsInterval | None
    """95% bootstrap interval of `delta_pp`, paired."""


class TaskArm(Answers):
    """One arm on one task, compared with the reference on the same documents."""

    delta_pp: Points | None
    """Accuracy minus that of the reference, in percentage points; negative is worse."""
    ci95: PointsInterval | None
    """95% bootstrap interval of `delta_pp`: paired, clustered by document."""
    p_value: Probability | None
    """Two-sided p of no difference, by `test`."""
    test: TestName | None
    """McNemar's exact test for one right-or-wrong answer per document; else sign flips by document."""
    mcnemar_p: Probability | None
    """`p_value` where `test` is McNemar's exact test; null with the reason where that test does not apply."""
    p_holm: Probability | None
    """`p_value` after Holm's correction over the arms of this task."""
    flips_to_wrong: Count
    """Pairs of answers, same document and sample, that score less than the reference's."""
    flips_to_right: Count
    """Pairs of answers that score more than the reference's."""
    discordant: Count
    """Documents whose score differs from the reference's."""
    mde_pp: Annotated[float, Field(ge=0, le=100)] | None
    """Smallest true difference that a test like this one, with this n and this discordance, finds 80% of the time."""
    by_quartile: tuple[QuartileAccuracy, ...]
    """Accuracy by quartile of the reference's output length; empty where lengths are unknown."""


class TaskReport(Record):
    """All arms on one task, or on all subtasks of a group together."""

    task: str
    """Name of the task or group."""
    members: tuple[str, ...] = ()
    """The tasks whose documents are pooled here; empty for a single task."""
    metric: str
    """Score of an answer, 0 to 1."""
    n: Count
    """Documents that the reference and every arm answered."""
    samples_per_document: Positive | None
    """Answers per document; null where members of the group differ."""
    dataset: dict[str, JsonValue]
    """Where the documents came from: path, name, revision, split, digest of the prompts."""
    settings: dict[str, JsonValue]
    """How they were asked: output type, few-shot examples, generation settings."""
    reference: Answers
    """The reference's answers."""
    arms: tuple[TaskArm, ...]
    """The arms, in the order asked for."""
    caution: str | None = None
    """Why to distrust the comparison, if there is a reason."""

    @model_validator(mode="after")
    def _no_policy_twice(self) -> Self:
        refuse_repeated(arm.policy for arm in self.arms)
        return self


class TasksReport(Report):
    """One measurement of `replayeval tasks`."""

    schema_name: Literal["replayeval.tasks/1"] = Field(default=TASKS_SCHEMA, alias="schema")
    """Name and version of this schema."""
    model: str
    """Where the weights came from: hub id, directory or built-in name; the served model for endpoints."""
    reference: str
    """Policy of the reference, or the name of the reference endpoint."""
    window: Positive | None
    """Default replay window in tokens; null for endpoints."""
    tasks: tuple[TaskReport, ...]
    """Tasks in the order asked for. A group comes first and its members follow."""
    intervals: Intervals
    """How the intervals came about."""
    checks: tuple[Check, ...] = ()
    """Checks that the apparatus ran on itself."""
    timing: Timing
    """What the answers cost; those that an earlier process had kept are included."""
    provenance: dict[str, JsonValue]
    """Versions, device, commit, arguments and seed that produced the numbers."""
