"""Watched jobs over HTTP: no step is lost or doubled whatever happens to the service, and what is told of them."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from fastapi.testclient import TestClient

from hp_tool.reporter import Reporter
from hp_tool.store import SqlStore
from service.app import create_app
from service.settings import Settings
from service.webhooks import verify
from service.webhooks.delivery import Deliveries
from tests.service.processes import api_process, free_port, wait_for
from tests.service.webhook_receiver import HERE, SECRET, Receiver

DENSE: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 32, "gpus_per_node": 8, "price_per_gpu_hour": 2.0},
    "training": {"sequence_length": 8192, "global_batch_size": 256, "precision": "bf16"},
    "parallel": {"tensor_parallel_size": 2, "micro_batch_size": 1},
}


@pytest.fixture
def http(store: SqlStore) -> Any:
    settings = Settings(poll_s=0.02, webhooks=HERE)
    with TestClient(create_app(settings, store=store), base_url="http://127.0.0.1:8000") as client:
        yield client


def batch(times_s: Any, *, first: int = 1, rank: int = 0, **more: Any) -> dict[str, Any]:
    reports = [{"seq": first + n, "step": 100 + first + n, "step_s": float(each)} for n, each in enumerate(times_s)]
    return {"source": f"r{rank}", "rank": rank, "host": f"node{rank}", "reports": reports, **more}


def times(steps: int, *, seed: int = 0, median_s: float = 6.5) -> np.ndarray:
    return median_s * np.exp(np.random.default_rng(seed).normal(0.0, 0.02, steps))


def send(http: TestClient, watch: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(f"/v1/watches/{watch}/steps", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_job_is_watched_and_told_slower_by_webhook(http: TestClient, store: SqlStore, receiver: Receiver) -> None:
    begun = http.post("/v1/watches", json={"name": "pretrain", "query": DENSE, "webhook": receiver.url})
    assert begun.status_code == 201
    watch = begun.json()["id"]
    deliveries = Deliveries(store=store, settings=HERE, stopping=threading.Event())
    steady = times(200)
    assert send(http, watch, batch(steady)) == {"acknowledged": 200, "status": "as_expected"}
    assert http.get(f"/v1/watches/{watch}").json()["verdict"]["text"] == []
    assert not deliveries.step()
    assert send(http, watch, batch(1.3 * times(30, seed=1), first=201))["status"] == "slower_than_it_was"
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
            report["parts_s"] = {"compute": float(seconds), "communication": report["step_s"] - float(seconds)}
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
    assert "cannot be" in http.get(f"/v1/watches/{odd}").json()["teaching"]
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
def test_what_cannot_be_watched_is_refused(http: TestClient, body: dict[str, Any], field: str | None) -> None:
    answer = http.post("/v1/watches", json=body)
    assert answer.status_code == 422
    assert field is None or answer.json()["field"] == field


def test_the_service_killed_and_back_loses_no_step_and_doubles_none(tmp_path: Path) -> None:
    """A training that reports while its service is killed in the middle of its work, twice, and starts again."""
    database, port = f"sqlite:///{tmp_path / 'hp.sqlite3'}", free_port()
    reporter, reported, stop = None, 0, threading.Event()

    def train(to: Reporter) -> None:
        nonlocal reported
        while not stop.is_set():
            reported += 1
            to.step(0.5 + 0.01 * (reported % 7), step=reported)
            time.sleep(0.002)

    for round_number in range(3):
        with api_process(database_url=database, home=tmp_path, port=port) as (url, serving):
            if reporter is None:
                watch = httpx.post(f"{url}/v1/watches", json={"name": "killed"}).json()["id"]
                reporter = Reporter(f"{url}/v1/watches/{watch}", rank=0, every_s=0.02)
                threading.Thread(target=train, args=(reporter,), daemon=True).start()
            before = _steps(url, watch)
            wait_for(lambda before=before: _steps(url, watch) > before + 50, timeout_s=60)
            if round_number < 2:
                psutil.Process(serving.pid).kill()
                serving.wait()
                continue
            stop.set()
            wait_for(lambda: reporter.close(timeout_s=40), timeout_s=60)
            assert _steps(url, watch) == reported
    assert reporter is not None
    assert reporter.dropped == 0


def _steps(url: str, watch: str) -> int:
    return int(httpx.get(f"{url}/v1/watches/{watch}", timeout=20).json()["verdict"]["steps"])
