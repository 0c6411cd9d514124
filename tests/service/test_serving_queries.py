"""Queries of kind inference over HTTP: the same answers as the library's, in one and in batches."""

import json
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from hp_tool.questions import answers, schema

QUERY: dict[str, Any] = {
    "id": "served",
    "kind": "inference",
    "model": "llama-3.1-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 2},
    "inference": {
        "input_length": 1024,
        "output_length": 256,
        "concurrency": 32,
        "engine": "trtllm",
    },
}


def test_an_estimate_and_recommendations_are_what_the_library_says(http: TestClient) -> None:
    query = schema.parse_query(QUERY)
    assert http.post("/v1/estimates", json=QUERY).json() == schema.to_dict(
        answers.answer_estimate(query)
    )
    found = http.post("/v1/recommendations", json=QUERY).json()
    expected = schema.to_dict(answers.answer_recommend(query, top=10))
    assert (
        found["recommendations"] == expected["recommendations"]
        and len(found["recommendations"]) > 1
    )


def test_a_missed_target_comes_with_what_mends_it_and_in_a_batch_without(http: TestClient) -> None:
    late = QUERY | {"parallel": {"tensor_parallel_size": 1}, "targets": {"tpot_s": 0.006}}
    told = http.post("/v1/estimates", json=late).json()["estimate"]
    assert (
        not told["feasible"]
        and told["fixes"]
        and all(fix["tpot_s"] <= 0.006 for fix in told["fixes"])
    )
    lines = http.post(
        "/v1/batch", content=json.dumps(late), headers={"Content-Type": "application/x-ndjson"}
    )
    assert json.loads(lines.text)["estimate"]["fixes"] == []


def test_a_batch_mixes_kinds(http: TestClient, query: dict[str, Any]) -> None:
    query["parallel"] = {"tensor_parallel_size": 2, "micro_batch_size": 2}
    lines = "\n".join(json.dumps(line) for line in (QUERY, query, QUERY | {"inference": {}}))
    response = http.post(
        "/v1/batch", content=lines, headers={"Content-Type": "application/x-ndjson"}
    )
    found = [json.loads(line) for line in response.text.splitlines()]
    assert [line["status"] for line in found] == ["ok", "ok", "error"]
    assert found[0]["estimate"]["ttft_s"] > 0 and found[1]["estimate"]["time"]["step_s"] > 0


def test_a_search_for_serving_is_refused_by_name(http: TestClient) -> None:
    response = http.post("/v1/searches", json=QUERY)
    assert response.status_code == 422 and response.json()["code"] == "unsupported"


def test_experts_and_pools_of_them_are_asked_for_over_http(http: TestClient) -> None:
    sizes = {
        "expert_parallel_size": 72,
        "attention_data_parallel_size": 72,
        "redundant_experts": 32,
    }
    load = {
        "input_length": 2048,
        "output_length": 256,
        "concurrency": 512,
        "precision": "fp8",
        "engine": "sglang",
    }
    asked = {
        "kind": "inference",
        "model": "deepseek-v3",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 72},
        "inference": load | {"expert_imbalance": 1.2, "two_batch_overlap": False},
        "parallel": {"tensor_parallel_size": 1} | sizes,
    }
    found = http.post("/v1/estimates", json=asked).json()["estimate"]
    assert (
        found["feasible"]
        and found["parallel"].items() >= sizes.items()
        and found["expert_imbalance"] == 1.2
    )
    pools = {"decode_expert_parallel_size": 32, "decode_attention_data_parallel_size": 32}
    apart = asked | {"inference": load | {"disaggregated": pools}, "parallel": {}}
    rows = http.post("/v1/recommendations", json=apart).json()["disaggregated"]
    assert rows and {row["decode"]["attention_data_parallel_size"] for row in rows} == {32}


def test_an_offline_load_is_asked_for_over_http_and_refused_beside_a_concurrency(
    http: TestClient,
) -> None:
    load = {
        "input_length": 1024,
        "output_length": 256,
        "engine": "trtllm",
        "load": {"arrival": "offline", "num_prompts": 5000},
    }
    found = http.post("/v1/estimates", json=QUERY | {"inference": load}).json()["estimate"]
    assert (
        found["feasible"]
        and found["parts_s"]["front_end"] == 0.0
        and "offline" in found["provenance"]["load"]
    )
    refused = http.post("/v1/estimates", json=QUERY | {"inference": load | {"concurrency": 8}})
    assert refused.status_code == 422 and refused.json()["field"] == "inference.concurrency"
    schema_of = http.get("/openapi.json").json()["components"]["schemas"]
    (arrival,) = [
        value["properties"]["arrival"]
        for name, value in schema_of.items()
        if name.startswith("LoadSpec")
    ]
    assert "offline" in arrival["enum"]


TRACE = {
    "arrival_s": [0.0, 0.25, 0.5],
    "input_tokens": [1024, 600, 2048],
    "output_tokens": [40, 8, 300],
}


def traced(trace: object) -> dict[str, Any]:
    return QUERY | {"inference": {"trace": trace}, "parallel": {"tensor_parallel_size": 1}}


def test_over_http_a_trace_is_inline_or_registered_and_never_a_path(
    http: TestClient, tmp_path: Path
) -> None:
    (tmp_path / "own.csv").write_text("arrival_s,input_tokens,output_tokens\n0,5,5\n")
    inline = http.post("/v1/estimates", json=traced(TRACE)).json()["estimate"]
    assert http.post("/v1/traces", json={"name": "monday", "spec": TRACE}).status_code == 201
    named = http.post("/v1/estimates", json=traced("monday")).json()["estimate"]
    assert named == inline and inline["ttft_s"] > 0
    assert [row["name"] for row in http.get("/v1/traces").json()["registered"]] == ["monday"]
    for text in (str(tmp_path / "own.csv"), "tuesday"):
        refused = http.post("/v1/estimates", json=traced(text))
        assert refused.status_code == 422 and refused.json()["field"] == "inference.trace"
    assert (
        http.post("/v1/traces", json={"name": "bad", "spec": {"input_tokens": [1]}}).status_code
        == 422
    )
    assert http.delete("/v1/traces/monday").status_code == 204
    assert http.post("/v1/estimates", json=traced("monday")).status_code == 422
