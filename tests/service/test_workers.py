"""What workers announce, and searches that none of them could run."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from hp_tool.domain.measurement import DeviceState, Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.records import Offer
from hp_tool.loop.tuning import find_offers
from hp_tool.store import SqlStore, tables
from hp_tool.store.workers import WORKER_TIMEOUT_S
from service.worker import announce
from tests.service.coordinator import claim, one_run
from tests.service.processes import wait_for

GPUS: dict[str, Any] = {
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
    "search": {"budget_runs": 2},
}
CPU = Offer(launcher="local", gpu="cpu", num_gpus=8)


def _posted(http: TestClient, query: dict[str, Any]) -> tuple[int, str | None, str | None]:
    answer = http.post("/v1/searches", json=query)
    return answer.status_code, answer.json().get("code"), answer.json().get("field")


def test_what_no_live_worker_can_run_is_refused_with_the_fix(
    http: TestClient, store: SqlStore, query: dict[str, Any]
) -> None:
    gpus = query | GPUS
    assert _posted(http, gpus) == (202, None, None)  # nobody is alive: the right worker may come
    assert "hp-tool worker" in http.get("/searches").text
    store.announce_worker(holder="host:1", offers=[CPU])
    assert _posted(http, gpus) == (422, "launcher_mismatch", "search.launcher")
    said = http.post("/v1/searches", json=gpus).json()["detail"]
    assert "h100-sxm-80gb" in said and "8 x cpu via local" in said and "hp-tool recommend" in said
    form = {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster.gpu": "h100-sxm-80gb",
        "cluster.num_gpus": "8",
        "training.sequence_length": "4096",
        "training.global_batch_size": "64",
    }
    shown = http.post("/searches/new", data=form)
    assert shown.status_code == 422 and "no live worker can run this search" in shown.text
    assert _posted(http, query) == (202, None, None)
    store.announce_worker(
        holder="host:2", offers=[Offer(launcher="slurm", gpu="h100-sxm-80gb", num_gpus=64)]
    )
    assert _posted(http, gpus) == (422, "launcher_mismatch", "search.launcher")
    assert _posted(http, gpus | {"search": {"launcher": "slurm"}}) == (202, None, None)
    store.retire_worker(holder="host:2")
    assert _posted(http, gpus | {"search": {"launcher": "slurm"}})[0] == 422


def test_too_few_devices_are_refused_where_no_smaller_run_can_stand_for_them(
    http: TestClient, store: SqlStore, query: dict[str, Any]
) -> None:
    store.announce_worker(holder="host:1", offers=[Offer(launcher="local", gpu="cpu", num_gpus=2)])
    large = query | {"cluster": {"gpu": "cpu", "num_gpus": 8}}
    whole = large | {"search": query["search"] | {"fidelity": "full"}}
    assert _posted(http, whole) == (422, "launcher_mismatch", "cluster.num_gpus")
    assert _posted(http, large) == (202, None, None)
    store.announce_worker(
        holder="host:1", offers=[Offer(launcher="local", gpu="cpu", num_gpus=2, profiler=False)]
    )
    assert _posted(http, query) == (422, "launcher_mismatch", "search.launcher")


def test_a_worker_announces_itself_until_it_leaves_or_falls_silent(
    http: TestClient, store: SqlStore
) -> None:
    stopping = threading.Event()
    worker = threading.Thread(
        target=announce,
        kwargs={"store": store, "holder": "here:7", "stopping": stopping, "every_s": 60.0},
    )
    worker.start()
    wait_for(lambda: bool(store.live_workers()))
    (view,) = http.get("/v1/workers").json()["items"]
    assert (
        view["holder"] == "here:7"
        and {"launcher": "local", "gpu": "cpu"}.items() <= view["offers"][-1].items()
    )
    page = http.get("/workers").text
    assert "here:7" in page and "cpu" in page
    stopping.set()
    worker.join(timeout=10)
    assert store.live_workers() == [] and "hp-tool worker" in http.get("/workers").text
    store.announce_worker(holder="silent:1", offers=[])
    with store._writing() as connection:
        seen_at = tables.workers.c.seen_at
        seen = connection.execute(sa.select(seen_at)).scalar_one()
        late = seen - timedelta(seconds=WORKER_TIMEOUT_S + 1)
        connection.execute(sa.update(tables.workers).values(seen_at=late))
    assert store.live_workers() == []
    store.announce_worker(holder="next:1", offers=[])
    with store._reading() as connection:
        assert connection.execute(sa.select(tables.workers.c.holder)).scalars().all() == ["next:1"]


def test_clusters_of_the_catalogue_are_offered(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {offer.launcher for offer in find_offers()} == {"local"}
    options = tmp_path / "slurm.yaml"
    options.write_text(
        "{name: site, gpu: h100-sxm-80gb, gpus_per_node: 8, max_nodes: 4, folder: /shared/runs}"
    )
    monkeypatch.setenv("HP_SLURM_CONFIG", str(options))
    assert Offer(launcher="slurm", gpu="h100-sxm-80gb", num_gpus=32) in find_offers()
    options.write_text("gpu: 1")
    assert {offer.launcher for offer in find_offers()} == {"local"}


def test_drift_and_slow_nodes_stand_beside_a_clusters_load(
    http: TestClient, store: SqlStore, query: dict[str, Any]
) -> None:
    search = http.post("/v1/searches", json=query).json()["id"]
    lease = claim(store, search)
    slow = {"kind": "node", "name": "n3", "slowdown": 1.31, "operations": 9}
    store.append_event(
        lease=lease, kind="preflight", payload={"status": "ok", "slow": [slow], "avoided": ["n3"]}
    )
    hot = DeviceState(host="n2", sm_clock_hz=1.2e9, throttled_by="0x40")
    devices = (*(DeviceState(host=f"n{i}", sm_clock_hz=1.9e9) for i in range(2)), hot)
    for micro_batch, step_s in (
        (1, 9.0),
        (2, 1.1),
        (4, 1.2),
        (8, 1.3),
    ):  # the first was expected by the cost model alone
        parallel = ParallelConfig(data_parallel_size=2, micro_batch_size=micro_batch)
        predicted = {"step_s": 0.5, "calibrated_step_s": 1.0}
        one_run(
            store,
            lease,
            Measurement(status="ok", step_s=step_s, devices=devices),
            parallel,
            predicted=predicted,
        )
    (cluster,) = http.get("/workers.json").json()["clusters"]
    page = http.get(f"/searches/{search}.json").json()
    assert page["health"] == cluster["runs"]
    assert (page["health"]["drift_fraction"], page["health"]["runs"]) == (pytest.approx(0.2), 3)
    found = {node["name"]: node["why"] for node in page["health"]["slow_nodes"]}
    assert (
        found.keys() == {"n2", "n3"}
        and "1.31 times" in found["n3"]
        and "36.8% below" in found["n2"]
    )
    assert "n3" in http.get("/workers").text and "Slow node" in http.get(f"/searches/{search}").text


def test_a_running_search_whose_holder_fell_silent_is_stalled(
    http: TestClient, store: SqlStore, query: dict[str, Any]
) -> None:
    gone, alive = (http.post("/v1/searches", json=query).json()["id"] for _ in range(2))
    store.claim_search(holder="gone:1", lease_s=1e-6, search_id=gone)
    store.claim_search(holder="alive:1", lease_s=60.0, search_id=alive)
    page = http.get("/workers.json").json()
    assert {each["id"]: (each["holder"], each["stalled"]) for each in page["running"]} == {
        gone: ("gone:1", True),
        alive: ("alive:1", False),
    }
    (load,) = page["clusters"]
    assert (load["running"], load["stalled"], load["tone"]) == (1, 1, "bad")


def test_pages_say_that_no_worker_runs_a_queued_search(
    http: TestClient, store: SqlStore, query: dict[str, Any]
) -> None:
    assert http.get("/searches.json").json()["no_worker"] is False  # nothing waits for one
    search = http.post("/v1/searches", json=query).json()["id"]
    pages = ("/searches.json", f"/searches/{search}.json")
    assert [http.get(page).json()["no_worker"] for page in pages] == [True, True]
    store.announce_worker(holder="host:1", offers=[])
    assert [http.get(page).json()["no_worker"] for page in pages] == [False, False]
