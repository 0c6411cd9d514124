"""Searches over HTTP: submitting, listing, following, steering. No worker runs here; a lease stands
for one.
"""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Store
from hp_tool.domain.states import SearchState
from tests.service.coordinator import claim, finish, one_run

Query = dict[str, Any]


def submit(http: TestClient, query: Query, **headers: str) -> dict[str, Any]:
    response = http.post("/v1/searches", json=query, headers=headers)
    assert response.status_code == 202, response.text
    body: dict[str, Any] = response.json()
    assert response.headers["location"] == f"/v1/searches/{body['id']}"
    return body


def test_a_submitted_search_waits_in_the_store(
    http: TestClient, store: Store, query: Query
) -> None:
    search = submit(http, query)
    assert search["state"] == "queued"
    assert search["query"]["model"]["name"] == "gpt-tiny"
    assert http.get(f"/v1/searches/{search['id']}").json() == search
    assert claim(store, search["id"]).search_id == search["id"]


def test_an_idempotency_key_makes_one_search(http: TestClient, query: Query) -> None:
    first = submit(http, query, **{"Idempotency-Key": "k1"})
    assert submit(http, query, **{"Idempotency-Key": "k1"})["id"] == first["id"]
    assert submit(http, query, **{"Idempotency-Key": "k2"})["id"] != first["id"]
    other = http.post(
        "/v1/searches", json=query | {"id": "other"}, headers={"Idempotency-Key": "k1"}
    )
    assert (other.status_code, other.json()["title"]) == (409, "Conflict")


def test_an_idempotency_key_is_looked_up_before_names_are(http: TestClient, query: Query) -> None:
    """A retry gets its search though the model of that name is another by now, or gone; another
    query does not.
    """
    model = {key: value for key, value in query["model"].items() if key != "name"}
    assert http.post("/v1/models", json={"name": "mine", "spec": model}).status_code == 201
    first = submit(http, query | {"model": "mine"}, **{"Idempotency-Key": "k"})
    assert (
        http.post(
            "/v1/models", json={"name": "mine", "spec": model | {"num_hidden_layers": 8}}
        ).status_code
        == 201
    )
    assert submit(http, query | {"model": "mine"}, **{"Idempotency-Key": "k"})["id"] == first["id"]
    assert http.delete("/v1/models/mine").status_code == 204
    assert submit(http, query | {"model": "mine"}, **{"Idempotency-Key": "k"})["id"] == first["id"]
    assert (
        http.post("/v1/searches", json=query, headers={"Idempotency-Key": "k"}).status_code == 409
    )
    assert (
        http.post(
            "/v1/searches", json=query | {"model": "mine"}, headers={"Idempotency-Key": "new"}
        ).status_code
        == 422
    )


def test_a_clones_key_makes_one_clone_of_one_search(http: TestClient, query: Query) -> None:
    key = {"Idempotency-Key": "k"}
    first, second = submit(http, query, **key)["id"], submit(http, query)["id"]
    clones = [
        http.post(f"/v1/searches/{search}/clone", headers=key).json()["id"]
        for search in (first, first, second)
    ]
    assert clones[0] == clones[1]
    assert (
        len({first, second, *clones}) == 4
    )  # neither the search that came with this key, nor the other's clone
    assert (
        http.post(f"/v1/searches/{first}/clone", headers={"Idempotency-Key": "x" * 201}).status_code
        == 422
    )


def test_unknown_searches_are_404(http: TestClient) -> None:
    for path in ("", "/trials", "/events", "/result"):
        response = http.get(f"/v1/searches/nope{path}")
        assert response.status_code == 404
        assert response.headers["content-type"] == "application/problem+json"
    assert http.post("/v1/searches/nope/cancel").status_code == 404
    assert http.get("/searches/nope").status_code == 404


def test_pages_of_the_list_hold_every_search_once(http: TestClient, query: Query) -> None:
    ids = [submit(http, query)["id"] for _ in range(5)]
    found: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = http.get(
            "/v1/searches", params={"limit": 2, **({"cursor": cursor} if cursor else {})}
        ).json()
        found += [row["id"] for row in page["items"]]
        cursor = page["next_cursor"]
    assert found == ids[::-1]
    assert http.get("/v1/searches", params={"state": "running"}).json()["items"] == []
    assert http.get("/v1/searches", params={"cursor": "garbage"}).status_code == 422
    assert http.get("/v1/searches", params={"state": "asleep"}).status_code == 422


def test_trials_set_predicted_and_measured_side_by_side(
    http: TestClient, store: Store, query: Query
) -> None:
    search = submit(http, query)["id"]
    lease = claim(store, search)
    one_run(store, lease, Measurement(status="ok", step_s=0.4, tokens_per_second_per_gpu=1280.0))
    failed = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True)
    one_run(store, lease, Measurement(status="oom", cause="rank 1", log_tail="the end"), failed)
    before = http.get(f"/v1/searches/{search}/trials").json()
    assert [trial["calibrated"] for trial in before["trials"]] == [None, None]
    finish(store, lease)
    answer = http.get(f"/v1/searches/{search}/trials").json()
    first, second = answer["trials"]
    assert answer["state"] == "succeeded"
    assert (
        first["predicted"]["step_s"],
        first["calibrated"]["step_s"],
        first["measurement"]["step_s"],
    ) == (0.5, 0.41, 0.4)
    assert (second["measurement"]["status"], second["measurement"]["log_tail"]) == (
        "oom",
        "the end",
    )


def test_the_result_is_there_when_the_search_has_ended(
    http: TestClient, store: Store, query: Query
) -> None:
    search = submit(http, query)["id"]
    waiting = http.get(f"/v1/searches/{search}/result", params={"wait_s": 0.05})
    assert (waiting.status_code, waiting.json()["state"]) == (202, "queued")
    finish(store, claim(store, search))
    assert http.get(f"/v1/searches/{search}/result").json()["recommendations"][0]["rank"] == 1


def test_a_failed_search_answers_with_its_error(
    http: TestClient, store: Store, query: Query
) -> None:
    search = submit(http, query)["id"]
    error = {"code": "launcher_mismatch", "message": "no such GPU here", "field": "cluster.gpu"}
    store.finish_search(lease=claim(store, search), state=SearchState.FAILED, error=error)
    answer = http.get(f"/v1/searches/{search}/result").json()
    assert (answer["id"], answer["status"], answer["error"]) == ("small", "error", error)
    page = http.get(f"/searches/{search}").text
    assert "No such GPU here" in page
    assert (
        f'action="/searches/{search}/resume"' in page
        and f'action="/searches/{search}/cancel"' not in page
    )
    assert http.post(f"/v1/searches/{search}/cancel").json()["state"] == "cancelled"


def test_searches_are_steered(http: TestClient, store: Store, query: Query) -> None:
    search = submit(http, query)["id"]

    def post(action: str) -> tuple[int, str | None]:
        response = http.post(f"/v1/searches/{search}/{action}")
        return response.status_code, response.json().get("state")

    assert post("pause") == (200, "paused")
    assert post("resume") == (200, "queued")
    lease = claim(store, search)
    assert post("cancel") == (200, "running")
    assert store.get_search(search_id=search).requested == "cancel"
    store.finish_search(lease=lease, state=SearchState.CANCELLED)
    assert post("resume")[0] == 409
    clone = http.post(f"/v1/searches/{search}/clone")
    assert clone.status_code == 202
    assert clone.json()["id"] != search
    assert clone.json()["query"] == http.get(f"/v1/searches/{search}").json()["query"]
    assert http.post(f"/v1/searches/{search}/explode").status_code == 404


def events(
    http: TestClient, search: str, **headers: str
) -> list[tuple[str | None, str | None, dict[str, Any]]]:
    """(id, name, data) of a whole stream."""
    response = http.get(f"/v1/searches/{search}/events", headers=headers)
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in block.splitlines() if not line.startswith(":")
        )
        if "data" in fields:
            found.append((fields.get("id"), fields.get("event"), json.loads(fields["data"])))
    return found


def test_events_are_all_told_in_order_and_end(http: TestClient, store: Store, query: Query) -> None:
    search = submit(http, query)["id"]
    lease = claim(store, search)
    one_run(store, lease, Measurement(status="ok", step_s=0.4))
    finish(store, lease)
    told = events(http, search)
    assert [identity for identity, _, _ in told[:-1]] == [str(n + 1) for n in range(len(told) - 1)]
    assert told[-1][1:] == ("end", {"state": "succeeded"})
    assert {data["kind"] for _, _, data in told[:-1]} == {"state", "run"}
    assert events(http, search, **{"Last-Event-ID": "3"}) == told[3:]
    assert (
        http.get(f"/v1/searches/{search}/events", headers={"Last-Event-ID": "x"}).status_code == 422
    )


@pytest.fixture
def report(query: Query) -> dict[str, Any]:
    parallel = {"tensor_parallel_size": 2}
    return {"query": query, "parallel": parallel, "measurement": {"status": "ok", "step_s": 0.25}}


def test_a_reported_measurement_is_kept_with_its_prediction(
    http: TestClient, report: dict[str, Any]
) -> None:
    response = http.post("/v1/measurements", json=report, headers={"Idempotency-Key": "m1"})
    assert response.status_code == 201, response.text
    stored = response.json()
    assert (stored["source"], stored["gpu"], stored["model"]) == ("reported", "cpu", "gpt-tiny")
    assert (stored["state"], stored["warnings"]) == ("accepted", [])
    assert stored["parallel"]["sequence_parallel"] is True
    assert stored["measurement"]["tokens_per_second_per_gpu"] == pytest.approx(8 * 128 / 0.25 / 2)
    assert stored["predicted"]["step_s"] > 0
    again = http.post("/v1/measurements", json=report, headers={"Idempotency-Key": "m1"})
    assert again.json()["id"] == stored["id"]
    assert [
        row["id"] for row in http.get("/v1/measurements", params={"gpu": "cpu"}).json()["items"]
    ] == [stored["id"]]
    assert http.get("/v1/measurements", params={"source": "profile"}).json()["items"] == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"measurement": {"status": "ok"}}, "measurement.step_s"),
        ({"measurement": {"status": "ok", "step_s": -1.0}}, "measurement.step_s"),
        (
            {"measurement": {"status": "ok", "step_s": 1.0, "hardware": {"gpu": "h100-sxm-80gb"}}},
            "measurement.hardware.gpu",
        ),
        ({"measurement": {"status": "ok", "stpe_s": 1.0}}, "measurement.stpe_s"),
        ({"parallel": {"tensor_parallel_size": 3}}, "parallel"),
        ({"parallel": {"tensor_parallel_size": [1, 2]}}, "parallel.tensor_parallel_size"),
    ],
)
def test_a_wrong_report_teaches_nothing(
    http: TestClient, report: dict[str, Any], change: dict[str, Any], field: str
) -> None:
    response = http.post("/v1/measurements", json=report | change)
    assert (response.status_code, response.json()["field"]) == (422, field)
    assert http.get("/v1/measurements").json()["items"] == []


def test_health_knows_the_database(
    http: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hp_tool.errors import StoreError

    assert http.get("/healthz").json()["status"] == http.get("/readyz").json()["status"] == "ok"

    def away() -> None:
        raise StoreError("the database is away")

    monkeypatch.setattr(store, "state", away)
    assert http.get("/healthz").status_code == 200
    assert (http.get("/readyz").status_code, http.get("/readyz").json()["code"]) == (
        503,
        "store_unavailable",
    )
