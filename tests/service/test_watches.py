"""Watched jobs over HTTP: no step is lost or doubled whatever happens to the service, and what is
told of them.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from hp_tool.reporter import Reporter
from hp_tool.store import SqlStore
from service.app import create_app
from service.settings import Settings
from service.webhooks import verify
from service.webhooks.delivery import Deliveries
from tests.service.processes import api_process, free_port, served, wait_for
from tests.service.test_caps import issued
from tests.service.webhook_receiver import HERE, SECRET, Receiver

DENSE: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {
        "gpu": "h100-sxm-80gb",
        "num_gpus": 32,
        "gpus_per_node": 8,
        "price_per_gpu_hour": 2.0,
    },
    "training": {"sequence_length": 8192, "global_batch_size": 256, "precision": "bf16"},
    "parallel": {"tensor_parallel_size": 2, "micro_batch_size": 1},
}


@pytest.fixture
def http(store: SqlStore) -> Any:
    settings = Settings(poll_s=0.02, webhooks=HERE)
    with TestClient(create_app(settings, store=store), base_url="http://127.0.0.1:8000") as client:
        yield client


def batch(times_s: Any, *, first: int = 1, rank: int = 0, **more: Any) -> dict[str, Any]:
    reports = [
        {"seq": first + n, "step": 100 + first + n, "step_s": float(each)}
        for n, each in enumerate(times_s)
    ]
    return {"source": f"r{rank}", "rank": rank, "host": f"node{rank}", "reports": reports, **more}


def times(steps: int, *, seed: int = 0, median_s: float = 6.5) -> np.ndarray:
    return median_s * np.exp(np.random.default_rng(seed).normal(0.0, 0.02, steps))


def send(http: TestClient, watch: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(f"/v1/watches/{watch}/steps", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_job_is_watched_and_told_slower_by_webhook(
    http: TestClient, store: SqlStore, receiver: Receiver
) -> None:
    begun = http.post(
        "/v1/watches", json={"name": "pretrain", "query": DENSE, "webhook": receiver.url}
    )
    assert begun.status_code == 201
    watch = begun.json()["id"]
    deliveries = Deliveries(store=store, settings=HERE, stopping=threading.Event())
    steady = times(200)
    assert send(http, watch, batch(steady)) == {"acknowledged": 200, "status": "as_expected"}
    assert http.get(f"/v1/watches/{watch}").json()["verdict"]["text"] == []
    assert not deliveries.step()
    assert (
        send(http, watch, batch(1.3 * times(30, seed=1), first=201))["status"]
        == "slower_than_it_was"
    )
    assert deliveries.step()
    (_, headers, body) = receiver.came[0]
    verify(secret=SECRET, headers=headers, body=body)
    message = json.loads(body)
    assert (message["type"], message["data"]["name"]) == ("watch.changed", "pretrain")
    assert abs(message["data"]["slowdown"]["since_step"] - 301) <= 2
    page = (Path(__file__).parents[2] / "docs" / "watch.md").read_text(encoding="utf-8")
    shown = json.loads(page.split("```json\n", 1)[1].split("```", 1)[0])
    assert (list(shown), list(shown["data"])) == (list(message), list(message["data"]))
    view = http.get(f"/v1/watches/{watch}").json()
    assert view["verdict"]["slowdown"]["factor"] == pytest.approx(1.3, abs=0.03)
    assert view["verdict"]["loss_per_day"]["cost"] > 0
    assert [each["id"] for each in http.get("/v1/watches").json()["items"]] == [watch]
    send(http, watch, batch(times(60, seed=2), first=231))
    assert deliveries.step()
    assert json.loads(receiver.came[1][2])["data"]["status"] == "as_expected"
    assert http.delete(f"/v1/watches/{watch}").status_code == 204
    assert http.get(f"/v1/watches/{watch}").status_code == 404


def test_a_batch_that_comes_again_changes_nothing(http: TestClient, store: SqlStore) -> None:
    watch = http.post("/v1/watches", json={}).json()["id"]
    for _ in range(3):
        assert send(http, watch, batch(times(50)))["acknowledged"] == 50
    assert send(http, watch, batch(times(80)))["acknowledged"] == 80  # the first 50 once more
    assert send(http, watch, batch(times(20), first=31))["acknowledged"] == 80
    assert http.get(f"/v1/watches/{watch}").json()["verdict"]["steps"] == 80


def test_one_slow_rank_is_named(http: TestClient) -> None:
    watch = http.post("/v1/watches", json={"name": "ranks"}).json()["id"]
    rng = np.random.default_rng(0)
    own = np.exp(rng.normal(0.0, 0.02, (160, 3)))
    own[120:, 1] *= 1.4
    for rank in (1, 2, 0):  # the first rank, which stands for the job, comes last
        body = batch(own.max(axis=1), rank=rank)
        for report, seconds in zip(body["reports"], own[:, rank], strict=True):
            report["parts_s"] = {
                "compute": float(seconds),
                "communication": report["step_s"] - float(seconds),
            }
        send(http, watch, body)
    verdict = http.get(f"/v1/watches/{watch}").json()["verdict"]
    assert verdict["causes"][0]["ranks"] == [1]
    assert verdict["causes"][0]["hosts"] == ["node1"]


def test_a_steady_pace_teaches_once(http: TestClient, store: SqlStore) -> None:
    watch = http.post("/v1/watches", json={"query": DENSE}).json()["id"]
    assert http.get("/v1/measurements").json()["items"] == []
    send(http, watch, batch(times(200)))
    send(http, watch, batch(times(50), first=201))
    (measurement,) = http.get("/v1/measurements").json()["items"]
    assert (measurement["source"], measurement["model"]) == ("reported", "llama-3-8b")
    assert measurement["measurement"]["step_s"] == pytest.approx(6.5, rel=0.01)
    assert http.get(f"/v1/watches/{watch}").json()["measurement_id"] == measurement["id"]
    odd = http.post("/v1/watches", json={"query": DENSE}).json()["id"]
    send(http, odd, batch(times(200, median_s=1e-3)))
    assert "implausible" in http.get(f"/v1/watches/{odd}").json()["teaching"]
    assert len(http.get("/v1/measurements").json()["items"]) == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": 3}, "name"),
        ({"qury": DENSE}, "qury"),
        ({"query": DENSE | {"kind": "inference"}}, None),
        ({"webhook": "http://example.org"}, "webhook"),
    ],
)
def test_what_cannot_be_watched_is_refused(
    http: TestClient, body: dict[str, Any], field: str | None
) -> None:
    answer = http.post("/v1/watches", json=body)
    assert answer.status_code == 422
    assert field is None or answer.json()["field"] == field


def test_the_processes_of_an_owners_jobs_have_a_quota(store: SqlStore) -> None:
    settings = Settings(api_key="the operator's key", max_watch_processes=3)
    with TestClient(create_app(settings, store=store), base_url="http://127.0.0.1:8000") as http:

        def report(key: dict[str, str], watch: str, rank: int) -> Any:
            return http.post(
                f"/v1/watches/{watch}/steps", json=batch(times(1), rank=rank), headers=key
            )

        ada, same, bob = issued(store), issued(store), issued(store, "bob")
        first, second, other = (
            http.post("/v1/watches", json={}, headers=key).json()["id"] for key in (ada, same, bob)
        )
        assert [report(ada, first, rank).status_code for rank in range(2)] == [200, 200]
        assert report(same, second, 0).status_code == 200
        refused = report(ada, first, 2)
        assert (refused.status_code, refused.json()["code"]) == (409, "too_many")
        assert "HP_MAX_WATCH_PROCESSES_PER_OWNER" in refused.json()["detail"]
        assert "DELETE /v1/watches/" in refused.json()["detail"]
        assert report(ada, first, 1).status_code == 200  # it reported before
        assert report(bob, other, 0).status_code == 200
        assert http.delete(f"/v1/watches/{second}", headers=ada).status_code == 204
        assert report(ada, first, 2).status_code == 200


class Training:
    """A thread that trains and reports, until it is stopped."""

    def __init__(self, reporter: Reporter, *, step_s: float) -> None:
        self.reporter, self.steps, self._step_s = reporter, 0, step_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        while not self._stop.wait(self._step_s):
            self.steps += 1
            self.reporter.step(0.5 + 0.01 * (self.steps % 7), step=self.steps)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        wait_for(lambda: self.reporter.close(timeout_s=40.0))


def test_the_service_away_and_back_loses_no_step_and_doubles_none(store: SqlStore) -> None:
    """Over a socket: cut off twice in the middle of a training, whose answers may be lost on the
    way.
    """
    port, watch, training = (
        free_port(),
        store.create_watch(name="away", query=None, expected=None).id,
        None,
    )
    for _ in range(3):
        with served(create_app(Settings(poll_s=0.02), store=store), port=port) as url:
            if training is None:
                reporter = Reporter(f"{url}/v1/watches/{watch}", rank=0, every_s=0.01)
                training = Training(reporter, step_s=0.002)
            before = training.steps
            wait_for(lambda before=before: _taken(store, watch) > before)  # type: ignore[misc]
    assert training is not None
    with served(create_app(Settings(poll_s=0.02), store=store), port=port):
        training.stop()
    assert _taken(store, watch) == training.steps
    assert training.reporter.dropped == 0


@pytest.mark.long
def test_the_service_killed_and_back_loses_no_step_and_doubles_none(tmp_path: Path) -> None:
    """A service that is killed in the middle of its work, twice, and starts again."""
    database, port, training, watch = f"sqlite:///{tmp_path / 'hp.sqlite3'}", free_port(), None, ""
    for number in range(3):
        with api_process(database_url=database, home=tmp_path, port=port) as (url, serving):
            if training is None:
                watch = httpx.post(f"{url}/v1/watches", json={"name": "killed"}, timeout=60).json()[
                    "id"
                ]
                training = Training(
                    Reporter(f"{url}/v1/watches/{watch}", rank=0, every_s=0.2), step_s=0.02
                )
            before = training.steps
            wait_for(lambda before=before, place=(url, watch): _steps(*place) > before)  # type: ignore[misc]
            if number < 2:
                serving.kill()
                serving.wait()
                continue
            training.stop()
            assert _steps(url, watch) == training.steps
            assert training.reporter.dropped == 0


def _taken(store: SqlStore, watch: str) -> int:
    return sum(each.state["steps"] for each in store.watch_sources(watch_id=watch))


def _steps(url: str, watch: str) -> int:
    return int(httpx.get(f"{url}/v1/watches/{watch}", timeout=60).json()["verdict"]["steps"])
