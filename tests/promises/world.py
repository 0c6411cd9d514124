"""A service in miniature whose processes take turns as a history says: workers and a sweep over the
real store and coordinator, in simulated time, each of which may stop for good or for a while before
any call to the database or the engine.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import sqlalchemy as sa
from greenlet import GreenletExit, getcurrent, greenlet
from sqlalchemy.pool import StaticPool

from hp_tool.domain.query import SearchSettings
from hp_tool.domain.records import EventRecord, Lease, OpenRunsLimit, RunRecord, SearchRecord
from hp_tool.domain.states import SearchState
from hp_tool.errors import ConflictError, HpToolError, LauncherError, StoreError
from hp_tool.loop.search import charges, coordinator
from hp_tool.loop.search.account import progress_of
from hp_tool.loop.search.coordinator import Coordinator
from hp_tool.loop.search.terms import Site, Timing
from hp_tool.loop.tuning import Sweeper
from hp_tool.loop.tuning.lease import account_of, end, outcome_stored
from hp_tool.loop.tuning.result import SearchSummary
from hp_tool.store import base, columns
from hp_tool.store.sql import SqlStore
from hp_tool.store.tables import metadata
from tests.promises.engine import Engine
from tests.promises.question import InOrder, problem

LEASE_S = 30.0
POLL_S = 2.0
FULL_POLL_S = 5.0
IDLE_S = 20.0
SWEEP_S = 60.0
CLUSTER = "shared"
CLUSTER_RUNS = 2
"""Runs that the cluster takes at a time, of all searches."""
DRAIN_S = 2700.0
"""Far more than any history needs to end, and less than what a clock that is set back by an hour
would add.
"""
CALLS, SWEEPS = 20, 2
EPOCH = datetime(2030, 1, 1, 12, tzinfo=UTC)
STORE_FAULTS, ENGINE_FAULTS = (
    ("database", "answer of the database"),
    ("engine", "answer of the engine", "folder"),
)
FAULTS = STORE_FAULTS + ENGINE_FAULTS


@dataclass(kw_only=True)
class Port:
    """A store or an engine as a process sees it: each call is a moment at which others may act, and
    may fail.
    """

    world: World
    behind: Any
    faults: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.behind, name)
        if not callable(method) or name in ("hardware", "plan"):
            return method

        def call(*arguments: Any, **options: Any) -> Any:
            self.world.turn()
            fault = self.world.fault_for(self.faults, name)
            if fault in ("database", "engine", "folder"):
                raise _error(fault)
            answer = method(*arguments, **options)
            if fault is not None:
                raise _error(fault)
            return answer

        return call


def _error(fault: str) -> Exception:
    if fault == "folder":
        return OSError(errno.ENOSPC, "No space left on device", "/runs")
    return (StoreError if fault in STORE_FAULTS else LauncherError)(f"simulated: {fault}")


FOLDER_CALLS = ("submit", "cancel", "fetch")


@dataclass(kw_only=True)
class Process:
    """Something that runs until it is killed; `stopping` asks it to end."""

    name: str
    work: Callable[[Process], None]
    stopping: bool = False
    wakes_at: float = 0.0
    thread: greenlet = field(init=False)

    def __post_init__(self) -> None:
        self.thread = greenlet(lambda: self.work(self))

    @property
    def is_alive(self) -> bool:
        return not self.thread.dead

    def run(self, calls: int) -> None:
        """Let it make this many calls; its clock goes on while it sleeps."""
        for _ in range(calls):
            if self.is_alive:
                with suppress(KeyboardInterrupt):  # after one it may do its last calls yet
                    self.thread.switch()

    def rest(self) -> None:
        """Let it work until it sleeps again."""
        before = self.wakes_at
        while self.is_alive and self.wakes_at == before:
            self.run(1)

    def kill(self, error: BaseException | None = None) -> None:
        """Where it stands: nothing more of it happens, unless it catches the error."""
        with suppress(KeyboardInterrupt):
            self.thread.throw(error or GreenletExit())


class World:
    """One history's database, engine, clock and processes."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self.shift_s = 0.0
        """By how much the wall clock was set, beside the time that passed."""
        self._ticks = itertools.count()
        self._numbers = itertools.count()
        self.armed: dict[str, int] = {}
        """Faults to come, by how many calls each will hit."""
        self.happened: set[str] = set()
        self.accepted: list[str] = []
        self.cancelled: set[str] = set()
        self.budgets: dict[str, int] = {}
        """The largest of each search."""
        self.parallel_runs: dict[str, int] = {}
        self.store = fresh_store()
        self._seen: dict[str, tuple[int, Any]] = {}
        self.engine = Engine(now=lambda: self.elapsed_s, is_cancelled=self._is_cancelled)
        self.processes: dict[str, Process] = {}
        self._hired = itertools.count()
        self._patches = ExitStack()
        clock = type("SimulatedClock", (datetime,), {"now": staticmethod(self._wall_clock)})
        for module in (base, charges):
            self._patches.enter_context(mock.patch.object(module, "datetime", clock))
        random = SimpleNamespace(token_hex=lambda size: f"{next(self._numbers):0{2 * size}x}")
        self._patches.enter_context(mock.patch.object(columns, "secrets", random))
        self._patches.enter_context(mock.patch.object(coordinator, "FULL_POLL_S", FULL_POLL_S))
        self.start("sweep", self._sweep)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        self._patches.close()

    def _wall_clock(self, zone: object = None) -> datetime:
        """No two answers are the same, so that nothing is ordered by chance."""
        return EPOCH + timedelta(
            seconds=self.elapsed_s + self.shift_s, microseconds=next(self._ticks)
        )

    def _is_cancelled(self, search_id: str) -> bool:
        return self.store.get_search(search_id=search_id).state is SearchState.CANCELLED

    # Users

    def submit(self, *, budget_runs: int, parallel_runs: int) -> str:
        """A new search. A user whom no answer reached asks again, with the same key."""
        query = {
            "cluster": CLUSTER,
            "search": {"budget_runs": budget_runs, "parallel_runs": parallel_runs},
        }
        key = f"request-{len(self.accepted)}"
        users: Any = Port(world=self, behind=self.store, faults=STORE_FAULTS)
        while True:
            with suppress(StoreError):
                search_id: str = users.create_search(query=query, idempotency_key=key).id
                break
        self.accepted.append(search_id)
        self.budgets[search_id], self.parallel_runs[search_id] = budget_runs, parallel_runs
        return search_id

    def cancel(self, search_id: str) -> None:
        with suppress(ConflictError):
            self.store.request_cancel(search_id=search_id)
            self.cancelled.add(search_id)

    def change_budget(self, search_id: str, *, budget_runs: int) -> None:
        with suppress(ConflictError):
            self.store.change_budget(search_id=search_id, budget_runs=budget_runs)
            self.budgets[search_id] = max(self.budgets[search_id], budget_runs)

    # What the audit looks at

    def searches(self) -> tuple[SearchRecord, ...]:
        return self._read("searches", lambda: self.store.list_searches(limit=200).items)

    def runs(self) -> list[RunRecord]:
        return self._read(
            "runs",
            lambda: [run for each in self.accepted for run in self.store.runs(search_id=each)],
        )

    def events(self, search_id: str) -> list[EventRecord]:
        return self.store.events(search_id=search_id, limit=10_000)

    def _read(self, what: str, read: Callable[[], Any]) -> Any:
        """What was read before, where nothing was written since."""
        with _engine().connect() as connection:
            changes = connection.connection.dbapi_connection.total_changes  # type: ignore[union-attr]
        if what not in self._seen or self._seen[what][0] != changes:
            self._seen[what] = (changes, read())
        return self._seen[what][1]

    def drain(self) -> None:
        """Everything works again, and users resume what they had paused: work until every search
        has ended, and sweep.
        """
        self.armed.clear()
        until = self.elapsed_s + DRAIN_S
        while self.elapsed_s < until:
            left = [search for search in self.searches() if not search.state.ended]
            if not left:
                break
            for search in left:
                if search.state is SearchState.PAUSED or search.requested == "pause":
                    self.store.resume_search(search_id=search.id)
            self.all_work(CALLS)
        for worker in self.workers():  # those that sleep over a search that others ended
            worker.stopping = True
            worker.run(CALLS)
        for _ in range(SWEEPS):
            self.processes["sweep"].rest()

    def all_work(self, calls: int) -> None:
        """All processes make so many calls, as time goes on for all of them."""
        if not self.workers():
            self.hire()
        for _ in range(calls):
            min(
                (each for each in self.processes.values() if each.is_alive),
                key=lambda each: each.wakes_at,
            ).run(1)

    # Processes

    def start(self, name: str, work: Callable[[Process], None]) -> Process:
        self.processes[name] = Process(name=name, work=work)
        return self.processes[name]

    def hire(self) -> Process:
        return self.start(f"worker-{next(self._hired)}", self._worker)

    def workers(self) -> list[Process]:
        return [each for each in self.processes.values() if each.is_alive and each.name != "sweep"]

    def turn(self) -> None:
        """Let others act, where a process asks; users do not wait."""
        current = getcurrent()
        if current.parent is not None:
            current.parent.switch()

    def sleep(self, seconds: float) -> None:
        wakes_at = self.elapsed_s + seconds
        current = next(each for each in self.processes.values() if each.thread is getcurrent())
        current.wakes_at = wakes_at
        self.turn()
        self.elapsed_s = max(self.elapsed_s, wakes_at)

    def fault_for(self, kinds: tuple[str, ...], method: str) -> str | None:
        """The fault that this call meets."""
        for kind in kinds:
            if self.armed.get(kind) and (kind != "folder" or method in FOLDER_CALLS):
                self.armed[kind] -= 1
                self.happened.add(kind)
                return kind
        return None

    def _worker(self, process: Process) -> None:
        """What `service.worker` does, search after search."""
        store = Port(world=self, behind=self.store, faults=STORE_FAULTS)
        while not process.stopping:
            lease = None
            with suppress(HpToolError):
                claim = (
                    store.claim_search(holder=process.name, lease_s=LEASE_S)
                    if self._is_work()
                    else None
                )
                lease = None if claim is None else claim[1]
            if lease is None:
                self.sleep(IDLE_S)
                continue
            try:
                self._search(store, lease, process)
            except StoreError:
                self._hand_back(store, lease, process)
            except HpToolError:  # stored with the search
                continue

    @staticmethod
    def _is_work() -> bool:
        """Whether a claim may find anything: asked for speed alone."""
        with _engine().connect() as connection:
            waiting = connection.exec_driver_sql(
                "SELECT 1 FROM hp_searches WHERE state IN ('queued', 'running')"
            )
            return waiting.first() is not None

    def _hand_back(self, store: Any, lease: Lease, process: Process) -> None:
        while not process.stopping:
            self.sleep(IDLE_S)
            try:
                store.release_search(lease=lease)
            except StoreError:
                continue
            except HpToolError:
                return
            return

    def _search(self, store: Any, lease: Lease, process: Process) -> None:
        """What `tuning.run_search` does with a claimed search, without models and predictions."""
        launcher: Any = Port(world=self, behind=self.engine, faults=ENGINE_FAULTS)
        with outcome_stored(store, lease, launcher=lambda: launcher):
            record = store.get_search(search_id=lease.search_id)
            if record.requested == "cancel" and record.lost_claims:
                raise ConflictError("cancelled", code="cancelled")
            outcome = Coordinator(
                store=store,
                launcher=launcher,
                lease=lease,
                problem=problem(**record.query["search"]),
                projection=InOrder(),  # type: ignore[arg-type]
                site=Site(limit=OpenRunsLimit(cluster=CLUSTER, runs=CLUSTER_RUNS)),
                timing=Timing(
                    lease_s=LEASE_S, poll_s=POLL_S, sleep=self.sleep, clock=lambda: self.elapsed_s
                ),
                should_release=lambda: process.stopping,
            ).run()
            if outcome.state == "released":
                store.release_search(lease=lease)
                return
            runs = store.runs(search_id=lease.search_id)
            account = account_of(runs, outcome, search_id=lease.search_id, seconds=0.0)
            store.set_progress(
                lease=lease, progress=progress_of(runs, budget_runs=1, expected_gain=None)
            )
            error = None if account.error is None else account.error.as_dict()
            summary = account.summary(settings=SearchSettings(), grid_gpu_seconds=None)
            end(store, lease, Result(search=summary, error=error))  # type: ignore[arg-type]

    def _sweep(self, process: Process) -> None:
        """What `service.worker.sweep` does."""
        store: Any = Port(world=self, behind=self.store, faults=STORE_FAULTS)
        launcher: Any = Port(world=self, behind=self.engine, faults=ENGINE_FAULTS)
        sweeper = Sweeper(store=store, launcher_of=lambda query: launcher)
        while not process.stopping:
            self.sleep(SWEEP_S)
            with suppress(HpToolError):
                sweeper.sweep()


@dataclass(frozen=True, kw_only=True)
class Result:
    """As much of a search's result as the store looks at."""

    search: SearchSummary
    error: dict[str, Any] | None


@cache
def _engine() -> sa.Engine:
    engine = sa.create_engine("sqlite://", poolclass=StaticPool)
    metadata.create_all(engine)
    return engine


def fresh_store() -> SqlStore:
    """The store on an empty database in memory, which all histories of this process use one after
    the other.
    """
    with _engine().begin() as connection:
        for table in reversed(metadata.sorted_tables):
            connection.execute(table.delete())
    return SqlStore(engine=_engine())
