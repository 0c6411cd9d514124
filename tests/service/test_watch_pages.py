"""The pages of watched jobs: what they say is what the API says, and what is drawn is what was
reported.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi.testclient import TestClient

from service.client import Client
from tests.service.test_watches import DENSE, batch, times

if TYPE_CHECKING:
    from playwright.sync_api import Page


def begun(http: Any, **new: Any) -> str:
    answer = http.post("/v1/watches", json=new)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def twin(http: Any, watch: str, **asked: Any) -> dict[str, Any]:
    answer = http.get(f"/watches/{watch}.json", params=asked)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_slower_job_is_shown_as_the_api_tells_it(http: TestClient) -> None:
    watch = begun(http, name="pretrain", query=DENSE)
    steady, slow = times(200), 1.3 * times(40, seed=1)
    http.post(f"/v1/watches/{watch}/steps", json=batch(steady))
    http.post(f"/v1/watches/{watch}/steps", json=batch(slow, first=201))
    page, view = twin(http, watch), http.get(f"/v1/watches/{watch}").json()
    assert page["verdict"] == view["verdict"] and page["row"]["status"] == "slower_than_it_was"
    (row,) = http.get("/watches.json").json()["rows"]
    assert (row["name"], row["steps"], row["tone"]) == ("pretrain", 240, "bad")
    assert (
        row["now_s"] == view["verdict"]["now"]["step_s"]
        and row["loss_per_day"] == view["verdict"]["loss_per_day"]
    )
    assert row["slower_fraction"] == pytest.approx(0.3, abs=0.01)
    steps, pace, expected, low, high = page["figure"]["traces"]
    # The trainer counts from 101. The newest pace has its 40 steps one by one, and those before
    # their median.
    assert steps["x"][-40:] == list(range(301, 341)) and steps["y"][-40:] == pytest.approx(slow)
    since = view["verdict"]["slowdown"]["since_step"]
    assert pace["x"] == [104, since - 1, None, since, 340, None]
    assert pace["y"][0] == pytest.approx(view["verdict"]["was"]["step_s"])
    assert pace["y"][3] == pytest.approx(view["verdict"]["now"]["step_s"])
    assert expected["y"] == [view["verdict"]["expected"]["step_s"]] * 2
    assert [low["y"][0], high["y"][0]] == view["verdict"]["expected"]["interval"]
    assert page["figure"]["shapes"] == [{"at": since, "color": "--bad", "label": "slower"}]
    began, last = (datetime.fromisoformat(at) for at in (page["slower_since"], row["updated_at"]))
    assert (last - began).total_seconds() == pytest.approx((340 - since) * row["now_s"], rel=1e-3)
    text = http.get(f"/watches/{watch}").text
    assert "Slower than it was: +30" in text and "Cost per day" in text
    assert f'(about <time datetime="{began.isoformat()}">' in text


def test_a_long_steady_job_shows_its_newest_steps(http: TestClient) -> None:
    watch = begun(http)
    for first in range(1, 1000, 200):
        sent = http.post(
            f"/v1/watches/{watch}/steps", json=batch(times(200, seed=first), first=first)
        )
        assert sent.status_code == 200, sent.text
    page = twin(http, watch)
    steps, pace = page["figure"]["traces"]
    # The newest 768 steady steps, and the 68 after them that are compared with these.
    assert steps["x"] == list(range(265, 1101))
    assert pace["x"] == [104, 1100, None] and page["figure"]["shapes"] == []
    assert page["configuration_href"] is None
    assert "runs at its past pace" in http.get(f"/watches/{watch}").text
    new = begun(http, name="new")
    assert (
        twin(http, new)["figure"] is None
        and "Measuring the normal step time" in http.get(f"/watches/{new}").text
    )


def test_a_job_faster_than_expected_is_told_so_and_lost_nodes_are_counted_from_its_own_pace(
    http: TestClient,
) -> None:
    watch = begun(http, query=DENSE)
    http.post(f"/v1/watches/{watch}/steps", json=batch(times(100, median_s=0.65)))
    page, text = twin(http, watch, lost_nodes=1), http.get(f"/watches/{watch}").text
    assert page["faster"].endswith("Is the query for another job?") and "Check the query." in text
    assert page["row"]["query_doubted"] and "check the query" in http.get("/watches").text
    assert "as it should be" not in text
    answer = http.post("/v1/lost-nodes?lost_nodes=1", json=DENSE).json()
    assert page["loss"]["own_step_s"] == pytest.approx(
        page["verdict"]["now"]["step_s"] / answer["pace"]
    )


def test_a_lost_node_is_advised_on_alike_everywhere(http: TestClient, server: str) -> None:
    watch = begun(http, query=DENSE)
    page = twin(http, watch, lost_nodes=1)
    answer = http.post("/v1/lost-nodes?lost_nodes=1", json=DENSE).json()
    assert page["loss"]["text"] == answer["text"] and page["loss"]["step_s"] == answer["step_s"]
    assert http.get(page["loss"]["run_href"]).status_code == 200
    with Client(server=server) as client:
        again = client.after_loss(query=DENSE)
        assert {**again, "recommendation": None} == {**answer, "recommendation": None}
    assert twin(http, watch, lost_nodes=4)["error"]["field"] == "lost_nodes"
    assert "has no query" in twin(http, begun(http), lost_nodes=1)["error"]["message"]
    assert http.post("/v1/lost-nodes?lost_nodes=0", json=DENSE).status_code == 422
    served = {"kind": "inference", "model": "qwen3-32b", "cluster": DENSE["cluster"]}
    served |= {"inference": {"input_length": 100, "output_length": 10, "concurrency": 1}}
    assert http.post("/v1/lost-nodes", json=served).status_code in (422, 501)


def test_a_chart_follows_new_steps_and_a_job_is_forgotten(page: Page, server: str) -> None:
    with httpx.Client(base_url=server, timeout=60) as http:
        watch = begun(http, name="alive")
        http.post(f"/v1/watches/{watch}/steps", json=batch(times(100)))
        page.goto(f"{server}/watches")
        page.get_by_role("link", name="alive").click()
        page.locator("[data-plot] > svg").wait_for()
        assert (
            page.evaluate("document.querySelector('[data-plot]').figure.traces[0].x.length") == 97
        )
        http.post(f"/v1/watches/{watch}/steps", json=batch(1.5 * times(40, seed=1), first=101))
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        page.locator(".state.bad", has_text="slower than it was").wait_for(timeout=40_000)
        page.wait_for_function("document.querySelector('[data-plot]').figure?.shapes.length === 1")
        page.locator("summary", has_text="Delete this job").click()
        page.get_by_role("button", name="Yes, delete this job").click()
        page.get_by_text("Removed.").wait_for()
        assert http.get(f"/v1/watches/{watch}").status_code == 404
