"""A baseline tells which predictions moved, and holds nothing measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.accuracy import baseline
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.groups import Group


def report(*predicted: float) -> dict[str, Any]:
    rows = [
        Comparison(source="s", model="m", what=f"row {index}", published=7.8125, predicted=value)
        for index, value in enumerate(predicted)
    ]
    group = Group(title="Runs", left_out="model", saw="nothing", rows=rows)
    return {"groups": [group], "grid": None, "days": {}, "not_stated": {}}


def test_only_rows_that_moved_are_named() -> None:
    before, after = (baseline.summarise(report(*values)) for values in ((1.0, 2.0), (1.0, 2.2)))
    text = baseline.moved(after, before)
    assert "+10.00%  m row 1" in text and "row 0" not in text


def test_nothing_moved() -> None:
    same = baseline.summarise(report(1.0))
    assert baseline.moved(same, same).endswith("nothing")


def test_what_is_saved_is_read_back_and_holds_no_measurement(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    summary = baseline.summarise(report(1.0, 2.0))
    baseline.save(summary, path)
    assert baseline.load(path) == summary
    assert "7.8125" not in path.read_text()


def test_saved_files_hold_figures_predictions_and_coarse_points() -> None:
    for path in (baseline.SAVED, baseline.RESULT):
        saved = json.loads(path.read_text())
        assert saved["groups"]
        for entry in saved["groups"].values():
            assert set(entry) == {"left_out", "saw", "unit", "figures", "parts", "predicted", "points"}
            numbers = entry["points"].replace(",", " ").split()
            assert all(len(number.partition(".")[2]) == 2 for number in numbers)  # of a logarithm: 2.3 %
