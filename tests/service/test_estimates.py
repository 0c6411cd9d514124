"""Estimates, recommendations and batches over HTTP."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.api.problems import MEDIA_TYPE

Query = dict[str, Any]


def test_an_estimate_is_what_the_library_says(http: TestClient, query: Query) -> None:
    from hp_tool.questions import schema, training

    query["parallel"] = {"tensor_parallel_size": 2, "micro_batch_size": 2}
    response = http.post("/v1/estimates", json=query)
    assert response.status_code == 200
    answer = response.json()
    assert (answer["id"], answer["status"]) == ("small", "ok")
    assert answer["estimate"] == schema.to_dict(training.estimate(query=schema.parse_query(query)))
    assert answer["estimate"]["parallel"]["data_parallel_size"] == 1


def test_what_is_illegal_is_an_answer_not_an_error(http: TestClient, query: Query) -> None:
    query["cluster"]["num_gpus"] = 3
    query["parallel"] = {"tensor_parallel_size": 3}
    response = http.post("/v1/estimates", json=query)
    assert response.status_code == 200
    assert response.json()["estimate"]["feasible"] is False
    assert "heads_not_divisible" in [
        reason["code"] for reason in response.json()["estimate"]["reasons"]
    ]


def test_recommendations_are_ranked_and_limited(http: TestClient, query: Query) -> None:
    answer = http.post("/v1/recommendations", params={"top": 3}, json=query).json()
    assert answer["status"] == "ok"
    assert [row["rank"] for row in answer["recommendations"]] == [1, 2, 3]
    steps = [row["estimate"]["time"]["step_s"] for row in answer["recommendations"]]
    assert steps == sorted(steps)
    assert answer["space"]["feasible"] >= 3
    again = http.post(
        "/v1/estimates", json=query | {"parallel": answer["recommendations"][0]["parallel"]}
    ).json()
    assert again["estimate"]["time"]["step_s"] == pytest.approx(steps[0])


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"modle": "x"}, "unknown_key", "modle"),
        ({"model": "gpt3-176b"}, "not_found", "model"),
        ({"model": "/etc/passwd.json"}, "invalid_input", "model"),
        ({"model": "../secret/config.json"}, "invalid_input", "model"),
        (
            {"trainer": {"command": ["rm", "-rf", "/"], "reader": "megatron-lm"}},
            "unsupported",
            "trainer.command",
        ),
        (
            {"training": {"sequence_length": "128", "global_batch_size": 8}},
            "invalid_value",
            "training.sequence_length",
        ),
        ({"cluster": {"gpu": "h1000", "num_gpus": 2}}, "not_found", "cluster.gpu"),
    ],
)
def test_bad_input_is_422_with_code_and_field(
    http: TestClient, query: Query, change: Query, code: str, field: str
) -> None:
    for path in ("/v1/estimates", "/v1/recommendations", "/v1/searches"):
        response = http.post(path, json=query | change)
        assert response.status_code == 422, response.text
        assert response.headers["content-type"] == MEDIA_TYPE
        assert (response.json()["code"], response.json()["field"]) == (code, field)


def test_what_is_no_json_is_422(http: TestClient) -> None:
    for content in (b"", b"{", b"\xff\xfe", b"[1]", b"[" * 5000):
        assert http.post("/v1/estimates", content=content).status_code == 422


def test_a_wrong_parameter_names_itself(http: TestClient, query: Query) -> None:
    response = http.post("/v1/recommendations", params={"top": 0}, json=query)
    assert response.status_code == 422
    assert response.json()["field"] == "top"


def test_a_batch_answers_in_order_and_a_bad_line_harms_only_itself(
    http: TestClient, query: Query
) -> None:
    lines = [
        json.dumps(query | {"id": "a"}),
        json.dumps(query | {"id": "b", "modle": 1}),
        "no json",
        json.dumps({"id": "long", "x": "x" * 30_000}),
        "",
        json.dumps(query | {"id": "c", "parallel": {"pipeline_parallel_size": 2}}),
    ]
    response = http.post("/v1/batch", content="\n".join(lines))
    assert response.headers["content-type"] == "application/x-ndjson"
    answers = [json.loads(line) for line in response.text.splitlines()]
    assert [(answer["id"], answer["status"]) for answer in answers] == [
        ("a", "ok"),
        ("b", "error"),
        (None, "error"),
        (None, "error"),
        ("c", "ok"),
    ]
    assert answers[1]["error"] == {
        "code": "unknown_key",
        "message": answers[1]["error"]["message"],
        "field": "modle",
    }
    assert answers[3]["error"]["code"] == "payload_too_large"
    assert answers[4]["estimate"]["parallel"]["pipeline_parallel_size"] == 2


def test_a_batch_of_recommendations(http: TestClient, query: Query) -> None:
    content = (json.dumps(query) + "\n") * 3
    response = http.post("/v1/batch", params={"task": "recommend", "top": 2}, content=content)
    answers = [json.loads(line) for line in response.text.splitlines()]
    assert [len(answer["recommendations"]) for answer in answers] == [2, 2, 2]


def test_a_bug_on_one_line_stays_on_it(
    http: TestClient, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hp_tool.questions import answers as lines

    honest = lines.problem_of

    def broken(query: Any, **resolved: Any) -> Any:
        if query.id == "bug":
            raise ZeroDivisionError("secret")
        return honest(query, **resolved)

    monkeypatch.setattr(lines, "problem_of", broken)
    content = "\n".join(json.dumps(query | {"id": name}) for name in ("a", "bug", "c"))
    answers = [
        json.loads(line) for line in http.post("/v1/batch", content=content).text.splitlines()
    ]
    assert [answer["status"] for answer in answers] == ["ok", "error", "ok"]
    assert answers[1]["error"]["code"] == "internal"
    assert "secret" not in json.dumps(answers[1])


def test_the_catalogue_is_listed(http: TestClient) -> None:
    assert "gpt3-175b" in [row["name"] for row in http.get("/v1/models").json()["items"]]
    assert {"h100-sxm-80gb", "cpu"} <= {row["name"] for row in http.get("/v1/gpus").json()["items"]}
    assert all(row["gpus_per_node"] for row in http.get("/v1/clusters").json()["items"])


def test_the_api_description_is_complete(http: TestClient) -> None:
    description = http.get("/openapi.json").json()
    schemas = description["components"]["schemas"]
    assert schemas["Query-Input"]["properties"]["model"]

    def references(node: Any) -> set[str]:
        if isinstance(node, dict):
            own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
            return own.union(*(references(child) for child in node.values())) if node else own
        return (
            set().union(*(references(child) for child in node)) if isinstance(node, list) else set()
        )

    for reference in references(description):
        assert reference.removeprefix("#/components/schemas/") in schemas
    paths = {(method, path) for path, item in description["paths"].items() for method in item}
    for wanted in [
        ("post", "/v1/estimates"),
        ("post", "/v1/recommendations"),
        ("post", "/v1/batch"),
        ("post", "/v1/searches"),
        ("get", "/v1/searches"),
        ("get", "/v1/searches/{search_id}"),
        ("get", "/v1/searches/{search_id}/trials"),
        ("get", "/v1/searches/{search_id}/events"),
        ("get", "/v1/searches/{search_id}/result"),
        ("post", "/v1/measurements"),
        ("get", "/v1/measurements"),
        ("get", "/healthz"),
        ("get", "/readyz"),
    ]:
        assert wanted in paths


def test_a_parameter_of_several_kinds_names_all_of_them(
    shared_http: TestClient, query: Query
) -> None:
    problem = shared_http.post("/v1/recommendations", params={"pareto": "speed"}, json=query).json()
    assert problem["field"] == "pareto"
    assert all(word in problem["detail"] for word in ("memory", "gpus", "throughput"))


def test_lists_of_what_is_trained_are_ranked_and_declared(
    shared_http: TestClient, query: Query
) -> None:
    query["training"]["gradient_precision"] = ["fp32", "bf16"]
    answer = shared_http.post("/v1/recommendations", params={"top": 1}, json=query).json()
    assert answer["recommendations"][0]["estimate"]["provenance"]["assumed"][
        "training.gradient_precision"
    ] in ("fp32", "bf16")
    refused = shared_http.post("/v1/estimates", json=query)
    assert (refused.status_code, refused.json()["field"]) == (422, "training.gradient_precision")
    schemas = shared_http.get("/openapi.json").json()["components"]["schemas"]
    declared = schemas["TrainingWorkload-Input"]["properties"]["gradient_precision"]
    assert "array" in [branch.get("type") for branch in declared["oneOf"]]


def test_a_body_where_none_is_read_is_refused(shared_http: TestClient) -> None:
    assert shared_http.post("/v1/calibrations", json={"gpu": "h100-sxm-80gb"}).status_code == 422
    assert shared_http.post("/v1/calibrations", json={}).status_code == 201
