"""How far one estimate has to be followed through the files."""

from __future__ import annotations

import hp_tool
from hp_tool import units
from scripts.count_calls import Counts, count_calls, count_estimate

MAX_FILES = 70
MAX_CALLS_BETWEEN_FILES = 414
"""Budgets: lower them when the code allows."""


def test_an_estimate_passes_few_files_and_seldom_crosses_between_them() -> None:
    counts = count_estimate()
    assert 0 < counts.files <= MAX_FILES
    assert 0 < counts.calls_between_files <= MAX_CALLS_BETWEEN_FILES
