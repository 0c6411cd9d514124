"""How far one estimate has to be followed through the files."""

from __future__ import annotations

from fractions import Fraction

import pytest

import hp_tool
from hp_tool import units
from scripts.count_calls import Counts, count_calls, count_estimate

MAX_FILES = 47
MAX_CALLS_BETWEEN_FILES = 245
"""Budgets: lower them when the code allows."""


def test_an_estimate_passes_few_files_and_seldom_crosses_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HP_CATALOG_DIR", raising=False)  # a host's own entries are looked up too
    counts = count_estimate()
    assert counts.files <= MAX_FILES
    assert counts.calls_between_files <= MAX_CALLS_BETWEEN_FILES


def test_calls_between_files_have_both_ends_in_the_package() -> None:
    counts = count_calls(lambda: [units.gib(1.0), Fraction(1, 2) + Fraction(1, 3)])
    assert counts == Counts(files=1, functions=1, calls=1, calls_between_files=0)
    counts = count_calls(
        lambda: hp_tool.make_query(model="gpt3-175b", gpu="h100-sxm-80gb", sequence_length=2048, global_batch_size=8)
    )
    assert 1 < counts.files <= counts.calls_between_files < counts.calls
