"""Time travel: what came out in a month, by constants fitted on what was published before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from statistics import median

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.fit_frameworks import fit_today
from benchmarks.accuracy.prepared import Constants, Prepared, compare_all
from evidence.cases import Case
from hp_tool.errors import InputError

FEWEST = 4
"""Configurations from which constants are fitted; before there are so many nothing is predicted."""


def predicted_ahead(
    cases: Sequence[Case], *, known: Sequence[Case], start: Constants
) -> list[Comparison]:
    """Every case by constants fitted on the `known` ones of earlier months; `part` is its month.
    `start` holds what these rows do not tell.
    """
    predictions = []
    for date in sorted({case.date for case in cases}):
        seen = tuple(prepared(voted(case for case in known if case.date < date)))
        if len(seen) < FEWEST:
            continue
        constants = fit_today(seen, start)
        rows = compare_all(
            (case for case in cases if case.date == date),
            constants.compare,
        )
        predictions += [dataclasses.replace(row, part=date) for row in rows]
    return predictions


def voted(cases: Iterable[Case]) -> list[Case]:
    """One case a setting: its newest, with the median of all releases' steps."""
    grouped: dict[str, list[Case]] = {}
    for case in cases:
        grouped.setdefault(case.setting, []).append(case)
    return [
        dataclasses.replace(members[-1], step_s=median(case.step_s for case in members))
        for members in grouped.values()
    ]


def prepared(cases: Iterable[Case]) -> list[Prepared]:
    """Those that a query can state."""
    runs = []
    for case in cases:
        try:
            runs.append(Prepared.of(case))
        except InputError:
            continue
    return runs
