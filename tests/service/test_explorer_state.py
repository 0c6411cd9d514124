"""What the page that asks keeps when the question changes, and what Back leads to."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote_plus

from fastapi.testclient import TestClient

from tests.service.conftest import checked_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SMALL = (
    "model=llama-3-8b&cluster.gpu=h100-sxm-80gb&training.global_batch_size=16"
    "&training.sequence_length=4096"
)


def settled(page: Page) -> None:
    page.locator(".findings:not([aria-busy=true])").wait_for()


def test_offload_of_a_small_cluster_does_not_stay_on_a_large_one(
    browser: Browser, server: str
) -> None:
    with checked_page(browser) as page:
        page.goto(f"{server}/explorer?{SMALL}&cluster.num_gpus=1")
        settled(page)
        page.locator("select[name='at.parallel.recompute']").select_option("full")
        page.wait_for_url("**recompute=full**")
        settled(page)
        assert "offload" in unquote_plus(page.url), "one GPU needs it"
        page.get_by_label("Number of GPUs").fill("16")
        page.wait_for_url("**cluster.num_gpus=16**")
        settled(page)
        assert "num_gpus=16" in page.url
        assert "offload" not in unquote_plus(page.url), "nobody asked for it"


def test_the_list_stays_when_one_of_its_rows_is_opened(shared_http: TestClient) -> None:
    asked = (
        "model=llama-3-8b&cluster.gpu=h100-sxm-80gb&cluster.num_gpus=16"
        "&training.global_batch_size=16&training.sequence_length=131072"
    )
    before = shared_http.get(f"/explorer.json?{asked}").json()["rows"]
    listed = [(row["arithmetic"], row["details"]) for row in before]
    ways = {row["parallel"]["context_parallel_communication"] for row in before}
    assert len(ways) > 1, "the rows must differ in a field without a control"
    for row in before:
        after = shared_http.get(
            row["settings_href"].replace("/explorer?", "/explorer.json?")
        ).json()["rows"]
        assert [(each["arithmetic"], each["details"]) for each in after] == listed


def test_back_after_a_slider_leads_to_the_values_before(browser: Browser, server: str) -> None:
    with checked_page(browser) as page:
        page.goto(f"{server}/guide")
        page.goto(f"{server}/explorer?{SMALL}&cluster.num_gpus=16")
        settled(page)
        first = page.url
        slider = page.locator(
            "input[type=range][aria-labelledby='label-at.parallel.pipeline_parallel_size']"
        )
        slider.fill("1")
        page.wait_for_url("**pipeline_parallel_size=2**")
        settled(page)
        page.go_back()
        assert page.url == first
