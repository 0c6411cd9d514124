"""A search's configuration is one thing on its pages, behind their links, in its report and in what
it exports; figures there are that search's own.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from fastapi.testclient import TestClient

from hp_tool.domain.measurement import Hardware, Measurement, ProfileRequest
from hp_tool.domain.ports import Store
from hp_tool.loop.tuning import tune
from hp_tool.questions import schema
from service.dashboard import formats
from tests.tuning.cpu_engine import CpuEngine


class ThisHost(CpuEngine):
    """Runs that the service, which is on this host, takes for its own."""

    def hardware(self) -> Hardware:
        return replace(super().hardware(), hosts=(socket.gethostname(),))


def slower(factor: float) -> Any:
    """Steps of so many seconds for each micro-batch."""

    def outcome(request: ProfileRequest) -> Measurement:
        step_s = factor / request.parallel.micro_batch_size
        times = tuple(step_s * share for share in (0.999, 1.0, 1.001))
        return Measurement(
            status="ok", step_s=step_s, step_times_s=times, wall_s=10.0, peak_memory_bytes=1 << 30
        )

    return outcome


def searched(query: dict[str, Any], store: Store, outcome: Any) -> tuple[str, list[dict[str, Any]]]:
    """A search's id and the rows of its result."""
    query["search"] |= {"budget_runs": 3, "fidelity": "full", "min_gain_fraction": 0.0}
    result = tune(
        query=schema.parse_query(query), store=store, launcher=ThisHost(num_gpus=2, outcome=outcome)
    )
    return result.search.id, schema.to_dict(result)["recommendations"]


def test_the_page_behind_a_run_shows_what_its_own_search_knows(
    http: TestClient, store: Store, query: dict[str, Any]
) -> None:
    search, rows = searched(query, store, slower(4.0))
    searched(query, store, slower(40.0))
    trials = http.get(f"/v1/searches/{search}/trials").json()["trials"]
    known = {schema.to_json(row["parallel"]): row["calibrated_estimate"] for row in rows}
    best = http.get(f"/searches/{search}.json").json()["best_href"]
    for path, parallel in (
        *((f"/searches/{search}/runs/{each['run_id']}", each["parallel"]) for each in trials),
        (best, rows[0]["parallel"]),
    ):
        page = http.get(path)
        address = page.url
        there = http.get(f"{address.path}.json", params=address.params).json()
        step = next(metric for metric in there["view"]["metrics"] if metric["name"] == "Step time")
        own = known[schema.to_json(parallel)]
        assert step["value"] == own["time"]["step_s"]
        assert [step["low"], step["high"]] == own["intervals"]["step_s"]
        assert (
            there["view"]["evidence_href"] == f"/searches/{search}"
            and f'href="/searches/{search}"' in page.text
        )
    elsewhere = http.get(
        "/configurations.json", params={"query": parse_qs(urlsplit(best).query)["query"][0]}
    ).json()
    figure = next(
        metric for metric in elsewhere["view"]["metrics"] if metric["name"] == "Step time"
    )
    assert figure["value"] > 2.0 * known[schema.to_json(rows[0]["parallel"])]["time"]["step_s"], (
        "by the newest calibration"
    )
    assert (
        elsewhere["view"]["evidence_href"].startswith("/calibration")
        and "calibration" in elsewhere["view"]["evidence"]
    )
    assert (
        http.get("/configurations.json", params={"query": "{}", "search": "0" * 16}).status_code
        == 422
    )


def test_a_run_is_held_against_what_was_predicted_before_it_ran(
    http: TestClient, store: Store, query: dict[str, Any]
) -> None:
    search, _ = searched(query, store, slower(40.0))
    runs = store.runs(search_id=search)
    assert len(runs) == 3
    for run in runs:
        page = http.get(f"/searches/{search}/runs/{run.id}.json").json()
        assert run.measurement is not None and run.measurement.step_s is not None
        low, high = run.predicted["calibrated_step_s_interval"]
        inside = low <= run.measurement.step_s <= high
        assert page["measured"]["inside"] == inside
        predicted = formats.seconds(run.predicted["calibrated_step_s"])
        between = f"{formats.seconds(low)} to {formats.seconds(high)}"
        assert f"predicted before the run {predicted} ({between})" in page["measured"]["text"]
        fitted = next(metric for metric in page["view"]["metrics"] if metric["name"] == "Step time")
        assert fitted["value"] != run.predicted["calibrated_step_s"]
    assert (
        http.get(f"/searches/{search}/runs/{runs[0].id}.json").json()["measured"]["word"]
        == "outside its interval"
    )
    pair = [f"/searches/{search}/runs/{run.id}" for run in runs[:2]]
    both = http.get("/compare", params={"more": pair}).text
    assert ", calibrated</span>" in both and ", predicted</span>" not in both


def test_what_the_query_says_of_all_layouts_is_said_of_each(
    http: TestClient, store: Store, query: dict[str, Any]
) -> None:
    """How ranks exchange a sequence stands in the query alone; a search's runs and rows leave it to
    that.
    """
    query["parallel"] = {"context_parallel_size": 2, "context_parallel_communication": "all_gather"}
    search, rows = searched(query, store, slower(4.0))
    run = http.get(f"/v1/searches/{search}/trials").json()["trials"][0]["run_id"]
    page = http.get(f"/searches/{search}.json").json()
    assert (
        "all_gather" in page["best"]["details"]
        and "all_gather" in http.get(f"/searches/{search}/report").text
    )
    for chosen in ({}, {"run": run}):
        text = http.get(f"/searches/{search}/export", params={"format": "yaml", **chosen}).text
        assert yaml.safe_load(text)["parallel"]["context_parallel_communication"] == "all_gather"
        flags = http.get(
            f"/searches/{search}/export", params={"format": "megatron-lm", **chosen}
        ).text
        assert "--cp-comm-type all_gather" in flags
    text = http.get(f"/searches/{search}/export", params={"format": "yaml"}).text
    again = http.post("/v1/estimates", json=yaml.safe_load(text)).json()["estimate"]
    assert again["time"]["step_s"] == pytest.approx(rows[0]["estimate"]["time"]["step_s"], rel=1e-9)
    assert "all_gather" in http.get(f"/searches/{search}/runs/{run}").text
    result = http.get(f"/v1/searches/{search}/result").json()
    exported = http.post(
        "/v1/exports",
        json={
            "format": "megatron-lm",
            "result": {"query": query, "recommendations": result["recommendations"][:1]},
        },
    )
    assert "--cp-comm-type all_gather" in exported.json().get("text", ""), exported.text
