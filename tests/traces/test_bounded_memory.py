"""Readers keep a bounded amount of what a trace repeats: names, header values, process groups."""

from __future__ import annotations

import gzip
import json
import sqlite3
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from hp_tool.errors import InputError
from hp_tool.traces import messages, read_traces
from tests.service.hostile import KERNEL

MIB = 2**20


def long_strings(path: Path) -> Path:
    with sqlite3.connect(path) as base:
        base.executescript(
            """
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT GENERATED ALWAYS AS (printf('%0200000d', id)));
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, "end" INTEGER, deviceId INTEGER, correlationId INTEGER,
                globalPid INTEGER, demangledName INTEGER);
            CREATE TABLE NVTX_EVENTS (start INTEGER, "end" INTEGER, text TEXT, textId INTEGER, globalTid INTEGER);
            """  # noqa: E501
        )
        base.executemany(
            "INSERT INTO StringIds (id) VALUES (?)", [(number,) for number in range(1, 400)]
        )
        base.execute("INSERT INTO NVTX_EVENTS SELECT 1000, 2000, NULL, id, 1 FROM StringIds")
        base.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL SELECT 1000, 2000, 0, 1, 1, id FROM StringIds"
        )
    return path


def long_names(path: Path) -> Path:
    events = [
        KERNEL | {"name": "gemm" + "a" * 100_000 + str(number), "ts": number}
        for number in range(400)
    ]
    path.write_text(json.dumps(events))
    return path


def unknown_headers(path: Path) -> Path:
    values = {f"header{number}": [[]] * 100_000 for number in range(10)}
    path.write_text(json.dumps({**values, "traceEvents": [KERNEL | {"name": "gemm", "ts": 1}]}))
    return path


@pytest.mark.parametrize("make", [long_strings, long_names, unknown_headers])
def test_memory_does_not_grow_with_what_no_answer_needs(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    path = make(tmp_path / "trace")
    tracemalloc.start()
    try:
        read_traces([path])
        largest = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert largest < 25 * MIB


def test_more_process_groups_than_any_job_has_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_GROUP_MEMBERS", 10_000)
    events = []
    for number in range(20):
        args = {
            "Process Group Name": str(number),
            "Process Group Ranks": list(range(number, number + 1000)),
        }
        events.append(KERNEL | {"name": "ncclDevKernel_AllReduce", "ts": number, "args": args})
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(events).encode()))
    with pytest.raises(InputError, match="process groups"):
        read_traces([path])
