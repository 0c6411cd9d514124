"""Running a stored search under its lease."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hp_tool.domain.ports import Launcher, Store
from hp_tool.domain.query import Query
from hp_tool.domain.records import JsonObject, Lease
from hp_tool.errors import ConflictError
from hp_tool.learning.stored import StoredCalibrations
from hp_tool.queries.schema import parse_query
from hp_tool.search.coordinator import Coordinator
from hp_tool.search.sampler import CostModelSampler
from hp_tool.search.spending import spent_by
from hp_tool.search.stopping import coverage_runs
from hp_tool.search.study import StudyProjection
from hp_tool.serving.problem import ServingProblem
from hp_tool.trainers import TrainerLauncher
from hp_tool.training.problem import TrainingProblem
from hp_tool.training.rank import CostedSpace
from hp_tool.tuning.clusters import create_launcher, runs_limit
from hp_tool.tuning.ending import conclude, end, outcome_stored
from hp_tool.tuning.evidence import earlier_evidence, reusable_measurements
from hp_tool.tuning.heartbeat import LEASE_S, Heartbeat
from hp_tool.tuning.problem import TuningProblem, build_problem, resolve_training_search
from hp_tool.tuning.result import TuneResult, nothing_feasible
from hp_tool.tuning.serving import ServingTuning, build_serving, resolve_serving_search
from hp_tool.tuning.study import study_storage

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

OnEvent = Callable[[str, JsonObject], None]


def resolve_search(query: Query) -> TrainingProblem | ServingProblem:
    """The query's problem, if real runs can search it at all; else InputError or UnsupportedError says what they cannot."""
    return resolve_serving_search(query) if query.kind == "inference" else resolve_training_search(query)


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
    search as failed (it may be resumed or cancelled) with the jobs of its runs, and are raised; ConflictError `lease_lost` is
    raised with nothing touched.
    `launcher` and `storage` (Optuna's) default to what the query names and to memory.
    """
    heart = Heartbeat(store=store, lease=lease, lease_s=lease_s)
    with heart as heartbeat, outcome_stored(store, lease, launcher=lambda: launcher):
        record = store.get_search(search_id=lease.search_id)
        query = parse_query(record.query)
        launcher = launcher or create_launcher(query)
        if record.requested == "cancel" and record.lost_claims:  # what cost the last workers their lives is not begun again
            raise ConflictError(f"search {record.id} was cancelled", code="cancelled")
        started = time.perf_counter()
        hardware = launcher.hardware()
        # As it was known when the search began: taken up again, it asks the same question.
        known = StoredCalibrations(store=store, before=record.created_at, hardware=hardware)
        asked: dict[str, Any] = {"query": query, "query_json": record.query, "hardware": hardware}
        serves = query.kind == "inference"
        problem = build_serving(**asked) if serves else build_problem(**asked, calibrations=known)
        seconds = time.perf_counter() - started
        if isinstance(problem, CostedSpace):
            training = resolve_training_search(query)
            nothing = nothing_feasible(query=query, problem=training, space=problem, search_id=lease.search_id, seconds=seconds)
            return end(store, lease, nothing)
        if query.trainer is not None and isinstance(problem, TuningProblem):  # refused for serving
            launcher = TrainerLauncher(launcher, trainer=query.trainer, problem=problem.training, settings=query.search)
        earlier = spent_by(store.runs(search_id=lease.search_id)).profile_runs
        on_event("started", {"search_id": lease.search_id, "profile_runs": earlier, **_size(problem)})
        sampler = CostModelSampler(
            table=problem.search.table,
            prior=problem.prior,
            evidence=earlier_evidence(store, problem, without_search=lease.search_id),
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
        return conclude(store, lease, problem, outcome, calibration=calibration, seconds=seconds)


def _size(problem: TuningProblem | ServingTuning) -> JsonObject:
    legal = problem.search.candidates if isinstance(problem, ServingTuning) else problem.space.candidates
    return {
        "candidates": len(problem.search.table),
        "legal": len(legal),
        "budget_runs": problem.query.search.budget_runs,
    }
