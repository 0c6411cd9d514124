"""Every page in a real browser, wide and narrow, light and dark: no error, nothing fetched from
elsewhere, nothing that axe-core finds, hardly a part that moves while it loads, nothing of a user's
words run; and a picture of each, kept where HP_SCREENSHOTS says.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from fastapi.testclient import TestClient

from hp_tool.store import open_store
from service.app import create_app
from service.settings import Settings
from tests.conftest import skip_or_fail
from tests.service.conftest import SMALL
from tests.service.every_page import html_routes, seeded_pages, without_a_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Site = tuple[str, dict[str, str]]
"""A server's URL, and the addresses of all pages by name."""
WIDE, NARROW, HEIGHT = 1440, 390, 900
Look = tuple[int, str, dict[str, Any] | None]
"""Width, scheme, and what axe-core looks for; {}: everything, None: nothing."""
CONTRAST = {
    "runOnly": ["color-contrast"]
}  # what the scheme can change of a page that is otherwise the same
Looks = tuple[tuple[Look, ...], ...]
"""Ways to look at pages, which take them in turn."""
FEW: Looks = (
    ((WIDE, "light", {}), (NARROW, "dark", None)),
    ((WIDE, "dark", {}), (NARROW, "light", None)),
)
ALL: Looks = (
    ((WIDE, "light", {}), (1920, "dark", CONTRAST), (1024, "dark", None), (NARROW, "light", None)),
)
VIOLATIONS = """async (rules) =>
  (await axe.run(document, { resultTypes: ["violations"], ...rules })).violations.flatMap((each) =>
  each.nodes.slice(0, 3).map((node) => `${each.id}: ${node.html.slice(0, 160)} ${node.any[0]?.message ?? ""}`))"""  # noqa: E501
CUT = """() => [...document.querySelectorAll(".scroll")].filter((each) => each.checkVisibility())
  .filter((each) => each.scrollWidth > each.clientWidth)
  .map((each) => `a table of ${each.scrollWidth} pixels in ${each.clientWidth}: ${each.innerText.slice(0, 60)}`)"""  # noqa: E501
PAPER = 718
"""Pixels of A4 between margins of 10 mm."""
MOST_SHIFT = 0.02
SHIFTS = """window.shifted = 0;
new PerformanceObserver((list) => list.getEntries().forEach((each) => { if (!each.hadRecentInput) shifted += each.value; }))
  .observe({ type: "layout-shift", buffered: true });"""  # noqa: E501
FOLLOWED = """() => {
  const busy = document.querySelector("[aria-busy=true]");  // dimmed until its answer is there
  return !busy && [...document.querySelectorAll(".plot:has(> svg)")].every(({dataset, clientWidth: width}) =>
    width === 0 || Number(dataset.width) === width);
}"""  # noqa: E501
"""Answers are there, and charts have followed the screen."""
DRAWN = """() => [...document.querySelectorAll("[data-figure], #trials .plot")]
  .every((each) => !each.checkVisibility() || each.querySelector("svg"))"""
EMPTY = """() => [...document.querySelectorAll(".plot:has(> svg)")].filter((each) => each.checkVisibility())
  .filter((each) => !each.figure.traces.some((trace) => trace.x?.length && trace.y?.some((value) => value != null)))
  .map((each) => `empty axes: ${each.ariaLabel}`)"""  # noqa: E501


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server over a store with something of everything."""
    store = open_store(f"sqlite:///{tmp_path_factory.mktemp('site') / 'hp.sqlite3'}")
    app = create_app(Settings(poll_s=0.02), store=store)
    with TestClient(app, base_url="http://127.0.0.1:8000") as http:
        pages = seeded_pages(store, http, SMALL)
    running = uvicorn.Server(
        uvicorn.Config(
            app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=1
        )
    )
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}", pages
    running.should_exit = True
    thread.join()
    store.close()


@pytest.fixture(scope="module")
def pictures() -> Path | None:
    """Where pictures are kept; None: nobody will look at them, and none is taken."""
    folder = os.environ.get("HP_SCREENSHOTS")
    if not folder:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)


def test_no_page_is_forgotten(site: Site) -> None:
    _, pages = site
    assert without_a_page(pages) == []
    assert without_a_page({}) == [route.path for route in html_routes()] != []


@pytest.mark.parametrize(
    "looks", [FEW, pytest.param(ALL, marks=pytest.mark.long)], ids=["few", "all"]
)
def test_every_page(browser: Browser, site: Site, pictures: Path | None, looks: Looks) -> None:
    url, pages = site
    context = browser.new_context(
        viewport={"width": WIDE, "height": HEIGHT}, color_scheme="light", reduced_motion="reduce"
    )
    page = context.new_page()
    page.add_init_script(SHIFTS)
    wrong: list[str] = []
    page.on(
        "console",
        lambda message: (
            wrong.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda request: (
            None if request.url.startswith((url, "data:")) else wrong.append(f"asked {request.url}")
        ),
    )
    found: dict[str, list[str]] = {}
    for number, (name, path) in enumerate(pages.items()):
        page.set_viewport_size({"width": WIDE, "height": HEIGHT})
        page.emulate_media(color_scheme="light")
        answer = page.goto(url + path)
        assert answer is not None and answer.status == 200
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self'" in policy and "unsafe" not in policy
        if page.locator("#trials").count():
            page.locator("#trials[data-ready]").wait_for()
        # Before anything is opened: what a script opens pushes the rest down.
        if (shift := page.evaluate("window.shifted")) > MOST_SHIFT:
            wrong.append(f"its parts moved by {shift:.3f} while it loaded")
        page.evaluate(
            "document.querySelectorAll('.more-of, .change').forEach((each) => (each.open = true))"
        )
        if page.locator("#trials").count():  # its charts are drawn when they come into sight
            page.set_viewport_size(
                {
                    "width": WIDE,
                    "height": 2 * page.evaluate("document.documentElement.scrollHeight"),
                }
            )
        page.wait_for_function(DRAWN)
        wrong += page.evaluate(EMPTY)
        page.evaluate(_axe())
        # Loaded once, then looked at in several ways: a page follows the screen and the scheme by
        # itself.
        for width, scheme, rules in looks[number % len(looks)]:
            wrong += _looked_at(page, width=width, scheme=scheme)
            if rules is not None:
                wrong += page.evaluate(VIOLATIONS, rules)
            if pictures is not None:
                page.screenshot(path=pictures / f"{name}-{width}-{scheme}.png", full_page=True)
        wrong += _on_paper(page)
        if page.evaluate("'pwned' in window"):
            wrong.append("a user's words were run")
        if wrong:
            found[name] = wrong.copy()
            wrong.clear()
    context.close()
    assert found == {}


def _looked_at(page: Page, *, width: int, scheme: Any) -> list[str]:
    """What is wrong with the page at this width and in this scheme."""
    page.set_viewport_size({"width": width, "height": HEIGHT})
    page.emulate_media(color_scheme=scheme)
    page.wait_for_function(FOLLOWED)
    wrong = (
        page.evaluate(CUT) if width >= WIDE or width == NARROW else []
    )  # between, a table may scroll
    seen = page.evaluate(
        "() => [document.documentElement.scrollWidth, "
        "getComputedStyle(document.documentElement).backgroundColor]"
    )
    if seen[0] > width:
        wrong.append(f"it is wider than {width} pixels")
    brightness = (
        sum(int(part) for part in seen[1].removeprefix("rgb(").removesuffix(")").split(",")) / 3
    )
    if (brightness > 128) != (scheme == "light"):
        wrong.append(f"it does not follow the {scheme} scheme")
    return wrong


def _on_paper(page: Page) -> list[str]:
    """What is cut where the page is printed: as Chromium does it, by the event, then the width and
    the styles of paper.
    """
    page.set_viewport_size({"width": PAPER, "height": HEIGHT})
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    width = page.evaluate("document.documentElement.scrollWidth")
    charts = page.evaluate(
        "[...document.querySelectorAll('.plot > svg')].every((each) => "
        "each.hasAttribute('viewBox'))"
    )
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    return [f"on paper it is {width} pixels wide"] * (width > PAPER) + [
        "on paper a chart keeps its width"
    ] * (not charts)


@functools.cache
def _axe() -> str:
    try:
        import axe_playwright_python
    except ImportError as error:
        skip_or_fail(component="CHROMIUM", reason=f"no axe-core: {error}")
    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
