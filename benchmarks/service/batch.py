"""Send a long batch to POST /v1/batch, and test a client that does not read its answers.

`python -m benchmarks.service.batch [--lines 100000] [--json]`. The lines are different estimates of
GPT-3 175B on 1,024 GPUs. One client sends and reads at the same time, while the server's peak
resident memory is recorded; its processor time gives the lines per second and core. Then a client
sends the same lines and never reads. The server must stop accepting lines from it, must not use
more memory, and must answer other clients.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import threading
import time
from typing import Any

import httpx
import psutil

from benchmarks.service.load import ESTIMATE, serving
from benchmarks.speed.workloads import query_lines, single_queries

DISTINCT = 2000
STALLED_S = 15.0
LIMIT_BYTES = 64 * 2**20
"""Allowed increase of memory over that after a small batch. It is too small for a large batch."""


class Peak:
    """Record the peak resident memory of a process."""

    def __init__(self, pid: int) -> None:
        self._process, self.bytes = psutil.Process(pid), 0
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._left.wait(0.1):
            self.bytes = max(self.bytes, self._process.memory_info().rss)


def http_chunk(size: int, data: bytes) -> bytes:
    """Return one chunk of a chunked body."""
    return f"{size:x}\r\n".encode() + data + b"\r\n"


def open_chunked_post(port: int) -> socket.socket:
    """Return a connection that has begun a chunked POST."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=600)
    head = (
        f"POST /v1/batch HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: "
        "application/x-ndjson\r\nTransfer-Encoding: chunked"
    )
    connection.sendall(head.encode() + b"\r\n\r\n")
    return connection


def send_and_read(*, port: int, pid: int, lines: list[bytes], count: int) -> dict[str, Any]:
    """Send `count` lines, and read their answers at the same time."""
    connection = open_chunked_post(port)
    busy = psutil.Process(pid)

    def send() -> None:
        for start in range(0, count, DISTINCT):
            data = b"".join(line + b"\n" for line in lines[: min(DISTINCT, count - start)])
            connection.sendall(http_chunk(len(data), data))
        connection.sendall(b"0\r\n\r\n")

    before, begun = sum(busy.cpu_times()[:2]), time.perf_counter()
    with Peak(pid) as peak:
        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        answered, errors, tail = 0, 0, b""
        while not tail.endswith(b"\r\n0\r\n\r\n"):
            data = connection.recv(2**20)
            if not data:
                break
            # A chunk may end anywhere in a line, so the words are also searched where two pieces
            # join.
            joined = tail[-64:] + data
            answered += joined.count(b'"status":"ok"') - tail[-64:].count(b'"status":"ok"')
            errors += joined.count(b'"status": "error"') - tail[-64:].count(b'"status": "error"')
            tail = joined[-128:]
        sender.join()
    connection.close()
    cpu_s = sum(busy.cpu_times()[:2]) - before
    wall_s = time.perf_counter() - begun
    return {
        "lines": count,
        "answered": answered,
        "errors": errors,
        "wall_s": wall_s,
        "per_second": count / wall_s,
        "per_cpu_second": count / cpu_s,
        "peak_bytes": peak.bytes,
    }


def send_without_reading(
    *, port: int, pid: int, lines: list[bytes], seconds: float
) -> dict[str, Any]:
    """Send without reading for `seconds`, while other clients ask."""
    connection = open_chunked_post(port)
    connection.settimeout(1.0)
    data = b"".join(line + b"\n" for line in lines)
    ending, times, errors = time.monotonic() + seconds, [], 0
    with (
        Peak(pid) as peak,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as other,
    ):
        sender = threading.Thread(target=lambda: _send_all(connection, data, ending), daemon=True)
        sender.start()
        while time.monotonic() < ending:
            begun = time.perf_counter()
            errors += other.post("/v1/estimates", json=ESTIMATE).status_code != httpx.codes.OK
            times.append(time.perf_counter() - begun)
            time.sleep(0.05)
        sender.join()
    connection.close()
    return {
        "seconds": seconds,
        "others": len(times),
        "others_median_s": statistics.median(times),
        "others_errors": errors,
        "peak_bytes": peak.bytes,
    }


def _send_all(connection: socket.socket, data: bytes, ending: float) -> None:
    while time.monotonic() < ending:
        try:
            connection.sendall(http_chunk(len(data), data))
        except OSError:  # The server accepts no more data, as intended.
            time.sleep(max(ending - time.monotonic(), 0.0))


def evaluate(*, count: int) -> dict[str, Any]:
    """Run a small batch, the long batch, and the client that does not read."""
    lines = query_lines(single_queries(DISTINCT))
    with serving() as (port, pid):
        small = send_and_read(port=port, pid=pid, lines=lines, count=max(count // 50, 1))
        long = send_and_read(port=port, pid=pid, lines=lines, count=count)
        stalled = send_without_reading(port=port, pid=pid, lines=lines, seconds=STALLED_S)
    bounded = max(long["peak_bytes"], stalled["peak_bytes"]) - small["peak_bytes"] < LIMIT_BYTES
    return {
        "small": small,
        "long": long,
        "stalled": stalled,
        "bounded": bounded,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service.batch", description=__doc__)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    arguments = parser.parse_args()
    report = evaluate(count=arguments.lines)
    if arguments.json:
        print(json.dumps(report))
        return
    for row in (report["small"], report["long"]):
        print(
            f"{row['lines']:,} lines: {row['answered']:,} answered, {row['errors']} errors, "
            f"{row['per_second']:,.0f} lines/s "
            f"by the wall clock, {row['per_cpu_second']:,.0f} a second of processor, peak "
            f"{row['peak_bytes'] / 2**20:.0f} MiB"
        )
    row = report["stalled"]
    print(
        f"a client that never reads, {row['seconds']:.0f} s: peak {row['peak_bytes'] / 2**20:.0f} "
        f"MiB; {row['others']} "
        f"estimates for others meanwhile, {1e3 * row['others_median_s']:.0f} ms each, "
        f"{row['others_errors']} errors"
    )


if __name__ == "__main__":
    main()
