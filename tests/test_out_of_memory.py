"""Chances of running out of memory beside published runs that failed and that did not."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import out_of_memory
from benchmarks.accuracy.data import rows
from benchmarks.accuracy.out_of_memory import Outcome, calibration, figures
from evidence.table import FOLDER


def outcome(probability: float, *, failed: bool) -> Outcome:
    return Outcome(part="p", what="w", probability=probability, failed=failed)


ROWS = [
    outcome(0.995, failed=True),
    outcome(0.6, failed=True),
    outcome(0.4, failed=True),
    outcome(0.2, failed=False),
    outcome(0.0, failed=False),
    outcome(0.7, failed=False),
]


def test_figures_count_the_right_side_of_one_half() -> None:
    found = figures(ROWS)
    assert (found["failed"], found["ran"]) == (3, 3)
    assert found["failed_above_half"] == found["ran_below_half"] == pytest.approx(2 / 3)
    squares = [0.005**2, 0.4**2, 0.6**2, 0.2**2, 0.0, 0.7**2]
    assert found["brier"] == pytest.approx(sum(squares) / 6)


def test_every_row_is_in_one_bin() -> None:
    table = calibration([*ROWS, outcome(1.0, failed=True)])
    assert sum(line["runs"] for line in table) == 7
    last = table[-1]
    assert (last["predicted"], last["runs"], last["failed"]) == ("99% to 100%", 2, 1.0)


def test_published_failures_of_trainers_are_foreseen() -> None:
    """The failed runs of Hugging Face's trainer, which filled their GPUs, and those that ran."""
    table = rows(FOLDER, "trainer_fms_a100")
    assert sum(row["status"] == "failed" for row in table) >= 35
    found = figures(list(out_of_memory._of_rows([row for row in table if _counts(row)])))
    assert found["failed"] >= 35 and found["failed_above_half"] > 0.95
    assert found["ran"] > 140 and found["ran_below_half"] > 0.99


def _counts(row: out_of_memory.Row) -> bool:
    return out_of_memory.trainers.counts_memory(row)
