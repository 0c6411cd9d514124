"""How far an answer has to be followed through the files: a dense estimate, and by ratios to it what else is asked most."""

from __future__ import annotations

from fractions import Fraction

import pytest

import hp_tool
from hp_tool import units
from scripts.count_calls import QUESTIONS, Counts, count_calls, count_question

MAX_FILES = 57
MAX_CALLS_BETWEEN_FILES = 287
MAX_RATIOS = {
    "experts": (1.1, 1.6), "answer": (1.2, 4.6), "infeasible": (1.35, 17.0), "serving": (0.8, 5.5), "export": (1.4, 1.6),
}  # fmt: skip
"""Budgets, the ratios of files and of calls between files to those of a dense estimate: lower them when the code allows."""


@pytest.fixture(autouse=True)
def _no_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HP_CATALOG_DIR", raising=False)  # a host's own entries are looked up too


@pytest.fixture
def dense() -> Counts:
    return count_question("dense")


def test_an_estimate_passes_few_files_and_seldom_crosses_between_them(dense: Counts) -> None:
    assert dense.files <= MAX_FILES
    assert dense.calls_between_files <= MAX_CALLS_BETWEEN_FILES


@pytest.mark.parametrize("name", [name for name in QUESTIONS if name != "dense"])
def test_other_answers_are_followed_not_much_further(name: str, dense: Counts) -> None:
    counts, (files, calls) = count_question(name), MAX_RATIOS[name]
    assert counts.files <= files * dense.files
    assert counts.calls_between_files <= calls * dense.calls_between_files


def test_calls_between_files_have_both_ends_in_the_package() -> None:
    counts = count_calls(lambda: [units.gib(1.0), Fraction(1, 2) + Fraction(1, 3)])
    assert counts == Counts(files=1, functions=1, calls=1, calls_between_files=0)
    counts = count_calls(
        lambda: hp_tool.make_query(model="gpt3-175b", gpu="h100-sxm-80gb", sequence_length=2048, global_batch_size=8)
    )
    assert 1 < counts.files <= counts.calls_between_files < counts.calls
