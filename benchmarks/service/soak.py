"""Run 16 clients and 2 workers for half an hour, and check that memory and handles do not grow.

`python -m benchmarks.service.soak [--minutes 30] [--json]` compares the memory and the file handles
of API and workers in the last third of the time with those in the second third, when caches are
full.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from benchmarks.service.contention import run_contention
from hp_tool.store import engine
from tests.service.faults.campaign import QUERY
from tests.service.faults.databases import Sqlite
from tests.service.faults.processes import Service, preload

SAMPLES = 90
LEVEL = 1.10
"""Growth of a median from one third to the next that may be due to chance."""
HANDLES = 10
ESTIMATE: dict[str, Any] = {
    **{part: QUERY[part] for part in ("kind", "model", "cluster", "training")},
    "parallel": {"data_parallel_size": 2},
}
PATHS = (
    "/",
    "/searches",
    "/metrics",
    "/v1/models",
    "/v1/searches?limit=50",
    "/v1/measurements?limit=50",
)


def run_soak(*, home: Path, seconds: float) -> dict[str, Any]:
    """Return the answers to the clients, and the medians of (MiB, handles) of each process in the
    second and the last third.
    """
    service = Service(
        database_url=Sqlite(home).url, home=home, lease_s=30.0, busy_timeout_s=engine.BUSY_TIMEOUT_S
    )
    (home / "faults").mkdir()
    try:
        service.start_api()
        service.ensure_workers(2)
        processes = {
            "api": service.api,
            **{f"worker {n}": worker for n, worker in enumerate(service.workers)},
        }
        seen = {
            name: psutil.Process(process.pid)
            for name, process in processes.items()
            if process is not None
        }
        samples: dict[str, list[tuple[float, int]]] = {name: [] for name in seen}
        over = threading.Event()

        def look() -> None:
            with httpx.Client(base_url=service.url, timeout=120.0) as client:
                number = 0
                while not over.wait(seconds / SAMPLES):
                    # Pages that the clients do not request, and estimates that are not cached.
                    for path in PATHS:
                        client.get(path).raise_for_status()
                        training = ESTIMATE["training"] | {
                            "global_batch_size": 8 * (number := number + 1)
                        }
                        client.post(
                            "/v1/estimates", json={**ESTIMATE, "training": training}
                        ).raise_for_status()
                    for name, process in seen.items():
                        samples[name].append((process.memory_info().rss / 2**20, process.num_fds()))

        looking = threading.Thread(target=look)
        looking.start()
        counts = run_contention(service=service, seconds=seconds)
        over.set()
        looking.join()
    finally:
        service.stop()
    return {
        **counts,
        "processes": {name: _medians_of_thirds(each) for name, each in samples.items()},
    }


def _medians_of_thirds(samples: list[tuple[float, int]]) -> dict[str, Any]:
    third = len(samples) // 3
    parts = samples[third : 2 * third], samples[2 * third :]
    mib, handles = (
        [round(median(sample[kind] for sample in part), 1) for part in parts] for kind in (0, 1)
    )
    return {
        "mib": mib,
        "handles": handles,
        "level": mib[1] <= LEVEL * mib[0] and handles[1] <= handles[0] + HANDLES,
    }


def main() -> None:
    """Exit with 1 if memory or handles grew, or if a request failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    arguments = parser.parse_args()
    preload()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hp-soak-", ignore_cleanup_errors=True) as folder:
        report = run_soak(home=Path(folder), seconds=60 * arguments.minutes)
    if arguments.json:
        print(json.dumps(report))
    else:
        counts = (
            f"{report['requests']} requests, {report['errors']} errors, {report['searches']} "
            "searches"
        )
        print(f"{counts}, {report['statuses']} in {time.monotonic() - began:.0f} s")
        for name, process in report["processes"].items():
            print(
                f"{name}: MiB {process['mib']}, handles "
                f"{process['handles']}{'' if process['level'] else ': RISES'}"
            )
    sys.exit(
        not all(process["level"] for process in report["processes"].values())
        or report["errors"] > 0
    )


if __name__ == "__main__":
    main()
