"""What a page keeps where it is left and come back to, and what it says where its server is away:
in a real browser.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Store
from service.client import Client
from tests.service.conftest import checked_page
from tests.service.coordinator import claim, one_run
from tests.service.processes import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser

OTHER = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, recompute="selective")


def test_back_takes_back_a_slider_and_a_silent_server_is_said(
    browser: Browser, server: str
) -> None:
    with checked_page(browser, console=()) as page:
        page.goto(
            f"{server}/explorer?model=gpt3-13b&cluster.num_gpus=8&training.global_batch_size=64"
        )
        heading = page.locator("[data-part=verdict] .arithmetic")
        before = heading.inner_text()
        choice = page.locator("select[name='at.parallel.micro_batch_size']")
        first = choice.input_value()
        for value in ("2", "4"):  # one control moved on is one step back
            choice.select_option(value)
            page.wait_for_url(f"**micro_batch_size={value}**")
            page.locator(".findings[aria-busy=false]").wait_for()
        page.go_back()
        wait_for(lambda: choice.input_value() == first)
        page.locator(".findings[aria-busy=false]").wait_for()
        assert heading.inner_text() == before
        page.route("**/explorer?**", lambda route: route.abort())
        choice.select_option("2")
        page.get_by_text(f"The server is unreachable. Still showing {before}").wait_for()


def test_ticks_and_the_form_survive_a_reload_and_back(
    browser: Browser, server: str, store: Store, query: dict[str, Any]
) -> None:
    with Client(server=server) as client:
        search = client.submit_search(query=query).id
    lease = claim(store, search)
    one_run(store, lease, Measurement(status="ok", step_s=0.4))
    one_run(store, lease, Measurement(status="ok", step_s=0.5), OTHER)
    with checked_page(browser) as page:
        page.goto(f"{server}/searches/{search}")
        page.get_by_label("Select run 2").check()
        page.reload()
        assert (
            page.get_by_label("Select run 2").is_checked()
            and not page.get_by_label("Select run 1").is_checked()
        )
        page.goto(f"{server}/")
        page.locator("[data-part=best]").get_by_role("checkbox", name="Compare").first.check()
        page.get_by_role("link", name="Compare the two").click()  # a run and a row of a ranking
        page.wait_for_url("**/compare?**")
        assert "500.0 ms" in page.locator(
            "main"
        ).inner_text() and f"/searches/{search}/runs/" in unquote(page.url)
        page.get_by_role("button", name="Clear").click()
        page.goto(f"{server}/searches/{search}")
        assert not page.get_by_label("Select run 2").is_checked()
