"""A hand-made record of tasks."""

from typing import Any

from replayeval.report.schema import Intervals, Timing
from replayeval.report.tasks_schema import Answers, QuartileAccuracy, TaskArm, TaskReport, TasksReport


def answers(policy: str, accuracy: float, *, n: int = 100) -> dict[str, Any]:
    return dict(
        policy=policy,
        n=n,
        samples=n,
        accuracy=accuracy,
        accuracy_ci95=(max(accuracy - 0.05, 0), min(accuracy + 0.05, 1)),
        output_tokens_mean=400.0,
        output_tokens_p90=900.0,
        extraction_failures=1,
        truncations=2,
    )


def task_arm(policy: str, delta_pp: float, *, half: float = 1.0, n: int = 100) -> TaskArm:
    return TaskArm(
        **answers(policy, 0.8 + delta_pp / 100, n=n),
        delta_pp=delta_pp,
        ci95=(delta_pp - half, delta_pp + half),
        p_value=0.2,
        test="mcnemar_exact",
        mcnemar_p=0.2,
        p_holm=0.4,
        flips_to_wrong=5,
        flips_to_right=2,
        discordant=7,
        mde_pp=6.0,
        by_quartile=tuple(
            QuartileAccuracy(
                quartile=quartile,
                n=n // 4,
                reference_tokens=(100.0 * quartile, 100.0 * quartile + 99),
                accuracy_reference=0.8,
                accuracy=0.8 + quartile * delta_pp / 100,
                delta_pp=quartile * delta_pp,
                ci95=(quartile * delta_pp - half, quartile * delta_pp + half),
            )
            for quartile in range(1, 5)
        ),
    )


def task(name: str, *arms: TaskArm, n: int = 100, **changes: Any) -> TaskReport:
    values: dict[str, Any] = dict(
        task=name,
        metric="exact_match",
        n=n,
        samples_per_document=1,
        dataset={"path": "builtin"},
        settings={"output_type": "generate_until"},
        reference=Answers(**answers("conventional:fp32", 0.8, n=n)),
        arms=arms,
    )
    return TaskReport(**(values | changes))


def tasks_report(*tasks: TaskReport, **changes: Any) -> TasksReport:
    values: dict[str, Any] = dict(
        model="builtin:gdn",
        reference="conventional:fp32",
        window=16,
        tasks=tasks,
        intervals=Intervals(level=0.95, method="documents_bca", resamples=4000, seed=0, caution=None),
        timing=Timing(seconds=2.0, tokens_per_s=2048.0, tokens_per_s_per_arm=4096.0, peak_memory_bytes=123),
        provenance={"seed": 0, "versions": {"torch": "2.13.0"}},
    )
    return TasksReport(**(values | changes))


def two_tasks() -> TasksReport:
    arms = (task_arm("shared:fp8+sr@L=16", -0.2), task_arm("shared:nvfp4@L=16", -4.0))
    return tasks_report(task("recall", *arms), task("arithmetic", *arms))
