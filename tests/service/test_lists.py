"""Long lists: by time, in either order, without a gap between pages; and measurements many at a time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hp_tool.store import SqlStore


def pages(http: TestClient, path: str, **given: Any) -> list[str]:
    """The ids of all items, page by page of two."""
    found: list[str] = []
    cursor: str | None = None
    while True:
        params = {"limit": 2, **given, **({"cursor": cursor} if cursor else {})}
        page = http.get(path, params=params).json()
        found += [item["id"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


def test_searches_by_order_and_time(http: TestClient, store: SqlStore, query: dict[str, Any]) -> None:
    made = [store.create_search(query=query) for _ in range(5)]
    ids = [record.id for record in made]
    assert pages(http, "/v1/searches", order="oldest") == ids
    assert pages(http, "/v1/searches") == ids[::-1]
    since, until = made[1].created_at.isoformat(), made[4].created_at.isoformat()
    assert pages(http, "/v1/searches", order="oldest", since=since, until=until) == ids[1:4]
    assert pages(http, "/v1/searches", owner="nobody") == []
    for wrong in ({"since": "2026-01-01T00:00:00"}, {"order": "random"}, {"cursor": "x"}):  # no time zone, no such order
        assert http.get("/v1/searches", params=wrong).status_code == 422


def test_measurements_in_bulk(http: TestClient, store: SqlStore, query: dict[str, Any]) -> None:
    def line(step_s: float) -> bytes:
        report = {"query": query, "parallel": {}, "measurement": {"status": "ok", "step_s": step_s}}
        return json.dumps(report).encode()

    body = b"\n".join([line(0.5), b"{}", line(-1.0), b"x" * 30_000, line(0.6)])
    answers = [
        [json.loads(text) for text in http.post("/v1/measurements/bulk", content=body, headers=headers).text.splitlines()]
        for headers in ({"Idempotency-Key": "k"}, {"Idempotency-Key": "k"}, {})
    ]
    assert [each["status"] for each in answers[0]] == ["ok", "error", "error", "error", "ok"]
    assert [each["error"]["field"] for each in answers[0][1:3]] == ["query", "measurement.step_s"]
    assert answers[0] == answers[1]
    stored = pages(http, "/v1/measurements", order="oldest")
    assert stored[:2] == [answers[0][0]["id"], answers[0][4]["id"]]
    assert len(stored) == 4


def test_an_unknown_parameter_names_its_nearest(http: TestClient) -> None:
    answer = http.get("/v1/searches", params={"ordr": "oldest"})
    assert (answer.status_code, answer.json()["code"], answer.json()["field"]) == (422, "unknown_key", "ordr")
    assert "did you mean order?" in answer.json()["detail"]
    assert http.post("/v1/recommendations", params={"tpo": 3}, json={}).json()["field"] == "tpo"


@pytest.mark.parametrize("path", ["/v1/searches", "/v1/measurements"])
def test_an_empty_list_is_a_page(http: TestClient, path: str) -> None:
    assert http.get(path, params={"order": "oldest"}).json() == {"items": [], "next_cursor": None}
