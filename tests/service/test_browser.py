"""Pages in a real browser: no error, no overflow at any width, live rows, buttons that work under
the content policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Store
from hp_tool.domain.states import SearchState
from service.client import Client
from tests.service.coordinator import claim, finish, one_run
from tests.service.processes import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Query = dict[str, Any]
OTHER = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, recompute="selective")


def test_rows_come_alive_and_an_opened_log_stays_open(
    page: Page, server: str, store: Store, query: Query
) -> None:
    with Client(server=server) as client:
        search = client.submit_search(query=query).id
    page.goto(f"{server}/searches/{search}")
    assert page.locator("h1 + .state").inner_text() == "queued"
    lease = claim(store, search)
    page.locator(".state.busy", has_text="running").wait_for()
    one_run(
        store, lease, Measurement(status="oom", cause="rank 1", log_tail="the end of it"), OTHER
    )
    page.locator("tr[data-key]", has_text="oom").wait_for()
    page.get_by_role("button", name="Runs, log and command of run 1").click()
    page.locator("summary", has_text="End of the log").click()
    one_run(store, lease, Measurement(status="ok", step_s=0.4, tokens_per_second_per_gpu=1280.0))
    page.locator("tr.chosen").wait_for()
    page.locator("pre", has_text="the end of it").wait_for()  # asked for again
    finish(store, lease)
    page.locator("h1 + .state", has_text="succeeded").wait_for()
    assert page.locator(".arithmetic").inner_text() == "TP 1 x PP 1 x DP 2 = 2 devices"
    assert page.locator("tbody > tr[data-key]:not(.more)").count() == 2
    assert page.locator("progress").count() == 0


def test_buttons_steer(page: Page, server: str, store: Store, query: Query) -> None:
    with Client(server=server) as client:
        search = client.submit_search(query=query).id
    page.goto(f"{server}/searches/{search}")
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Resume").click()
    page.locator("summary", has_text="Cancel").click()
    assert store.get_search(search_id=search).state is not SearchState.CANCELLED
    page.get_by_role("button", name="Yes, cancel").click()
    page.get_by_role("button", name="Run again").wait_for()
    assert store.get_search(search_id=search).state is SearchState.CANCELLED


def test_moments_are_in_the_readers_time_zone_and_name_utc(
    browser: Browser, server: str, query: Query
) -> None:
    with Client(server=server) as client:
        search = client.submit_search(query=query)
    context = browser.new_context(timezone_id="Asia/Tokyo", locale="en-GB")
    page = context.new_page()
    page.goto(f"{server}/searches/{search.id}")
    moment = page.locator("time[title]").first
    tokyo = search.created_at.astimezone(ZoneInfo("Asia/Tokyo"))
    assert f"{tokyo:%H:%M}" in moment.inner_text()
    assert moment.get_attribute("title") == f"{search.created_at:%Y-%m-%d %H:%M} UTC"
    context.close()


def test_a_figure_is_drawn_under_the_content_policy_and_follows_the_colour_scheme(
    page: Page, server: str
) -> None:
    page.emulate_media(color_scheme="light")
    page.goto(server)
    page.evaluate("""async () => {
        const styles = document.querySelector('link[href$="/tokens.css"]').href;
        const { draw } = await import(styles.replace("tokens.css", "plot.js"));
        const place = document.createElement("div");
        document.querySelector("main").append(place);
        place.className = "plot";
        draw(place, { traces: [{ mode: "points", x: [1, 2], y: [3, 4], color: "--good" }], x: { title: "Run" } });
    }""")  # noqa: E501
    colour = "getComputedStyle(document.querySelector('.plot circle')).fill"
    assert page.evaluate(colour) == "rgb(27, 122, 67)"
    page.emulate_media(color_scheme="dark")
    wait_for(lambda: page.evaluate(colour) == "rgb(121, 210, 155)")


def test_a_page_whose_scripts_were_cut_off_mends_itself(
    browser: Browser, server: str, store: Store, query: Query
) -> None:
    with Client(server=server) as client:
        search = client.submit_search(query=query).id
    one_run(store, claim(store, search), Measurement(status="ok", step_s=0.4))
    context = browser.new_context()
    page = context.new_page()
    away = ("**/static/*/table.js", "**/events")
    for address in away:
        page.route(address, lambda route: route.abort())
    page.goto(f"{server}/searches/{search}")
    page.get_by_text("The server is unreachable").wait_for()
    assert page.locator("tr.chosen").count() == 0
    for address in away:
        page.unroute(address)
    page.locator("tr.chosen").wait_for()
    context.close()


def test_cells_of_wide_tables_get_the_headings_of_their_columns(page: Page, server: str) -> None:
    page.goto(server)
    page.evaluate("""() => {
        const table = (heads, ...rows) => `<table><thead><tr>${heads}</tr></thead><tbody>${rows.map((row) => `<tr>${row}</tr>`).join("")}</tbody></table>`;
        const wide = '<th>Run</th><th><abbr title="x">MFU</abbr></th><th>Step</th><th><span class="unseen">Change</span></th><th>Memory</th>';
        const made = document.createElement("div");
        made.id = "made";
        made.innerHTML = table(wide, '<th scope="row">TP 1</th><td>4%</td><td></td><td>x</td><td>–</td>', '<td colspan="5">none</td>')
            + table('<th>A</th><th>B</th><th>C</th><th class="spare">D</th>', '<th>1</th><td>2</td><td>3</td><td>4</td>');
        document.querySelector("main").append(made);
    }""")  # noqa: E501
    page.locator("#made td[data-heading]").first.wait_for(state="attached")
    assert page.locator("#made td").evaluate_all(
        "cells => cells.map(({dataset}) => [dataset.heading ?? null, 'none' in dataset])"
    ) == [
        ["MFU", False],
        ["Step", True],
        [None, False],
        ["Memory", True],
        [None, False],
        *[[None, False]] * 3,
    ]
    assert page.locator("#made [data-rows]").count() == 1
