"""Hand-made records for the tests of the report and of the command line."""

from typing import Any

from replayeval.report.schema import ArmReport, Check, KLAtLength, KLReport, KLStatistics, Timing


def point(n: int, mean: float | None, *, documents: int = 4) -> KLAtLength:
    interval = None if mean is None else (0.9 * mean, 1.1 * mean)
    notes = {"mean": "the arm diverged before this length"} if mean is None else {}
    return KLAtLength(
        n=n,
        documents=documents,
        tokens=n * documents,
        mean=mean,
        ci95=interval,
        local_mean=mean,
        local_ci95=interval,
        top1_agreement=0.99,
        top1_agreement_ci95=(0.98, 0.995),
        nll_delta=1e-3,
        nll_delta_ci95=(0.0, 2e-3),
        ratio_to_floor=None,
        notes=notes,
    )


def arm(policy: str, means: dict[int, float | None], **changes: Any) -> ArmReport:
    last = list(means.values())[-1]
    values: dict[str, Any] = dict(
        policy=policy,
        bits_per_element=4.5,
        kl=KLStatistics(
            mean=last,
            ci95=None if last is None else (0.9 * last, 1.1 * last),
            p50=last,
            p90=last,
            p99=last,
            p999=last,
            max=last,
        ),
        by_length=tuple(point(n, mean) for n, mean in means.items()),
        top1_agreement=0.9931,
        top1_agreement_ci95=(0.99, 0.995),
        nll_delta=1.3e-3,
        nll_delta_ci95=(1e-3, 1.5e-3),
        ppl=3.21,
        ppl_reference=3.2,
        diverged_at=None,
        ratio_to_floor=None if last is None else 312.0,
        ratio_to_floor_ci95=None,
    )
    return ArmReport(**(values | changes))


def report(*arms: ArmReport, **changes: Any) -> KLReport:
    values: dict[str, Any] = dict(
        model="builtin:gdn",
        reference="conventional:fp32",
        window=16,
        docs=4,
        tokens=4096,
        arms=arms,
        checks=(Check(name="control arm", passed=True, value=1e-12, limit=1e-6),),
        timing=Timing(seconds=2.0, tokens_per_s=2048.0, tokens_per_s_per_arm=4096.0, peak_memory_bytes=123),
        provenance={"seed": 0, "versions": {"torch": "2.13.0"}},
    )
    return KLReport(**(values | changes))


def two_arms() -> KLReport:
    return report(
        arm("shared:fp32@L=16", {512: 1e-9, 1024: 2e-9}, ratio_to_floor=1.0),
        arm("separate:nvfp4/fp16+sr@L=16", {512: 3.2e-3, 1024: 4.4e-3}),
    )
