"""The accuracy report: every group of evidence that the folder of measured figures contains, as one
structure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import Any

from benchmarks.accuracy import evidence, headlines, out_of_memory
from benchmarks.accuracy import fit_nanotron as nanotron
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import rows
from benchmarks.accuracy.groups import pools
from benchmarks.accuracy.runs import titan_cases
from evidence.table import Row


def table4_differences(comparisons: list[Comparison]) -> list[dict[str, Any]]:
    """Return the milliseconds that each technique adds to one layer, forward and backward. These
    differences are small, so their signs are compared too.
    """
    differences = []
    base = {c.what.split()[1]: c for c in comparisons if c.what.startswith("baseline_no_recompute")}
    for comparison in comparisons:
        experiment, direction = comparison.what.split()
        published = round(comparison.published - base[direction].published, 3)
        predicted = comparison.predicted - base[direction].predicted
        if published:
            same = published * predicted > 0
            differences.append(
                {
                    "what": f"{experiment} {direction}",
                    "published": published,
                    "predicted": predicted,
                    "same_sign": same,
                }
            )
    return differences


def not_stated(folder: Path) -> dict[str, int]:
    """Return the number of published rows that no query can describe, by the missing setting."""
    step_times = Counter(f"step time: {why}" for why in titan_cases(folder)[1])
    memory = Counter(
        f"peak memory: {_missing(row)}"
        for row in rows(folder, "memory_measured", excluded=True)
        if _missing(row)
    )
    return dict(step_times + memory)


def _missing(row: Row) -> str | None:
    """Return the settings that a row of peak memory does not state. torchtitan's rows also have a
    separate table and are predicted from there.
    """
    if row["framework"] == "torch-fsdp":
        return None if row["recompute"] == "full" else f"recomputation of {row['recompute']}"
    return "heads, vocabulary and MLP width of the model"


def evaluate(folder: Path, *, only: Container[str] | None = None) -> dict[str, Any]:
    """Return {days, groups, table4_differences, grid, out_of_memory, not_stated, pooled} for the
    given sections.
    """
    groups = evidence.groups(folder, only=only)
    layer = next((group.rows for group in groups if group.title.startswith("Table 4")), [])
    return {
        "days": headlines.training_days(),
        "groups": groups,
        "table4_differences": table4_differences(layer),
        "grid": nanotron.evaluate(folder),
        "out_of_memory": out_of_memory.evaluate(folder),
        "not_stated": not_stated(folder),
        "pooled": pools(groups),
    }


def as_dict(report: dict[str, Any]) -> dict[str, Any]:
    return report | {"groups": [group.as_dict() for group in report["groups"]]}
