"""Someone who has read nothing finds what to run for a 70B model on 64 H100, and why TP=1 does not
work: by what is on the screen alone, found by its role and the name that it shows.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture
def screen(page: Page, server: str) -> Page:
    page.goto(server)
    return page


def test_what_to_run_and_why_tp_1_does_not_work(screen: Page) -> None:
    # The question is the first thing on the first page, in fields as they are named.
    screen.get_by_role("combobox", name="Model", exact=True).select_option(label="llama-3-70b")
    screen.get_by_role("combobox", name="GPU", exact=True).select_option(label="h100-sxm-80gb")
    number = screen.get_by_label("Number of GPUs")
    number.fill("64")
    number.press("Tab")

    # What to run: the first row under that heading.
    answer = screen.get_by_role("region", name="What to run").get_by_role("row").nth(1)
    best = answer.get_by_role("rowheader").inner_text()
    assert "= 64 GPUs" in best and math.prod(map(int, re.findall(r"[A-Z]P (\d+)", best))) == 64
    memory = re.search(r"([\d.]+) GiB", answer.inner_text())
    assert memory is not None and float(memory[1]) < 80

    # Why not TP 1: the slider to its left end, and the page says it with numbers.
    status = screen.get_by_role("status").filter(has=screen.get_by_role("heading"))
    assert re.search(r"\bfits\b", status.inner_text())
    slider = screen.get_by_role("slider", name="Tensor parallel")
    slider.press("Home")
    status.get_by_text("does not fit").wait_for()
    assert status.get_by_role("heading").inner_text().startswith("TP 1 x ")
    why = screen.get_by_role("region", name="Why it does not fit")
    needed = re.search(
        r"Needs ([\d.]+) GiB, has ([\d.]+) GiB: (\w+) [\d.]+ GiB, (\w+)", why.inner_text()
    )
    assert needed is not None
    assert float(needed[1]) > float(needed[2])

    # What fixes it: the first proposal, followed, fits.
    fix = why.get_by_role("rowheader").first.get_by_role("link")
    assert "TP 1 →" in fix.inner_text()
    fix.click()
    screen.get_by_role("heading", level=1, name=re.compile("= 64 GPUs")).wait_for()
    assert screen.get_by_text(re.compile("^(fits|tight)$")).is_visible()
    screen.get_by_role("region", name="Memory per pipeline stage").wait_for()

    # And back to the question: the address carries it.
    screen.get_by_role("link", name="Edit settings").click()
    assert screen.get_by_role("combobox", name="Model", exact=True).input_value() == "llama-3-70b"


def test_by_keyboard_alone_the_charts_follow_and_the_address_can_be_shared(
    screen: Page, browser: Browser
) -> None:
    slider = screen.get_by_role("slider", name="Recomputation")
    slider.press("End")
    assert slider.get_attribute("aria-valuetext") == "full"
    screen.get_by_role("status").get_by_text("full recomputation").wait_for()
    heading = screen.get_by_role("status").get_by_role("heading").inner_text()
    other = browser.new_context().new_page()
    other.goto(screen.url)
    assert other.get_by_role("status").get_by_role("heading").inner_text() == heading
    assert other.get_by_role("combobox", name="Recomputation").input_value() == "full"
    other.context.close()
