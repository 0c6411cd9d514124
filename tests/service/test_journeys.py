"""Ten ways through the dashboard, by mouse and by keyboard, with as few presses as they should
take: what a page says at the end is what their JSON says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from fastapi.testclient import TestClient

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.ports import Store
from service.dashboard import formats
from service.dashboard.page import address
from tests.service.coordinator import claim, finish, one_run
from tests.service.every_page import RENT

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


class Hands:
    """Presses controls, and counts how often."""

    def __init__(self, *, keyboard: bool) -> None:
        self.keyboard, self.presses = keyboard, 0

    def press(self, place: Locator) -> None:
        self.presses += 1
        if self.keyboard:
            place.press("Space" if place.get_attribute("type") == "checkbox" else "Enter")
        else:
            place.click()

    @contextmanager
    def at_most(self, presses: int) -> Iterator[None]:
        """Fails where more presses are needed."""
        before = self.presses
        yield
        assert self.presses - before <= presses


def twin(http: TestClient, page: Page) -> dict[str, Any]:
    """The JSON of the page that is open."""
    address = urlsplit(page.locator("link[rel=alternate]").get_attribute("href") or "")
    answer: dict[str, Any] = http.get(f"{address.path}?{address.query}").json()
    return answer


@pytest.mark.parametrize(
    "keyboard", [True, pytest.param(False, marks=pytest.mark.long)], ids=["keyboard", "mouse"]
)
def test_ten_journeys(
    page: Page, server: str, store: Store, http: TestClient, query: dict[str, Any], keyboard: bool
) -> None:
    hands = Hands(keyboard=keyboard)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])

    with hands.at_most(3):  # the best layout
        page.goto(server)
        page.get_by_label("Model", exact=True).select_option("llama-3-8b")
        page.wait_for_url("**model=llama-3-8b**")
        page.get_by_label("Number of GPUs").fill("8")
        page.get_by_label("Number of GPUs").press("Tab")
        page.wait_for_url("**num_gpus=8**")
        verdict = page.locator("[data-part=verdict]")
        answer = twin(http, page)
        best, shown = answer["rows"][0], answer["view"]
        assert verdict.get_by_role("heading").inner_text() == best["arithmetic"] == shown["heading"]
        assert formats.seconds(best["step_s"]) in verdict.inner_text()
        assert (
            shown["chance"] in verdict.inner_text().replace("Below", "below")
            and "chance of running out" in shown["chance"]
        )

    with hands.at_most(2):  # Megatron's flags, without a search
        hands.press(page.get_by_role("link", name="Run it").first)
        script = page.locator("dialog pre").first
        script.wait_for()
        assert (
            f"--tensor-model-parallel-size {best['parallel']['tensor_parallel_size']}"
            in script.inner_text()
        )
        assert (
            f"--pipeline-model-parallel-size {best['parallel']['pipeline_parallel_size']}"
            in script.inner_text()
        )
        page.keyboard.press("Escape")
        page.locator("dialog").wait_for(state="detached")

    with hands.at_most(1):  # share it
        hands.press(page.get_by_role("button", name="Copy link"))
        page.get_by_role("button", name="Copied").wait_for()
        copied = page.evaluate("navigator.clipboard.readText()")
        other = page.context.new_page()
        other.goto(copied)
        assert other.locator("[data-part=verdict] h2").inner_text() == shown["heading"]
        other.close()

    with hands.at_most(3):  # compare two
        boxes = page.locator("[data-part=best]").get_by_role("checkbox", name="Compare")
        for place in (0, 1):
            hands.press(boxes.nth(place))
        hands.press(page.get_by_role("link", name="Compare the two"))
        page.get_by_role("heading", name="Compare").wait_for()
        compared = twin(http, page)
        assert page.get_by_role("status").first.inner_text() == compared["verdict"]
        headings = [row["arithmetic"] for row in answer["rows"][:2]]
        assert [view["heading"] for view in compared["views"]] == headings
        page.get_by_role("button", name="Clear").press("Enter")

    with hands.at_most(1):  # why not all of it on each device
        page.goto(copied)
        page.get_by_role("slider", name="Tensor parallel").press("Home")
        page.get_by_role("slider", name="Recomputation").press("Home")
        page.get_by_role("slider", name="Micro-batch").press("End")
        page.locator("[data-part=verdict] .state", has_text="does not fit").wait_for()
        page.locator(".findings[aria-busy=false]").wait_for()
        reason = twin(http, page)["view"]["reasons"][0]["message"]
        assert (
            reason[1:] in page.get_by_role("region", name="Why it does not fit").inner_text()
        )  # there a sentence

    with hands.at_most(3):  # start a search
        page.goto(copied)
        hands.press(page.get_by_role("link", name="Search with real runs").first)
        page.get_by_role("heading", name="Best predicted configuration").wait_for()
        hands.press(page.get_by_role("button", name="Start the search"))
        page.locator("h1 ~ .state", has_text="queued").wait_for()
        assert twin(http, page)["state"] == "queued"

    search = http.post("/v1/searches", json=query).json()["id"]
    with hands.at_most(0):  # follow one, and what did it win
        page.goto(f"{server}/searches/{search}")
        lease = claim(store, search)
        page.locator(".state.busy", has_text="running").wait_for()
        one_run(
            store, lease, Measurement(status="ok", step_s=0.4, tokens_per_second_per_gpu=1280.0)
        )
        page.locator("tr.chosen").wait_for()
        finish(store, lease)
        page.locator("h1 ~ .state", has_text="succeeded").wait_for()
        won = twin(http, page)["best"]
        card = page.locator("[data-live=best]")
        assert card.locator(".arithmetic").inner_text() == won["arithmetic"]
        assert formats.seconds(won["step_s"]) in card.inner_text()
        assert all(sentence in card.inner_text() for sentence in won["sentences"])

    with hands.at_most(1):  # find a model, and ask about it
        page.keyboard.press("Control+k")
        page.keyboard.type("qwen3-32b")
        page.locator(".find li").first.wait_for()
        page.keyboard.press("Enter")
        page.wait_for_url("**/models/qwen3-32b")
        facts = {fact["name"]: fact["value"] for fact in twin(http, page)["facts"]}
        assert facts["parameters"] in page.locator(".facts").inner_text()
        hands.press(page.get_by_role("link", name="Ask about it"))
        page.get_by_label("Model", exact=True).wait_for()
        subject = twin(http, page)["view"]["subject"]
        assert subject.startswith("qwen3-32b on ")
        assert subject in page.locator("[data-part=verdict]").inner_text()

    with hands.at_most(2):  # how many GPUs for this deadline
        page.goto(f"{server}{address('/explorer', RENT | {'cluster.num_gpus': '8'})}")
        page.get_by_label("Maximum days").fill("1")
        hands.press(page.get_by_role("button", name="Rank the machines"))
        page.wait_for_url("**max_days=1&**")
        missed = twin(http, page)["machines"]
        said = page.get_by_role("status", name="Answer").inner_text()
        assert missed["rows"] == [] and all(each in said for each in missed["verdict"])
        assert missed["enough"][0] in said
        hands.press(page.get_by_role("link", name="With the required number of GPUs"))
        page.get_by_role("heading", name="Cheapest within 1 day").wait_for()
        enough = twin(http, page)["machines"]
        assert enough["verdict"] == missed["enough"]
        cheapest = enough["rows"][0]
        first = page.locator(".ranking tbody tr").first.inner_text()
        assert cheapest["machine"] in first and str(cheapest["num_gpus"]) in first
