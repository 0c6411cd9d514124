"""Measure estimates and recommendations under load.

`python -m benchmarks.service.load [--seconds 5] [--clients 1 8 64] [--json]` sends queries about
GPT-3 175B on 1,024 GPUs: the same query repeatedly (cached), and different queries (uncached). A
trivial FastAPI route in the same uvicorn process gives the ceiling, which is the cost of HTTP
alone. The clients run in a separate process as asyncio streams with keep-alive. In addition to
requests per second and latencies, the command reports the server's processor time per request,
which does not depend on the load of the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from benchmarks.service.clients import repeat_forever, request_bytes, send_requests
from benchmarks.speed.workloads import QUERY

ESTIMATE = QUERY | {
    "parallel": {
        "tensor_parallel_size": 8,
        "pipeline_parallel_size": 16,
        "virtual_pipeline_parallel_size": 3,
        "micro_batch_size": 1,
        "recompute": "selective",
    }
}
TRIVIAL, ESTIMATES, RECOMMENDATIONS = "/trivial", "/v1/estimates", "/v1/recommendations?top=10"
CEILING = "trivial route"


def serve(url: str, port: int) -> None:
    """Run the service as `hp-tool serve` does, with a trivial route in the same process."""
    import uvicorn
    from fastapi import FastAPI
    from starlette.types import Receive, Scope, Send

    from service.app import create_app
    from service.settings import Settings

    ours, bare = create_app(Settings(database_url=url)), FastAPI()

    @bare.post(TRIVIAL)
    async def trivial(body: dict[str, Any]) -> dict[str, bool]:
        return {"ok": bool(body)}

    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        await (bare if scope.get("path") == TRIVIAL else ours)(scope, receive, send)

    uvicorn.run(
        both, host="127.0.0.1", port=port, log_config=None, access_log=False, server_header=False
    )


@contextmanager
def serving() -> Iterator[tuple[int, int]]:
    """Yield the port and process id of a service with an empty database in a separate process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="hp-load-") as folder:
        url = f"sqlite:///{Path(folder) / 'hp.sqlite3'}"
        server = get_context("spawn").Process(target=serve, args=(url, port), daemon=True)
        server.start()
        try:
            wait_for_port(port)
            assert server.pid is not None
            yield port, server.pid
        finally:
            server.terminate()
            server.join(10)


def wait_for_port(port: int, *, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def workloads(port: int) -> dict[str, Iterator[bytes]]:
    """Return endless requests by the name of the workload."""

    def different(path: str, query: dict[str, Any]) -> Iterator[bytes]:
        for number in itertools.count():
            training = query["training"] | {"total_tokens": 300e9 + number}
            yield request_bytes(
                path=path, body=json.dumps(query | {"training": training}).encode(), port=port
            )

    def same(path: str, query: dict[str, Any]) -> Iterator[bytes]:
        return repeat_forever(request_bytes(path=path, body=json.dumps(query).encode(), port=port))

    return {
        CEILING: same(TRIVIAL, ESTIMATE),
        "estimate, cached": same(ESTIMATES, ESTIMATE),
        "estimate, uncached": different(ESTIMATES, ESTIMATE),
        "recommendation, cached": same(RECOMMENDATIONS, QUERY),
        "recommendation, uncached": different(RECOMMENDATIONS, QUERY),
    }


def evaluate(*, clients: list[int], seconds: float) -> dict[str, Any]:
    """Run all workloads with every number of clients."""
    rows = []
    with serving() as (port, pid):
        busy = psutil.Process(pid)
        for name, requests in workloads(port).items():
            send_requests(
                port=port, requests=requests, clients=2, seconds=min(seconds, 1.0)
            )  # warm
            for number in clients:
                before = sum(busy.cpu_times()[:2])
                answers = send_requests(
                    port=port, requests=requests, clients=number, seconds=seconds
                )
                rows.append(
                    {
                        "workload": name,
                        "clients": number,
                        "requests": len(answers.seconds),
                        "per_second": answers.per_second,
                        "p50_s": answers.quantile_s(0.5),
                        "p99_s": answers.quantile_s(0.99),
                        "errors": answers.errors,
                        "cpu_s": (sum(busy.cpu_times()[:2]) - before) / len(answers.seconds),
                    }
                )
                sys.stderr.write(as_text(rows[-1]) + "\n")
    return {
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "rows": rows,
        "of_ceiling": shares_of_ceiling(rows),
    }


def shares_of_ceiling(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return requests per second as a share of the trivial route's, by wall clock and by processor
    time. The best number of clients counts.
    """
    ceiling = {row["clients"]: row for row in rows if row["workload"] == CEILING}
    shares: dict[str, dict[str, float]] = {}
    for row in rows:
        top, share = (
            ceiling[row["clients"]],
            shares.setdefault(row["workload"], {"wall": 0.0, "cpu": 0.0}),
        )
        share["wall"] = max(share["wall"], row["per_second"] / top["per_second"])
        share["cpu"] = max(share["cpu"], top["cpu_s"] / row["cpu_s"] if row["cpu_s"] else 0.0)
    return shares


def as_text(row: dict[str, Any]) -> str:
    """Return one line of the report."""
    return (
        f"{row['workload']:26} {row['clients']:3} clients: {row['per_second']:8,.0f}/s, p50 "
        f"{1e3 * row['p50_s']:7.1f} ms, "
        f"p99 {1e3 * row['p99_s']:7.1f} ms, {row['errors']} errors, {1e3 * row['cpu_s']:6.2f} ms "
        "of processor each"
    )


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service.load", description=__doc__)
    parser.add_argument(
        "--seconds",
        type=float,
        default=5.0,
        help="duration for each workload and number of clients",
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    arguments = parser.parse_args()
    report = evaluate(clients=arguments.clients, seconds=arguments.seconds)
    if arguments.json:
        print(json.dumps(report))
        return
    print(
        f"load {report['load']:.1f} on {report['cores']} cores; shares of the ceiling by wall "
        "clock and by processor time:"
    )
    for name, share in report["of_ceiling"].items():
        print(f"  {name:26} {share['wall']:.2f} {share['cpu']:.2f}")


if __name__ == "__main__":
    main()
