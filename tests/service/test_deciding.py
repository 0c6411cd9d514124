"""The end of a search, one run and a comparison say what to do; anything is found by Ctrl-K."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from fastapi.testclient import TestClient

from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Store
from hp_tool.domain.states import SearchState
from hp_tool.loop.search.underway import Underway
from tests.service.coordinator import claim, end_run, finish, one_run
from tests.service.every_page import LLAMA
from tests.service.processes import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Page

Query = dict[str, Any]
OTHER = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, recompute="selective")
DONE = Measurement(status="ok", step_s=0.4, tokens_per_second_per_gpu=1280.0)


def submitted(http: TestClient, query: Query) -> str:
    search: str = http.post("/v1/searches", json=query).json()["id"]
    return search


def test_the_sample_decides_in_two_sentences_and_says_why_on_request(
    page: Page, server: str, http: TestClient
) -> None:
    best = http.get("/searches/sample.json").json()["best"]
    page.goto(f"{server}/searches/sample")
    card = page.get_by_role("region", name="Use this configuration")
    assert card.locator(".headline").inner_text() == " ".join(
        best["sentences"][: best["num_verdict"]]
    )
    assert best["num_verdict"] <= 2 < len(best["sentences"])
    reason = page.get_by_text(best["sentences"][-1])
    assert not reason.is_visible()
    card.get_by_role("link", name="Why?").click()
    reason.wait_for(state="visible")


def test_a_search_that_was_cancelled_recommends_nothing(
    http: TestClient, store: Store, query: Query
) -> None:
    lease = claim(store, submitted(http, query))
    one_run(store, lease, DONE)
    assert http.get(f"/searches/{lease.search_id}.json").json()["best"]["step_s"] == 0.4
    store.request_cancel(search_id=lease.search_id)
    store.finish_search(lease=lease, state=SearchState.CANCELLED, stopped_because="cancelled")
    twin = http.get(f"/searches/{lease.search_id}.json").json()
    assert (twin["best"], twin["run_href"], twin["export_href"]) == (None, None, None)
    text = http.get(f"/searches/{lease.search_id}").text
    assert "No recommendation" in text and "was cancelled after 1 run, before it could" in text
    assert "data-run>" not in text
    assert http.get(f"/searches/{lease.search_id}/trials.json").json()["best"] is None
    (row,) = http.get("/searches.json").json()["rows"]
    assert (row["best"], row["best_step_s"]) == (None, None)


def test_a_run_is_followed_from_its_start_up(
    page: Page, server: str, http: TestClient, store: Store, query: Query
) -> None:
    lease = claim(store, submitted(http, query))
    predicted = {"step_s": 0.5, "calibrated_step_s": 0.45}
    predicted |= {"calibrated_step_s_interval": [0.3, 0.6], "calibration_measurements": 3}
    run = store.intend_run(lease=lease, parallel=OTHER, fidelity=Fidelity(), predicted=predicted)
    store.mark_submitted(lease=lease, run_id=run.id, handle="43")
    page.goto(f"{server}/searches/{lease.search_id}/runs/{run.id}")
    before = page.get_by_role("region", name="Predicted before the run")
    assert "450.0 ms" in before.inner_text() and "300.0 ms to 600.0 ms" in before.inner_text()
    assert "calibrated by 3 earlier runs" in before.inner_text()
    page.get_by_text("Waiting for the log").wait_for()
    progress = store.get_search(search_id=lease.search_id).progress
    seen = asdict(Underway(phase="start-up", log_tail="loading the libraries"))
    store.set_progress(lease=lease, progress=progress | {"underway": {run.id: seen}})
    page.get_by_text("starting up").wait_for()
    page.get_by_text("loading the libraries").wait_for()
    end_run(store, lease, run.id, DONE, OTHER)
    page.get_by_role("region", name="Learned").get_by_text("inside its interval").wait_for()
    assert "400.0 ms" in page.get_by_role("region", name="Measured").inner_text()


def test_five_are_compared_and_no_more(shared_http: TestClient) -> None:
    queries = [
        json.dumps(LLAMA | {"parallel": {"tensor_parallel_size": 8, "micro_batch_size": size}})
        for size in (1, 2, 4, 8, 16, 32)
    ]
    five = shared_http.get("/compare.json", params={"more": queries[:5]}).json()
    assert len(set(five["names"])) == 5 and five["names"][1].endswith(" 2")
    assert shared_http.get("/compare.json", params={"more": queries}).status_code == 422


def test_the_search_box_opens_by_a_key_and_lists_what_is_there(page: Page, server: str) -> None:
    page.goto(f"{server}/searches/sample")
    page.keyboard.press("Control+k")
    page.keyboard.type("llama-3-70b")
    page.locator(".find li", has_text="llama-3-70b").wait_for()
    page.keyboard.press("Enter")
    page.wait_for_url("**/models/llama-3-70b")


def test_things_are_found_without_scripts(http: TestClient, store: Store, query: Query) -> None:
    search = submitted(http, query)
    http.put(f"/v1/searches/{search}/label", json={"name": "Blackwell trial"})
    found = {
        words: [(each["kind"], each["href"]) for each in answer.json()["found"]]
        for words in ("blackwell", "h100-sxm", "watch", "gloss", "llama-3.1 405")
        for answer in [http.get("/find.json", params={"q": words})]
    }
    assert ("search", f"/searches/{search}") in found["blackwell"]
    assert ("GPU", "/gpus/h100-sxm-80gb") in found["h100-sxm"]
    assert ("page", "/watches") in found["watch"]
    assert ("guide", "/guide/glossary") in found["gloss"]
    assert found["llama-3.1 405"] == [("model", "/models/llama-3.1-405b")]
    assert "No name contains zzz" in http.get("/find", params={"q": "zzz"}).text
    http.put(f"/v1/searches/{search}/label", json={"name": ""})
    by_model, by_id = (
        http.get("/find.json", params={"q": words}).json()["found"]
        for words in (f"{query['model']['name']} cpu", search)
    )
    assert [each["href"] for each in by_model] == [f"/searches/{search}"]
    assert [each["href"] for each in by_id] == [f"/searches/{search}"]


def test_the_theme_is_switched_and_kept(page: Page, server: str) -> None:
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    page.emulate_media(color_scheme="light")
    page.goto(f"{server}/searches")
    light = page.evaluate(ground)
    page.get_by_role("button", name="Light or dark").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.goto(f"{server}/models")
    assert page.evaluate(ground) == dark
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate(ground) == light


def test_the_tab_says_that_a_search_has_ended(
    page: Page, server: str, http: TestClient, store: Store, query: Query
) -> None:
    search = submitted(http, query)
    page.goto(f"{server}/searches/{search}")
    lease = claim(store, search)
    one_run(store, lease, DONE)
    finish(store, lease)
    wait_for(lambda: page.title().startswith("succeeded: "))


def test_a_history_is_zoomed_by_dragging(page: Page, server: str) -> None:
    page.goto(f"{server}/searches/sample")
    chart = page.locator("[data-part=history]")
    chart.scroll_into_view_if_needed()  # charts are drawn once they are seen
    chart.locator(":scope > svg").wait_for()
    points = "() => document.querySelector('[data-part=history]').points.length"
    whole = page.evaluate(points)
    box = chart.locator(":scope > svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 150)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 150)
    page.mouse.up()
    chart.get_by_role("button", name="Show all").wait_for()
    assert 0 < page.evaluate(points) < whole
    chart.get_by_role("button", name="Show all").click()
    assert page.evaluate(points) == whole


def test_every_table_has_a_file(page: Page, server: str) -> None:
    page.goto(f"{server}/gpus")
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0].startswith('"GPU","Memory"') and any("h100-sxm-80gb" in line for line in lines)


def test_a_term_leads_to_the_glossary(page: Page, server: str) -> None:
    query = LLAMA | {"parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 4}}
    page.goto(f"{server}/configurations?{urlencode({'query': json.dumps(query)})}")
    page.get_by_role("link", name="What is MFU?").first.click()
    page.wait_for_url("**/guide/glossary#mfu")
    assert page.locator("#mfu").inner_text() == "MFU"
