"""API and workers as processes that can be killed, and started again within a moment.

They are the service's own, started from a process that has imported everything (fork server); a
worker differs from `hp-tool worker` in the quick job it launches and in how long it waits for a
locked SQLite file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.forked import FORKED
from tests.service.faults.quick_job import append_line
from tests.service.processes import free_port

BUSY_TIMEOUT_S = 0.5
"""In place of 30 s, so that a lock of a fault is felt."""
HANG_S = 600.0
"""A process that is alive and not ready by then hangs."""
SECRET = "a secret of 24 bytes or more"


@dataclass(kw_only=True)
class Service:
    """The processes over one database. `home` holds the jobs, the ledger, the logs and the files
    that cause faults.
    """

    database_url: str
    home: Path
    lease_s: float
    environment: dict[str, str] = field(default_factory=dict)
    """Of API and workers, besides what they get from here."""
    busy_timeout_s: float = BUSY_TIMEOUT_S
    """Of workers on SQLite."""
    port: int = field(default_factory=free_port)
    api: ForkServerProcess | None = None
    workers: list[ForkServerProcess] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start_api(self) -> None:
        """Returns once it is ready."""
        self.api = self._start(_api, self.port)
        deadline = time.monotonic() + HANG_S
        while not self._ready():
            if not self.api.is_alive() or time.monotonic() > deadline:
                raise RuntimeError(f"the API did not start; see {self.home / 'api.log'}")
            time.sleep(0.02)

    def start_worker(self) -> ForkServerProcess:
        """Another worker; it is at work at once."""
        process = self._start(_worker, self.lease_s, self.busy_timeout_s)
        self.workers.append(process)
        return process

    def start_tune(
        self, *, query: dict[str, Any] | None = None, resume: str | None = None
    ) -> ForkServerProcess:
        """What `hp-tool tune` does; the ledger tells how it ended."""
        return self._start(_tune, query, resume)

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
        living = [
            process
            for process in (self.api, *self.workers)
            if process is not None and process.is_alive()
        ]
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
                if process.pid != os.getpid() and any(
                    str(self.home) in word for word in process.cmdline()
                ):
                    found.append(process)
        return found

    def start_worker_of(self, folder: Path) -> subprocess.Popen[bytes]:
        """A worker of the edition in a folder, with that edition's quick job; its log is
        older.log.
        """
        code = (
            f"from tests.service.faults.processes import _worker; _worker({self.lease_s}, "
            f"{self.busy_timeout_s})"
        )
        environment = os.environ | self.own_environment()
        with (self.home / "older.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", code], cwd=folder, env=environment, stdout=log, stderr=log
            )

    def own_environment(self) -> dict[str, str]:
        """What API and workers get besides what they inherit."""
        home = {
            "HP_RUNS_DIR": str(self.home / "runs"),
            "HP_CATALOG_DIR": str(self.home / "catalog"),
        }
        webhooks = {"HP_WEBHOOK_SECRET": SECRET, "HP_WEBHOOK_NETWORKS": "127.0.0.0/8"}
        uploads = {"HP_MAX_UPLOAD_MEMORY_MIB": "256", "TMPDIR": str(self.home / "temporary")}
        return {
            **home,
            **webhooks,
            **uploads,
            "HP_DATABASE_URL": self.database_url,
            **self.environment,
        }

    def _start(self, work: Callable[..., None], *arguments: object) -> ForkServerProcess:
        arguments = (str(self.home), self.own_environment(), work, *arguments)
        process = FORKED.Process(target=_own, args=arguments, daemon=True)
        process.start()
        return process

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=30).status_code == 200
        except httpx.TransportError:
            return False


def preload() -> None:
    """Import once what every process needs; returns when that is done."""
    FORKED.set_forkserver_preload(
        ["tests.service.faults.preloaded", "tests.service.faults.campaign"]
    )
    first = FORKED.Process(target=os.getpid)
    first.start()
    first.join()


def _own(
    home: str, environment: dict[str, str], work: Callable[..., None], *arguments: object
) -> None:
    """`work` with an environment, log and signals of its own."""
    os.environ |= environment
    log = os.open(
        Path(home) / f"{work.__name__[1:]}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    work(*arguments)


def _api(port: int) -> None:
    from service.app import serve
    from service.settings import from_environment

    serve(settings=from_environment(port=port))


def _worker(lease_s: float, busy_timeout_s: float) -> None:
    from service import logs, worker

    logs.configure_logging(form="text", level="info")
    _quicken(busy_timeout_s)
    worker.SWEEP_EVERY_S = lease_s
    worker.work(database_url=None, lease_s=lease_s)


def _tune(query: dict[str, Any] | None, resume: str | None) -> None:
    from hp_tool import store
    from hp_tool.errors import HpToolError
    from hp_tool.loop import tuning
    from hp_tool.questions import schema
    from hp_tool.store import engine

    _quicken(engine.BUSY_TIMEOUT_S)
    opened, ledger = (
        store.open_store(store.database_url()),
        Path(os.environ["HP_RUNS_DIR"]).parent / "ledger",
    )
    asked = None if query is None else schema.parse_query(query)
    try:
        told = tuning.tune(query=asked, store=opened, search_id=resume)
        append_line(ledger, {"event": "tuned", "search": told.search.id})
    except HpToolError as error:
        append_line(
            ledger, {"event": "refused" if resume else "tune failed", "error": error.message}
        )
    finally:
        opened.close()


def _quicken(busy_timeout_s: float) -> None:
    """Jobs and locks of this process take a moment."""
    from hp_tool.cluster import launchers
    from hp_tool.store import engine

    quick = "tests.service.faults.quick_launcher"
    launchers._ADAPTERS |= {
        name: (quick, f"Quick{name.capitalize()}") for name in ("local", "slurm", "ray")
    }
    engine.BUSY_TIMEOUT_S = busy_timeout_s
    restrict(Path(os.environ["HP_RUNS_DIR"]).parent / "faults")


def restrict(faults: Path) -> None:
    """SQLite files of this process may not grow while `full` lies among the faults (SQLite's own
    limit stands for a full disk), and not be written while `read-only` does.
    """
    import sqlalchemy as sa

    @sa.event.listens_for(sa.Engine, "begin")
    def begin(connection: sa.Connection) -> None:
        if connection.dialect.name == "sqlite":
            pages = 1 if (faults / "full").exists() else 2**30  # never below what the file has
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
            connection.exec_driver_sql(
                f"PRAGMA query_only = {int((faults / 'read-only').exists())}"
            )
