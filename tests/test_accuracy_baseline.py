"""A baseline tells which predictions moved, and holds nothing measured."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.accuracy import baseline
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.sections import Section


def section(*predicted: float) -> Section:
    rows = [
        Comparison(source="s", model="m", what=f"row {index}", published=7.8125, predicted=value)
        for index, value in enumerate(predicted)
    ]
    return Section(title="Runs (s)", role="held out", fitted_on="nothing", comparisons=rows)


def test_only_rows_that_moved_are_named() -> None:
    before, after = (baseline.summarise([section(*values)]) for values in ((1.0, 2.0), (1.0, 2.2)))
    text = baseline.moved(after, before)
    assert "+10.00%  m row 1" in text and "row 0" not in text


def test_nothing_moved() -> None:
    same = baseline.summarise([section(1.0)], refused=0)
    assert baseline.moved(same, same).endswith("nothing")


def test_what_is_saved_is_read_back_and_holds_no_measurement(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    summary = baseline.summarise([section(1.0, 2.0)], refused=3)
    baseline.save(summary, path)
    assert baseline.load(path) == summary
    assert "7.8125" not in path.read_text()


def test_the_shipped_baseline_holds_predictions_alone() -> None:
    saved = json.loads(baseline.SAVED.read_text())
    assert saved["sections"]
    for entry in saved["sections"].values():
        assert set(entry) == {"mean_error", "worst_error", "predicted"}
