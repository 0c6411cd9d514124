"""What is one user's before another: every route there is, asked by who knows all the ids and owns
none of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from hp_tool.domain.access import Scope
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.states import SearchState
from hp_tool.store import SqlStore
from service import keys
from service.app import create_app
from service.settings import Settings, webhook_settings
from tests.service.coordinator import claim, finish, one_run
from tests.service.routes import Address, every_route

CANARY, VOCABULARY = "canary", 77_777
"""In everything that is Ada's, and in nothing that Bob sends."""
TRACE = re.compile(rf"{CANARY}|(?<![\d.]){VOCABULARY}(?!\d)")
"""A trace of hers, which the digits of a time stamp are not."""


@pytest.fixture
def app(store: SqlStore) -> FastAPI:
    webhooks = webhook_settings({"HP_WEBHOOK_SECRET": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"})
    return create_app(
        Settings(api_key="the operator's key", webhooks=webhooks, poll_s=0.02), store=store
    )


@pytest.fixture
def http(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Ada's things, which Bob may know by their names."""

    search: str
    run: str
    key: str
    measurement: str
    watch: str
    query: dict[str, Any]

    def path(self, address: Address) -> str:
        """Where a route speaks of hers. A parameter of a new kind fails here, and joins."""
        name = "cpu" if address.pattern.startswith("/gpus") else "hers"
        return address.at(
            search_id=self.search,
            run_id=self.run,
            key_id=self.key,
            name=name,
            action="clone",
            measurement_id=self.measurement,
            watch_id=self.watch,
        )

    def parameters(self, address: Address) -> dict[str, str]:
        """Whatever parameter of the query string can name something of hers."""
        named = {
            **dict.fromkeys(("search_id", "from"), self.search),
            **dict.fromkeys(("a", "b"), self.run),
            **dict.fromkeys(("query", "first", "second"), json.dumps(self.query)),
            "owner": "ada",
            "format": "megatron-lm",
        }
        return {name: value for name, value in named.items() if name in address.parameters}


def headers(store: SqlStore, owner: str) -> tuple[str, dict[str, str]]:
    record, token = keys.issue(store=store, owner=owner, scope=Scope.SUBMIT)
    return record.id, {"Authorization": f"Bearer {token}"}


def furnished(
    http: TestClient, store: SqlStore, query: dict[str, Any], *, key: str, ada: dict[str, str]
) -> Stand:
    """A search that has ended, with a webhook; a measurement, a model and a cluster of her own."""
    model = query["model"] | {"vocab_size": VOCABULARY, "name": "hers"}
    cluster = {
        "gpu": "cpu",
        "gpus_per_node": 2,
        "inter_node_bandwidth_bytes_per_second": 1e9,
        "fabric": CANARY,
        "num_gpus": 2,
    }
    for path, spec in (("/v1/models", model), ("/v1/clusters", cluster)):
        assert http.post(path, json={"name": "hers", "spec": spec}, headers=ada).status_code == 201
    asked = query | {"id": CANARY, "model": model | {"name": CANARY}}
    submitted = http.post(
        "/v1/searches", json=asked, params={"webhook": f"https://{CANARY}.example/"}, headers=ada
    )
    search = submitted.json()["id"]
    lease = claim(store, search)
    run = one_run(store, lease, Measurement(status="ok", step_s=0.4, log_tail=CANARY))
    finish(store, lease)
    report = {"query": asked, "parallel": {}, "measurement": {"status": "ok", "step_s": 0.5}}
    measured = http.post("/v1/measurements", json=report, headers=ada).json()["id"]
    assert http.post("/v1/calibrations", headers=ada).json()["items"][0]["models"] == {
        "models of users": 1
    }
    watched = http.post(
        "/v1/watches", json={"name": CANARY, "query": asked | {"parallel": {}}}, headers=ada
    )
    return Stand(
        search=search,
        run=run,
        key=key,
        measurement=measured,
        watch=watched.json()["id"],
        query=query | {"model": "hers", "parallel": {}},
    )


def ask(http: TestClient, stand: Stand, address: Address, who: dict[str, str]) -> httpx.Response:
    path, parameters = stand.path(address), stand.parameters(address)
    bodies = {"{measurement_id}": {"state": "excluded"}, "/label": {"name": "bob's"}}
    changed: dict[str, Any] = next(
        (body for part, body in bodies.items() if part in address.pattern), {"budget_runs": 3}
    )
    body = (
        {}
        if address.method == "GET"
        else {"json": changed}
        if "/v1/" in path
        else {"data": changed}
    )
    return http.request(
        address.method, path, params=parameters, headers=who, follow_redirects=False, **body
    )


def test_owners_are_isolated(
    app: FastAPI, http: TestClient, store: SqlStore, query: dict[str, Any]
) -> None:
    (key, ada), (_, bob) = headers(store, "ada"), headers(store, "bob")
    stand = furnished(http, store, query, key=key, ada=ada)
    before = store.get_search(search_id=stand.search), store.get_webhook(search_id=stand.search)
    routes = [address for address in every_route(app) if not address.pattern.startswith("/static/")]
    of_searches = [address for address in routes if "{search_id}" in address.pattern]
    assert (len(routes) > 75, len(of_searches) > 15) == (True, True)
    for address in of_searches:
        if (
            address.method == "GET"
        ):  # what she is told there, or the next question would prove nothing
            assert ask(http, stand, address, ada).status_code in (200, 303), address
    for address in routes:
        answer = ask(http, stand, address, bob)
        assert answer.status_code < 500, (address, answer.text)
        assert not TRACE.search(answer.text), address
        if "{search_id}" in address.pattern:
            assert (answer.status_code, answer.json()["detail"]) == (
                404,
                f"No search '{stand.search}'.",
            ), address
        elif "{name}" in address.pattern and "/gpus/" not in address.pattern:
            assert answer.status_code in (403, 404), address
        elif "{measurement_id}" in address.pattern or (
            "{watch_id}" in address.pattern and not address.pattern.endswith("/steps")
        ):
            assert answer.status_code == 404, address
        elif "{key_id}" in address.pattern:
            assert answer.status_code == 403, address
    assert (
        store.get_search(search_id=stand.search),
        store.get_webhook(search_id=stand.search),
    ) == before
    assert store.usage().searches == {
        state: int(state is SearchState.SUCCEEDED) for state in SearchState
    }
    assert store.get_key(key_id=key).revoked_at is None
    assert store.get_measurement(measurement_id=stand.measurement).state == "accepted"
    assert [
        http.get(f"/v1/{kind}/hers", headers=ada).status_code for kind in ("models", "clusters")
    ] == [200, 200]
