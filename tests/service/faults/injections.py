"""The faults: what each one does to a running service, and that it is over when the function
returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import sqlalchemy as sa

from hp_tool.cluster.launchers.readback import read_json
from hp_tool.store import schema
from hp_tool.store.base import write_transaction
from hp_tool.store.engine import open_engine
from tests.service.editions import extract
from tests.service.faults import false_clock
from tests.service.faults.databases import Database, Postgres, until_it_answers
from tests.service.faults.engines import Local
from tests.service.faults.processes import Service
from tests.service.faults.quick_job import append_line
from tests.service.hostile import generated_column, million_ranks

SHORTEST_OUTAGE_S = 0.5
HOUR_S = 3600.0
RESTART, FOLDER_FULL, CLOCK = "PostgreSQL restarted", "runs folder full", "clock jump"
"""The fault that SQLite cannot suffer, the one that needs a disk of its own, and the one that needs
libfaketime.
"""
OLDER = "worker of an older edition"
"""The fault that needs this repository's history."""
DAMAGE_WAYS = ("remove", "pipe", "link", "folder")
DAMAGED_NAMES = (
    *(
        "",
        "lock",
        "started.json",
        "running.json",
        "ended.json",
        "job.json",
        "cancel",
        "result.json",
        "result.rank0.json",
    ),
    *("claim", "submitted.json", "submit.lock"),
)
"""What a job lays its hand on; nothing: its folder as a whole."""
UPLOAD_S = 120.0
"""How long an upload may wait for its answer."""
LEVEL_BYTES = 150 * 2**20
"""How much the API may grow while it refuses an upload."""
PLACES = ("before", "within", "after")
"""Where in a submission a worker falls asleep."""


@dataclass(kw_only=True)
class Scene:
    """What a fault may touch."""

    service: Service
    database: Database
    random: random.Random
    longest_s: float
    engine: Local = field(default_factory=Local)
    query: dict[str, Any] = field(default_factory=dict)

    def duration_s(self) -> float:
        """Of an outage."""
        return self.random.uniform(SHORTEST_OUTAGE_S, self.longest_s)


def kill_worker(scene: Scene) -> None:
    """kill -9, and another worker in its place."""
    workers = [worker for worker in scene.service.workers if worker.is_alive()]
    scene.service.kill(scene.random.choice(workers))
    scene.service.ensure_workers(len(workers))


def kill_api(scene: Scene) -> None:
    """kill -9 of the API, and a new one at the same address."""
    assert scene.service.api is not None
    scene.service.kill(scene.service.api)
    scene.service.start_api()


def restart_database(scene: Scene) -> None:
    """PostgreSQL stops, as at a crash or in order, and comes back."""
    assert isinstance(scene.database, Postgres)
    scene.database.restart(random_source=scene.random)
    until_it_answers(scene.database)


def lock_database(scene: Scene) -> None:
    """Another program holds the database, longer than a lease."""
    with scene.database.locked():
        time.sleep(scene.duration_s())


def fill_database(scene: Scene) -> None:
    """The database has no space for a while."""
    with scene.database.full():
        time.sleep(scene.duration_s())


def make_database_read_only(scene: Scene) -> None:
    """The database answers and takes nothing."""
    with scene.database.read_only():
        time.sleep(scene.duration_s())


def fill_runs_folder(scene: Scene) -> None:
    """The disk of the runs folder, a small one, has no space for a while: for submits, for marks of
    cancels, for results.
    """
    filler = scene.service.home / "runs" / "~filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 2**12)
    time.sleep(scene.duration_s())
    filler.unlink()


def hang_job(scene: Scene) -> None:
    """The next job never ends by itself."""
    _for_one_job(scene, "hang")


def truncate_result(scene: Scene) -> None:
    """The next job leaves half of its result."""
    _for_one_job(scene, "truncate")


def damage_folder(scene: Scene) -> None:
    """The next job damages its own folder, or a file in it by which it is watched, and goes on."""
    fault = scene.service.home / "faults" / "damage"
    way, name = scene.random.choice(DAMAGE_WAYS), scene.random.choice(DAMAGED_NAMES)
    fault.with_name("~damage").write_text(json.dumps({"way": way, "name": name}))
    fault.with_name("~damage").rename(fault)
    _until(lambda: not fault.exists(), timeout_s=60)
    fault.unlink(missing_ok=True)


def refuse_for_a_while(scene: Scene) -> None:
    """The engine answers "try again later" for a while, to whatever it is asked."""
    fault = scene.service.home / "faults" / "again"
    fault.touch()
    time.sleep(scene.duration_s())
    fault.unlink()


def hang_engine(scene: Scene) -> None:
    """The engine answers the next question only after the lease is long lost."""
    fault = scene.service.home / "faults" / "engine"
    seconds = 2 * scene.service.lease_s
    fault.write_text(str(seconds))
    _until(lambda: not fault.exists(), timeout_s=30)
    fault.unlink(missing_ok=True)
    time.sleep(seconds)


def race_of_workers(scene: Scene) -> None:
    """All workers stand still until their leases are free, and wake at once: each claims, and each
    may hold an old lease.
    """
    pids = [
        worker.pid
        for worker in scene.service.workers
        if worker.is_alive() and worker.pid is not None
    ]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.2 * scene.service.lease_s)
    for pid in scene.random.sample(pids, len(pids)):
        os.kill(pid, signal.SIGCONT)


def sleep_through_cancel(scene: Scene, *, place: str | None = None) -> None:
    """A worker falls asleep before, within or after the submission of a job; its search is
    cancelled, another worker takes it over and ends it; and the first one wakes.
    """
    fault = scene.service.home / "faults" / "asleep"
    sleeper = fault.with_name("sleeper")
    fault.with_name("~asleep").write_text(place or scene.random.choice(PLACES))
    fault.with_name("~asleep").rename(fault)
    _until(sleeper.exists, timeout_s=60)
    asleep = read_json(sleeper)
    if asleep is None:
        raise RuntimeError("no worker submitted a job to fall asleep over")
    sleeper.unlink()
    _cancel(scene, asleep["job"].split("-")[1])
    os.kill(asleep["pid"], signal.SIGCONT)


def cancel_search(scene: Scene) -> None:
    """A search that is worked on is cancelled, wherever it is."""
    running = _running(scene)
    if running:
        time.sleep(scene.random.uniform(0.0, 1.0))
        _cancel(scene, scene.random.choice(running))


def tune_beside(scene: Scene) -> None:
    """Command lines search beside the workers, and two of them would continue what a worker has."""
    resumed = _running(scene)[:1] * 2
    tunes = [scene.service.start_tune(query=scene.query) for _ in range(2)]
    for tune in [*tunes, *(scene.service.start_tune(resume=each) for each in resumed)]:
        tune.join()


def lose_job(scene: Scene) -> None:
    """The engine loses a job that runs."""
    _until(lambda: scene.engine.lose_job(scene.service.home), timeout_s=60)


def work_beside_an_older_edition(scene: Scene) -> None:
    """A worker of an older edition, which began before the upgrade, takes searches beside this
    edition's; then it is stopped, and hands back what it has.
    """
    folder, log = scene.service.home / "older", scene.service.home / "older.log"
    if not folder.is_dir() and (reason := extract(folder)) is not None:
        raise RuntimeError(reason)
    log.write_text("")
    with schema_of(folder, database_url=scene.service.database_url):
        worker = scene.service.start_worker_of(folder)
        _until(lambda: "INFO worker" in log.read_text() or worker.poll() is not None, timeout_s=60)
    _until(lambda: ": taken" in log.read_text() or worker.poll() is not None, timeout_s=30)
    time.sleep(scene.duration_s())
    if worker.poll() is not None:
        raise RuntimeError(f"the older worker ended: {log.read_text()}")
    worker.terminate()
    worker.wait(60)


@contextlib.contextmanager
def schema_of(folder: Path, *, database_url: str) -> Iterator[None]:
    """Have the database say that its schema is the one of the edition in a folder, which it
    extends.
    """
    homes = (folder / "hp_tool" / "store" / name for name in ("schema.py", "__init__.py"))
    text = "\n".join(home.read_text() for home in homes)  # editions differ in where it stands
    found = re.search(r'^HEAD = "(\w+)"', text, re.MULTILINE)
    assert found is not None
    _set_revision(database_url, found[1])
    try:
        yield
    finally:
        _set_revision(database_url, schema.HEAD)


def _set_revision(database_url: str, revision: str) -> None:
    with open_engine(database_url) as engine, write_transaction(engine) as connection:
        connection.execute(
            sa.text(f"UPDATE {schema.VERSION_TABLE} SET version_num = :revision"),
            {"revision": revision},
        )


def jump_clock(scene: Scene) -> None:
    """The clock of API, workers and PostgreSQL (libfaketime's) jumps an hour, ahead or back; back,
    a worker dies as well, whose lease then seems to last.
    """
    file = Path(os.environ[false_clock.FILE])
    ahead = scene.random.random() < 0.5
    file.with_name("~clock").write_text(
        f"{float(file.read_text()) + (HOUR_S if ahead else -HOUR_S):+g}"
    )
    file.with_name("~clock").rename(file)
    if not ahead:
        kill_worker(scene)


def exhaust_memory(scene: Scene) -> None:
    """Send an upload whose reader needs gigabytes: the API refuses it, stays small and keeps
    answering.
    """
    process = _api_process(scene)
    before = process.memory_info().rss
    path = generated_column(scene.service.home / "report.sqlite")
    deadline = time.monotonic() + UPLOAD_S
    while True:
        with path.open("rb") as file:
            answer = httpx.post(
                f"{scene.service.url}/v1/explanations", files=[("trace", file)], timeout=UPLOAD_S
            )
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
            break
        time.sleep(1.0)
    if answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
        raise RuntimeError(f"the upload was answered {answer.status_code}: {answer.text[:300]}")
    if process.memory_info().rss - before > LEVEL_BYTES:
        raise RuntimeError(f"the API grew from {before} to {process.memory_info().rss} bytes")


def upload_without_end(scene: Scene) -> None:
    """One client drips an upload, another sends one that takes minutes to read, both until they
    hang up. Meanwhile the API answers others, and afterwards nothing of the uploads is left.
    """
    process = _api_process(scene)
    place = urlsplit(scene.service.url)
    head = (
        f"POST /v1/explanations HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: "
        "multipart/form-data; boundary=b\r\n"
        "Content-Length: {0}\r\n\r\n"
    )
    part = b'--b\r\nContent-Disposition: form-data; name="trace"; filename="a.json.gz"\r\n\r\n'
    endless = (
        part + million_ranks(scene.service.home / "ranks.json.gz").read_bytes() + b"\r\n--b--\r\n"
    )
    assert place.port is not None
    with (
        socket.create_connection(("127.0.0.1", place.port), timeout=UPLOAD_S) as dripping,
        socket.create_connection(("127.0.0.1", place.port), timeout=UPLOAD_S) as reading,
    ):
        dripping.sendall(head.format(10**6).encode() + part)
        reading.sendall(head.format(len(endless)).encode() + endless)
        _until(lambda: bool(_readers(process)), timeout_s=30)
        ending = time.monotonic() + scene.duration_s()
        while time.monotonic() < ending:
            dripping.sendall(b" ")
            httpx.get(f"{scene.service.url}/healthz", timeout=10).raise_for_status()
            time.sleep(0.1)
    _until(lambda: not _readers(process), timeout_s=10)
    if left := _readers(process):
        raise RuntimeError(f"uploads are still read by {left}")


def _api_process(scene: Scene) -> psutil.Process:
    assert scene.service.api is not None
    return psutil.Process(scene.service.api.pid)


def _readers(process: psutil.Process) -> list[int]:
    """Return the living processes that read uploads for the API."""
    found = []
    for child in process.children():
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE and "service.analysis" in child.cmdline():
                found.append(child.pid)
    return found


def _running(scene: Scene) -> list[str]:
    answer = httpx.get(f"{scene.service.url}/v1/searches", params={"state": "running"}, timeout=60)
    return [each["id"] for each in answer.raise_for_status().json()["items"]]


def _cancel(scene: Scene, search_id: str) -> None:
    """Returns once it is final; the ledger tells so, unless it had ended before."""
    search = f"{scene.service.url}/v1/searches/{search_id}"
    if httpx.post(f"{search}/cancel", timeout=60).status_code == httpx.codes.CONFLICT:
        return
    _until(
        lambda: httpx.get(search, timeout=60).json()["state"] not in ("queued", "running"),
        timeout_s=120,
    )
    if httpx.get(search, timeout=60).json()["state"] == "cancelled":
        append_line(scene.service.home / "ledger", {"event": "cancelled", "search": search_id})


def _for_one_job(scene: Scene, name: str) -> None:
    """Lay the fault out, and wait until a job has taken it."""
    fault = scene.service.home / "faults" / name
    fault.touch()
    _until(lambda: not fault.exists(), timeout_s=60)
    fault.unlink(missing_ok=True)


def _until(condition: Callable[[], bool], *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


FAULTS: dict[str, Callable[[Scene], None]] = {
    "worker killed": kill_worker,
    "API killed": kill_api,
    RESTART: restart_database,
    "database locked": lock_database,
    "database full": fill_database,
    "database read-only": make_database_read_only,
    FOLDER_FULL: fill_runs_folder,
    "job hanging": hang_job,
    "job damaging its folder": damage_folder,
    "engine hanging": hang_engine,
    "engine answering try again": refuse_for_a_while,
    "workers claiming at once": race_of_workers,
    "cancelled under a sleeping worker": sleep_through_cancel,
    "search cancelled": cancel_search,
    "tune beside workers": tune_beside,
    "job lost by its engine": lose_job,
    CLOCK: jump_clock,
    OLDER: work_beside_an_older_edition,
    "result truncated": truncate_result,
    "upload that exhausts memory": exhaust_memory,
    "upload that never ends": upload_without_end,
}
