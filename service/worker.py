"""The worker: takes queued searches from the store, one at a time, and runs them as the command line would.

Any number of workers share a database. What keeps them apart is the store's lease; what survives one that dies is the store's
record of intents: the next worker finds the running job by its name and goes on.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from hp_tool import tuning
from hp_tool.domain.access_store import AccessStore
from hp_tool.domain.records import JsonObject, Lease
from hp_tool.errors import HpToolError, StoreError
from hp_tool.learning import Follower
from hp_tool.tuning.heartbeat import LEASE_S
from hp_tool.tuning.run import default_holder
from service import logs
from service.settings import webhook_settings
from service.webhooks.delivery import Deliveries, Undelivered

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

log = logging.getLogger(__name__)

PRUNE_EVERY_S = 86_400.0
SHORTEST_IDLE_S = 0.25
LONGEST_IDLE_S = 5.0
SWEEP_EVERY_S = 60.0
"""How often a worker looks whether an engine runs jobs that no live search owns, beside its own work."""
FOLLOW_EVERY_S = 60.0
"""How often a worker that has no search looks whether reported measurements have something to teach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One coordinator at work; a process runs one."""

    store: AccessStore
    storage: BaseStorage | None = None
    """Optuna's; None: in memory."""
    holder: str
    """Who this is, for people."""
    per_cluster: int | None = None
    """Searches that all workers together run on one cluster at most; None: any number."""
    lease_s: float = LEASE_S
    follow_every_s: float = FOLLOW_EVERY_S
    retention_days: float | None = None
    """Events, audit rows and ends of logs older than this are forgotten, looked after once a day; None: never."""
    stopping: threading.Event
    """Set it, and the worker hands its search back to the queue, with the job running, and returns."""

    def run(self) -> None:
        """Work until told to stop. No error of a search ends the worker, nor does a database that is away for a while."""
        idle_s = SHORTEST_IDLE_S
        follower, followed_at, pruned_at = Follower(store=self.store), -math.inf, -math.inf
        while not self.stopping.is_set():
            if self.retention_days is not None and time.monotonic() - pruned_at >= PRUNE_EVERY_S:
                self._prune(self.retention_days)
                pruned_at = time.monotonic()
            if time.monotonic() - followed_at >= self.follow_every_s:
                self._follow(follower)
                followed_at = time.monotonic()
            if self._step():
                idle_s = SHORTEST_IDLE_S
            else:
                self.stopping.wait(idle_s)
                idle_s = min(2 * idle_s, LONGEST_IDLE_S)

    def _prune(self, days: float) -> None:
        try:
            log.info("forgot what is older than %g days: %s", days, self.store.prune(older_than_days=days))
        except HpToolError as error:
            log.warning("cannot forget what is old: %s", error.message)

    def _follow(self, follower: Follower) -> None:
        try:
            for made in follower.catch_up():
                log.info("calibration %s: version %d of %s", made.record.id, made.record.version, made.record.cluster_key)
        except HpToolError as error:
            log.warning("cannot follow reported measurements: %s", error.message)
        except Exception:  # one measurement that breaks the fit must not end the worker
            log.exception("following reported measurements: unhandled error")

    def _step(self) -> bool:
        """Run one search, if there is one; whether there was."""
        try:
            claimed = self.store.claim_search(holder=self.holder, lease_s=self.lease_s, per_cluster=self.per_cluster)
        except HpToolError as error:
            log.warning("cannot look for work: %s", error.message)
            return False
        if claimed is None:
            return False
        with logs.about(search=claimed[1].search_id):
            self._search(claimed[1])
        return True

    def _search(self, lease: Lease) -> None:
        log.info("search %s: taken (claim %d)", lease.search_id, lease.token)
        try:
            result = tuning.run_search(
                store=self.store,
                lease=lease,
                storage=self.storage,
                on_event=_log_waiting,
                should_release=self.stopping.is_set,
                lease_s=self.lease_s,
            )
        except HpToolError as error:  # stored with the search already, unless the lease or the store is lost
            log.warning("search %s: %s (%s)", lease.search_id, error.message, error.code)
            if isinstance(error, StoreError):
                self._hand_back(lease)
        except Exception:  # likewise; a bug that one search finds must not stop the others
            log.exception("search %s: unhandled error", lease.search_id)
        else:
            log.info("search %s: %s", lease.search_id, result.search.state if result else "handed back to the queue")

    def _hand_back(self, lease: Lease) -> None:
        """Let go of the search once the database is back: a worker that outlived it is not lost."""
        idle_s = SHORTEST_IDLE_S
        while not self.stopping.wait(idle_s):
            try:
                self.store.release_search(lease=lease)
            except StoreError:
                idle_s = min(2 * idle_s, LONGEST_IDLE_S)
            except HpToolError:  # another worker has it by now, or it has ended
                return
            else:
                return


def _log_waiting(kind: str, payload: JsonObject) -> None:
    if kind == "waiting":
        log.warning("waiting for the runs folder: %s", payload["waiting_for"])


def sweep(*, store: AccessStore, stopping: threading.Event, every_s: float) -> None:
    """End jobs that no live search owns, again and again until `stopping` is set. No engine and no database ends it."""
    sweeper = tuning.Sweeper(store=store)
    while not stopping.wait(every_s):
        try:
            sweeper.sweep()
        except HpToolError as error:
            log.warning("cannot sweep: %s", error.message)
        except Exception:  # one engine that answers nonsense must not end the sweeping of the others
            log.exception("sweeping: unhandled error")


def work(
    *, database_url: str | None, lease_s: float = LEASE_S, per_cluster: int | None = None, retention_days: float | None = None
) -> None:
    """Run a worker in this process until SIGTERM or SIGINT; a second SIGINT interrupts at once."""
    from hp_tool import store as stores

    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        log.info("asked to stop")
        stopping.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    url = stores.database_url(database_url)
    webhooks = webhook_settings()
    store = stores.open_store(url)
    try:
        log.info("worker %s on %s", holder := default_holder(), stores.masked(url))
        storage = tuning.study_storage(url)  # imports the rest of SQLAlchemy, before a second thread uses it
        telling = (
            Undelivered(store=store, stopping=stopping)
            if webhooks is None
            else Deliveries(store=store, settings=webhooks, stopping=stopping)
        )
        threading.Thread(target=telling.run, name="webhooks", daemon=True).start()
        sweeping = {"store": store, "stopping": stopping, "every_s": SWEEP_EVERY_S}
        threading.Thread(target=sweep, kwargs=sweeping, name="sweep", daemon=True).start()
        Worker(
            store=store,
            storage=storage,
            holder=holder,
            lease_s=lease_s,
            per_cluster=per_cluster,
            retention_days=retention_days,
            stopping=stopping,
        ).run()
    finally:
        store.close()
