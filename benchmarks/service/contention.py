"""Run workers with searches and many clients of the API on one database at the same time."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from typing import Any

import httpx

from tests.service.faults.campaign import QUERY
from tests.service.faults.processes import Service

CLIENTS, WORKERS = 16, 2
REPORT: dict[str, Any] = {
    "query": {key: QUERY[key] for key in ("kind", "model", "cluster", "training")},
    "parallel": {"data_parallel_size": 2},
    "measurement": {"status": "ok", "step_s": 0.5},
}


def run_contention(*, service: Service, seconds: float, clients: int = CLIENTS) -> dict[str, Any]:
    """Let every client read and write for `seconds` while workers run searches; return what
    happened. The API must run.
    """
    service.ensure_workers(WORKERS)
    ending = time.monotonic() + seconds
    statuses: Counter[str] = Counter()
    writes: Counter[str] = Counter()

    def use(number: int) -> None:
        with httpx.Client(base_url=service.url, timeout=120.0) as client:
            turn = 0
            while time.monotonic() < ending:
                turn += 1
                key = {"Idempotency-Key": uuid.uuid4().hex}
                try:
                    if number % 4 == 0 and turn % 20 == 1:
                        answer = client.post("/v1/searches", json=QUERY, headers=key)
                        writes["searches"] += answer.status_code == httpx.codes.ACCEPTED
                    elif turn % 2:
                        answer = client.post("/v1/measurements", json=REPORT, headers=key)
                        writes["measurements"] += answer.status_code == httpx.codes.CREATED
                    else:
                        answer = client.get("/v1/searches", params={"limit": 10})
                    statuses[str(answer.status_code)] += 1
                except httpx.HTTPError as error:
                    statuses[type(error).__name__] += 1

    threads = [threading.Thread(target=use, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    logs = "".join(
        (service.home / name).read_text()
        for name in ("api.log", "worker.log")
        if (service.home / name).exists()
    )
    return {
        "clients": clients,
        "workers": WORKERS,
        "seconds": seconds,
        "requests": sum(statuses.values()),
        "writes": sum(writes.values()),
        "errors": sum(count for status, count in statuses.items() if not status.startswith("2")),
        "statuses": dict(statuses),
        "locked": logs.count("database is locked"),
        "searches": logs.count(": succeeded"),
    }
