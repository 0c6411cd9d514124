"""Running a stored search under its lease, and `tune`, which also creates it."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hp_tool.calibration import Calibration, Evidence, fit_calibration
from hp_tool.domain.ports import Launcher, Store
from hp_tool.domain.query import Query
from hp_tool.domain.records import JsonObject, Lease, RunRecord, SearchState
from hp_tool.errors import ConflictError, HpToolError, NotFoundError, StoreError
from hp_tool.learning.evidence import stored_evidence
from hp_tool.learning.make import accuracy_of, save
from hp_tool.learning.stored import StoredCalibrations
from hp_tool.problem import TrainingProblem
from hp_tool.ranking import CostedSpace
from hp_tool.schema import parse, parse_query, to_dict
from hp_tool.search.coordinator import Coordinator, Outcome
from hp_tool.search.progress import progress_of
from hp_tool.search.sampler import CostModelSampler
from hp_tool.search.spending import spent_by
from hp_tool.search.stopping import coverage_runs
from hp_tool.search.study import StudyProjection
from hp_tool.serving.problem import ServingProblem
from hp_tool.trainers import TrainerLauncher
from hp_tool.tuning.clusters import create_launcher, daily_limits, runs_limit, within_limits
from hp_tool.tuning.evidence import reusable_measurements
from hp_tool.tuning.heartbeat import Heartbeat
from hp_tool.tuning.problem import TuningProblem, build_problem, resolve_training_search
from hp_tool.tuning.result import TuneResult, make_result, nothing_feasible
from hp_tool.tuning.serving import ServingTuning, build_serving, resolve_serving_search
from hp_tool.tuning.serving_evidence import LatencyCalibration, stored_lessons
from hp_tool.tuning.serving_result import make_serving_result

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

LEASE_S = 30.0
"""A coordinator that died keeps its search from others this long; a living one renews far more often."""
_CREATE_ATTEMPTS = 5
OnEvent = Callable[[str, JsonObject], None]


def resolve_search(query: Query) -> TrainingProblem | ServingProblem:
    """The query's problem, if real runs can search it at all; else InputError or UnsupportedError says what they cannot."""
    return resolve_serving_search(query) if query.kind == "inference" else resolve_training_search(query)


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
    """Search in this process: a new search for `query`, or the one called `search_id` from where it stands.

    A search that already succeeded is answered as it was. One that a process which died had held is free once its
    lease expired: that is waited for, `patience_s` at most. Raises ConflictError where another process works on it,
    InputError where the launcher is not the cluster's, and whatever made the search fail; it can then be resumed.
    """
    if search_id is None:
        if query is None:
            raise NotFoundError("neither a query nor a search to resume was given", field="query")
        resolve_search(query)
        asked = within_limits(to_dict(query))
        search_id = store.create_search(query=asked, paused=True, limits=daily_limits(asked)).id
    record = store.get_search(search_id=search_id)
    if record.state is SearchState.SUCCEEDED and record.result is not None:
        done: TuneResult = parse(TuneResult, record.result)
        return done
    if record.state is SearchState.FAILED:
        store.resume_search(search_id=search_id, limits=daily_limits(record.query))
    lease = _claim(store, search_id, holder=holder or default_holder(), patience_s=patience_s)
    result = run_search(store=store, lease=lease, launcher=launcher, storage=storage, on_event=on_event)
    if result is None:
        raise ConflictError(f"search {search_id} was handed back to the queue", code="released")
    return result


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
    """Coordinate a claimed search until it ends, is paused, or `should_release` says that this process has to go.

    The search is ended or let go in the store, with its result. None: released, nothing to say yet. Errors end the
    search as failed (it may be resumed) and are raised; ConflictError `lease_lost` is raised with nothing touched.
    `launcher` and `storage` (Optuna's) default to what the query names and to memory.
    """
    with Heartbeat(store=store, lease=lease, lease_s=lease_s) as heartbeat, _outcome_stored(store, lease):
        record = store.get_search(search_id=lease.search_id)
        query = parse_query(record.query)
        launcher = launcher or create_launcher(query)
        started = time.perf_counter()
        hardware = launcher.hardware()
        # As it was known when the search began: taken up again, it asks the same question.
        known = StoredCalibrations(store=store, before=record.created_at, hardware=hardware)
        asked: dict[str, Any] = {"query": query, "query_json": record.query, "hardware": hardware}
        serves = query.kind == "inference"
        problem = build_serving(**asked) if serves else build_problem(**asked, corrections=known)
        seconds = time.perf_counter() - started
        if isinstance(problem, CostedSpace):
            training = resolve_training_search(query)
            nothing = nothing_feasible(query=query, problem=training, space=problem, search_id=lease.search_id, seconds=seconds)
            return _end(store, lease, nothing)
        if query.trainer is not None and isinstance(problem, TuningProblem):  # refused for serving
            launcher = TrainerLauncher(launcher, trainer=query.trainer, problem=problem.training, settings=query.search)
        earlier = spent_by(store.runs(search_id=lease.search_id)).profile_runs
        on_event("started", {"search_id": lease.search_id, "profile_runs": earlier, **_size(problem)})
        sampler = CostModelSampler(
            table=problem.search.table,
            prior=problem.prior,
            evidence=_earlier(store, problem, without_search=lease.search_id),
            coverage_runs=coverage_runs(query.search, prior=problem.prior),
            seed=query.search.seed,
        )
        projection = StudyProjection(
            search_id=lease.search_id,
            claim=lease.token,
            problem=problem.search,
            sampler=sampler,
            storage=storage or study_storage(None),
        )
        outcome = Coordinator(
            store=store,
            launcher=launcher,
            lease=lease,
            problem=problem.search,
            projection=projection,
            reusable=reusable_measurements(store=store, problem=problem.search) if query.search.reuse else {},
            lease_s=lease_s,
            report=on_event,
            should_release=heartbeat.watched(should_release),
            limit=runs_limit(query),
        ).run()
        if outcome.state == "released":
            store.release_search(lease=lease)
            return None
        calibration = sampler.calibration(study=projection.study)
        return _conclude(store, lease, problem, outcome, calibration=calibration, seconds=seconds)


@contextlib.contextmanager
def _outcome_stored(store: Store, lease: Lease) -> Iterator[None]:
    """An error inside ends the search as failed, or lets go of it; and is raised."""
    try:
        yield
    except KeyboardInterrupt:  # outside the loop, which pauses by itself
        store.release_search(lease=lease, paused=True)
        raise
    except HpToolError as error:
        # With another coordinator at work, or the store away, it is not ours to end: the lease decides who goes on.
        if error.code != "lease_lost" and not isinstance(error, StoreError):
            _fail(store, lease, error)
        raise
    except Exception as bug:
        from hp_tool.store.base import is_the_drivers

        if is_the_drivers(bug):  # Optuna's tables lie in it too, and it raises the driver's errors as they are
            raise StoreError(f"the study's database: {type(bug).__name__}") from bug
        _fail(store, lease, HpToolError(f"{type(bug).__name__}: {bug}"))
        raise


def study_storage(database_url: str | None) -> BaseStorage:
    """Where Optuna keeps the studies: in tables of its own in the database at this URL, or in memory.

    Safe to call from many processes at once on a new database. Raises StoreError where the database does not answer.
    """
    import optuna

    if database_url is None:
        return optuna.storages.InMemoryStorage()
    from hp_tool.store.engine import BUSY_TIMEOUT_S, parse_url

    url = parse_url(database_url)
    # Like our own connections, Optuna's wait for their turn on SQLite instead of failing.
    options = {"connect_args": {"timeout": BUSY_TIMEOUT_S}} if url.get_backend_name() == "sqlite" else {"pool_pre_ping": True}
    for attempt in range(_CREATE_ATTEMPTS):
        try:
            return optuna.storages.RDBStorage(url.render_as_string(hide_password=False), engine_kwargs=dict(options))
        except Exception as error:  # the driver's, passed on as it is
            # Optuna creates its tables without a lock: of several processes that begin at once, all but one fail.
            if attempt + 1 == _CREATE_ATTEMPTS:
                raise StoreError(f"Optuna's tables cannot be opened: {type(error).__name__}") from error
            time.sleep(0.2 * (attempt + 1))
    raise AssertionError("unreachable")


def default_holder() -> str:
    """Who this process is, for people: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _claim(store: Store, search_id: str, *, holder: str, patience_s: float) -> Lease:
    """Become this search's coordinator; ConflictError where it has ended or its holder goes on renewing the lease."""
    deadline = time.monotonic() + patience_s
    while True:
        claimed = store.claim_search(holder=holder, lease_s=LEASE_S, search_id=search_id)
        if claimed is not None:
            return claimed[1]
        current = store.get_search(search_id=search_id)
        if current.lease is None or time.monotonic() >= deadline:
            who = f"; {current.lease.holder} works on it" if current.lease else ""
            raise ConflictError(f"search {search_id} is {current.state}{who}", field="search_id")
        time.sleep(0.5)


def _conclude(
    store: Store,
    lease: Lease,
    problem: TuningProblem | ServingTuning,
    outcome: Outcome,
    *,
    calibration: Calibration,
    seconds: float,
) -> TuneResult:
    """Keep what was learnt, and end or let go of the search with its result."""
    evidence = _earlier(store, problem)
    if len(evidence):
        # Not the search's own: that one saw reduced runs as what they imply, here they stand for what they are.
        lasting = fit_calibration(evidence=evidence, prior=problem.prior)
        save(store, series=problem.series, calibration=lasting, accuracy=accuracy_of(evidence, prior=problem.prior))
    runs = store.runs(search_id=lease.search_id)
    error = _nothing_worked(runs) if outcome.state == "succeeded" else None
    state = SearchState.FAILED if error else SearchState(outcome.state)
    account: dict[str, Any] = {
        "runs": runs,
        "search_id": lease.search_id,
        "state": state,
        "stopped_because": outcome.stopped_because,
        "expected_gain_fraction": outcome.expected_gain_fraction,
        "seconds": seconds,
        "error": error,
    }
    if isinstance(problem, ServingTuning):
        lessons = stored_lessons(store=store, series=problem.series)
        latencies = LatencyCalibration.fitted(lessons, prior=problem.prior)
        result = make_serving_result(tuning=problem, calibration=latencies, **account)
    else:
        result = make_result(problem=problem, calibration=calibration, **account)
    budget = problem.query.search.budget_runs
    progress = progress_of(runs, budget_runs=budget, expected_gain=outcome.expected_gain_fraction)
    store.set_progress(lease=lease, progress=progress | {"grid_gpu_seconds": result.search.grid_gpu_seconds})
    return _end(store, lease, result)


def _earlier(store: Store, problem: TuningProblem | ServingTuning, *, without_search: str | None = None) -> Evidence:
    """What stored runs like these taught."""
    if isinstance(problem, ServingTuning):
        return stored_lessons(store=store, series=problem.series, without_search=without_search).round
    return stored_evidence(store=store, series=problem.series, without_search=without_search)


def _end(store: Store, lease: Lease, result: TuneResult) -> TuneResult:
    """End the search with its result, or let go of a paused one."""
    if result.search.state is SearchState.PAUSED:
        store.release_search(lease=lease, paused=True)
    else:
        store.finish_search(
            lease=lease,
            state=result.search.state,
            stopped_because=result.search.stopped_because,
            result=to_dict(result),
            error=result.error,
        )
    return result


def _nothing_worked(runs: Sequence[RunRecord]) -> HpToolError | None:
    """The error of a search whose every run failed: how many of each kind, and the last one's cause."""
    measurements = [run.measurement for run in runs if run.measurement is not None]
    if not measurements or any(measurement.status == "ok" for measurement in measurements):
        return None
    counts = Counter(measurement.status for measurement in measurements)
    told = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    return HpToolError(
        f"no profile run succeeded ({told}); the last: {measurements[-1].cause or 'no cause given'}", code="all_runs_failed"
    )


def _fail(store: Store, lease: Lease, error: HpToolError) -> None:
    """End the search as failed. Where the store itself is the trouble, the error that led here says more."""
    with contextlib.suppress(HpToolError):
        store.finish_search(lease=lease, state=SearchState.FAILED, stopped_because=error.code, error=error.as_dict())


def _size(problem: TuningProblem | ServingTuning) -> JsonObject:
    legal = problem.search.candidates if isinstance(problem, ServingTuning) else problem.space.candidates
    return {
        "candidates": len(problem.search.table),
        "legal": len(legal),
        "budget_runs": problem.query.search.budget_runs,
    }
