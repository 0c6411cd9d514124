"""What an operator sees: ids, logs, metrics, the audit log, and what readiness says is wrong."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from hp_tool.domain.access import Scope
from hp_tool.domain.measurement import Measurement
from hp_tool.errors import StoreError
from hp_tool.store import SqlStore
from service import keys, logs
from service.app import create_app
from service.settings import Settings
from tests.service.coordinator import claim, one_run

OPERATOR = {"Authorization": "Bearer the operator's key"}


@pytest.fixture
def app(store: SqlStore) -> FastAPI:
    return create_app(Settings(api_key="the operator's key"), store=store)


@pytest.fixture
def http(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        yield client


def samples(http: TestClient) -> dict[tuple[str, ...], float]:
    """Every sample by its name and label values; the exposition must parse."""
    families = text_string_to_metric_families(http.get("/metrics", headers=OPERATOR).text)
    return {
        (each.name, *each.labels.values()): each.value
        for family in families
        for each in family.samples
    }


def test_a_request_id_comes_back_and_is_made_where_none_is_sound(http: TestClient) -> None:
    assert (
        http.get("/healthz", headers={"X-Request-ID": "step-7.a_b"}).headers["x-request-id"]
        == "step-7.a_b"
    )
    for unsound in ("", "a b", "x" * 65, '{"a": 1}', "a\tb"):
        made = http.get("/healthz", headers={"X-Request-ID": unsound}).headers["x-request-id"]
        assert made != unsound
        assert len(made) == 16
    assert http.get("/v1/searches").headers["x-request-id"]  # what the gate refuses has one too


def test_a_bug_is_logged_under_the_id_its_answer_names(
    app: FastAPI, http: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    @app.get("/bug")
    def bug() -> None:
        raise RuntimeError("inside")

    with caplog.at_level(logging.INFO, logger="service"):
        answer = http.get("/bug", headers=OPERATOR | {"X-Request-ID": "r1"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "r1")
    assert "request r1" in answer.json()["detail"]
    assert "inside" not in answer.text
    assert any(record.exc_info and "Unhandled error" in record.message for record in caplog.records)


def test_log_lines_are_json_and_know_request_and_search() -> None:
    record = logging.makeLogRecord(
        {"msg": "%s done", "args": ("it",), "levelname": "INFO", "name": "service", "status": 200}
    )
    with logs.log_context(request="r1", search="s1"):
        line = json.loads(logs.JsonLines().format(record))
    assert (
        line.items()
        >= {
            "message": "it done",
            "request_id": "r1",
            "search_id": "s1",
            "status": 200,
            "level": "info",
        }.items()
    )
    forged = logging.makeLogRecord({"msg": "a\n2026 INFO forged"})
    assert "\n" not in logs.JsonLines().format(forged)
    assert "request_id" not in json.loads(logs.JsonLines().format(record))


def test_nothing_in_a_message_forges_a_line_of_text() -> None:
    for made in ("a\n2026 INFO forged", "a\r\x1b[2Kforged", "a\u202egnp.exe", "a\u2028forged"):
        line = logs.Text().format(logging.makeLogRecord({"msg": "GET %s", "args": (made,)}))
        assert line.isprintable() and "GET a\\" in line
    try:
        raise ValueError("inside")
    except ValueError:
        failed = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    assert len(logs.Text().format(failed).splitlines()) > 3  # a traceback keeps its lines


def test_metrics_tell_of_requests_queue_runs_and_prediction_error(
    http: TestClient, store: SqlStore, query: dict[str, Any]
) -> None:
    found = http.post("/v1/searches", json=query, headers=OPERATOR)
    path = found.headers["location"]
    for suffix in ("", "/trials", "/nothing"):
        http.get(path + suffix, headers=OPERATOR)
    seen = samples(http)
    assert seen["hp_http_requests_total", "POST", "/v1/searches", "202"] == 1
    assert seen["hp_http_requests_total", "GET", "/v1/searches/{search_id}", "200"] == 1
    assert seen["hp_http_request_seconds_count", "GET", "/v1/searches/{search_id}/trials"] == 1
    assert (seen["hp_searches", "queued"], seen["hp_queue_oldest_seconds",] > 0) == (1, True)
    lease = claim(store, path.rsplit("/", 1)[1])
    one_run(store, lease, Measurement(status="ok", step_s=0.4))  # predicted: 0.5
    seen = samples(http)
    assert seen["hp_gpu_seconds_total",] == 12.0
    assert seen["hp_runs", "finished"] == 1
    assert seen["hp_prediction_error_ratio", "profile"] == pytest.approx(0.2)
    assert seen["hp_prediction_bias_ratio", "profile"] == pytest.approx(-0.2)
    assert ("hp_prediction_error_ratio", "reported") not in seen


def test_metrics_outlive_the_database(
    http: TestClient, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert samples(http)["hp_database_up",] == 1

    def away() -> None:
        raise StoreError("database away")

    monkeypatch.setattr(store, "usage", away)
    seen = samples(http)
    assert seen["hp_database_up",] == 0
    assert seen["hp_http_requests_total", "GET", "/metrics", "200"] == 1


def test_the_audit_log_tells_who_changed_what_and_who_was_refused(
    http: TestClient, store: SqlStore, query: dict[str, Any]
) -> None:
    record, token = keys.issue(store=store, owner="ada", scope=Scope.SUBMIT)
    ada = {"Authorization": f"Bearer {token}"}
    path = http.post("/v1/searches", json=query, headers=ada | {"X-Request-ID": "r1"}).headers[
        "location"
    ]
    http.post("/v1/estimates", json=query, headers=ada)  # changes nothing
    http.get(path, headers=ada)
    http.post(f"{path}/cancel", headers=ada)
    http.get("/v1/keys", headers=ada)
    http.post(
        "/v1/searches", json=query
    )  # a stranger: in the log, not in the table, which strangers could fill
    made = http.post("/v1/keys", json={"owner": "bob", "scope": "read"}, headers=OPERATOR).headers[
        "location"
    ]
    rows: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = http.get(
            "/v1/audit",
            params={"limit": 2} | ({"cursor": cursor} if cursor else {}),
            headers=OPERATOR,
        ).json()
        rows += page["items"]
        if (cursor := page["next_cursor"]) is None:
            break
    told = [
        (row["owner"], row["action"], row["resource"], row["outcome"]) for row in reversed(rows)
    ]
    assert told == [
        ("ada", "POST /v1/searches", path, "202"),
        ("ada", "POST /v1/searches/{search_id}/cancel", f"{path}/cancel", "200"),
        ("ada", "GET /v1/keys", "/v1/keys", "403"),
        (None, "POST /v1/keys", made, "201"),
    ]
    assert (rows[-1]["api_key_id"], rows[-1]["request_id"]) == (record.id, "r1")
    assert (
        len(http.get("/v1/audit", params={"owner": "ada"}, headers=OPERATOR).json()["items"]) == 3
    )


def test_readiness_tells_what_is_wrong(
    http: TestClient, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = http.get("/readyz").json()
    assert ready["status"] == "ok"
    assert {check["name"]: check["status"] for check in ready["checks"]} == {
        "schema": "ok",
        "clock": "ok",
    }
    old = replace(store.state(), revision="0001", read_only=True)
    monkeypatch.setattr(store, "state", lambda: old)
    answer = http.get("/readyz")
    assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
    assert "hp-tool db upgrade" in answer.json()["detail"]
    assert "is read-only" in answer.json()["detail"]
    full = replace(old, revision=old.needed_revision, read_only=False, free_bytes=2**20)
    monkeypatch.setattr(store, "state", lambda: full)
    answer = http.get("/readyz")
    assert (
        answer.status_code == 503
        and "1 MiB free on the database's disk: free some space" in answer.json()["detail"]
    )
    newer = replace(old, revision="9999", read_only=False)  # another host was updated first
    monkeypatch.setattr(store, "state", lambda: newer)
    assert http.get("/readyz").status_code == 200
    assert http.get("/healthz").status_code == 200
