"""The result of a measurement in Python: numbers per token, the record, and the views of both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import JsonValue

from replayeval.errors import ConfigError
from replayeval.report.from_summary import arm_report, intervals_report, rounding_report
from replayeval.report.page import kl_html
from replayeval.report.schema import Check, KLReport, Timing
from replayeval.report.table import TABLE_WIDTH, KLTable
from replayeval.report.text import printable

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]
    from matplotlib.figure import Figure
    from rich.console import Console, ConsoleOptions, RenderResult

    from replayeval.stats import KLSummary
    from replayeval.store import DocumentScores


@dataclass(frozen=True, kw_only=True, eq=False)
class KLResult:
    """What `measure_kl` returns.

    Attributes:
        report: The record: everything that `to_json` writes.
        scores: The numbers per token, one entry per document.
    """

    report: KLReport
    scores: "Sequence[DocumentScores]"

    @classmethod
    def build(
        cls,
        *,
        scores: "Sequence[DocumentScores]",
        summary: "KLSummary",
        model: str,
        reference: str,
        window: int,
        bits_per_element: Mapping[str, float],
        checks: Sequence[Check],
        timing: Timing,
        provenance: Mapping[str, JsonValue],
    ) -> Self:
        """Put a result together.

        Args:
            scores: The numbers per token, one entry per document.
            summary: What the statistics made of them.
            model: Where the weights came from.
            reference: Canonical text of the reference policy.
            window: Default replay window in tokens.
            bits_per_element: Stored bits per state element by policy; a policy that is missing has no such number.
            checks: Outcomes of the checks that the apparatus ran on itself.
            timing: What the measurement cost.
            provenance: Versions, device, commit, arguments and seed.
        """
        report = KLReport(
            model=model,
            reference=reference,
            window=window,
            docs=summary.documents,
            tokens=summary.tokens,
            arms=tuple(arm_report(arm, bits_per_element=bits_per_element.get(arm.policy)) for arm in summary.arms),
            rounding_ratios=tuple(rounding_report(ratio) for ratio in summary.rounding_ratios),
            intervals=intervals_report(summary),
            checks=tuple(checks),
            timing=timing,
            provenance=dict(provenance),
        )
        return cls(report=report, scores=tuple(scores))

    @property
    def passed(self) -> bool:
        """Whether no check that the apparatus ran on itself failed."""
        return all(check.passed is not False for check in self.report.checks)

    def table(self, *, width: int = TABLE_WIDTH) -> KLTable:
        """Return the tables for a rich console.

        Args:
            width: Widest line in columns.
        """
        return KLTable(self.report, width=width)

    def to_pandas(self) -> "pd.DataFrame":
        """Return one row per document, arm and decoded token.

        Columns: `doc_index`, `doc_id`, `arm`, `n` (generation length, from 1), `kl_nats`, `nll_nats`,
        `nll_reference_nats` and `top1_agrees`. A number is NaN where it is undefined: from the token where an arm
        diverged, and for the likelihood at the last token of a document.
        """
        import numpy as np

        pd = _pandas()

        frames = [
            pd.DataFrame(
                {
                    "doc_index": document.doc_index,
                    "doc_id": document.doc_id,
                    "arm": arm,
                    "n": np.arange(1, document.kl_nats.shape[1] + 1),
                    "kl_nats": document.kl_nats[index],
                    "nll_nats": document.nll_nats[index],
                    "nll_reference_nats": document.nll_reference_nats,
                    "top1_agrees": document.top1_agrees[index],
                }
            )
            for document in self.scores
            for index, arm in enumerate(document.arms)
        ]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def summary_frame(self) -> "pd.DataFrame":
        """Return one row per arm and length: `policy`, `n`, `documents`, `mean`, `low`, `high` and `local_mean`."""
        pd = _pandas()
        rows: list[dict[str, Any]] = []
        for arm in self.report.arms:
            for point in arm.by_length:
                low, high = (None, None) if point.ci95 is None else point.ci95
                rows.append(
                    {
                        "policy": arm.policy,
                        "n": point.n,
                        "documents": point.documents,
                        "mean": point.mean,
                        "low": low,
                        "high": high,
                        "local_mean": point.local_mean,
                    }
                )
        numbers = ["mean", "low", "high", "local_mean"]
        columns = ["policy", "n", "documents", *numbers]
        return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(numbers, "float64"))

    def plot(self) -> "Figure":
        """Return a figure of mean KL by generation length with 95% bands."""
        from replayeval.report.figure import kl_figure

        return kl_figure(self.report)

    def to_json(self) -> str:
        """Return the record in schema `replayeval.kl/1`."""
        return self.report.to_json()

    def save(self, path: Path | str) -> None:
        """Write the record to a file.

        Raises:
            ConfigError: The file cannot be written.
        """
        try:
            Path(path).write_text(self.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {printable(str(path))}: {error.strerror}.") from None

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """Show the tables."""
        yield self.table()

    def __repr__(self) -> str:
        """Name the model and the arms, not the arrays."""
        arms = ", ".join(arm.policy for arm in self.report.arms)
        return f"KLResult(model={self.report.model!r}, docs={self.report.docs}, arms=[{arms}])"

    def _repr_html_(self) -> str:
        return kl_html(self.report)


def _pandas() -> Any:
    # Takes half a second to import, and only frames need it.
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    return pd
