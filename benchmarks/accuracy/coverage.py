"""Whether stated intervals hold: how many rows that the constants did not see lie inside, at 50 % and at 90 %."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from benchmarks.accuracy.sections import Section

LEVELS = (0.5, 0.9)


def coverage(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """A line for each section of held-out rows that states a width, and one for all their rows together: how many rows, and
    the share within the central interval of each level. With n rows the share of a true 90 % scatters by sqrt(0.09 / n).
    """
    lines, pooled = [], []
    for section in sections:
        if section.role == "in sample" or not section.stated_log_sd:
            continue
        logs = np.abs(np.log1p([comparison.error for comparison in section.comparisons]))
        standardised = logs / section.stated_log_sd
        pooled.append(standardised)
        lines.append(_line(section.title, standardised))
    return [*lines, _line("all held-out rows", np.concatenate(pooled))] if pooled else []


def as_text(lines: Sequence[dict[str, Any]]) -> str:
    """The table."""
    told = ["Stated intervals on rows not fitted on: share within the 50 % and the 90 % interval"]
    for line in lines:
        shares = " ".join(f"{line[f'within_{level:.0%}']:>6.0%}" for level in LEVELS)
        told.append(f"  {line['title']:75} {line['rows']:4} rows {shares}")
    return "\n".join(told)


def _line(title: str, standardised: np.ndarray) -> dict[str, Any]:
    shares = {
        f"within_{level:.0%}": float((standardised <= NormalDist().inv_cdf(0.5 + level / 2.0)).mean()) for level in LEVELS
    }
    return {"title": title, "rows": len(standardised), **shares}
