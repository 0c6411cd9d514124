"""The worker, which claims queued searches from the store and runs them.

Leases coordinate any number of workers.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from hp_tool.domain.access import AccessStore
from hp_tool.domain.records import JsonObject, Lease
from hp_tool.domain.retention import Retention
from hp_tool.errors import OLDER_EDITION, HpToolError, StoreError
from hp_tool.loop import tuning
from hp_tool.loop.learning import Follower
from hp_tool.loop.tuning.lease import LEASE_S
from hp_tool.loop.tuning.run import default_holder
from hp_tool.questions.edition import count_query_terms
from service import logs
from service.logs import log_errors
from service.settings import webhook_settings
from service.webhooks.delivery import Deliveries, warn_of_overdue

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

log = logging.getLogger(__name__)
_RETIRING = threading.Lock()

PRUNE_EVERY_S = 86_400.0
NOTHING = Retention()
SHORTEST_IDLE_S = 0.25
LONGEST_IDLE_S = 5.0
SWEEP_EVERY_S = 60.0
"""Seconds between checks for jobs that do not belong to a live search."""
ANNOUNCE_EVERY_S = 10.0
FOLLOW_EVERY_S = 60.0
"""Seconds between checks for newly reported measurements, by a worker without a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process that coordinates several searches, each in its own thread."""

    store: AccessStore
    storage: BaseStorage | None = None
    """Optuna's storage; None stores studies in memory."""
    holder: str
    """Human-readable name of the worker."""
    per_cluster: int | None = None
    """Maximum number of running searches per cluster, over all workers; None for no limit."""
    searches: int = 1
    """Number of searches that the worker runs concurrently."""
    lease_s: float = LEASE_S
    follow_every_s: float = FOLLOW_EVERY_S
    database_url: str = ""
    """URL of the store. Retention uses it to find Optuna's tables."""
    retention: Retention = NOTHING
    """Data that is deleted once a day; nothing by default."""
    stopping: threading.Event
    """If set, the worker returns its searches to the queue and exits. Their jobs continue."""
    outdated: threading.Event = field(default_factory=threading.Event)
    """Set when the worker finds data of a newer version: it then finishes its searches, claims no
    more, and exits.
    """

    def run(self) -> None:
        """Run searches until `stopping` is set, or until data of a newer hp_tool is found.

        The worker survives errors of searches and an unreachable database.
        """
        threads = [
            threading.Thread(target=self._serve, name=f"searches-{n}", daemon=True)
            for n in range(1, self.searches)
        ]
        for other in threads:
            other.start()
        self._serve(chores=True)
        for other in threads:
            other.join()

    def _serve(self, *, chores: bool = False) -> None:
        """Run one search after another. With `chores`, do the worker's other tasks in between."""
        idle_s = SHORTEST_IDLE_S
        follower, followed_at, pruned_at = Follower(store=self.store), -math.inf, -math.inf
        while not self.stopping.is_set() and not self.outdated.is_set():
            if chores and self.retention and time.monotonic() - pruned_at >= PRUNE_EVERY_S:
                with log_errors("delete old data", log):
                    pruned = tuning.prune(
                        store=self.store, database_url=self.database_url, retention=self.retention
                    )
                    log.info("deleted old data: %s", pruned)
                pruned_at = time.monotonic()
            if chores and time.monotonic() - followed_at >= self.follow_every_s:
                with log_errors("learn from reported measurements", log):
                    for made in follower.catch_up():
                        record = made.record
                        log.info(
                            "calibration %s: version %d of %s",
                            record.id,
                            record.version,
                            record.cluster_key,
                        )
                followed_at = time.monotonic()
            lease = self._claim()
            if lease is not None:
                with logs.log_context(search=lease.search_id):
                    self._search(lease)
                idle_s = SHORTEST_IDLE_S
            else:
                self.stopping.wait(idle_s)
                idle_s = min(2 * idle_s, LONGEST_IDLE_S)

    def _claim(self) -> Lease | None:
        """Return the lease of the next search.

        Return None if there is no search, if the database is unreachable, or if this hp_tool is too
        old.
        """
        with log_errors("look for work", log):
            try:
                claim = self.store.claim_search(
                    holder=self.holder,
                    lease_s=self.lease_s,
                    per_cluster=self.per_cluster,
                    edition=count_query_terms(),
                )
            except StoreError as error:
                if error.code != OLDER_EDITION:
                    raise
                self._retire(error)
                return None
            return None if claim is None else claim[1]
        return None

    def _retire(self, error: StoreError) -> None:
        with _RETIRING:
            if not self.outdated.is_set():
                log.warning(
                    "%s. This worker claims no more searches and ends after its current ones",
                    error.message,
                )
                self.outdated.set()

    def _search(self, lease: Lease) -> None:
        log.info("search %s: claimed (token %d)", lease.search_id, lease.token)
        try:
            result = tuning.run_search(
                store=self.store,
                lease=lease,
                storage=self.storage,
                on_event=_log_waiting,
                should_release=self.stopping.is_set,
                lease_s=self.lease_s,
            )
        except HpToolError as error:
            # The error is stored with the search, unless the lease or the store is lost.
            log.warning("search %s: %s (%s)", lease.search_id, error.message, error.code)
            if isinstance(error, StoreError):
                self._hand_back(lease)
        except Exception:  # A bug that one search triggers must not stop the others.
            log.exception("search %s: unhandled error", lease.search_id)
        else:
            log.info(
                "search %s: %s",
                lease.search_id,
                result.search.state if result else "returned to the queue",
            )

    def _hand_back(self, lease: Lease) -> None:
        """Return the search to the queue once the database is reachable."""
        idle_s = SHORTEST_IDLE_S
        while not self.stopping.wait(idle_s):
            try:
                self.store.release_search(lease=lease)
            except StoreError:
                idle_s = min(2 * idle_s, LONGEST_IDLE_S)
            except HpToolError:  # Another worker has claimed the search, or it has ended.
                return
            else:
                return


def _log_waiting(kind: str, payload: JsonObject) -> None:
    if kind == "waiting":
        log.warning("waiting: %s", payload["waiting_for"])
    elif kind == "pending":
        starts_at = payload.get("starts_at")
        log.info(
            "run %s waits: %s%s",
            payload["number"],
            payload.get("reason"),
            f", until {starts_at}" if starts_at else "",
        )


def sweep(*, store: AccessStore, stopping: threading.Event, every_s: float) -> None:
    """Every `every_s` seconds, end jobs without a live search, until `stopping` is set."""
    sweeper = tuning.Sweeper(store=store)
    while not stopping.wait(every_s):
        with log_errors("sweep", log):
            sweeper.sweep()


def announce(*, store: AccessStore, holder: str, stopping: threading.Event, every_s: float) -> None:
    """Record every `every_s` seconds that this worker is alive and what it can run.

    When `stopping` is set, remove the record.
    """
    while True:
        with log_errors("announce this worker", log):
            store.announce_worker(holder=holder, offers=tuning.find_offers())
        if stopping.wait(every_s):
            break
    with log_errors("take leave", log):
        store.retire_worker(holder=holder)


def work(
    *,
    database_url: str | None,
    lease_s: float = LEASE_S,
    per_cluster: int | None = None,
    searches: int = 1,
    retention: Retention = NOTHING,
) -> None:
    """Run a worker in this process until SIGTERM or SIGINT. A second SIGINT interrupts it."""
    from hp_tool import store as stores

    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        log.info("asked to stop")
        stopping.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    url = stores.database_url(database_url)
    store = stores.open_store(url)
    announcing: threading.Thread | None = None
    try:
        log.info("worker %s on %s", holder := default_holder(), stores.mask_password(url))
        # This imports the rest of SQLAlchemy before a second thread uses it.
        storage = tuning.study_storage(url)
        settings = webhook_settings()
        delivering = (
            partial(warn_of_overdue, store=store, stopping=stopping)
            if settings is None
            else Deliveries(store=store, settings=settings, stopping=stopping).run
        )
        threading.Thread(target=delivering, name="webhooks", daemon=True).start()
        sweeping = partial(sweep, store=store, stopping=stopping, every_s=SWEEP_EVERY_S)
        threading.Thread(target=sweeping, name="sweep", daemon=True).start()
        saying = partial(
            announce, store=store, holder=holder, stopping=stopping, every_s=ANNOUNCE_EVERY_S
        )
        announcing = threading.Thread(target=saying, name="announce", daemon=True)
        announcing.start()
        Worker(
            store=store,
            storage=storage,
            holder=holder,
            lease_s=lease_s,
            per_cluster=per_cluster,
            searches=searches,
            database_url=url,
            retention=retention,
            stopping=stopping,
        ).run()
    finally:
        stopping.set()
        if announcing is not None:
            announcing.join(timeout=LONGEST_IDLE_S)
        store.close()
