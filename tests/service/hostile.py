"""Hostile and very large recordings, generated: each is small to send and costly to read without
limits.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

KERNEL = {"ph": "X", "cat": "kernel", "tid": 7, "dur": 1}


def generated_column(path: Path) -> Path:
    """Write an Nsight SQLite file of a few kilobytes whose generated column returns a megabyte of
    text for each row.
    """
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as base:
        base.executescript(
            """
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT GENERATED ALWAYS AS (printf('%0900000d', id)));
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, "end" INTEGER, deviceId INTEGER, correlationId INTEGER,
                globalPid INTEGER, demangledName INTEGER);
            CREATE TABLE NVTX_EVENTS (start INTEGER, "end" INTEGER, text TEXT, textId INTEGER, globalTid INTEGER);
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1000, 2000, 0, 1, 1, 1);
            """  # noqa: E501
        )
        base.executemany(
            "INSERT INTO StringIds (id) VALUES (?)", [(number,) for number in range(1, 4000)]
        )
        base.execute("INSERT INTO NVTX_EVENTS SELECT 1000, 2000, NULL, id, 1 FROM StringIds")
    base.close()
    return path


def gzip_bomb(path: Path) -> Path:
    """Write a gzip file below the limit on its ratio, whose JSON needs twenty times its text in
    memory as Python objects.
    """
    lists = b"[" + b"[]," * 2_500_000 + b"[]]"
    with gzip.open(path, "wb") as file:
        file.write(b'{"traceEvents": []')
        for number in range(8):
            file.write(b', "header%d": ' % number + lists)
        file.write(b"}")
    return path


def long_names(path: Path) -> Path:
    """Write a gzip file of kernels whose names have 100,000 characters each and differ at their
    ends.
    """
    with gzip.open(path, "wb") as file:
        file.write(b"[")
        for number in range(5_000):
            event = KERNEL | {"name": "gemm" + "a" * 13_000 + str(number), "ts": number}
            file.write(json.dumps(event).encode() + b",")
        file.write(b"{}]")
    return path


def million_ranks(path: Path) -> Path:
    """Write a trace of 20,000 collectives of one group that lists a million ranks."""
    args = {
        "Collective name": "allreduce",
        "Process Group Name": "1",
        "Process Group Description": "DATA_PARALLEL_GROUP",
    }
    args |= {"In msg nelems": 1024, "dtype": "BFloat16"}
    group = {"pg_name": "1", "pg_desc": "DATA_PARALLEL_GROUP", "ranks": list(range(1_000_000))}
    events = [
        KERNEL | {"name": "ncclDevKernel_AllReduce", "ts": 2 * number, "args": args}
        for number in range(20_000)
    ]
    document = {"distributedInfo": {"rank": 0, "pg_config": [group]}, "traceEvents": events}
    path.write_bytes(gzip.compress(json.dumps(document, separators=(",", ":")).encode()))
    return path


def many_ranks_log(path: Path, *, ranks: int = 16_384) -> Path:
    """Write an honest log of Megatron with --timing-log-option all, of a job of many ranks; rank 5
    is slow.
    """
    step = (
        " [2026-03-01 10:00:00.123456] iteration {0:8d}/     500 | consumed samples: 1280 | "
        "elapsed time per iteration (ms): "
        "{1:.1f} | learning rate: 1.2E-05 | global batch size: 128 | lm loss: 9.1E+00 |\n"
    )
    with path.open("w") as file:
        file.write(step.format(1, 20_000.0))
        for iteration in (10, 20):
            file.write(step.format(iteration, 1000.0) + "times across ranks (ms):\n")
            for name, ms in (
                ("forward-compute", 200.0),
                ("backward-compute", 400.0),
                ("optimizer", 100.0),
            ):
                file.write(f"  {name}:\n")
                file.writelines(
                    f"     rank {rank:2d}: {ms * (1.3 if rank == 5 else 1.0):.2f}\n"
                    for rank in range(ranks)
                )
    return path


HOSTILE: dict[str, Callable[[Path], Path]] = {
    "report.sqlite": generated_column,
    "bomb.json.gz": gzip_bomb,
    "names.json.gz": long_names,
    "ranks.json.gz": million_ranks,
}
"""By file name."""
