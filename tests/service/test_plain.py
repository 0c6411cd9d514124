"""Without scripts: the form's ranking and a search's runs are there all the same."""

from __future__ import annotations

from typing import Any

from fastapi.testclient import TestClient

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.ports import Store
from hp_tool.domain.states import SearchState
from tests.service.coordinator import claim, one_run

FILLED = {
    "model": "llama-3-8b",
    "cluster.gpu": "h100-sxm-80gb",
    "cluster.num_gpus": "8",
    "training.sequence_length": "2048",
    "training.global_batch_size": "64",
}


def test_the_form_ranks_what_the_address_fills_in(http: TestClient) -> None:
    form = http.get("/searches/new", params=FILLED | {"ranked": "true"})
    rows = http.get("/searches/new.json", params=FILLED | {"ranked": "true"}).json()["preview"][
        "rows"
    ]
    assert rows and all(row["details"] in form.text for row in rows)
    assert http.get("/searches/new.json", params=FILLED).json()["preview"] is None, (
        "scripts ask for it"
    )
    assert (
        '<button formmethod="get" formaction="/searches/new" name="ranked" value="true">'
        in form.text
    )


def test_runs_are_a_table(http: TestClient, store: Store, query: dict[str, Any]) -> None:
    search = http.post("/v1/searches", json=query).json()["id"]
    assert f'href="/searches/{search}/runs"' in http.get(f"/searches/{search}").text
    assert "No runs yet" in http.get(f"/searches/{search}/runs").text
    one_run(store, claim(store, search), Measurement(status="ok", step_s=0.4))
    assert "400.0 ms" in http.get(f"/searches/{search}/runs").text


def test_runs_that_were_cut_off_run_again_with_a_longer_limit(
    http: TestClient, store: Store, query: dict[str, Any]
) -> None:
    query["search"]["run_timeout_s"] = 3.0
    search = http.post("/v1/searches", json=query).json()["id"]
    lease = claim(store, search)
    one_run(store, lease, Measurement(status="timeout", cause="cut off at 3 s"))
    error = {"code": "every_run_failed", "message": "every run failed", "field": None}
    store.finish_search(lease=lease, state=SearchState.FAILED, error=error)
    page = http.get(f"/searches/{search}.json").json()
    assert (
        page["longer_s"] == 60
        and "Run again with 60 s for each run" in http.get(f"/searches/{search}").text
    )
    again = http.post(
        f"/searches/{search}/longer", content="run_timeout_s=60", follow_redirects=False
    ).headers["location"]
    assert http.get(f"/v1{again}").json()["query"]["search"]["run_timeout_s"] == 60
