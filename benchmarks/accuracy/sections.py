"""What a report is made of: comparisons in named sections, each with its errors and what its constants were fitted on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from benchmarks.accuracy.korthikanti import Comparison
from hp_tool.cost.uncertainty import NORMAL_QUANTILE

MANY_ROWS = 40
"""Above this a table names models instead of rows; `--json` has them all."""

Role = Literal["headline", "held out", "in sample"]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Comparisons of one source against one profile."""

    title: str
    role: Role
    """headline: held-out rows a limit is set on; held out: the constants did not see these rows; in sample: they did."""
    fitted_on: str
    """The rows behind the constants that predicted these."""
    comparisons: list[Comparison]
    stated_log_sd: float | None = None
    """What the profile says log(published / predicted) scatters by; it sets the width of intervals."""
    stated_log_sd_below: float | None = None
    """The same where less was published than is predicted; None: no different."""

    def standardised(self) -> np.ndarray:
        """|log(published / predicted)| of each row, in stated standard deviations."""
        logs = -np.log1p([comparison.error for comparison in self.comparisons])
        assert self.stated_log_sd is not None
        return np.abs(logs) / np.where(logs < 0.0, self.stated_log_sd_below or self.stated_log_sd, self.stated_log_sd)

    def summary(self) -> dict[str, float | None]:
        """Mean and worst absolute relative error; bias and spread are of log(published / predicted); the share of rows
        within the 90 % interval that the profile states.
        """
        errors = np.array([comparison.error for comparison in self.comparisons])
        logs = -np.log1p(errors)
        return {
            "rows": len(errors),
            "mean_error": float(np.abs(errors).mean()),
            "worst_error": float(np.abs(errors).max()),
            "bias": float(math.expm1(-logs.mean())),
            "log_sd": float(np.sqrt((logs**2).mean())),
            "within_interval_share": (float((self.standardised() <= NORMAL_QUANTILE).mean()) if self.stated_log_sd else None),
        }

    def as_dict(self) -> dict[str, Any]:
        rows = [vars(comparison) | {"error": comparison.error} for comparison in self.comparisons]
        return {"title": self.title, "role": self.role, "fitted_on": self.fitted_on, "rows": rows, **self.summary()}

    def as_text(self) -> str:
        """A table with one line a row (a model, where there are many), and the summary beneath."""
        lines = [f"{self.title}  [{self.role}]", f"  constants from: {self.fitted_on}"]
        lines += self._by_model() if len(self.comparisons) > MANY_ROWS else self._by_row()
        s = self.summary()
        lines.append(
            f"  mean {s['mean_error']:.2%}, worst {s['worst_error']:.2%}, bias {s['bias']:+.2%}, "
            f"log standard deviation around zero {s['log_sd']:.3f}, {s['rows']} rows"
        )
        if self.stated_log_sd:
            lines[-1] += f"; {s['within_interval_share']:.0%} within the stated 90 % interval"
        return "\n".join(lines)

    def _by_row(self) -> list[str]:
        return [
            f"  {row.model:16} {row.what:50} {_number(row.published):>9} {_number(row.predicted):>9} {row.error:+7.1%}"
            for row in self.comparisons
        ]

    def _by_model(self) -> list[str]:
        lines = []
        for model in dict.fromkeys(row.model for row in self.comparisons):
            rows = [row for row in self.comparisons if row.model == model]
            errors = np.array([row.error for row in rows])
            worst = rows[int(np.abs(errors).argmax())]
            lines.append(
                f"  {model:16} {len(rows):3} rows, mean {np.abs(errors).mean():.1%}, bias {errors.mean():+.1%}, "
                f"worst {worst.error:+.1%} ({worst.what})"
            )
        return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
