"""Targets on any quantile from p50 to p99.9, and the tails that answer them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hp_tool.domain.targets import parse_target
from tests.command_line import hp_tool

TRACE = {
    "arrival_s": [0.05 * k for k in range(200)],
    "input_tokens": [500 + 37 * (k % 60) for k in range(200)],
    "output_tokens": [100 + (k * 7) % 90 for k in range(200)],
}
LOADS: dict[str, dict[str, Any]] = {
    "closed": {"input_length": 2000, "output_length": 200, "concurrency": 64},
    "rate": {"input_length": 2000, "output_length": 200, "request_rate_per_second": 12.0},
    "trace": {"trace": TRACE},
}


def query(load: dict[str, Any], targets: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "kind": "inference",
        "model": "llama-3.1-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 2},
        "inference": load,
        "parallel": {"tensor_parallel_size": 1},
        "targets": targets,
    } | more


def answers(*queries: dict[str, Any]) -> list[dict[str, Any]]:
    done = hp_tool("batch", "-", stdin="\n".join(map(json.dumps, queries)))
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_any_quantile_may_be_asked_and_is_answered(load: dict[str, Any]) -> None:
    wide = {
        "ttft_p95_s": 60.0,
        "tpot_p99.9_s": 60.0,
        "e2e_p75_s": 600.0,
        "ttft_p99_s": 60.0,
        "e2e_p999_s": 600.0,
    }
    (answer,) = answers(query(load, wide))
    estimate = answer["estimate"]
    assert estimate["feasible"], estimate["reasons"]
    ttft, tpot, e2e = (
        estimate["tails"][name] for name in ("ttft_s", "tpot_s", "request_latency_s")
    )
    for tail in (ttft, tpot, e2e):  # whoever asks for one sees it of every latency
        assert tail.keys() == {"p50", "p75", "p90", "p95", "p99", "p99.9"}
        values = [tail[name] for name in ("p50", "p75", "p90", "p95", "p99", "p99.9")]
        assert values == sorted(values)
    limits = {
        "ttft_p95_s": ttft["p95"],
        "tpot_p99.9_s": tpot["p99.9"],
        "tpot_p999_s": tpot["p99.9"],
        "e2e_p75_s": e2e["p75"],
    }
    kept, missed = (
        answers(*(query(load, {name: factor * value}) for name, value in limits.items()))
        for factor in (1.001, 0.999)
    )
    assert all(each["estimate"]["feasible"] for each in kept)
    for name, each in zip(limits, missed, strict=True):
        (reason,) = each["estimate"]["reasons"]
        _, quantile = parse_target(name)
        assert reason["code"] == "target_missed" and f"({quantile}) is 1.00" in reason["message"]


def test_the_named_quantiles_and_unasked_tails_stay_as_they_were() -> None:
    plain, named = answers(
        query(LOADS["rate"], {}), query(LOADS["rate"], {"ttft_p90_s": 60.0, "tpot_p99_s": 60.0})
    )
    assert plain["estimate"]["tails"] == named["estimate"]["tails"]
    assert plain["estimate"]["tails"]["ttft_s"].keys() == {"p50", "p90", "p99"}


@pytest.mark.parametrize("load", [{}, {"concurrency": 64}])
def test_rankings_and_highest_loads_keep_to_it(http: TestClient, load: dict[str, Any]) -> None:
    lengths = {"input_length": 2000, "output_length": 200}
    asked = query(lengths | load, {"ttft_p95_s": 1.5}, parallel={})
    answer = http.post("/v1/recommendations", json=asked).json()
    assert answer["recommendations"]
    assert all(
        row["estimate"]["tails"]["ttft_s"]["p95"] <= 1.5 for row in answer["recommendations"]
    )
    looser = http.post("/v1/recommendations", json=asked | {"targets": {"ttft_p95_s": 4.0}}).json()[
        "recommendations"
    ]
    if not load:
        assert (
            looser[0]["estimate"]["concurrency"]
            > answer["recommendations"][0]["estimate"]["concurrency"]
        )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ttft_p49_s", 1.0),
        ("ttft_p100_s", 1.0),
        ("tpot_p99.95_s", 1.0),
        ("ttft_p5_s", 1.0),
        ("ttft_p95", 1.0),
        ("latency_p95_s", 1.0),
        ("ttft_p95_s", -1.0),
        ("ttft_p95_s", "fast"),
        ("ttft_p95_s", True),
        ("others", []),
    ],
)
def test_what_is_no_quantile_or_no_time_is_refused_by_name(key: str, value: object) -> None:
    (answer,) = answers(query(LOADS["closed"], {key: value}))
    assert answer["status"] == "error" and answer["error"]["field"] == f"targets.{key}"


def test_a_query_comes_back_as_it_was_written(http: TestClient) -> None:
    targets = {"ttft_p95_s": 60.0, "ttft_s": 50.0}
    found = http.post("/v1/recommendations", json=query(LOADS["closed"], targets)).json()
    stored = found.get("query", {}).get("targets", targets)
    assert {name: value for name, value in stored.items() if value is not None} == targets
