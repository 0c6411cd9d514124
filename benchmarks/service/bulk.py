"""Fill a database with searches, runs and measurements of several years, by the drivers' bulk
inserts.

A few rows have the content that the API and a worker would store. The others repeat it with other
names, times and owners, because only sizes and distributions matter here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sqlite3
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa

from hp_tool.domain.digests import configuration_digest
from hp_tool.domain.measurement import Fidelity, Hardware, Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.questions.schema import to_dict
from hp_tool.store import tables
from hp_tool.store.engine import create_engine, parse_url

MEASUREMENTS_PER_SEARCH = 50
RUNS_PER_SEARCH = 10
OWNERS, MODELS, CLUSTERS = 200, 300, 100
GPUS = ("h100-sxm-80gb", "a100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "v100-sxm-32gb")
FRAMEWORKS = ("megatron-core",) * 20 + ("torch-fsdp",) * 4 + ("nanotron",)
STATUSES = ("ok",) * 90 + ("oom",) * 7 + ("crashed",) * 2 + ("timeout",)
STATES = ("succeeded",) * 95 + ("failed",) * 3 + ("cancelled",) * 2
QUEUED = 50
BEGUN = datetime(2024, 1, 1, tzinfo=UTC)
APART_S = 60
QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-2-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64, "gpus_per_node": 8},
    "training": {"sequence_length": 4096, "global_batch_size": 1024},
}


def seed_everything(*, url: str, measurements: int, seed: int = 0) -> dict[str, int]:
    """Fill an upgraded, empty database; return the number of rows of each table."""
    dice = random.Random(seed)
    searches = measurements // MEASUREMENTS_PER_SEARCH
    ids = [f"{dice.getrandbits(64):016x}" for _ in range(searches)]
    engine = create_engine(url)
    indexes = [
        index
        for table in (tables.searches, tables.runs, tables.measurements)
        for index in table.indexes
    ]
    # Indexes are created at the end, which takes a tenth of the time.
    with engine.begin() as connection:
        for index in indexes:
            index.drop(connection)
    counts = {
        "searches": _write(url, tables.searches, _searches(dice, ids)),
        "runs": _write(url, tables.runs, _runs(dice, ids)),
        "measurements": _write(url, tables.measurements, _measurements(dice, ids, measurements)),
    }
    with engine.begin() as connection:
        for index in indexes:
            index.create(connection)
    options = {"isolation_level": "AUTOCOMMIT"} if engine.dialect.name == "postgresql" else {}
    with engine.connect().execution_options(**options) as connection:
        # Statistics and the visibility map, which autovacuum updates within minutes.
        # alone.
        connection.exec_driver_sql(
            "VACUUM ANALYZE" if engine.dialect.name == "postgresql" else "ANALYZE"
        )
        connection.commit()
    engine.dispose()
    return counts


def _searches(dice: random.Random, ids: Sequence[str]) -> Iterator[dict[str, Any]]:
    query, progress = (
        json.dumps(QUERY),
        json.dumps({"profile_runs": 8, "budget_runs": 8, "gpu_seconds": 100.0}),
    )
    for number, search in enumerate(ids):
        at = BEGUN + timedelta(seconds=number * APART_S * MEASUREMENTS_PER_SEARCH)
        yield {
            "id": search,
            "state": dice.choice(STATES) if number < len(ids) - QUEUED else "queued",
            "query": query,
            "owner": _owner(dice),
            "kind": QUERY["kind"] if dice.random() < 0.98 else "inference",
            "model": _model(dice),
            "priority": 0,
            "lease_token": 1,
            "last_event": 0,
            "progress": progress,
            "created_at": at,
            "updated_at": at,
            "started_at": at,
            "finished_at": at,
        }


def _runs(dice: random.Random, ids: Sequence[str]) -> Iterator[dict[str, Any]]:
    parallel, fidelity, predicted = (
        json.dumps(each) for each in (_parallel(), to_dict(Fidelity()), _predicted())
    )
    for place, search in enumerate(ids):
        for number in range(RUNS_PER_SEARCH):
            at = BEGUN + timedelta(seconds=(place * MEASUREMENTS_PER_SEARCH + number) * APART_S)
            yield {
                "id": _run_id(search, number),
                "search_id": search,
                "number": number,
                "digest": f"{number:064x}",
                "attempt": 0,
                "state": "finished",
                "parallel": parallel,
                "fidelity": fidelity,
                "predicted": predicted,
                "job_name": f"hp-{search}-r{number}-t1",
                "token": 1,
                "gpu_seconds": 64 * dice.uniform(20, 60),
                "created_at": at,
                "finished_at": at,
            }


def _measurements(dice: random.Random, ids: Sequence[str], number: int) -> Iterator[dict[str, Any]]:
    query, parallel, predicted = (json.dumps(each) for each in (QUERY, _parallel(), _predicted()))
    outcomes = {status: json.dumps(to_dict(_outcome(status))) for status in set(STATUSES)}
    digest = configuration_digest(parallel=ParallelConfig(), fidelity=Fidelity())
    for place in range(number):
        search, of_run = divmod(place, MEASUREMENTS_PER_SEARCH)
        profiled = of_run < RUNS_PER_SEARCH and search < len(ids)
        cluster = dice.randrange(CLUSTERS)
        status = dice.choice(STATUSES)
        yield {
            "id": f"{dice.getrandbits(64):016x}",
            "source": "profile" if profiled else "reported",
            "search_id": ids[search] if profiled else None,
            "run_id": _run_id(ids[search], of_run) if profiled else None,
            "cluster_key": f"cluster-{cluster}",
            "gpu": GPUS[cluster % len(GPUS)],
            "framework": FRAMEWORKS[cluster % len(FRAMEWORKS)],
            "model": _model(dice),
            "query": query,
            "parallel": parallel,
            "problem_digest": f"{dice.randrange(10_000):064x}",
            "digest": digest,
            "status": status,
            "step_s": 1.5 if status == "ok" else None,
            "measurement": outcomes[status],
            "predicted": predicted,
            "trust": 1.0,
            "state": "accepted",
            "owner": _owner(dice),
            "created_at": BEGUN + timedelta(seconds=place * APART_S),
        }


def _model(dice: random.Random) -> str:
    return f"model-{int(MODELS * dice.random() ** 3)}"  # A few models have most rows.


def _owner(dice: random.Random) -> str:
    return f"owner-{int(OWNERS * dice.random() ** 2)}"


def _run_id(search: str, number: int) -> str:
    return f"{(int(search, 16) + number + 1) % 2**64:016x}"


def _parallel() -> dict[str, Any]:
    parallel: dict[str, Any] = to_dict(
        ParallelConfig(tensor_parallel_size=8, pipeline_parallel_size=4, data_parallel_size=2)
    )
    return parallel


def _predicted() -> dict[str, float]:
    return {"step_s": 1.4, "calibrated_step_s": 1.5, "memory_allocated_bytes": 6e10}


def _outcome(status: Any) -> Measurement:
    if status != "ok":
        return Measurement(
            status=status, cause="rank 3 failed", log_tail="[rank3] out of memory\n" * 40
        )
    hardware = Hardware(
        gpu="h100-sxm-80gb", num_gpus=64, hosts=tuple(f"node-{n}" for n in range(8))
    )
    return Measurement(
        status="ok",
        step_s=1.5,
        step_times_s=(1.4, 1.5, 1.6),
        peak_memory_bytes=6 * 10**10,
        hardware=hardware,
    )


def _write(url: str, table: sa.Table, rows: Iterator[dict[str, Any]]) -> int:
    """Insert rows whose JSON is already text; return their number."""
    first = next(rows, None)
    if first is None:
        return 0
    names, count = list(first), 0

    def values() -> Iterator[list[Any]]:
        nonlocal count
        for row in itertools.chain((first,), rows):
            count += 1
            yield list(row.values())

    if parse_url(url).get_backend_name() == "sqlite":
        _write_sqlite(url, table.name, names, values())
    else:
        _write_postgresql(url, table.name, names, values())
    return count


def _write_sqlite(url: str, table: str, names: Sequence[str], rows: Iterator[list[Any]]) -> None:
    statement = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    with (
        contextlib.closing(sqlite3.connect(parse_url(url).database or "")) as connection,
        connection,
    ):
        connection.executemany(statement, ([_text(value) for value in row] for row in rows))


def _text(value: Any) -> Any:
    return (
        value.replace(tzinfo=None).isoformat(" ", timespec="microseconds")
        if isinstance(value, datetime)
        else value
    )


def _write_postgresql(
    url: str, table: str, names: Sequence[str], rows: Iterator[list[Any]]
) -> None:
    import psycopg

    libpq = parse_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    into = f"COPY {table} ({', '.join(names)}) FROM STDIN"
    with psycopg.connect(libpq) as connection, connection.cursor().copy(into) as copy:  # type: ignore[arg-type]
        for row in rows:
            copy.write_row(row)
