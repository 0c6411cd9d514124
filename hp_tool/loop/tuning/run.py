"""Run a new search in this process, or a stored one under its lease."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hp_tool.domain.measurement import Hardware
from hp_tool.domain.ports import Launcher, Store
from hp_tool.domain.query import Query
from hp_tool.domain.records import JsonObject, Lease
from hp_tool.domain.states import SearchState
from hp_tool.errors import ConflictError, NotFoundError
from hp_tool.loop.learning.series import StoredCalibrations
from hp_tool.loop.search.account import spent_by
from hp_tool.loop.search.coordinator import Coordinator
from hp_tool.loop.search.terms import Site, Timing
from hp_tool.loop.tuning.clusters import create_launcher, daily_limits, runs_limit, within_limits
from hp_tool.loop.tuning.evidence import (
    earlier_evidence,
    reusable_measurements,
    with_measured_startup,
)
from hp_tool.loop.tuning.lease import LEASE_S, Heartbeat, conclude, end, outcome_stored
from hp_tool.loop.tuning.preflight import Preflight, preflight
from hp_tool.loop.tuning.problem import build_problem, resolve_training_search
from hp_tool.loop.tuning.result import TuneResult, nothing_feasible
from hp_tool.loop.tuning.searched import Searched
from hp_tool.loop.tuning.serving import build_serving, resolve_serving_search
from hp_tool.loop.tuning.study import projection_of, study_storage
from hp_tool.questions.edition import count_query_terms
from hp_tool.questions.schema import parse, parse_query, query_mapping
from hp_tool.questions.serving.problem import ServingProblem
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.questions.training.problem import TrainingProblem, inline_files
from hp_tool.questions.training.ranking.rank import CostedSpace

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

OnEvent = Callable[[str, JsonObject], None]


def resolve_search(query: Query) -> TrainingProblem | ServingProblem:
    """Return the query's problem if actual runs can search it.

    Raises:
        InputError: The query is invalid.
        UnsupportedError: Runs do not support the query.
    """
    return (
        resolve_serving_search(query)
        if query.kind == "inference"
        else resolve_training_search(query)
    )


def build_search(
    *,
    query: Query,
    query_json: JsonObject,
    hardware: Hardware,
    calibrations: Calibrations | None = None,
    chosen: Mapping[str, Any] | None = None,
) -> Searched | CostedSpace:
    """Resolve the query, and enumerate and cost its candidates; see `build_problem`.

    If no candidate can fit in memory, return only the space.
    """
    if query.kind == "inference":
        return build_serving(query=query, query_json=query_json, hardware=hardware)
    return build_problem(
        query=query,
        query_json=query_json,
        hardware=hardware,
        calibrations=calibrations,
        chosen=chosen,
    )


def run_search(
    *,
    store: Store,
    lease: Lease,
    launcher: Launcher | None = None,
    storage: BaseStorage | None = None,
    on_event: OnEvent = lambda kind, payload: None,
    should_release: Callable[[], bool] = lambda: False,
    lease_s: float = LEASE_S,
) -> TuneResult | None:
    """Coordinate a claimed search until it ends, is paused, or `should_release` returns True.

    The search is ended or released in the store. Return its result; None if it was released. On an
    error, the search is marked as failed (it can be resumed or cancelled), its jobs are ended, and
    the error is raised. By default, `launcher` is the query's launcher, and Optuna's `storage` is
    in memory.

    Raises:
        ConflictError: The lease was lost (`lease_lost`). Nothing was changed.
    """
    heartbeat = Heartbeat(store=store, lease=lease, lease_s=lease_s)
    with heartbeat, outcome_stored(store, lease, launcher=lambda: launcher):
        record = store.get_search(search_id=lease.search_id)
        query = parse_query(record.query)
        launcher = launcher or create_launcher(query)
        if (
            record.requested == "cancel" and record.lost_claims
        ):  # A search that killed its last workers is not started again.
            raise ConflictError(f"search {record.id} was cancelled", code="cancelled")
        started = time.perf_counter()
        hardware = launcher.hardware()
        # Use only calibrations made before the search, so that a resumed search solves the same
        # problem.
        calibrations = StoredCalibrations(
            store=store, before=record.created_at, hardware=hardware, owner=record.owner or ""
        )
        ran = store.runs(search_id=lease.search_id)
        problem = build_search(
            query=query,
            query_json=record.query,
            hardware=hardware,
            calibrations=calibrations,
            chosen=ran[0].set if ran else None,
        )
        seconds = time.perf_counter() - started
        if isinstance(problem, CostedSpace):
            training = resolve_training_search(query)
            nothing = nothing_feasible(
                query=query,
                problem=training,
                space=problem,
                search_id=lease.search_id,
                seconds=seconds,
            )
            return end(store, lease, nothing)
        should_stop = heartbeat.watched(should_release)
        checked = Preflight()
        if query.search.preflight:
            checked = preflight(
                store=store,
                lease=lease,
                launcher=launcher,
                cluster=problem.search.cluster,
                should_release=should_stop,
                on_event=on_event,
            )
        launcher = problem.launched(launcher)
        earlier = spent_by(store.runs(search_id=lease.search_id)).profile_runs
        size = {
            "candidates": len(problem.search.table),
            "legal": problem.legal,
            "budget_runs": query.search.budget_runs,
        }
        on_event("started", {"search_id": lease.search_id, "profile_runs": earlier, **size})
        reusable = (
            reusable_measurements(store=store, problem=problem.search) if query.search.reuse else {}
        )
        projection = projection_of(
            problem,
            stored=reusable,
            evidence=earlier_evidence(
                store, problem, without_search=lease.search_id, owner=record.owner or ""
            ),
            search_id=lease.search_id,
            storage=storage or study_storage(None),
            claim=lease.token,
        )
        outcome = Coordinator(
            store=store,
            launcher=launcher,
            lease=lease,
            problem=with_measured_startup(problem.search, store=store),
            projection=projection,
            reusable=reusable,
            site=Site(
                limit=runs_limit(query),
                owner=record.owner or os.environ.get("USER", ""),
                avoided_hosts=checked.hosts,
                check_gpu_seconds=checked.gpu_seconds,
            ),
            timing=Timing(lease_s=lease_s),
            report=on_event,
            should_release=should_stop,
        ).run()
        if outcome.state == "released":
            store.release_search(lease=lease)
            return None
        calibration = projection.sampler.calibration(study=projection.study)
        return conclude(
            store,
            lease,
            problem,
            outcome,
            calibration=calibration,
            seconds=seconds,
            owner=record.owner or "",
        )


def tune(
    *,
    query: Query | None = None,
    store: Store,
    launcher: Launcher | None = None,
    storage: BaseStorage | None = None,
    search_id: str | None = None,
    holder: str | None = None,
    patience_s: float = LEASE_S + 2.0,
    on_event: OnEvent = lambda kind, payload: None,
) -> TuneResult:
    """Run a search in this process: a new one for `query`, or the existing one with `search_id`.

    A search that has succeeded is answered from the store. If the process of a search died, the
    search is available once its lease expires; this function waits for that up to `patience_s`
    seconds. If the search fails, its error is raised, and the search can be resumed.

    Raises:
        ConflictError: Another process is working on the search.
        InputError: The launcher is not the cluster's.
    """
    if search_id is None:
        if query is None:
            raise NotFoundError("Pass a query, or the id of a search to resume.", field="query")
        stored = query_mapping(inline_files(query))
        resolve_search(
            parse_query(stored)
        )  # As stored, without files that only this process can read.
        stored = within_limits(stored)
        search_id = store.create_search(
            query=stored, paused=True, limits=daily_limits(stored), edition=count_query_terms()
        ).id
    record = store.get_search(search_id=search_id)
    if record.state is SearchState.SUCCEEDED and record.result is not None:
        done: TuneResult = parse(TuneResult, record.result)
        return done
    if record.state is SearchState.FAILED:
        store.resume_search(search_id=search_id, limits=daily_limits(record.query))
    lease = _claim(store, search_id, holder=holder or default_holder(), patience_s=patience_s)
    while (
        result := run_search(
            store=store, lease=lease, launcher=launcher, storage=storage, on_event=on_event
        )
    ) is None:
        if waiting_for := store.get_search(search_id=search_id).progress.get("waiting_for"):
            raise ConflictError(
                f"search {search_id} was returned to the queue: {waiting_for}", code="released"
            )
        # Other searches use the entire cluster. A worker would continue with its other searches,
        # but this process has none.
        lease = _claim(store, search_id, holder=holder or default_holder(), patience_s=patience_s)
    return result


def default_holder() -> str:
    """Return a readable name for this process: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _claim(store: Store, search_id: str, *, holder: str, patience_s: float) -> Lease:
    """Claim the lease of this search.

    Raises:
        ConflictError: The search has ended, or its holder still renews the lease.
        StoreError: A newer edition stored the search.
    """
    deadline = time.monotonic() + patience_s
    while True:
        claimed = store.claim_search(
            holder=holder, lease_s=LEASE_S, search_id=search_id, edition=count_query_terms()
        )
        if claimed is not None:
            return claimed[1]
        current = store.get_search(search_id=search_id)
        if current.lease is None or time.monotonic() >= deadline:
            who = f"; {current.lease.holder} works on it" if current.lease else ""
            raise ConflictError(f"search {search_id} is {current.state}{who}", field="search_id")
        time.sleep(0.5)
