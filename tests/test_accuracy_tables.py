"""Reports as text: records in tables, other figures by their names."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.groups import Group
from benchmarks.accuracy.tables import as_text


@dataclass
class Row:
    name: str
    error: float | None


def test_records_are_a_table_whose_figures_stand_right() -> None:
    rows = [Row("first", 0.12345), Row("a second", None)]
    assert as_text({"rows": rows}).splitlines() == [
        "rows",
        "  name       error",
        "  first     0.1235",
        "  a second",
    ]


def test_long_text_stands_last() -> None:
    line = as_text([{"why": "a word " * 9, "rows": 3}]).splitlines()[1]
    assert line.startswith("     3  a word")


def test_a_mapping_of_records_is_a_table_and_other_figures_have_their_names() -> None:
    report = {"days": 24.0, "cells": {"1B": {"rows": 1200}, "8B": {"rows": 30}}}
    assert as_text(report).splitlines() == [
        "  days: 24",
        "",
        "cells",
        "       rows",
        "  1B  1,200",
        "  8B     30",
    ]


def test_a_group_gives_its_rows_and_figures() -> None:
    row = Comparison(source="s", model="m", what="run", published=2.0, predicted=1.0)
    text = as_text([Group(title="Runs", left_out="model", saw="others", rows=[row])])
    assert "Runs (s)" in text and "constants from: others" in text
    assert "run" in text and "-0.5" in text and "configurations" in text
