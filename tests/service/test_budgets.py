"""The budget of a search that is under way: changed, bounded, and promised before it is spent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hp_tool.domain.access import Scope
from hp_tool.store import SqlStore
from service.app import create_app
from service.settings import Settings
from tests.service.coordinator import claim, finish
from tests.service.test_access import OPERATOR, key


@pytest.fixture
def http(store: SqlStore) -> Iterator[TestClient]:
    app = create_app(Settings(api_key=OPERATOR, max_gpu_seconds_per_search=500.0), store=store)
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client


def test_a_budget_changes_until_the_end(
    http: TestClient, store: SqlStore, query: dict[str, Any]
) -> None:
    ada, bob = key(store, Scope.SUBMIT), key(store, Scope.SUBMIT, owner="bob")
    path = http.post("/v1/searches", json=query, headers=ada).headers["location"]
    changed = http.patch(path, json={"budget_runs": 9}, headers=ada)
    assert changed.status_code == 200, changed.text
    assert changed.json()["query"]["search"]["budget_runs"] == 9
    assert changed.json()["query"]["search"]["budget_gpu_seconds"] == 500.0
    assert http.patch(path, json={"budget_runs": 2}, headers=bob).status_code == 404
    for wrong, field in (
        ({"budget_runs": 0}, "budget_runs"),
        ({"runs": 3}, "runs"),
        ({"budget_gpu_seconds": -1.0}, None),
    ):
        answer = http.patch(path, json=wrong, headers=ada)
        assert (answer.status_code, answer.json()["field"]) == (
            422,
            field or "budget_gpu_seconds",
        ), answer.text
    answer = http.patch(path, json={"budget_gpu_seconds": 501.0}, headers=ada)
    assert (answer.status_code, answer.json()["code"]) == (422, "gpu_seconds_ceiling")
    finish(store, claim(store, path.rsplit("/", 1)[1]))
    answer = http.patch(path, json={"budget_runs": 3}, headers=ada)
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")


def test_more_is_held_against_the_days_quota(
    http: TestClient, store: SqlStore, query: dict[str, Any]
) -> None:
    ada = key(store, Scope.SUBMIT, gpu_seconds_per_day=100.0)
    body = query | {"search": query["search"] | {"budget_gpu_seconds": 40.0}}
    first, second = (
        http.post("/v1/searches", json=body, headers=ada).headers["location"] for _ in range(2)
    )
    answer = http.patch(first, json={"budget_gpu_seconds": 70.0}, headers=ada)
    assert (answer.status_code, answer.json()["code"]) == (429, "quota_exhausted")
    assert http.patch(second, json={"budget_gpu_seconds": 10.0}, headers=ada).status_code == 200
    assert http.patch(first, json={"budget_gpu_seconds": 70.0}, headers=ada).status_code == 200
