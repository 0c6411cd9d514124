"""API and workers as processes that can be killed, and started again within a moment.

They are the service's own, started from a process that has imported everything (fork server); a worker differs from
`hp-tool worker` in the quick job it launches and in how long it waits for a locked SQLite file.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import httpx
import psutil

from tests.service.processes import free_port

BUSY_TIMEOUT_S = 0.5
"""In place of 30 s, so that a lock is felt."""
START_S = 60.0
_context = multiprocessing.get_context("forkserver")


@dataclass(kw_only=True)
class Service:
    """The processes over one database. `home` holds the jobs, the ledger, the logs and the files that cause faults."""

    database_url: str
    home: Path
    lease_s: float
    port: int = field(default_factory=free_port)
    api: ForkServerProcess | None = None
    workers: list[ForkServerProcess] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start_api(self) -> None:
        """Returns once it is ready."""
        self.api = _context.Process(target=_api, args=(self.database_url, str(self.home), self.port), daemon=True)
        self.api.start()
        deadline = time.monotonic() + START_S
        while not self._ready():
            if not self.api.is_alive() or time.monotonic() > deadline:
                raise RuntimeError(f"the API did not start; see {self.home / 'api.log'}")
            time.sleep(0.02)

    def start_worker(self) -> ForkServerProcess:
        """Another worker; it is at work at once."""
        process = _context.Process(target=_worker, args=(self.database_url, str(self.home), self.lease_s), daemon=True)
        process.start()
        self.workers.append(process)
        return process

    def ensure_workers(self, number: int) -> None:
        """Start what is missing, as a supervisor of processes would."""
        self.workers = [worker for worker in self.workers if worker.is_alive()]
        while len(self.workers) < number:
            self.start_worker()

    def kill(self, process: ForkServerProcess) -> None:
        """kill -9, and wait for it to be gone."""
        process.kill()
        process.join(10)

    def stop(self) -> None:
        """SIGTERM to all, as at a shutdown."""
        living = [process for process in (self.api, *self.workers) if process is not None and process.is_alive()]
        for process in living:
            process.terminate()
        for process in living:
            process.join(30)
            if process.is_alive():
                process.kill()

    def leftovers(self) -> list[psutil.Process]:
        """Living processes of jobs: those that name this home in their arguments."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and any(str(self.home) in word for word in process.cmdline()):
                    found.append(process)
        return found

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


def preload() -> None:
    """Import once what every process needs."""
    _context.set_forkserver_preload(["tests.service.faults.preloaded"])


def _api(database_url: str, home: str, port: int) -> None:
    from service.app import serve
    from service.settings import Settings

    _own(home, "api")
    serve(settings=Settings(database_url=database_url, port=port))


def _worker(database_url: str, home: str, lease_s: float) -> None:
    from hp_tool import launchers
    from hp_tool.store import engine
    from service import logs, worker

    _own(home, "worker")
    logs.configure(form="text", level="info")
    launchers._ADAPTERS["local"] = ("tests.service.faults.quick_launcher", "QuickLauncher")
    engine.BUSY_TIMEOUT_S = BUSY_TIMEOUT_S
    restrict(Path(home) / "faults")
    worker.SWEEP_EVERY_S = lease_s
    worker.work(database_url=database_url, lease_s=lease_s)


def restrict(faults: Path) -> None:
    """SQLite files of this process may not grow while `full` lies among the faults (SQLite's own limit stands for a full disk),
    and not be written while `read-only` does."""
    import sqlalchemy as sa

    @sa.event.listens_for(sa.Engine, "begin")
    def begin(connection: sa.Connection) -> None:
        if connection.dialect.name == "sqlite":
            pages = 1 if (faults / "full").exists() else 2**30  # never below what the file has
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
            connection.exec_driver_sql(f"PRAGMA query_only = {int((faults / 'read-only').exists())}")


def _own(home: str, name: str) -> None:
    """This process's environment, log and signals."""
    os.environ |= {"HP_RUNS_DIR": str(Path(home) / "runs"), "HP_CATALOG_DIR": str(Path(home) / "catalog")}
    log = os.open(Path(home) / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.default_int_handler)
