"""Groups of measured runs to which the constants were fitted. `domain.familiarity` uses them."""

import csv
import functools
from pathlib import Path
from typing import Any

from hp_tool.catalog import documents
from hp_tool.domain.familiarity import Index, Measured

FILE = Path(__file__).parent / "data" / "efficiency" / "measured_runs.csv"
"""File written by `python -m evidence.fit --only familiarity`."""
COLUMNS = (
    "kind",
    "software",
    "release",
    "gpu",
    "die",
    "family",
    "model_kind",
    "precision",
    "task",
    "load",
    "num_gpus",
    "n",
    "source",
)
NUMBERS = ("num_gpus", "n")


@functools.cache
def measured_runs(kind: str) -> Index:
    """Return the groups of measured runs of a kind, `training` or `serving`."""
    return Index(tuple(run for each, run in read_runs(FILE) if each == kind))


def read_runs(path: Path) -> list[tuple[str, Measured]]:
    """Return pairs of (kind, group of runs) in a file."""
    runs = []
    for row in csv.DictReader(documents.read_text(path).splitlines()):
        values: dict[str, Any] = {
            name: int(value) if name in NUMBERS else value for name, value in row.items()
        }
        runs.append((values.pop("kind"), Measured(**values)))
    return runs
