"""Compare predicted probabilities of running out of memory with published failures: `python -m
benchmarks.accuracy.out_of_memory [--data DIR] [--json]`.

A failed run counts as out of memory. nanotron's grid states no causes: about 5% of its small
layouts failed too, so its fraction of detected failures is a lower bound. One constant was fitted
to rows of this table: `cost.uncertainty.ALLOCATABLE_FRACTION`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import fit_nanotron as nanotron
from benchmarks.accuracy import fit_trainers as trainers
from benchmarks.accuracy.data import print_report
from benchmarks.accuracy.data import rows as rows_of
from benchmarks.accuracy.prepared import Prepared
from benchmarks.accuracy.runs import b200_cases, mlperf_cases, release_cases
from evidence.cases import Case, missing_fields, training_case
from evidence.table import Row
from hp_tool.domain.fit import EVEN_PROBABILITY
from hp_tool.errors import HpToolError

FAILED = ("failed", "out_of_memory")
RECOMPUTED = ("none", "full", "per_op")
"""torchtitan's recomputation modes that a query supports."""
BINS = (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)
"""Edges of the bins of the predicted probability in the calibration table."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A published run: its predicted probability of running out of memory, and whether it ran out
    of memory.
    """

    part: str
    what: str
    probability: float
    failed: bool

    @property
    def is_wrong(self) -> bool:
        """Return True if the more probable outcome differs from the published one."""
        return (self.probability > EVEN_PROBABILITY) != self.failed


def outcomes(folder: Path) -> list[Outcome]:
    """Return every published run whose settings determine its memory."""
    return [*_of_trainers(folder), *_of_titan(folder), *_of_megatron(folder), *_of_grid(folder)]


def _outcome(case: Case, *, part: str, failed: bool) -> Iterator[Outcome]:
    """Yield the outcome of a run; nothing if no query supports its settings."""
    try:
        stated = Prepared.from_case(case).estimate
    except HpToolError:
        return
    if stated.out_of_memory_probability is not None:
        yield Outcome(
            part=part,
            what=f"{case.name}, {case.what}",
            probability=stated.out_of_memory_probability,
            failed=failed,
        )


def _of_rows(rows: Sequence[Row], part: str = "") -> Iterator[Outcome]:
    for row in rows:
        if not missing_fields(row):
            name = part or f"{row['framework']} {row['task']}"
            yield from _outcome(training_case(row), part=name, failed=row["status"] in FAILED)


def _of_trainers(folder: Path) -> Iterator[Outcome]:
    for table in trainers.TABLES:
        yield from _of_rows([row for row in rows_of(folder, table) if trainers.counts_memory(row)])


def _of_titan(folder: Path) -> Iterator[Outcome]:
    rows = rows_of(folder, "training_torchtitan")
    yield from _of_rows([row for row in rows if row["recompute"] in RECOMPUTED], "torchtitan")


def _of_megatron(folder: Path) -> Iterator[Outcome]:
    for case in (*release_cases(folder), *mlperf_cases(folder), *b200_cases(folder)):
        yield from _outcome(case, part="Megatron Core", failed=False)


def _of_grid(folder: Path) -> Iterator[Outcome]:
    """Yield nanotron's legal layouts, predicted by constants fitted to the other model."""
    if not rows_of(folder, "grid_h100_nanotron"):
        return
    for cell in nanotron.cells(folder)["model_left_out"]:
        for place in np.flatnonzero(cell.legal):
            row = cell.group.rows[place]
            yield Outcome(
                part="nanotron",
                what=", ".join(f"{name} {row[name]}" for name in ("model", "nodes", "tp", "pp")),
                probability=1.0 - float(cell.fit_probability[place]),
                failed=not cell.ran[place],
            )


def figures(rows: Sequence[Outcome]) -> dict[str, Any]:
    """Return the fraction of failed runs with a probability above one half, the fraction of other
    runs with one below, and the mean squared error of the probability (Brier score).
    """
    failed = [row for row in rows if row.failed]
    ran = [row for row in rows if not row.failed]

    def share(members: Sequence[Outcome]) -> float | None:
        return sum(not row.is_wrong for row in members) / len(members) if members else None

    return {
        "failed": len(failed),
        "failed_above_half": share(failed),
        "ran": len(ran),
        "ran_below_half": share(ran),
        "brier": float(np.mean([(row.probability - row.failed) ** 2 for row in rows])),
    }


def calibration(rows: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return the number of runs, the mean predicted probability and the fraction that failed, for
    each bin of the prediction.
    """
    table = []
    for low, high in itertools.pairwise(BINS):
        members = [
            row for row in rows if low <= row.probability < high or row.probability == high == 1.0
        ]
        if members:
            table.append(
                {
                    "predicted": f"{low:.0%} to {high:.0%}",
                    "runs": len(members),
                    "mean_predicted": float(np.mean([row.probability for row in members])),
                    "failed": float(np.mean([row.failed for row in members])),
                }
            )
    return table


def evaluate(folder: Path) -> dict[str, Any]:
    """Return the figures by framework, the calibration table, and the wrong predictions among runs
    with a stated cause.
    """
    rows = outcomes(folder)
    parts = sorted({row.part for row in rows})
    stated = [row for row in rows if row.part != "nanotron"]
    return {
        "parts": [
            {"part": part} | figures([row for row in rows if row.part == part]) for part in parts
        ],
        "calibration of nanotron's grid": calibration(
            [row for row in rows if row.part == "nanotron"]
        ),
        "calibration of all others": calibration(stated),
        "wrong": [
            {"part": row.part, "what": row.what, "failed": row.failed, "predicted": row.probability}
            for row in stated
            if row.is_wrong
        ],
    }


if __name__ == "__main__":
    print_report(description=__doc__, evaluate=evaluate)
