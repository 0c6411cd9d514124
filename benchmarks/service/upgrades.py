"""`python -m benchmarks.service.upgrades [--measurements 300000] [--database ...] [--json]`: what
an upgrade does to writers.

A database of schema 0008 with that many measurements of one search's cluster is upgraded by
`hp-tool db upgrade`, while a writer does what a search does all the time: it renews a lease, and
stores a measurement. Waits are the writer's own, beside the same writes on the same database
before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import sqlalchemy as sa

from benchmarks.service import bulk
from hp_tool.store import schema
from hp_tool.store.engine import DURABLE, WRITES, opened
from tests.service.faults.databases import Database, Postgres, Sqlite
from tests.service.processes import hp_tool

FROM = "0008"
PART_KEY, WHOLE_KEY = "h100-sxm-80gb/node2/nvlink2/50GBps", "h100-sxm-80gb/node8/nvlink8/50GBps"
"""Of every measurement before and after: revision 0009 files small jobs under their whole
machine.
"""
EVERY_S = 0.005
KEPT = (
    "source",
    "cluster_key",
    "gpu",
    "framework",
    "model",
    "query",
    "parallel",
    "problem_digest",
    "digest",
    "status",
)
KEPT += ("step_s", "measurement", "predicted", "trust", "created_at")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One upgrade under writes."""

    upgrade_s: float
    writes: int
    """Transactions of the writer during it."""
    measurements_written: int
    longest_wait_s: float
    """Of one of them, ..."""
    usual_wait_s: float
    """... and the longest of as many before it."""


def seed(url: str, *, measurements: int) -> None:
    """Fill an empty database and take it back to schema FROM."""
    schema.upgrade(url)
    bulk.seed_everything(url=url, measurements=measurements)
    schema.downgrade(url, to=FROM)
    with opened(url) as engine, engine.execution_options(**{WRITES: True}).begin() as connection:
        connection.execute(
            sa.text("UPDATE hp_measurements SET cluster_key = :key"), {"key": PART_KEY}
        )


class Writer:
    """Writes as a search does, in a thread, and notes how long each write took."""

    def __init__(self, url: str) -> None:
        self._url, self._stop = url, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.waits_s: list[float] = []
        self.measurements = 0

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        columns = ", ".join(KEPT)
        renew = sa.text(
            "UPDATE hp_searches SET updated_at = updated_at WHERE id = (SELECT max(id) FROM "
            "hp_searches)"
        )
        store = sa.text(
            f"INSERT INTO hp_measurements (id, {columns}) SELECT :id, {columns} FROM "
            "hp_measurements "
            "WHERE id = (SELECT min(id) FROM hp_measurements)"
        )
        with opened(self._url) as engine:
            writing = engine.execution_options(**{WRITES: True, DURABLE: False})
            while not self._stop.wait(EVERY_S):
                begun = time.perf_counter()
                with writing.begin() as connection:
                    connection.execute(renew)
                    connection.execute(store, {"id": f"~{self.measurements:015d}"})
                self.waits_s.append(time.perf_counter() - begun)
                self.measurements += 1


def upgrade_under_writes(url: str) -> Report:
    """Upgrade the database by a process of its own while a Writer writes."""
    with Writer(url) as writer:
        time.sleep(1.0)
        usual_s, before = max(writer.waits_s), len(writer.waits_s)
        begun = time.perf_counter()
        command = hp_tool("db", "upgrade")
        subprocess.run(
            command, env=os.environ | {"HP_DATABASE_URL": url}, check=True, capture_output=True
        )
        upgrade_s = time.perf_counter() - begun
    during = writer.waits_s[before:]
    return Report(
        upgrade_s=upgrade_s,
        writes=len(during),
        measurements_written=writer.measurements,
        longest_wait_s=max(during),
        usual_wait_s=usual_s,
    )


def evaluate(*, kind: str, measurements: int) -> Report:
    """Seed a database of its own and upgrade it."""
    with tempfile.TemporaryDirectory(prefix="hp-upgrade-", ignore_cleanup_errors=True) as folder:
        database: Database = Sqlite(Path(folder)) if kind == "sqlite" else Postgres()
        try:
            schema.downgrade(database.url, to="base")
            seed(database.url, measurements=measurements)
            return upgrade_under_writes(database.url)
        finally:
            database.close()


def main() -> None:
    """Run on one or both databases."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.service.upgrades", description=__doc__
    )
    parser.add_argument("--measurements", type=int, default=300_000)
    parser.add_argument("--database", choices=("sqlite", "postgresql", "both"), default="both")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    kinds = ("postgresql", "sqlite") if arguments.database == "both" else (arguments.database,)
    reports = {kind: evaluate(kind=kind, measurements=arguments.measurements) for kind in kinds}
    for kind, report in reports.items():
        line = (
            f"{kind}: {arguments.measurements:,} measurements upgraded in {report.upgrade_s:.1f} "
            "s; of "
            f"{report.writes:,} writes meanwhile the longest took {report.longest_wait_s:.2f} s "
            "(before: "
            f"{report.usual_wait_s:.2f} s)"
        )
        sys.stderr.write(line + "\n")
    if arguments.json:
        print(json.dumps({kind: asdict(report) for kind, report in reports.items()}))


if __name__ == "__main__":
    main()
