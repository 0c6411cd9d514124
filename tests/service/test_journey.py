"""From the empty page to the copied command, by keyboard (Tab, Shift+Tab, Enter and Space) and by
mouse: a real browser, server and worker.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hp_tool.store import schema
from tests.conftest import skip_or_fail
from tests.service.conftest import checked_page
from tests.service.processes import api, free_port, process, wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.components
PATIENCE_MS = 240_000
MODEL = """model: {name: gpt-tiny, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 512}
search: {steps: 2, warmup_steps: 1, configurations_per_job: 2}
training: {precision: fp32}"""  # noqa: E501
MOST_STOPS = 80
"""Of the focus on the way from one control to the next."""
BEHIND = """each => {
  const place = document.activeElement.compareDocumentPosition(each);
  return Boolean(place & Node.DOCUMENT_POSITION_PRECEDING) && !(place & Node.DOCUMENT_POSITION_CONTAINS);
}"""  # noqa: E501
SEEN = """() => {
  const at = document.activeElement, box = at.getBoundingClientRect(), { outlineStyle, outlineWidth } = getComputedStyle(at);
  const inSight = box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
  return at === document.body || (inSight && outlineStyle !== "none" && outlineWidth !== "0px");
}"""  # noqa: E501


@pytest.fixture(
    params=["sqlite", pytest.param("postgresql", marks=[pytest.mark.components, pytest.mark.long])]
)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        skip_or_fail(component="MEGATRON", reason="the profiler extra is not installed")
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'hp.sqlite3'}"
    url: str = request.getfixturevalue("postgres_url")
    schema.upgrade(url)
    return url


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """The server's absence, which the console reports, is part of the journey."""
    with checked_page(browser, console=()) as opened:
        opened.set_default_timeout(PATIENCE_MS)
        yield opened


class Mouse:
    """Does what a visitor does, with a mouse."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def press(self, place: Locator) -> None:
        place.click()

    def tick(self, place: Locator) -> None:
        place.click()

    def write(self, place: Locator, text: str) -> None:
        place.click()
        place.fill(text)


class Keyboard(Mouse):
    """The same without one: the focus goes from stop to stop, and is seen at each."""

    def press(self, place: Locator) -> None:
        self._reach(place)
        self.page.keyboard.press("Enter")

    def tick(self, place: Locator) -> None:
        self._reach(place)
        self.page.keyboard.press("Space")

    def write(self, place: Locator, text: str) -> None:
        self._reach(place)
        self.page.keyboard.type(text)  # Tab has selected what stood there

    def _reach(self, place: Locator) -> None:
        place.wait_for()
        key = "Shift+Tab" if place.evaluate(BEHIND) else "Tab"
        for _ in range(MOST_STOPS):
            if place.evaluate("each => each === document.activeElement"):
                return
            self.page.keyboard.press(key)
            assert self.page.evaluate(SEEN), self.page.evaluate("document.activeElement.outerHTML")
        pytest.fail(f"{key} does not reach {place}")


@pytest.fixture(params=[Keyboard, pytest.param(Mouse, marks=pytest.mark.long)])
def hands(request: pytest.FixtureRequest, page: Page) -> Mouse:
    visitor: Mouse = request.param(page)
    return visitor


def test_a_search_from_the_empty_page_to_its_command(
    page: Page, hands: Mouse, database_url: str, tmp_path: Path
) -> None:
    port = free_port()
    with api(database_url=database_url, home=tmp_path, port=port) as url:
        page.goto(url)
        page.get_by_role("heading", name="Your first search").wait_for()
        if isinstance(hands, Keyboard):  # the first stop leads past the menu
            page.keyboard.press("Tab")
            hands.press(page.get_by_role("link", name="Skip to content"))
            page.wait_for_url("**#content")
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.textContent") == "Training"
        page.get_by_role("combobox", name="GPU", exact=True).select_option("cpu")
        for label, value in (
            ("Number of GPUs", "2"),
            ("Tokens per sequence", "64"),
            ("Global batch size", "4"),
        ):
            hands.write(page.get_by_label(label, exact=True), value)
        hands.press(page.locator("summary", has_text="Further settings"))
        hands.press(page.locator("summary", has_text="Other fields"))
        hands.write(page.get_by_label("Other query fields, as YAML"), MODEL)
        page.keyboard.press("Tab")
        page.get_by_text("gpt-tiny on 2 x cpu").first.wait_for()
        page.locator(".findings[aria-busy=false]").wait_for()
        hands.press(page.get_by_role("link", name="Search with real runs"))
        page.get_by_role("heading", name="Best predicted configuration").wait_for()
        hands.press(page.locator("summary", has_text="Profile runs"))
        hands.write(page.get_by_label("Maximum profile runs"), "2")
        hands.press(page.get_by_role("button", name="Start the search"))
        page.locator("h1 + .state", has_text="queued").wait_for()
        search = page.url
    # Nobody answers now; the page says so, and comes back by itself.
    page.get_by_text("The server is unreachable").wait_for()
    with (
        api(database_url=database_url, home=tmp_path, port=port),
        process("worker", database_url=database_url, home=tmp_path),
    ):
        page.locator("h1 + .state", has_text="succeeded").wait_for()
        assert page.url == search
        wait_for(lambda: page.locator("#connection").inner_text() == "")
        rows = page.locator("tbody[data-part=rows] > tr")
        rows.nth(1).wait_for()
        assert rows.count() == 2
        best = page.locator(".arithmetic").inner_text()
        assert best.endswith("= 2 devices")
        # The noise of two runs may leave a layout ahead that did not run: then no row is marked.
        assert page.locator("tr.chosen a").all_inner_texts() in ([], [best])
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        hands.press(page.get_by_role("button", name="command", exact=True))
        page.get_by_text("Copied the command.").wait_for()
        assert "pretrain_gpt.py" in page.evaluate("navigator.clipboard.readText()")
        hands.press(page.get_by_role("link", name="Run it"))
        drawer = page.get_by_role("dialog")
        with page.expect_download() as download:
            hands.press(drawer.get_by_role("link", name="Download").first)
        assert "--tensor-model-parallel-size" in Path(download.value.path()).read_text()
        page.keyboard.press("Escape")
        for box in page.locator("tbody[data-part=rows]").get_by_role("checkbox").all():
            hands.tick(box)
        hands.press(page.get_by_role("link", name="Compare the two"))
        page.wait_for_url("**/compare?**")
        assert page.locator("h1").inner_text()
