"""Predicted cost of a search: its first run, the leader's confirmation, and the full budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

from hp_tool.cost.candidates import Candidates
from hp_tool.domain.measurement import Hardware
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.plan import PlanAnswer, PlannedRun, SearchPlan
from hp_tool.domain.ports import Launcher, Store
from hp_tool.domain.query import Query
from hp_tool.domain.records import RunRecord
from hp_tool.domain.states import RunState
from hp_tool.domain.units import SECONDS_PER_HOUR
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.search.account import run_gpu_seconds
from hp_tool.loop.search.fidelity import WHOLE, num_gpus
from hp_tool.loop.search.planner import CONFIRMATION, Nothing, Planner
from hp_tool.loop.search.rivals import rivals_of
from hp_tool.loop.tuning.clusters import create_launcher, launcher_name, with_trainer, within_limits
from hp_tool.loop.tuning.evidence import earlier_evidence, with_measured_startup
from hp_tool.loop.tuning.problem import build_problem, resolve_training_search
from hp_tool.loop.tuning.study import projection_of, study_storage
from hp_tool.loop.tuning.training_result import TuningProblem
from hp_tool.questions.schema import parse_query, to_dict
from hp_tool.questions.training.problem import inline_files
from hp_tool.questions.training.ranking.rank import CostedSpace

_NAME = "planned"


def plan_search(
    query: Query, *, store: Store | None = None, launcher: Launcher | None = None
) -> PlanAnswer:
    """Return the cost of a search in this process, with its first job.

    `store` contains the measurements that the search would use.

    Raises:
        InputError: No candidate fits in memory, or the query cannot run.
    """
    launcher = launcher or create_launcher(query)
    plan, problem, run = _plan(query, hardware=launcher.hardware(), store=store)
    launcher = with_trainer(query, launcher, problem=problem.training)
    job = launcher.describe(launcher.plan(problem.search.request(run), job_name=run.job_name))
    return PlanAnswer(id=query.id, plan=plan, job=job)


def bill(query: Query, *, store: Store | None = None) -> PlanAnswer:
    """Return the plan of a search, assuming that one job may use the entire cluster.

    No launcher is needed.
    """
    cluster = resolve_training_search(_a_training(query)).cluster
    hardware = Hardware(gpu=cluster.gpu.name, num_gpus=cluster.num_gpus, hosts=(cluster.name,))
    plan, _, _ = _plan(query, hardware=hardware, store=store)
    return PlanAnswer(id=query.id, plan=plan)


def _a_training(query: Query) -> Query:
    if query.kind != "training":
        raise UnsupportedError("Plans support only training queries.", field="kind")
    return query


def _plan(
    query: Query, *, hardware: Hardware, store: Store | None
) -> tuple[SearchPlan, TuningProblem, RunRecord]:
    """Return the costs, the problem, and the first run in the form to be stored."""
    stored = within_limits(to_dict(inline_files(_a_training(query))))
    query = replace(query, search=parse_query(stored).search)
    problem = build_problem(query=query, query_json=stored, hardware=hardware)
    if isinstance(problem, CostedSpace):
        raise InputError(
            "No configuration that the query allows fits, so there is nothing to run.",
            field="parallel",
            code="nothing_feasible",
        )
    if store is not None:
        problem = replace(problem, search=with_measured_startup(problem.search, store=store))
    evidence = None if store is None else earlier_evidence(store, problem)
    projection = projection_of(
        problem, evidence=evidence, search_id=_NAME, storage=study_storage(None)
    )
    planner = Planner(
        problem=problem.search, projection=projection, available_gpus=hardware.num_gpus, reusable={}
    )
    decision = planner.decide([], projection.proposal())
    assert not isinstance(decision, Nothing) and isinstance(
        decision.parallel, ParallelConfig
    )  # Nothing has run yet.
    run = RunRecord(
        id=_NAME,
        search_id=_NAME,
        number=0,
        digest="",
        attempt=0,
        state=RunState.INTENDED,
        parallel=decision.parallel,
        fidelity=decision.fidelity,
        predicted=decision.predicted,
        job_name=_NAME,
        token=0,
        created_at=datetime.now(UTC),
    )
    first = _planned(run, problem, chosen_by=decision.predicted["chosen_by"])
    proof = None
    if not run.fidelity.is_whole and num_gpus(run.parallel) <= hardware.num_gpus:
        of_whole = {
            name: value for name, value in run.predicted.items() if not name.startswith("reduced_")
        }
        proof = _planned(
            replace(run, fidelity=WHOLE, predicted=of_whole), problem, chosen_by=CONFIRMATION
        )
    return _total_plan(first, proof, problem=problem), problem, run


def _planned(run: RunRecord, problem: TuningProblem, *, chosen_by: str) -> PlannedRun:
    search, predicted = problem.search, run.predicted
    devices, low_high = num_gpus(run.parallel, run.fidelity), search.startup_range_s()
    step_s: float = predicted.get("reduced_calibrated_step_s") or predicted["calibrated_step_s"]
    assert isinstance(run.parallel, ParallelConfig)
    beside = [rival["calibrated_step_s"] for rival in rivals_of(run)]
    cost = partial(run_gpu_seconds, num_gpus=1, settings=search.settings)
    limit_s = search.time_limit_s(run, startup_s=None)

    def needed_s(startup_s: float) -> float:
        own_s = cost(step_s=step_s, startup_s=startup_s)
        return own_s + sum(
            cost(step_s=each, startup_s=assumed().search.next_startup_share * startup_s)
            for each in beside
        )

    expected_s = needed_s(search.assumed_startup_s)
    low_s, high_s = (min(needed_s(each), limit_s) for each in low_high)
    return PlannedRun(
        chosen_by=chosen_by,
        parallel=run.parallel,
        fidelity=run.fidelity,
        num_gpus=devices,
        num_nodes=-(-devices // search.cluster.gpus_per_node),
        step_s=step_s,
        configurations=1 + len(beside),
        wall_s=min(expected_s, limit_s),
        wall_s_interval=None if search.startup_is_known else (low_s, high_s),
        time_limit_s=limit_s,
        cut_off=expected_s > limit_s,
        hold_probability=predicted["hold_probability"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bill:
    """Expected cost of all runs of a search."""

    wall_s: float
    gpu_seconds: float
    alike: int
    """Number of runs that are expected to cost as much as the first one."""


def _total_plan(
    first: PlannedRun, proof: PlannedRun | None, *, problem: TuningProblem
) -> SearchPlan:
    """Return the cost of all runs in the budget, in jobs like the first one.

    It includes the confirmation of the leader if that is affordable.
    """
    settings, budget = problem.search.settings, problem.search.settings.budget_gpu_seconds
    if proof is not None and (
        settings.budget_runs < 2 or first.gpu_seconds + proof.gpu_seconds > (budget or float("inf"))
    ):
        proof = None
    proven = 0 if proof is None else 1
    by_space, by_runs = len(problem.search.table), settings.budget_runs - proven

    def whole(first_s: float, proof_s: float) -> _Bill:
        proof_gpu_seconds = 0.0 if proof is None else proof.num_gpus * proof_s
        each_gpu_seconds = first.num_gpus * first_s / first.configurations
        affordable = (
            by_runs
            if budget is None
            else max(int((budget - proof_gpu_seconds) // each_gpu_seconds), 1)
        )
        alike = min(by_runs, affordable, by_space)
        turns = math.ceil(math.ceil(alike / first.configurations) / settings.parallel_runs)
        return _Bill(
            wall_s=turns * first_s + proven * proof_s,
            gpu_seconds=alike * each_gpu_seconds + proof_gpu_seconds,
            alike=alike,
        )

    bills = [whole(*walls) for walls in zip(_walls(first), _walls(proof), strict=True)]
    expected = bills[1]

    def interval(name: str, scale: float = 1.0) -> tuple[float, float] | None:
        values = [scale * getattr(each, name) for each in bills]
        return None if problem.search.startup_is_known else (min(values), max(values))

    alike = expected.alike
    stopped_by = (
        "budget_runs"
        if alike == by_runs
        else "space_exhausted"
        if alike == by_space
        else "budget_gpu_seconds"
    )
    jobs = math.ceil(alike / first.configurations)
    most = sum(
        count * run.num_gpus * run.time_limit_s
        for count, run in ((jobs, first), (proven, proof))
        if run is not None
    )
    most = max(most, *(each.gpu_seconds for each in bills))
    price = problem.search.cluster.price_per_gpu_hour
    per_second = None if price is None else price / SECONDS_PER_HOUR
    return SearchPlan(
        launcher=launcher_name(problem.query),
        first=first,
        confirmation=proof,
        runs=alike + proven,
        stopped_by=stopped_by,
        wall_s=expected.wall_s,
        wall_s_interval=interval("wall_s"),
        gpu_seconds=expected.gpu_seconds,
        gpu_seconds_interval=interval("gpu_seconds"),
        gpu_hours=expected.gpu_seconds / SECONDS_PER_HOUR,
        cost=None if per_second is None else per_second * expected.gpu_seconds,
        cost_interval=None if per_second is None else interval("gpu_seconds", per_second),
        most_gpu_seconds=most,
        most_cost=None if per_second is None else per_second * most,
        set=dict(problem.training.chosen),
        unrun=problem.unrun_settings(Candidates.from_configs([first.parallel])),
    )


def _walls(run: PlannedRun | None) -> tuple[float, float, float]:
    """Return the duration of a run's job for minimum, expected and maximum start-up, in seconds.

    Without a run, all three are 0.
    """
    if run is None:
        return 0.0, 0.0, 0.0
    low_s, high_s = run.wall_s_interval or (run.wall_s, run.wall_s)
    return low_s, run.wall_s, high_s
