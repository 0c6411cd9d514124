"""docs/formats.md lists the formats that are registered."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
from packaging.version import Version

from hp_tool.formats.registry import formats
from scripts.formats_table import PAGE, RELEASES, releases, with_tables

FACTS = [
    pytest.param(each, id=f"{name}: {each['what']}")
    for name, facts in releases().items()
    for each in facts
]


def test_the_page_has_the_tables_of_the_registered_formats() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "run: python scripts/formats_table.py"
    assert page.count("<!-- formats ") == 3


def test_each_fact_on_releases_is_of_a_format() -> None:
    assert set(releases()) <= {each.name for each in formats()}


@pytest.mark.parametrize("fact", FACTS)
def test_a_release_is_one_that_a_test_runs_or_recorded(fact: dict[str, Any]) -> None:
    version = fact["release"].split()[-1]
    test = (RELEASES.parent / fact["test"]).read_text(encoding="utf-8")
    if "recorded" in fact:
        recorded = RELEASES.parent / fact["recorded"]
        assert version in recorded.read_text(encoding="utf-8")[:400], (
            "the file is of another release"
        )
        assert recorded.stem in test, "the test does not read it"
        return
    module = fact["installed"].replace("-core", "")
    assert module in test, "the test does not run it"
    try:
        installed = importlib.metadata.version(fact["installed"])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{fact['installed']} is not installed")
    assert Version(version) <= Version(installed), "it was never installed"
