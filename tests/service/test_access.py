"""Who may do what: every route under every kind of key, and one user's searches before another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from hp_tool.domain.access import Scope
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.states import SearchState
from hp_tool.errors import InputError, LimitError
from hp_tool.store import SqlStore
from service import keys
from service.app import create_app
from service.client import Client
from service.clients.retries import MAX_ATTEMPTS, MAX_RETRY_AFTER_S, RetryTransport
from service.http.routes import OPEN_PATHS
from service.http.security import BURST_S, RateLimits
from service.settings import Settings
from tests.service.coordinator import claim, one_run
from tests.service.routes import every_route

OPERATOR = "the operator's key"
CHANGING = {"POST", "PUT", "PATCH", "DELETE"}


@pytest.fixture
def app(store: SqlStore) -> FastAPI:
    settings = Settings(
        api_key=OPERATOR, max_body_bytes=200_000, poll_s=0.02, wrong_keys_per_second=1e4
    )
    return create_app(settings, store=store)


@pytest.fixture
def http(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client


def key(store: SqlStore, scope: Scope, *, owner: str = "ada", **limits: float) -> dict[str, str]:
    """The headers of a new key's owner."""
    return {
        "Authorization": f"Bearer {keys.issue(store=store, owner=owner, scope=scope, **limits)[1]}"
    }


def addresses(app: FastAPI) -> list[tuple[str, str]]:
    """(method, path) of every route, with ids that name nothing."""
    nothing = dict.fromkeys(
        ("search_id", "key_id", "name", "run_id", "measurement_id", "watch_id"), "nope"
    ) | {"action": "cancel"}
    return [(address.method, address.at(**nothing)) for address in every_route(app)]


def test_no_route_answers_without_a_valid_key(
    app: FastAPI, http: TestClient, store: SqlStore
) -> None:
    wrong = key(store, Scope.ADMIN)["Authorization"][:-1]
    refused = {
        None: "unauthorized",
        "Bearer wrong": "unauthorized",
        f"Bearer hp_{'0' * 16}_{'x' * 43}": "unauthorized",
        wrong + ("x" if not wrong.endswith("x") else "y"): "unauthorized",
    }
    expired, token = keys.issue(store=store, owner="ada", scope=Scope.ADMIN, lifetime_s=1e-6)
    assert expired.expires_at is not None
    assert expired.expires_at - datetime.now(UTC) < timedelta(seconds=1)
    refused[f"Bearer {token}"] = "key_expired"
    revoked, token = keys.issue(store=store, owner="ada", scope=Scope.ADMIN)
    store.revoke_key(key_id=revoked.id)
    refused[f"Bearer {token}"] = "key_revoked"
    routes = addresses(app)
    assert len(routes) > 75
    for method, path in routes:
        if path in OPEN_PATHS:
            assert http.request(method, path).status_code == 200
            continue
        for authorization, code in refused.items():
            answer = http.request(
                method, path, headers={"Authorization": authorization} if authorization else {}
            )
            assert (answer.status_code, answer.json()["code"]) == (401, code), (
                method,
                path,
                authorization,
            )
            assert answer.headers["www-authenticate"].startswith("Basic")


def test_a_reading_key_changes_nothing_and_only_administrators_administer(
    app: FastAPI, http: TestClient, store: SqlStore
) -> None:
    reading, submitting = key(store, Scope.READ), key(store, Scope.SUBMIT)
    computing = {
        "/v1/estimates",
        "/v1/recommendations",
        "/v1/batch",
        "/v1/exports",
        "/v1/imports",
        "/v1/sizings",
        "/v1/plans",
    }
    computing |= {
        "/v1/explanations",
        "/v1/lost-nodes",
        "/explain",
    }
    computing |= {"/mcp"}  # tools meet the scopes of what they ask
    for method, path in addresses(app):
        administration = path.startswith(("/v1/keys", "/v1/audit", "/keys", "/audit"))
        forbidden = administration or (method in CHANGING and path not in computing)
        answer = http.request(method, path, headers=reading)
        assert (answer.status_code == 403) is forbidden, (method, path, answer.text)
        if forbidden:
            assert answer.json()["code"] == "forbidden"
            submitted = http.request(method, path, headers=submitting)
            assert (submitted.status_code == 403) is administration, (method, path)
        assert answer.status_code < 500


def test_a_search_is_its_owners_and_the_administrators(
    http: TestClient, store: SqlStore, query: dict[str, Any]
) -> None:
    ada, bob, admin = (
        key(store, Scope.SUBMIT),
        key(store, Scope.SUBMIT, owner="bob"),
        key(store, Scope.ADMIN, owner="eve"),
    )
    path = http.post("/v1/searches", json=query, headers=ada).headers["location"]
    search_id = path.rsplit("/", 1)[1]
    one_run(store, claim(store, search_id), Measurement(status="ok", step_s=0.4))

    for listing in ("/v1/searches", "/v1/measurements", f"/v1/measurements?search_id={search_id}"):
        assert http.get(listing, headers=bob).json()["items"] == [], listing
        assert len(http.get(listing, headers=ada).json()["items"]) == 1, listing
        assert len(http.get(listing, headers=admin).json()["items"]) == 1, listing
    assert http.get("/searches.json", headers=bob).json()["rows"] == []

    assert (
        http.get(path, headers=ada | key(store, Scope.READ)).status_code == 200
    )  # the same owner's other key
    assert http.post(f"{path}/cancel", headers=admin).json()["requested"] == "cancel"
    assert store.get_search(search_id=search_id).owner == "ada"
    assert store.measurements(owner="ada").items[0].search_id == search_id


def test_keys_are_made_listed_and_revoked_over_http(http: TestClient, store: SqlStore) -> None:
    operator = {"Authorization": f"Bearer {OPERATOR}"}
    made = http.post(
        "/v1/keys", json={"owner": "ada", "scope": "submit", "lifetime_s": 3600}, headers=operator
    )
    assert made.status_code == 201
    token, key_id = made.json()["token"], made.json()["key"]["id"]
    mine = {"Authorization": f"Bearer {token}"}
    assert http.get("/v1/searches", headers=mine).status_code == 200
    secret = token.rsplit(key_id + "_", 1)[1]
    assert secret not in http.get("/v1/keys", headers=operator).text
    assert store.get_key(key_id=key_id).secret_sha256 != secret
    assert http.delete(f"/v1/keys/{key_id}", headers=operator).json()["revoked_at"] is not None
    answer = http.get(
        "/v1/searches", headers=mine
    )  # at once, though it was remembered a moment ago
    assert (answer.status_code, answer.json()["code"]) == (401, "key_revoked")
    for wrong in (
        {"owner": "", "scope": "read"},
        {"owner": "a", "scope": "root"},
        {"owner": "a" * 300, "scope": "read"},
    ):
        assert http.post("/v1/keys", json=wrong, headers=operator).status_code == 422
    assert http.delete("/v1/keys/nope", headers=operator).status_code == 404


def test_a_key_that_asks_too_often_is_told_when_to_come_back(
    http: TestClient, store: SqlStore
) -> None:
    slow, other = key(store, Scope.READ, requests_per_second=0.001), key(store, Scope.READ)
    answers = [http.get("/v1/searches", headers=slow) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert answers[1].json()["code"] == "rate_limited"
    assert 900 < int(answers[1].headers["retry-after"]) <= 1000
    assert http.get("/v1/searches", headers=other).status_code == 200


def test_a_bucket_refills_at_its_rate() -> None:
    now = 0.0
    rates = RateLimits(clock=lambda: now)

    def taken() -> int:
        count = 0
        while True:
            try:
                rates.take("k", per_second=4.0)
            except LimitError as error:
                assert 0 < error.retry_after_s <= 0.25
                return count
            count += 1

    assert taken() == 4 * BURST_S
    now = 1.0
    assert taken() == 4
    now = 1000.0
    assert taken() == 4 * BURST_S


def test_gpu_seconds_of_a_day_are_promised_before_they_are_spent(
    http: TestClient, store: SqlStore, query: dict[str, Any]
) -> None:
    ada = key(store, Scope.SUBMIT, gpu_seconds_per_day=100.0)

    def submit(budget: float | None) -> Any:
        search = query["search"] | ({} if budget is None else {"budget_gpu_seconds": budget})
        return http.post("/v1/searches", json=query | {"search": search}, headers=ada)

    answer = submit(101.0)
    assert (answer.status_code, answer.json()["code"]) == (422, "gpu_seconds_ceiling")
    first = submit(60.0).json()
    answer = submit(None)  # it may use all of the day's, and so does not fit beside the first
    assert (answer.status_code, answer.json()["code"]) == (429, "quota_exhausted")
    assert answer.json()["field"] == "search.budget_gpu_seconds"
    assert 0 < int(answer.headers["retry-after"]) <= 86_400
    assert submit(40.0).status_code == 202
    lease = claim(store, first["id"])
    one_run(store, lease, Measurement(status="ok", step_s=0.4))
    http.post(f"/v1/searches/{first['id']}/cancel", headers=ada)
    spent = sum(run.gpu_seconds or 0.0 for run in store.runs(search_id=first["id"]))
    assert spent > 0
    operator = {"Authorization": f"Bearer {OPERATOR}"}
    key_id = store.get_search(search_id=first["id"]).api_key_id
    assert http.get(f"/v1/keys/{key_id}", headers=operator).json()["gpu_seconds_today"] == 100.0
    store.finish_search(
        lease=lease, state=SearchState.CANCELLED
    )  # what it did not spend is free again
    assert http.get(f"/v1/keys/{key_id}", headers=operator).json()[
        "gpu_seconds_today"
    ] == pytest.approx(40.0 + spent)
    assert http.post(f"/v1/searches/{first['id']}/clone", headers=ada).status_code == 429
    assert submit(60.0 - spent).status_code == 202


def test_a_ceiling_of_the_service_becomes_a_budget(store: SqlStore, query: dict[str, Any]) -> None:
    settings = Settings(max_gpu_seconds_per_search=50.0, max_gpu_seconds_per_day=80.0)
    with TestClient(create_app(settings, store=store), base_url="http://127.0.0.1:8000") as http:
        assert (
            http.post("/v1/searches", json=query).json()["query"]["search"]["budget_gpu_seconds"]
            == 50.0
        )
        answer = http.post("/v1/searches", json=query)
        assert (answer.status_code, answer.json()["code"]) == (429, "quota_exhausted")


def test_the_client_waits_for_a_rate_and_not_for_a_quota(
    app: FastAPI, store: SqlStore, query: dict[str, Any]
) -> None:
    waited: list[float] = []

    def server(request: httpx.Request) -> httpx.Response:
        if not waited:
            return httpx.Response(429, headers={"Retry-After": "2"})
        wait = "3600" if request.url.path == "/quota" else "2"
        return httpx.Response(
            200 if request.url.path == "/rate" else 429, headers={"Retry-After": wait}
        )

    with httpx.Client(
        transport=RetryTransport(httpx.MockTransport(server), sleep=waited.append),
        base_url="http://x",
    ) as patient:
        assert patient.get("/rate").status_code == 200
        assert waited == [2.0]
        assert patient.get("/quota").status_code == 429
        assert waited == [2.0]
        assert patient.get("/crowded").status_code == 429  # in the end it gives up
        assert waited == [2.0] * MAX_ATTEMPTS

    def through_app(request: httpx.Request) -> httpx.Response:
        headers = {name: value for name, value in request.headers.items() if name != "host"}
        with TestClient(app, base_url="http://127.0.0.1:8000") as http:
            answer = http.request(
                request.method, request.url.path, content=request.content, headers=headers
            )
        return httpx.Response(
            answer.status_code, headers=dict(answer.headers), content=answer.content
        )

    token = keys.issue(store=store, owner="ada", scope=Scope.SUBMIT, gpu_seconds_per_day=10.0)[1]
    with Client(
        server="http://x", api_key=token, transport=httpx.MockTransport(through_app)
    ) as client:
        client.submit_search(query=query)
        with pytest.raises(LimitError) as caught:
            client.submit_search(query=query)
        assert (caught.value.code, caught.value.retry_after_s > MAX_RETRY_AFTER_S) == (
            "quota_exhausted",
            True,
        )
    with (
        Client(
            server="http://x", api_key="wrong", transport=httpx.MockTransport(through_app)
        ) as stranger,
        pytest.raises(InputError, match="Bearer") as refused,
    ):
        stranger.searches()
    assert refused.value.code == "unauthorized"


HOSTILE_NAMES = (
    "../../etc/passwd",
    "/etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "config.json",
    "C:\\windows\\x.json",
    "gpt\0-22b",
    "{{7*7}}",
    "{% include '/etc/passwd' %}",
    "${HOME}",
    "$(id)",
    "`id`; rm -rf /",
    "<script>alert(1)</script>",
)


def test_a_name_is_a_name_and_nothing_else(
    http: TestClient, store: SqlStore, query: dict[str, Any]
) -> None:
    """Neither a path, nor a template, nor a command, wherever a stranger may write one."""
    mine = key(store, Scope.SUBMIT)
    for name in HOSTILE_NAMES:
        attempt(http, query, mine, name)


def attempt(http: TestClient, query: dict[str, Any], mine: dict[str, str], name: str) -> None:
    """A stranger writes a name wherever one may stand."""
    for where in ({"model": name}, {"cluster": name}, {"cluster": {"gpu": name, "num_gpus": 2}}):
        answer = http.post("/v1/estimates", json=query | where, headers=mine)
        assert answer.status_code == 422, (where, answer.text)
        assert "root:" not in answer.text
    quoted = quote(name, safe="")
    for path in (
        f"/v1/searches/{quoted}",
        f"/searches/{quoted}",
        f"/searches/{quoted}.json",
        f"/static/{quoted}",
    ):
        assert http.get(path, headers=mine).status_code in (404, 405), (
            path
        )  # 405: with its slash it is another route
    # As a query's own id and a model's own name it is stored, shown as text, and never evaluated.
    answer = http.post(
        "/v1/searches",
        json=query | {"id": name, "model": query["model"] | {"name": name}},
        headers=mine,
    )
    if answer.status_code == 202:
        page = http.get(answer.headers["location"].removeprefix("/v1"), headers=mine)
        assert page.status_code == 200
        assert "<script>alert" not in page.text
        assert ">49<" not in page.text
        assert "root:" not in page.text
    else:
        assert answer.status_code == 422


def test_bodies_too_deep_or_too_large_are_refused(http: TestClient, store: SqlStore) -> None:
    mine = key(store, Scope.ADMIN)
    deep = (b"[" * 50_000, b'{"a":' * 10_000, b'{"id": ' + b"[" * 500 + b"]" * 500 + b"}")
    for path in (
        "/v1/estimates",
        "/v1/recommendations",
        "/v1/searches",
        "/v1/measurements",
        "/v1/keys",
        "/v1/exports",
    ):
        for content in deep:
            answer = http.post(path, content=content, headers=mine)
            assert (answer.status_code, answer.headers["content-type"]) == (
                422,
                "application/problem+json",
            ), (
                path,
                answer.text,
            )
        answer = http.post(path, content=b" " * 200_001, headers=mine)
        assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large"), path
    line = http.post("/v1/batch", content=b"[" * 50_000 + b"\n{}\n", headers=mine)
    assert [json.loads(text)["status"] for text in line.text.splitlines()] == ["error", "error"]
