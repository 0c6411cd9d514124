"""Long lists: by time, in either order, without a gap between pages; and measurements many at a
time.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.store import SqlStore
from tests.service.coordinator import claim, one_run


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


def test_searches_by_order_and_time(
    http: TestClient, store: SqlStore, query: dict[str, Any]
) -> None:
    made = [store.create_search(query=query) for _ in range(5)]
    ids = [record.id for record in made]
    assert pages(http, "/v1/searches", order="oldest") == ids
    assert pages(http, "/v1/searches") == ids[::-1]
    since, until = made[1].created_at.isoformat(), made[4].created_at.isoformat()
    assert pages(http, "/v1/searches", order="oldest", since=since, until=until) == ids[1:4]
    assert pages(http, "/v1/searches", owner="nobody") == []
    assert pages(http, "/v1/searches", kind="training", model=query["model"]["name"]) == ids[::-1]
    assert (
        pages(http, "/v1/searches", kind="inference")
        == pages(http, "/v1/searches", model="none")
        == []
    )
    for wrong in (
        {"since": "2026-01-01T00:00:00"},  # no time zone
        {"since": "0.5"},  # seconds since when?
        {"until": "0001-01-01T00:00:00+14:00"},  # before the first year of UTC
        {"order": "random"},
        {"cursor": "x"},
        {"kind": "x"},
    ):
        assert http.get("/v1/searches", params=wrong).status_code == 422, wrong
    cursor = http.get("/v1/searches", params={"limit": 2}).json()["next_cursor"]
    for path, filters in (
        ("/v1/searches", {"state": "queued"}),
        ("/v1/searches", {"kind": "training"}),
        ("/v1/searches", {"order": "oldest"}),
        ("/v1/measurements", {}),
    ):
        answer = http.get(path, params=filters | {"cursor": cursor})
        assert (answer.status_code, answer.json()["field"]) == (422, "cursor"), (path, filters)


def test_measurements_in_bulk(http: TestClient, store: SqlStore, query: dict[str, Any]) -> None:
    def line(step_s: float) -> bytes:
        report = {"query": query, "parallel": {}, "measurement": {"status": "ok", "step_s": step_s}}
        return json.dumps(report).encode()

    body = b"\n".join([line(0.5), b"{}", line(-1.0), b"x" * 30_000, line(0.6)])
    answers = [
        [
            json.loads(text)
            for text in http.post(
                "/v1/measurements/bulk", content=body, headers=headers
            ).text.splitlines()
        ]
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
    assert (answer.status_code, answer.json()["code"], answer.json()["field"]) == (
        422,
        "unknown_key",
        "ordr",
    )
    assert "did you mean order?" in answer.json()["detail"]
    assert http.post("/v1/recommendations", params={"tpo": 3}, json={}).json()["field"] == "tpo"


@pytest.mark.parametrize("path", ["/v1/searches", "/v1/measurements"])
def test_an_empty_list_is_a_page(http: TestClient, path: str) -> None:
    assert http.get(path, params={"order": "oldest"}).json() == {"items": [], "next_cursor": None}


def test_trials_by_order_state_and_outcome(
    http: TestClient, store: SqlStore, query: dict[str, Any]
) -> None:
    search = http.post("/v1/searches", json=query).json()["id"]
    lease, path = claim(store, search), f"/v1/searches/{search}/trials"
    assert http.get(path).json()["trials"] == []
    for tensor, status in ((1, "ok"), (2, "oom"), (4, "ok")):
        step_s = 0.4 if status == "ok" else None
        parallel = ParallelConfig(tensor_parallel_size=tensor, sequence_parallel=tensor > 1)
        one_run(store, lease, Measurement(status=status, step_s=step_s), parallel)
    open_run = ParallelConfig(pipeline_parallel_size=2)
    store.intend_run(lease=lease, parallel=open_run, fidelity=Fidelity(), predicted={"step_s": 1.0})

    def numbers(**given: Any) -> list[int]:
        found: list[int] = []
        cursor: str | None = None
        while True:
            page = http.get(
                path, params={"limit": 2, **given, **({"cursor": cursor} if cursor else {})}
            ).json()
            assert len(page["trials"]) <= 2
            found += [trial["number"] for trial in page["trials"]]
            if (cursor := page["next_cursor"]) is None:
                return found

    assert numbers() == [0, 1, 2, 3]
    assert numbers(order="newest") == [3, 2, 1, 0]
    assert (numbers(status="ok"), numbers(status="oom"), numbers(state="intended")) == (
        [0, 2],
        [1],
        [3],
    )
    assert numbers(status="timeout") == []
    third = store.runs(search_id=search)[2].created_at.isoformat()
    assert (numbers(until=third), numbers(since=third)) == ([0, 1], [2, 3])
    whole = http.get(path).json()
    assert (len(whole["trials"]), whole["next_cursor"], whole["state"]) == (4, None, "running")
    for wrong in (
        {"status": "fine"},
        {"state": "asleep"},
        {"cursor": "x"},
        {"limit": 0},
        {"sort": "step_s"},
    ):
        assert http.get(path, params=wrong).status_code == 422, wrong
    assert http.get("/v1/searches/nope/trials").status_code == 404
