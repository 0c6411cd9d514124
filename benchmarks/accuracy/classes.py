"""Accuracy of held-out rows by familiarity class: `python -m benchmarks.accuracy.classes [--data
DIR] [--json]`. The fits take minutes.

Each row is predicted as if only the runs behind its constants had been measured. Its class is the
`estimate.familiarity` of that prediction. `fit_added_log_sd` fits how much each difference from the
measured runs adds to the variance of an interval.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import print_report
from benchmarks.accuracy.groups import Group, figures, scatter_of, votes
from hp_tool.domain.familiarity import FAMILIAR_CLASS

START, ROUNDS = 0.05, 30
"""Initial value of `fit_added_log_sd`, and the number of passes over the dimensions."""


def held_out_rows(groups: Iterable[Group]) -> dict[str, list[Comparison]]:
    """Return the held-out rows by kind: dense, mixture (MoE) and adapters for training; the
    predicted figure for serving. Repeats of a setting within a group count once.
    """
    found: dict[str, list[Comparison]] = defaultdict(list)
    for group in groups:
        about, _, rest = group.classed.partition(" ")
        figure, _, only = rest.partition(" ")
        alike: dict[tuple[str, ...], list[Comparison]] = defaultdict(list)
        for row in group.rows if about else ():
            if row.differs is not None and row.low and only in ("", row.kind):
                alike[row.differs].append(row)
        for members in alike.values():
            for row in votes(members):
                kind = f"{about} {row.kind}{', ' if figure else ''}{figure}"
                found[kind].append(replace(row, setting=""))
    return dict(found)


def class_of(row: Comparison) -> str:
    """Return the class of a row: the difference from the measured runs that widens its interval
    most.
    """
    return row.differs[0] if row.differs else FAMILIAR_CLASS


def table(groups: Iterable[Group]) -> dict[str, dict[str, Any]]:
    """Return {kind, class: figures} of the held-out rows."""
    found = {}
    for kind, rows in held_out_rows(groups).items():
        by_class: dict[str, list[Comparison]] = defaultdict(list)
        for row in rows:
            by_class[class_of(row)].append(row)
        for name, members in sorted(by_class.items()):
            found[f"{kind}: {name}"] = figures(members)
    return found


def fit_added_log_sd(
    rows: Iterable[Comparison],
    *,
    known: Mapping[str, float] | None = None,
    units: Sequence[str] = (),
) -> dict[str, float]:
    """Return the standard deviation that each dimension of familiarity adds to those in
    `known`.

    All are fitted together, so that 90% of the rows that differ in a dimension are inside their
    intervals. An added deviation is at least the smallest one that so many rows can distinguish
    from zero: n rows determine a variance to within sqrt(2 / n).

    units: Dimensions in which each part counts once, regardless of its number of rows. For example,
    all rows of a release share the release's error, so the next release is expected to have the
    mean variance of the measured ones.
    """
    by_dimension: dict[str, list[Comparison]] = defaultdict(list)
    for row in rows:
        for name in row.differs or ():
            if name not in (known or {}):
                by_dimension[name].append(row)
    found = {**(known or {}), **dict.fromkeys(by_dimension, START)}
    order = sorted(by_dimension, key=lambda name: (-len(by_dimension[name]), name))
    for _ in range(ROUNDS):
        for name in order:
            members = by_dimension[name]
            added = missing_log_sd(members, {**found, name: 0.0}, by_part=name in units)
            found[name] = math.sqrt((found[name] ** 2 + added**2) / 2.0)
    return {name: found[name] for name in by_dimension}


def missing_log_sd(
    rows: Sequence[Comparison], known: Mapping[str, float], *, by_part: bool
) -> float:
    """Return the standard deviation that must be added to the known variance of each row for the
    intervals to contain 90% of the rows.
    """
    parts: dict[str, list[tuple[Comparison, float]]] = defaultdict(list)
    for row in rows:
        assert row.base_log_sd is not None and row.differs is not None
        variance = row.base_log_sd**2 + sum(known[name] ** 2 for name in row.differs)
        parts[row.part if by_part else ""].append((row, variance))
    least = median(variance for each in parts.values() for _, variance in each)
    variances = [scatter_of([each]) ** 2 for each in parts.values()]
    return math.sqrt(max(fmean(variances), least * math.sqrt(2.0 / len(rows))))


def evaluate(folder: Path) -> list[dict[str, Any]]:
    """Return a record for each kind and class."""
    from benchmarks.accuracy import evidence, inference

    groups = [
        *evidence.groups(folder),
        *inference.compare_shipped(folder),
        *inference.compare_refitted(folder),
    ]
    return [
        {
            "kind": name.rpartition(": ")[0],
            "class": name.rpartition(": ")[2],
            "rows": each["configurations"],
            "inside": each.get("coverage"),
            "high_low": each.get("width"),
            "score": each.get("interval_score"),
            "median_error": each.get("median_error"),
        }
        for name, each in table(groups).items()
    ]


if __name__ == "__main__":
    print_report(description=__doc__, evaluate=evaluate)
