"""Whether stated intervals hold: how many rows that the constants did not see lie inside, at 50 % and at 90 %."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from benchmarks.accuracy.sections import Section

LEVELS = (0.5, 0.9)


def coverage(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """A line for each section of held-out rows that states a width, and one for all of them together, in which a row that two
    sections leave out in different ways counts once, as in the first: how many rows, and the share within the central
    interval of each level. With n rows the share of a true 90 % scatters by sqrt(0.09 / n).
    """
    lines: list[dict[str, Any]] = []
    pooled: dict[tuple[str, str, float], float] = {}
    for section in sections:
        if section.role == "in sample" or not section.stated_log_sd:
            continue
        standardised = section.standardised()
        for row, distance in zip(section.comparisons, standardised, strict=True):
            pooled.setdefault((row.model, row.what, row.published), distance)
        lines.append(_line(section.title, standardised))
    return [*lines, _line("all held-out rows, each once", np.array(list(pooled.values())))] if lines else []


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
