"""Without scripts: asking, ranking, one search, one run and a comparison are there all the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from fastapi.testclient import TestClient

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.ports import Store
from hp_tool.domain.states import SearchState
from service.dashboard import formats
from tests.service.coordinator import claim, finish, one_run
from tests.service.every_page import OTHER

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FILLED = {
    "model": "llama-3-8b",
    "cluster.gpu": "h100-sxm-80gb",
    "cluster.num_gpus": "8",
    "training.sequence_length": "2048",
    "training.global_batch_size": "64",
}


def test_a_search_is_started_from_its_answer(http: TestClient) -> None:
    href = http.get("/explorer.json", params=FILLED).json()["form_href"]
    page = http.get(href).text
    assert http.get(href.replace("?", ".json?", 1)).json()["best"]["details"] in page
    assert '<form method="post" action="/searches/new"' in page


def test_runs_are_a_table(http: TestClient, store: Store, query: dict[str, Any]) -> None:
    search = http.post("/v1/searches", json=query).json()["id"]
    assert f'href="/searches/{search}/runs"' in http.get(f"/searches/{search}").text
    assert "No runs yet" in http.get(f"/searches/{search}/runs").text
    one_run(store, claim(store, search), Measurement(status="ok", step_s=0.4))
    assert "400.0 ms" in http.get(f"/searches/{search}/runs").text


def test_runs_that_were_cut_off_run_again_with_a_longer_limit(
    http: TestClient, store: Store, query: dict[str, Any]
) -> None:
    query["search"]["run_timeout_s"] = 3.0
    search = http.post("/v1/searches", json=query).json()["id"]
    lease = claim(store, search)
    one_run(store, lease, Measurement(status="timeout", cause="cut off at 3 s"))
    error = {"code": "every_run_failed", "message": "every run failed", "field": None}
    store.finish_search(lease=lease, state=SearchState.FAILED, error=error)
    page = http.get(f"/searches/{search}.json").json()
    assert (
        page["longer_s"] == 60
        and "Run again with 60 s per run" in http.get(f"/searches/{search}").text
    )
    again = http.post(
        f"/searches/{search}/longer", content="run_timeout_s=60", follow_redirects=False
    ).headers["location"]
    assert http.get(f"/v1{again}").json()["query"]["search"]["run_timeout_s"] == 60


@pytest.fixture
def plain(browser: Browser) -> Iterator[Page]:
    """A page that runs no scripts."""
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.set_default_timeout(60_000)  # a busy machine
    yield page
    context.close()


def twin(http: TestClient, page: Page) -> dict[str, Any]:
    """The JSON of the page that is open."""
    href = page.locator("link[rel=alternate]").get_attribute("href") or ""
    answer: dict[str, Any] = http.get(href).json()
    return answer


def test_a_question_is_asked_and_another_layout_shown(
    plain: Page, server: str, http: TestClient
) -> None:
    plain.goto(server)
    plain.get_by_label("Model", exact=True).select_option("llama-3-8b")
    plain.get_by_label("Number of GPUs").fill("8")
    plain.get_by_role("button", name="Ask", exact=True).click()
    answer = twin(http, plain)
    verdict = plain.locator("[data-part=verdict]")
    assert answer["view"]["subject"].startswith("llama-3-8b on 8 x ")
    assert answer["view"]["answer"] in verdict.inner_text()
    rows = plain.locator("[data-part=best] tbody tr")
    assert rows.count() == len(answer["rows"]) > 1
    rows.nth(1).get_by_role("link").click()
    assert verdict.get_by_role("heading").inner_text() == answer["rows"][1]["arithmetic"]
    assert twin(http, plain)["view"]["heading"] == answer["rows"][1]["arithmetic"]
    assert not plain.get_by_role("checkbox", name="Compare").first.is_visible()


def test_a_search_its_runs_and_their_comparison_are_read(
    plain: Page, server: str, http: TestClient, store: Store, query: dict[str, Any]
) -> None:
    search = http.post("/v1/searches", json=query).json()["id"]
    lease = claim(store, search)
    one_run(store, lease, Measurement(status="ok", step_s=0.4))
    one_run(store, lease, Measurement(status="ok", step_s=0.8), OTHER)
    finish(store, lease)
    plain.goto(f"{server}/searches/{search}")
    best = twin(http, plain)["best"]
    assert best["sentences"][0] in plain.locator("[data-live=best]").inner_text()
    plain.get_by_role("link", name="a plain table").click()
    plain.locator("tbody a").first.click()
    assert urlsplit(plain.url).path.startswith(f"/searches/{search}/runs/")
    run = twin(http, plain)
    measured = plain.get_by_role("region", name="Measured").inner_text()
    assert formats.seconds(run["run"]["metrics"][0]["value"]) == "400.0 ms" in measured
    bars = plain.get_by_role("region", name="Step time before and after the run")
    assert [bar["total"] for bar in run["steps"]["bars"]][:2] == [0.5, 0.4]
    assert "500.0 ms" in bars.inner_text()
    plain.get_by_role("link", name="Compare", exact=True).click()
    for place in (0, 1):
        plain.get_by_role("checkbox").nth(place).check()
    plain.get_by_role("button", name="Compare").click()
    verdict = plain.get_by_role("status").first.inner_text()
    assert verdict == twin(http, plain)["verdict"]
    assert verdict == "Use Run 1: Run 2 is 2.0 times as slow as Run 1, measured."
    assert "2.0 times as slow" in plain.get_by_role("region", name="Run 2").inner_text()
