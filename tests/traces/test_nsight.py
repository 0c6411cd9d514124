"""Reports of Nsight Systems: tables as its exporter writes them."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from hp_tool.errors import InputError
from hp_tool.traces import nsight, read_traces
from hp_tool.traces.timeline import KINDS, timeline

PROCESS = 0x0001_0000_0000_0000 + (4242 << 24)
THREAD = PROCESS + 4242
GEMM, REDUCE, ADAM, STEP = 1, 2, 3, 4


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """Two devices of two processes; the second one's matmul takes twice as long. Two steps of 100
    us.
    """
    path = tmp_path / "report.sqlite"
    with sqlite3.connect(path) as base:
        base.executescript(
            """
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
            CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, "end" INTEGER, deviceId INTEGER, streamId INTEGER,
                correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, "end" INTEGER, deviceId INTEGER, correlationId INTEGER,
                globalPid INTEGER, bytes INTEGER, copyKind INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, "end" INTEGER, globalTid INTEGER, correlationId INTEGER,
                nameId INTEGER);
            CREATE TABLE NVTX_EVENTS (start INTEGER, "end" INTEGER, eventType INTEGER, text TEXT, textId INTEGER,
                globalTid INTEGER);
            INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA A100-SXM4-80GB');
            INSERT INTO StringIds VALUES (1, 'ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_nn'),
                (2, 'ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)'),
                (3, 'void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor>'), (4, 'iteration 8');
            """  # noqa: E501
        )
        number = 0
        for place in range(2):
            process, thread = PROCESS + (place << 24), THREAD + (place << 24)
            for step in range(2):
                at = 1_000_000 + 100_000 * step
                kernels = [(GEMM, 10, 30 * (place + 1)), (REDUCE, 75, 10), (ADAM, 85, 14)]
                for kernel, begin, length in kernels:
                    number += 1
                    start = at + 1_000 * begin
                    row = (start, start + 1_000 * length, place, 7, number, process, kernel, kernel)
                    base.execute(
                        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?,?)", row
                    )
                    row = (at + 1_000, at + 2_000, thread, number, 9)
                    base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?)", row)
                base.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,?,?,?,?,?)",
                    (at, at + 5_000, place, -1, process, 64, 1),
                )
                text, identity = (f"step {step}", None) if step == 0 else (None, STEP)
                base.execute(
                    "INSERT INTO NVTX_EVENTS VALUES (?,?,?,?,?,?)",
                    (at, at + 98_000, 59, text, identity, thread),
                )
    return path


def test_a_report_of_two_processes_is_two_ranks(report: Path) -> None:
    ranks = read_traces([report])
    assert [rank.rank for rank in ranks] == [0, 1] and ranks[0].device == "NVIDIA A100-SXM4-80GB"
    assert sorted({KINDS[kind] for kind in ranks[0].kind}) == [
        "collective",
        "copy_host",
        "matmul",
        "optimizer",
    ]
    line = timeline(ranks)
    steps = [
        {name: round(1e6 * s, 3) for name, s in own[1].parts_s.items() if s} for own in line.splits
    ]
    assert steps[0] == {
        "compute": 30,
        "data_parallel": 10,
        "optimizer": 14,
        "offload": 5,
        "overhead": 41,
    }
    assert steps[1] == {
        "compute": 60,
        "data_parallel": 10,
        "optimizer": 14,
        "offload": 5,
        "overhead": 11,
    }


def test_what_is_no_report_is_refused(
    tmp_path: Path, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(report.read_bytes()[:3000])
    with pytest.raises(InputError, match="SQLite"):
        read_traces([broken])
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as base:
        base.execute("CREATE TABLE other (a)")
    with pytest.raises(InputError, match="no table CUPTI_ACTIVITY_KIND_KERNEL"):
        read_traces([other])
    with sqlite3.connect(other) as base:  # a view that never ends
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT * FROM n"
        base.execute(f"CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS {endless}")
    with pytest.raises(InputError, match="no table CUPTI_ACTIVITY_KIND_KERNEL"):
        read_traces([other])
    monkeypatch.setattr(nsight, "MAX_SQLITE_STEPS", 0)
    with sqlite3.connect(report) as base:
        rows = [(n, n, 0, 7, n, PROCESS, GEMM, GEMM) for n in range(100_000)]
        base.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?,?)", rows)
    with pytest.raises(InputError, match="interrupted"):
        read_traces([report])
