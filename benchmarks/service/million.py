"""Measure lists of a large database.

`python -m benchmarks.service.million [--measurements 1000000] [--database ...] [--json]` requests
every GET of the API and the dashboard that reads the store, with filters that match many or few
rows, and with cursors from the middle. It reports the best and median wall time of several
requests, and the processor time of API and database, which does not depend on the load of the
machine. Then two workers and sixteen clients use the same database at the same time, and every
answer is checked.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import sqlalchemy as sa

from benchmarks.service import bulk
from benchmarks.service.contention import run_contention
from hp_tool.store import tables
from hp_tool.store.paging import RowList
from tests.service.faults.databases import Database, Postgres, Sqlite
from tests.service.faults.processes import Service, preload

REPEATS = 7
LIMIT_S = 0.1


def requested_paths(database: Database) -> dict[str, str]:
    """Return the requested paths by name. Cursors and ids are those of this database."""
    s = tables.searches.c
    engine = database.engine()
    with engine.connect() as connection:
        search = connection.execute(
            sa.select(s.id).where(s.state == "succeeded").order_by(s.created_at).limit(1)
        ).scalar_one()
    engine.dispose()
    rare = f"model-{bulk.MODELS - 1}"
    listed = "/v1/measurements?limit=100"
    return {
        "measurements": listed,
        "measurements, a page in the middle": "cursor:/v1/measurements?limit=100",
        "measurements of a common model": f"{listed}&model=model-0",
        "measurements of a rare model": f"{listed}&model={rare}",
        "measurements on one GPU": f"{listed}&gpu=v100-sxm-32gb",
        "measurements of a rare framework": f"{listed}&framework=nanotron",
        "measurements of an unknown framework": f"{listed}&framework=none",
        "measurements that timed out": f"{listed}&status=timeout",
        "measurements reported": f"{listed}&source=reported",
        "measurements of a model that ran out of memory": f"{listed}&model={rare}&status=oom",
        "measurements of a search": f"{listed}&search_id={search}",
        "searches": "/v1/searches",
        "searches, a page in the middle": "cursor:/v1/searches?limit=50",
        "searches that failed": "/v1/searches?state=failed",
        "searches that are queued": "/v1/searches?state=queued",
        "searches that are paused": "/v1/searches?state=paused",
        "a search": f"/v1/searches/{search}",
        "trials of a search": f"/v1/searches/{search}/trials",
        "calibrations": "/v1/calibrations",
        "metrics": "/metrics",
        "dashboard": "/",
        "dashboard, failed searches": "/?state=failed",
        "dashboard, searches of a common model": "/?model=model-0",
        "dashboard, searches of a rare model": f"/?model={rare}",
        "dashboard, searches of a rare kind": "/?kind=inference",
        "dashboard, an owner's of a rare kind": "/?kind=inference&owner=owner-0",
        "dashboard, failed searches of a rare model": f"/?state=failed&model={rare}",
        "dashboard, a search": f"/searches/{search}",
    }


def path_from_middle(client: httpx.Client, path: str) -> str:
    """Return a list's path with the cursor after which half of the rows follow."""
    newest = client.get(f"{path}&limit=1").json()["items"][0]["created_at"]
    at = bulk.BEGUN + (datetime.fromisoformat(newest) - bulk.BEGUN) / 2
    table = tables.measurements if "measurements" in path else tables.searches
    return f"{path}&cursor={RowList(table=table).cursor(at, '0' * 16)}"


def time_requests(client: httpx.Client, path: str, *, cpu_s: Callable[[], float]) -> dict[str, Any]:
    """Return the seconds of repeated requests of one path."""
    status, times = client.get(path).status_code, []
    cpu_begun = cpu_s()
    for _ in range(REPEATS):
        begun = time.perf_counter()
        client.get(path)
        times.append(time.perf_counter() - begun)
    cpu = (cpu_s() - cpu_begun) / REPEATS
    return {
        "status": status,
        "best_s": min(times),
        "median_s": statistics.median(times),
        "cpu_s": cpu,
    }


def processor_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return the processor seconds of processes and their child processes, including ended ones."""
    total = 0.0
    for process in processes:
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                t = each.cpu_times()
                total += (
                    t.user
                    + t.system
                    + (t.children_user + t.children_system if each is process else 0.0)
                )
    return total


def evaluate(*, kind: str, measurements: int, seconds: float) -> dict[str, Any]:
    """Fill the database, request all paths, and run clients and workers."""
    with tempfile.TemporaryDirectory(prefix="hp-million-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        (home / "faults").mkdir()
        database: Database = Sqlite(home) if kind == "sqlite" else Postgres()
        service = Service(database_url=database.url, home=home, lease_s=30.0)
        try:
            begun = time.perf_counter()
            counts = bulk.seed_everything(url=database.url, measurements=measurements)
            seeded_s = time.perf_counter() - begun
            service.start_api()
            assert service.api is not None
            pids = [service.api.pid, *database.server_pids()]
            busy = functools.partial(processor_seconds, [psutil.Process(pid) for pid in pids])
            rows = {}
            with httpx.Client(base_url=service.url, timeout=120.0) as client:
                for name, path in requested_paths(database).items():
                    address = (
                        path_from_middle(client, path.removeprefix("cursor:"))
                        if path.startswith("cursor:")
                        else path
                    )
                    rows[name] = time_requests(client, address, cpu_s=busy)
            contention = run_contention(service=service, seconds=seconds)
        finally:
            service.stop()
            database.close()
    return {
        "database": kind,
        "rows": counts,
        "seeded_s": seeded_s,
        "requests": rows,
        "contention": contention,
    }


def main() -> None:
    """Run the benchmark on one or both databases."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.service.million", description=__doc__
    )
    parser.add_argument("--measurements", type=int, default=1_000_000)
    parser.add_argument("--database", choices=("sqlite", "postgresql", "both"), default="both")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="duration of simultaneous workers and clients"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    arguments = parser.parse_args()
    preload()
    kinds = ("postgresql", "sqlite") if arguments.database == "both" else (arguments.database,)
    reports = []
    for kind in kinds:
        reports.append(
            evaluate(kind=kind, measurements=arguments.measurements, seconds=arguments.seconds)
        )
        sys.stderr.write(as_text(reports[-1]) + "\n")
    if arguments.json:
        print(json.dumps({"databases": reports}))


def as_text(report: dict[str, Any]) -> str:
    """Return the report on one database."""
    counts = ", ".join(f"{count:,} {name}" for name, count in report["rows"].items())
    lines = [f"{report['database']}: {counts}, written in {report['seeded_s']:.0f} s"]
    for name, row in report["requests"].items():
        mark = "" if row["status"] == httpx.codes.OK else f"  STATUS {row['status']}"
        slow = "  above 100 ms" if min(row["best_s"], row["cpu_s"]) > LIMIT_S else ""
        walls = f"best {1e3 * row['best_s']:.1f}, median {1e3 * row['median_s']:.1f}"
        lines.append(
            f"  {name:48} {1e3 * row['cpu_s']:7.1f} ms of processor; wall {walls}{mark}{slow}"
        )
    c = report["contention"]
    lines.append(
        f"  {c['clients']} clients and {c['workers']} workers at once for {c['seconds']:.0f} s: "
        f"{c['requests']:,} requests, "
        f"{c['writes']:,} of them writes, {c['errors']} errors, {c['locked']} times locked; "
        f"{c['searches']} searches ended"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
