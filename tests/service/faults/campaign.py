"""Faults, one after another, under a stream of searches; then everything drains and is counted."""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from hp_tool.domain.access import Usage
from hp_tool.errors import StoreError
from hp_tool.store import open_store
from tests.service.editions import extract
from tests.service.faults.audit import KINDS, audit
from tests.service.faults.databases import Database, Postgres, Sqlite, small_disk
from tests.service.faults.engines import Local
from tests.service.faults.injections import FAULTS, FOLDER_FULL, OLDER, RESTART, Scene
from tests.service.faults.processes import Service
from tests.service.faults.receiver import receiving

WORKERS = 2
OPEN_SEARCHES = 3
"""Kept waiting or running while faults happen, so that each one hits something."""
RUNS = 3
DRAIN_S = 600.0
POLL_S = 0.3
QUERY: dict[str, Any] = {
    "kind": "training",
    "model": {
        "name": "gpt-tiny",
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 1024,
    },
    "cluster": {"gpu": "cpu", "num_gpus": 2},
    "training": {"sequence_length": 128, "global_batch_size": 8, "precision": "fp32"},
    # Few candidates: what is tested is who runs what, not which is best.
    "parallel": {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "zero_stage": [0, 1],
        "recompute": "none",
    },
    "search": {
        "budget_runs": RUNS,
        "run_timeout_s": 3.0,
        "fidelity": "full",
        "min_gain_fraction": 0.0,
    },
}


class Submitter:
    """Keeps searches coming. Every request carries an idempotency key and is sent until it is
    answered.
    """

    def __init__(self, url: str, *, query: dict[str, Any], webhook: str) -> None:
        self._url, self._query, self._webhook = url, query, webhook
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.accepted: dict[str, str] = {}
        self.open = 0

    def __enter__(self) -> Submitter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        for number in itertools.count():
            key = f"search-{number}-{uuid.uuid4().hex[:8]}"
            query = self._query | {"search": self._query["search"] | {"seed": number}}
            sent: dict[str, Any] = {
                "params": {"webhook": self._webhook},
                "headers": {"Idempotency-Key": key},
            }
            while key not in self.accepted:
                with contextlib.suppress(httpx.HTTPError):
                    answer = httpx.post(f"{self._url}/v1/searches", json=query, **sent, timeout=10)
                    if answer.status_code == httpx.codes.ACCEPTED:
                        self.accepted[key] = answer.json()["id"]
                        break
                    if answer.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                        raise RuntimeError(f"{answer.status_code}: {answer.text}")
                time.sleep(0.1)
            while (open_searches(self._url) or 0) >= OPEN_SEARCHES:
                if self._ending.wait(POLL_S):
                    return
            if self._ending.is_set():
                return


def open_searches(url: str) -> int | None:
    """How many searches have not ended; None where nobody answers."""
    try:
        found = [
            httpx.get(f"{url}/v1/searches", params={"state": s, "limit": 200}, timeout=10)
            for s in ("queued", "running")
        ]
    except httpx.HTTPError:
        return None
    if any(answer.status_code != httpx.codes.OK for answer in found):
        return None
    return sum(len(answer.json()["items"]) for answer in found)


def campaign(
    *,
    faults: Sequence[str],
    database: Database,
    home: Path,
    engine: Local | None = None,
    seed: int = 0,
    lease_s: float = 2.0,
    longest_s: float = 3.0,
) -> dict[str, Any]:
    """Let the faults happen one after another at random moments, and count what was lost, doubled,
    orphaned and unbooked.

    `longest_s`: how long a database is away at most.
    """
    (home / "faults").mkdir(parents=True, exist_ok=True)
    (home / "temporary").mkdir(exist_ok=True)
    engine = engine or Local()
    query = QUERY | {"search": QUERY["search"] | {"launcher": engine.name}}
    service = Service(
        database_url=database.url, home=home, lease_s=lease_s, environment=engine.environment(home)
    )
    scene = Scene(
        service=service,
        database=database,
        engine=engine,
        query=query,
        random=random.Random(seed),
        longest_s=longest_s,
    )
    started = time.monotonic()
    with receiving() as (webhook, told_by_webhook):
        try:
            service.start_api()
            service.ensure_workers(WORKERS)
            with Submitter(service.url, query=query, webhook=webhook) as submitter:
                for fault in faults:
                    wait_for_runs(service.url)
                    time.sleep(scene.random.uniform(0.0, 1.0))
                    FAULTS[fault](scene)
                    service.ensure_workers(WORKERS)
            recovering = time.monotonic()
            drained = drain(service)
            recovery_s = time.monotonic() - recovering
        finally:
            service.stop()
    leftovers = [f"process {' '.join(process.cmdline())}" for process in service.leftovers()]
    leftovers += [f"job {name} is still there" for name in engine.launcher(home).open_jobs()]
    leftovers += [
        f"file {each.name} of an upload" for each in (home / "temporary").glob("hp-explain-*")
    ]
    found = audit(
        database_url=database.url,
        home=home,
        accepted=submitter.accepted,
        leftovers=leftovers,
        told=told_by_webhook,
    )
    counts = {name: len(getattr(found, name)) for name in KINDS}
    told = {name: getattr(found, name)[:5] for name in counts if counts[name]}
    return {
        "fault": ", ".join(dict.fromkeys(faults)),
        "database": database.kind,
        "engine": engine.name,
        "times": len(faults),
        "searches": found.searches,
        "runs": found.runs,
        **counts,
        "drained": drained,
        "drain_s": round(recovery_s, 1),
        "wall_s": round(time.monotonic() - started, 1),
        "details": told,
    }


def own_campaign(
    *, fault: str, kind: str, times: int, seed: int, engine: Local | None = None
) -> dict[str, Any] | None:
    """A campaign on a database of its own; None where this fault cannot befall it, or not on this
    machine.
    """
    if kind == "sqlite" and fault == RESTART:
        return None
    with tempfile.TemporaryDirectory(prefix="hp-faults-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        database: Database = Sqlite(home) if kind == "sqlite" else Postgres()
        try:
            if (
                isinstance(database, Postgres)
                and fault == "database full"
                and not database.move_to_small_disk()
            ):
                sys.stderr.write(
                    "database full, postgresql: left out, this user may not mount a small disk\n"
                )
                return None
            if fault == FOLDER_FULL and not small_disk(home / "runs"):
                sys.stderr.write(
                    "runs folder full: left out, this user may not mount a small disk\n"
                )
                return None
            if fault == OLDER and (reason := extract(home / "older")) is not None:
                sys.stderr.write(f"{fault}, {kind}: left out, {reason}\n")
                return None
            return campaign(
                faults=[fault] * times, database=database, home=home, engine=engine, seed=seed
            )
        finally:
            database.close()
            if fault == FOLDER_FULL:
                subprocess.run(["umount", "--lazy", home / "runs"], check=False)


def is_clean(row: dict[str, Any]) -> bool:
    """Whether nothing was lost, doubled, orphaned or unbooked, and every search ended."""
    return bool(row["drained"]) and not any(row[name] for name in KINDS)


def as_text(row: dict[str, Any]) -> str:
    """One campaign on one line, and below it what went wrong."""
    counts = ", ".join(f"{name} {row[name]}" for name in KINDS)
    end = "" if row["drained"] else "; NOT DRAINED"
    where = f"{row['fault']}, {row['database']}, {row['engine']}"
    done = f"{row['times']} times under {row['searches']} searches, {row['runs']} runs"
    line = f"{where}: {done}: {counts}{end} ({row['wall_s']} s)"
    return "\n".join(
        [line, *(f"  {kind}: {what}" for kind, whats in row["details"].items() for what in whats)]
    )


def wait_for_runs(url: str, *, timeout_s: float = 30.0) -> None:
    """Until some search is being worked on."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(f"{url}/v1/searches", params={"state": "running"}, timeout=10)
            if answer.status_code == httpx.codes.OK and answer.json()["items"]:
                return
        time.sleep(POLL_S)


def _open(usage: Usage) -> int:
    """How many searches and runs have not ended."""
    return sum(usage.searches[name] for name in ("queued", "running")) + sum(
        usage.runs[name] for name in ("intended", "submitted")
    )


def drain(service: Service) -> bool:
    """Wait until all searches and runs have ended and all receivers were told; False where some
    never do.
    """
    deadline = time.monotonic() + DRAIN_S
    with closing(open_store(service.database_url)) as store:
        while time.monotonic() < deadline:
            with contextlib.suppress(StoreError):
                if not (
                    _open(store.usage()) or store.usage().webhooks["pending"]
                ):  # of ends that are committed by now
                    return True
            time.sleep(POLL_S)
    return False
