"""The accuracy pages, their pictures and README's table show the saved result; no measured figures
are needed.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.accuracy import ledger, page
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.groups import Group
from benchmarks.accuracy.scatter import scatter


@pytest.mark.parametrize("path", page.PAGES, ids=lambda path: path.name)
def test_pages_hold_what_the_result_gives(path: Path) -> None:
    result = ledger.load()
    text = path.read_text(encoding="utf-8")
    assert page.BLOCK.search(text)
    assert page.fill_page(text, result) == text, "run python -m benchmarks.accuracy.page"


def test_pictures_show_what_the_result_gives() -> None:
    for name, picture in page.pictures(ledger.load()).items():
        assert (page.PICTURES / f"{name}.svg").read_text(encoding="utf-8") == picture, (
            "run python -m benchmarks.accuracy.page"
        )


def test_the_page_leaves_no_group_out_and_the_first_page_not_the_worst() -> None:
    result = ledger.load()
    table = page.summary(result)
    assert all(f"| {title}" in table for title in result["groups"])
    unseen = {
        title: group
        for title, group in result["groups"].items()
        if group["left_out"] in ledger.DRAWN
    }
    worst = max(unseen, key=lambda title: unseen[title]["worst"])
    assert set(page.HEADLINES) <= set(page.OVERVIEW) <= set(result["groups"])
    assert worst in page.HEADLINES


def test_what_is_worse_is_told() -> None:
    """A group's refusals, its worst case by name, and its coverage beside the range of right
    intervals.
    """
    good = Comparison(
        source="s",
        model="m",
        what="fine",
        published=1.0,
        predicted=1.0,
        low=0.9,
        high=1.1,
        part="h100",
    )
    bad = dataclasses.replace(good, what="far off", published=2.0, refused="memory")
    group = Group(title="Runs", left_out="model", saw="others", rows=[good, bad])
    text = page.groups({"groups": {group.title: ledger.entry(group)}})
    assert (
        "m, far off: -50.0%" in text and "1 infeasible: memory" in text and "50% (50-100)" in text
    )


def test_a_point_on_the_diagonal_lies_on_it() -> None:
    picture = scatter({"runs": [(0.0, 0.0), (1.0, 1.0)]}, title="t")
    dots = next(line for line in picture.splitlines() if "stroke-linecap" in line)
    (x0, y0), (x1, y1) = (
        (float(v) for v in dot.removesuffix("h0").split())
        for dot in dots.split('"')[1].split("M")[1:]
    )
    assert x1 - x0 == y0 - y1 > 0
