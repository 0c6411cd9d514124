"""The page of several machines: its address is its question, it says what the API says, and needs
no script for it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, date, datetime
from html import unescape
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest
from fastapi.testclient import TestClient

from hp_tool.catalog.prices import offers
from tests.cli import shown
from tests.service.every_page import RENT

if TYPE_CHECKING:
    from playwright.sync_api import Browser

QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"node_type": "priced", "gpu": ["h100-sxm-80gb"], "num_gpus": [8, 16]},
    "training": {"sequence_length": 4096, "global_batch_size": 64, "total_tokens": 1e10},
    "constraints": {"max_days": 9.0},
    "parallel": {"pipeline_parallel_size": 1},
}


@pytest.fixture(scope="module")
def page(shared_http: TestClient) -> dict[str, Any]:
    response = shared_http.get("/explorer.json", params=RENT)
    assert response.status_code == 200
    answer: dict[str, Any] = response.json()
    assert answer["error"] is None
    return answer["machines"] | {name: answer[name] for name in ("json_href", "values")}


def test_it_says_what_the_api_says(shared_http: TestClient, page: dict[str, Any]) -> None:
    answer = shared_http.post("/v1/recommendations", json=QUERY, params={"top": 40}).json()
    assert len(page["rows"]) == len(answer["recommendations"]) > 4
    for row, same in zip(page["rows"], answer["recommendations"], strict=True):
        for name in (
            "cost",
            "cost_interval",
            "days_interval",
            "deadline_probability",
            "energy",
            "co2_kg",
        ):
            assert row[name] == same[name]
        assert (row["machine"], row["price"]["per_gpu_hour"]) == (same["cluster"], same["price"])
        assert row["configuration"]["parallel"] == same["parallel"]
    on_front = {(row["machine"], row["num_gpus"]) for row in page["rows"] if row["on_front"]}
    assert on_front == {
        (row["cluster"], row["set"]["cluster"]["num_gpus"]) for row in answer["pareto"]
    }
    cheapest = page["rows"][0]
    where = (
        f"{cheapest['machine']}{' over an assumed network' if cheapest['network_assumed'] else ''}"
    )
    assert page["verdict"][0].startswith(
        f"Cheapest within 9 days: {cheapest['num_gpus']} GPUs of {where}, $"
    )
    assert page["verdict"][1].startswith("Fastest within 9 days: 16 GPUs of ")


def test_an_assumed_network_is_marked_in_the_table(
    page: dict[str, Any], shared_http: TestClient
) -> None:
    assumed = [row["network_assumed"] for row in page["rows"]]
    assert any(assumed) and not all(assumed)
    text = shared_http.get("/explorer", params=RENT).text
    assert (
        text.count('title="network assumed"') == sum(assumed)
        and "the usual network of servers with this GPU is used" in text
    )
    stated = RENT | {"cluster.inter_node_bandwidth_bytes_per_second": "5e10"}
    text = shared_http.get("/explorer", params=stated).text
    assert "network assumed" not in text.lower()


def test_every_price_has_its_day_its_age_and_its_line(
    page: dict[str, Any], shared_http: TestClient
) -> None:
    listed = {offer.name: offer for offer in offers()}
    today = datetime.now(UTC).date()
    for row in page["rows"]:
        offer, price = listed[row["machine"]], row["price"]
        assert (price["date"], price["line"], price["source"]) == (
            offer.date,
            offer.line,
            offer.source,
        )
        assert 0 <= (today - date.fromisoformat(offer.date)).days - price["age_days"] <= 1
    own = shared_http.get(
        "/explorer.json", params=RENT | {"cluster.price_per_gpu_hour": "1.5"}
    ).json()["machines"]["rows"]
    assert {
        (row["price"]["per_gpu_hour"], row["price"]["date"], row["price"]["line"]) for row in own
    } == {(1.5, None, None)}


def test_its_rows_lead_to_one_machine(page: dict[str, Any], shared_http: TestClient) -> None:
    row = page["rows"][-1]
    (text,) = parse_qs(urlsplit(row["configuration"]["href"]).query)["query"]
    estimate = shared_http.post("/v1/estimates", content=text).json()["estimate"]
    assert estimate["cost"] == pytest.approx(row["cost"], rel=1e-12)
    assert shared_http.get(row["configuration"]["run_href"]).status_code == 200
    again = shared_http.get(page["json_href"]).json()
    assert again["machines"]["rows"][0]["cost"] == page["rows"][0]["cost"]
    assert again["values"] == page["values"]


def test_a_service_and_machines_of_one_s_own_are_compared(shared_http: TestClient) -> None:
    spec: dict[str, Any] = {
        "gpu": "h100-sxm-80gb",
        "gpus_per_node": 8,
        "price_per_gpu_hour": 2.5,
        "fabric": "1 x 400 Gb/s",
    }
    spec["inter_node_bandwidth_bytes_per_second"] = 50e9
    stored = shared_http.post("/v1/clusters", json={"name": "ours", "spec": spec})
    assert stored.status_code in (201, 409), stored.text
    asked = RENT | {
        "cluster.node_type": "priced, ours",
        "cluster.gpu": "a100-sxm-80gb",
        "cluster.num_gpus": "8",
    }
    rows = shared_http.get("/explorer.json", params=asked).json()["machines"]["rows"]
    own = next(row for row in rows if row["machine"] == "ours")
    assert own["price"] == {
        "per_gpu_hour": 2.5,
        "date": None,
        "age_days": None,
        "line": None,
        "source": None,
    }
    served = shared_http.get(
        "/explorer.json?kind=inference&cluster.node_type=priced&cluster.gpu=h100-sxm-80gb"
    ).json()["machines"]
    costs = [row["per_million_tokens"] for row in served["rows"]]
    assert (
        costs == sorted(costs)
        and len(costs) > 4
        and " per million output tokens, " in served["verdict"][0]
    )
    assert served["verdict"][0].endswith(" per output token; it meets both targets.")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"cluster.node_type": "priced, nosuch"}, None),
        ({"cluster.num_gpus": "8, many"}, "cluster.num_gpus"),
        ({"cluster.num_gpus": ",".join(map(str, range(1, 400)))}, "cluster.num_gpus"),
        ({"training.sequence_length": "x"}, "training.sequence_length"),
        ({"cluster.market": "spot"}, "cluster.market"),
    ],
)
def test_what_cannot_be_compared_says_why(
    shared_http: TestClient, change: dict[str, str], field: str | None
) -> None:
    error = shared_http.get("/explorer.json", params=RENT | change).json()["error"]
    assert error is not None and (field is None or error["field"] == field)
    assert "This cannot be answered" in shared_http.get("/explorer", params=RENT | change).text


def test_a_budget_out_of_reach_shows_what_comes_nearest(shared_http: TestClient) -> None:
    page = shared_http.get("/explorer.json", params=RENT | {"constraints.max_cost": "5"}).json()[
        "machines"
    ]
    assert (
        page["verdict"][0] == "No machine finishes within 9 days and $5.00." and page["rows"] == []
    )
    assert (
        page["verdict"][1].startswith("Cheapest beyond the limits: ")
        and " days (" in page["verdict"][1]
    )
    assert 0 < len(page["misses"]) <= 3 and page["misses"][0]["configuration"]["reasons"]
    costs = [row["cost"] for row in page["misses"]]
    assert costs == sorted(costs)


def test_too_few_devices_for_a_deadline_name_how_many_meet_it(shared_http: TestClient) -> None:
    asked = RENT | {"cluster.num_gpus": "8", "constraints.max_days": "0.8"}
    page = shared_http.get("/explorer.json", params=asked).json()["machines"]
    assert page["verdict"][0] == "No machine finishes within 0.8 days." and page["rows"] == []
    assert page["enough"][0].startswith("Cheapest within 0.8 days: ")
    there = shared_http.get(page["enough_href"].replace("?", ".json?")).json()["machines"]
    assert there["verdict"] == page["enough"]
    assert all(row["num_gpus"] > 8 and row["days"] <= 0.8 for row in there["rows"])
    assert page["enough"][0] in unescape(shared_http.get("/explorer", params=asked).text)


def test_a_reader_without_scripts_compares_machines(browser: Browser, server: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{server}/explorer?{'&'.join(f'{name}={value}' for name, value in RENT.items())}")
    page.locator("summary", has_text="Machines:").click()
    page.get_by_label("a100-sxm-80gb").check()
    page.get_by_label("GPUs of each").fill("8")
    page.get_by_role("button", name="Rank the machines").click()
    asked = parse_qs(urlsplit(page.url).query)
    assert asked["cluster.gpu"] == ["a100-sxm-80gb", "h100-sxm-80gb"]
    assert asked["cluster.num_gpus"] == ["8"]
    rows = page.locator("table tbody tr")
    rows.nth(8).wait_for()  # after the question, as soon as they are known
    assert re.search(r"\$[\d,.]+\s*\$[\d,.]+ – \$[\d,.]+", rows.first.inner_text())
    assert "Cheapest within 9 days" in page.locator(".answered").inner_text()
    context.close()


def test_a_million_tokens_cost_the_price_of_the_time_they_take() -> None:
    """At $3.60 a GPU-hour a second costs $0.001; a GPU takes 3,072 / 12 tokens in it."""
    estimate = replace(shown.estimate(12.0), days=None)
    row = replace(shown.recommendations().recommendations[0], price=3.6, estimate=estimate)
    assert row.cost_per_million_tokens == pytest.approx(0.001 / (3072 / 12) * 1e6)
    assert replace(row, price=None).cost_per_million_tokens is None
    assert replace(row, estimate=shown.estimate(12.0)).cost_per_million_tokens is None
