"""Registered models and clusters: usable by name, one's own before everybody's, and never
another's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hp_tool.domain.access import Scope
from hp_tool.store import SqlStore
from service.app import create_app
from service.settings import Settings
from tests.service.test_access import OPERATOR, key

MODEL = {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 1024}
LAB = {
    "gpu": "h100-sxm-80gb",
    "gpus_per_node": 8,
    "inter_node_bandwidth_bytes_per_second": 25e9,
    "fabric": "1 x 200 Gb/s",
    "price_per_gpu_hour": 1.5,
    "num_gpus": 64,
}
TRACE = {"arrival_s": [0.0, 0.4], "input_tokens": [812, 77], "output_tokens": [120, 64]}
Headers = dict[str, str]


@pytest.fixture
def http(store: SqlStore) -> Iterator[TestClient]:
    app = create_app(Settings(api_key=OPERATOR, poll_s=0.02), store=store)
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client


@pytest.fixture
def ada(store: SqlStore) -> Headers:
    return key(store, Scope.SUBMIT)


@pytest.fixture
def bob(store: SqlStore) -> Headers:
    return key(store, Scope.SUBMIT, owner="bob")


def of_model(query: dict[str, Any], name: str) -> dict[str, Any]:
    return query | {"model": name}


def test_a_registered_model_is_what_its_fields_are(
    http: TestClient, ada: Headers, bob: Headers, query: dict[str, Any]
) -> None:
    made = http.post("/v1/models", json={"name": "mine", "spec": MODEL}, headers=ada)
    assert (made.status_code, made.json()["owner"]) == (201, "ada")
    written_out = http.post(
        "/v1/estimates", json=of_model(query, "") | {"model": {"name": "mine"} | MODEL}, headers=ada
    )
    for name in ("mine", "Mine"):
        assert (
            http.post("/v1/estimates", json=of_model(query, name), headers=ada).json()
            == written_out.json()
        )
    line = json.dumps(of_model(query, "mine")).encode()
    assert json.loads(http.post("/v1/batch", content=line, headers=ada).text)["status"] == "ok"
    assert (
        http.post("/v1/recommendations", json=of_model(query, "mine"), headers=ada).status_code
        == 200
    )
    report = {
        "query": of_model(query, "mine"),
        "parallel": {},
        "measurement": {"status": "ok", "step_s": 0.5},
    }
    assert http.post("/v1/measurements", json=report, headers=ada).json()["model"] == "mine"
    sized = http.post(
        "/v1/sizings", json={"model": "mine", "cluster": query["cluster"], "days": 1.0}, headers=ada
    )
    assert sized.status_code == 200, sized.text
    assert http.get("/v1/models/mine", headers=ada).json()["hidden_size"] == 128
    assert "mine" in [each["name"] for each in http.get("/v1/models", headers=ada).json()["items"]]

    answer = http.post("/v1/estimates", json=of_model(query, "mine"), headers=bob)
    assert (answer.status_code, answer.json()["field"]) == (422, "model")
    assert http.get("/v1/models/mine", headers=bob).status_code == 404
    assert http.get("/v1/models", headers=bob).json()["registered"] == []
    assert http.delete("/v1/models/mine", headers=bob).status_code == 404
    assert http.delete("/v1/models/mine", headers=ada).status_code == 204
    assert http.post("/v1/estimates", json=of_model(query, "mine"), headers=ada).status_code == 422


@pytest.mark.parametrize(
    ("kind", "spec"), [("models", MODEL), ("clusters", LAB), ("traces", TRACE), ("gpus", None)]
)
def test_lists_of_names_come_in_pages(
    http: TestClient, ada: Headers, kind: str, spec: dict[str, Any] | None
) -> None:
    for name in ("zz-one", "zz-two", "zz-three") if spec else ():
        assert (
            http.post(f"/v1/{kind}", json={"name": name, "spec": spec}, headers=ada).status_code
            == 201
        )
    whole = http.get(f"/v1/{kind}", headers=ada).json()
    assert whole["next_cursor"] is None
    pages, cursor = [], "gb" if kind == "gpus" else "zz"
    while cursor is not None:
        pages.append(
            http.get(f"/v1/{kind}", params={"limit": 2, "cursor": cursor}, headers=ada).json()
        )
        cursor = pages[-1]["next_cursor"]
    paged = [each for page in pages for each in page["items"]]
    assert len(pages) > 1 and len(paged) >= 3 and paged == whole["items"][-len(paged) :]
    assert [each["name"] for page in pages for each in page["registered"]] == [
        each["name"] for each in whole["registered"]
    ]
    refused = http.get(f"/v1/{kind}", params={"limit": 0}, headers=ada)
    assert (refused.status_code, refused.json()["field"]) == (422, "limit")


def test_a_submitted_search_keeps_what_its_names_meant(
    http: TestClient, ada: Headers, query: dict[str, Any]
) -> None:
    http.post("/v1/models", json={"name": "mine", "spec": MODEL}, headers=ada)
    stored = http.post("/v1/searches", json=of_model(query, "mine"), headers=ada).json()["query"]
    assert stored["model"] == {"name": "mine"} | MODEL


def test_a_report_sent_again_is_the_one_that_was_stored_whatever_its_names_mean_by_now(
    http: TestClient, ada: Headers, query: dict[str, Any]
) -> None:
    http.post("/v1/models", json={"name": "mine", "spec": MODEL}, headers=ada)
    report = {
        "query": of_model(query, "mine"),
        "parallel": {},
        "measurement": {"status": "ok", "step_s": 0.5},
    }
    keyed = ada | {"Idempotency-Key": "k"}
    first = http.post("/v1/measurements", json=report, headers=keyed).json()
    listed = http.post("/v1/measurements", json=[report], headers=keyed).json()["stored"]
    http.post(
        "/v1/models", json={"name": "mine", "spec": MODEL | {"hidden_size": 256}}, headers=ada
    )
    for _ in range(2):
        assert http.post("/v1/measurements", json=report, headers=keyed).json() == first
        assert (
            http.post("/v1/measurements", json=[report], headers=keyed).json()["stored"] == listed
        )
        http.delete("/v1/models/mine", headers=ada)
    other = report | {"measurement": {"status": "ok", "step_s": 0.6}}
    assert (
        http.post("/v1/measurements", json=other, headers=keyed).json()["code"]
        == "idempotency_key_reused"
    )


@pytest.mark.parametrize(
    "cluster",
    ["lab", {"node_type": "lab"}, {"node_type": "lab", "num_gpus": 64, "gpus_per_node": 8}],
)
def test_a_registered_cluster_is_what_its_fields_are(
    http: TestClient, ada: Headers, query: dict[str, Any], cluster: Any
) -> None:
    http.post("/v1/clusters", json={"name": "lab", "spec": LAB}, headers=ada)
    asked = query | {
        "model": "llama-3-8b",
        "training": {"sequence_length": 4096, "global_batch_size": 128, "total_tokens": 1e12},
    }
    given = http.post("/v1/recommendations", json=asked | {"cluster": cluster}, headers=ada)
    assert given.status_code == 200, given.text
    described = {name: value for name, value in LAB.items() if name != "fabric"} | {
        "name": "lab",
        "nvlink_domain_size": 8,
    }
    written_out = http.post(
        "/v1/recommendations", json=asked | {"cluster": described}, headers=ada
    ).json()
    assert given.json()["recommendations"] == written_out["recommendations"]
    assert given.json()["recommendations"][0]["estimate"]["cost"] > 0


def test_everybodys_are_the_administrators_to_change(
    http: TestClient, store: SqlStore, ada: Headers, bob: Headers
) -> None:
    operator = {"Authorization": f"Bearer {OPERATOR}"}
    eve = key(store, Scope.ADMIN, owner="eve")
    shared = {"name": "lab", "spec": LAB, "shared": True}
    assert http.post("/v1/clusters", json=shared, headers=ada).json()["code"] == "forbidden"
    assert http.post("/v1/clusters", json=shared, headers=eve).json()["owner"] is None
    assert (
        http.post("/v1/clusters", json={"name": "attic", "spec": LAB}, headers=operator).json()[
            "owner"
        ]
        is None
    )
    own = {"name": "lab", "spec": LAB | {"price_per_gpu_hour": 9.0}}
    assert http.post("/v1/clusters", json=own, headers=ada).status_code == 201
    prices = [
        http.get("/v1/clusters/lab", headers=who).json()["price_per_gpu_hour"]
        for who in (ada, bob, operator)
    ]
    assert prices == [9.0, 1.5, 1.5]
    assert [
        each["name"] for each in http.get("/v1/clusters", headers=bob).json()["registered"]
    ] == ["attic", "lab"]
    for path in ("/v1/clusters/lab?shared=true", "/v1/clusters/lab?owner=ada"):
        assert http.delete(path, headers=bob).status_code == 403
        assert http.delete(path, headers=eve).status_code == 204
    assert http.get("/v1/clusters/lab", headers=ada).status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"name": "gpt3-175b", "spec": MODEL}, 409, "name"),
        ({"name": "GPT3-175B", "spec": MODEL}, 422, "name"),
        ({"name": "mine.json", "spec": MODEL}, 422, "name"),
        ({"name": "../mine", "spec": MODEL}, 422, "name"),
        ({"name": "", "spec": MODEL}, 422, "name"),
        ({"name": "mine", "spec": MODEL | {"hidden_sise": 1}}, 422, "model.hidden_sise"),
        ({"name": "mine", "spec": MODEL | {"hidden_size": -1}}, 422, "model.hidden_size"),
        ({"name": "mine", "spec": MODEL | {"name": "yours"}}, 422, "model.name"),
        ({"name": "mine", "spec": MODEL, "owner": "bob"}, 422, "owner"),
    ],
)
def test_what_is_no_model_is_refused_with_its_field(
    http: TestClient, ada: Headers, body: dict[str, Any], status: int, field: str
) -> None:
    answer = http.post("/v1/models", json=body, headers=ada)
    assert (answer.status_code, answer.json()["field"]) == (status, field), answer.text


def test_a_cluster_of_a_gpu_that_nobody_knows_is_refused(http: TestClient, ada: Headers) -> None:
    answer = http.post(
        "/v1/clusters", json={"name": "lab", "spec": LAB | {"gpu": "h1000"}}, headers=ada
    )
    assert (answer.status_code, answer.json()["field"]) == (422, "cluster.gpu")
