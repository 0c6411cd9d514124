"""A list of machines on routes that take one: it is rejected by name, whatever the objective."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "gpt-22b",
    "training": {"sequence_length": 2048, "global_batch_size": 4},
    "parallel": {"tensor_parallel_size": 8},
}
LISTS: tuple[Any, ...] = (
    ["dgx-h100"],
    [{"gpu": "h100-sxm-80gb"}, {"gpu": "a100-sxm-80gb", "num_gpus": 8}],
)


@pytest.mark.parametrize("objective", ["throughput", "min_gpus"])
@pytest.mark.parametrize("cluster", LISTS)
def test_a_list_of_machines_is_rejected_by_name(
    http: TestClient, cluster: Any, objective: str
) -> None:
    query = QUERY | {"cluster": cluster, "objective": objective}
    report = {
        "query": QUERY | {"cluster": cluster, "objective": objective},
        "measurement": {"status": "ok", "step_s": 1.0},
    }
    report["parallel"] = report["query"].pop("parallel")
    bodies = {
        **dict.fromkeys(("/v1/estimates", "/v1/searches", "/v1/plans", "/v1/lost-nodes"), query),
        "/v1/watches": {"query": query},
        "/v1/measurements": report,
    }
    for path, body in bodies.items():
        answer = http.post(path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, "several_machines"), (
            path,
            answer.text,
        )
    inference = {
        "kind": "inference",
        "model": "qwen3-32b",
        "cluster": cluster,
        "objective": "min_gpus",
        "inference": {
            "input_length": 4000,
            "output_length": 1000,
            "concurrency": 8,
            "precision": "fp8",
        },
    }
    answer = http.post("/v1/searches", json=inference)
    assert (answer.status_code, answer.json()["code"]) == (422, "several_machines"), answer.text
