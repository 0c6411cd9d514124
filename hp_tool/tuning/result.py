"""The result of a training search: candidates ranked by one estimate each, of calibration and own runs."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from hp_tool.calibration import Calibration
from hp_tool.calibration.evidence import FloatArray
from hp_tool.cost.breakdown import estimate_row
from hp_tool.domain.answer import Answer, ServingAnswer
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.query import Query
from hp_tool.domain.records import RunRecord, SearchState
from hp_tool.domain.result import Recommendation, SpaceSummary
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.errors import HpToolError
from hp_tool.search.account import run_gpu_seconds, spent_by, startup_s
from hp_tool.search.fidelity import standing
from hp_tool.search.problem import Question
from hp_tool.space.pareto import undominated
from hp_tool.training.calibrated import CalibratedPredictor
from hp_tool.training.problem import TrainingProblem
from hp_tool.training.ranking.choice import simplest
from hp_tool.training.ranking.exact import NEAR
from hp_tool.training.ranking.misses import NEAREST, nearest, nearest_recommendations
from hp_tool.training.ranking.rank import CostedSpace
from hp_tool.tuning.answer import answer_of, baseline_of, effect_of_axes
from hp_tool.tuning.known import KnownRows, as_good, known_rows
from hp_tool.tuning.problem import TuningProblem

TOP = 10
"""Recommendations in a result; measured configurations beyond it are added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSummary:
    """What a search cost, and why it ended."""

    id: str
    state: SearchState
    profile_runs: int
    """Real runs that ended with a measurement, good or bad."""
    gpu_seconds: float
    """Devices x wall seconds of all runs."""
    grid_gpu_seconds: float | None
    """What running every feasible candidate would have cost, by the calibrated prediction; None where nothing succeeded."""
    stopped_because: str
    expected_gain_fraction: float | None = None
    """Saving expected of another run, as a share of the best step time; None where it was not computed."""
    queue_s: float = 0.0
    """Seconds that the runs' jobs waited for devices; they cost nothing."""
    reduced_runs: int = 0
    """How many of the runs left out replicas, micro-batches or layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The ranked answer with measurements, the space it was found in, and the search's account."""

    id: str | None
    """The query's."""
    status: Literal["ok", "error"] = "ok"
    """error: no run succeeded; what is recommended is only predicted."""
    error: dict[str, str | None] | None = None
    """{code, message, field}"""
    recommendations: tuple[Recommendation, ...] | tuple[ServingRecommendation, ...]
    space: SpaceSummary
    rejections: dict[str, int]
    search: SearchSummary
    nearest_misses: tuple[Recommendation, ...] | tuple[ServingRecommendation, ...] = ()
    """Where nothing is recommended: the infeasible configurations that lack least of memory, days, money or latency."""
    answer: Answer | ServingAnswer | None = None
    """The first recommendation in figures; None where nothing is recommended."""
    axes: dict[str, dict[str, float]] = field(default_factory=dict)
    """Step time (of serving: request latency) known of the best configuration with each value of an axis: what holding on to
    that value costs."""
    pareto: tuple[Recommendation, ...] = ()
    """What no other beats in both step time and memory of the fullest device, measured where it ran; fastest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A search's runs and how it ended: what a result says beside its recommendations."""

    search_id: str
    state: SearchState
    runs: Sequence[RunRecord]
    stopped_because: str
    seconds: float
    """Spent on enumerating and costing the space."""
    expected_gain_fraction: float | None = None
    error: HpToolError | None = None

    def summary(self, *, grid_gpu_seconds: float | None) -> SearchSummary:
        """What the search cost."""
        spent = spent_by(self.runs)
        return SearchSummary(
            id=self.search_id,
            state=self.state,
            profile_runs=spent.profile_runs,
            gpu_seconds=spent.gpu_seconds,
            queue_s=spent.queue_s,
            grid_gpu_seconds=grid_gpu_seconds,
            stopped_because=self.stopped_because,
            expected_gain_fraction=self.expected_gain_fraction,
            reduced_runs=sum(run.measurement is not None and not run.fidelity.is_whole for run in self.runs),
        )


def make_result(*, problem: TuningProblem, calibration: Calibration, account: Account) -> TuneResult:
    """Rank and describe. A result can be made at any moment of a search.

    Candidates whose known step misses max_days or max_cost are not recommended.
    """
    table = problem.search.table
    outcomes = outcome_of_rows(problem.search, account.runs)
    measured = {row: outcome for row, outcome in outcomes.items() if outcome.status == "ok"}
    failed = outcomes.keys() - measured.keys()
    known = known_rows(search=problem.search, calibration=calibration, runs=account.runs)
    step_s, limit_s = known.step.median_s, problem.training.longest_step_s
    fits = known.memory.fit_probability(table.usable_bytes) >= 0.5
    predictor = CalibratedPredictor(calibration=calibration)
    baseline = baseline_of(
        problem.query,
        problem=problem.training,
        search=problem.search,
        predictor=predictor,
        known=known,
        runs=account.runs,
    )
    rows = [row for row in np.flatnonzero(step_s <= limit_s).tolist() if row in measured or (fits[row] and row not in failed)]
    whole = {row: float(step_s[row]) for row in rows if known.ran[row]}
    rows = rank(median_s=step_s, log_sd=known.step.log_sd, eligible=rows, measured_s=whole)
    rows = simplest_first(
        rows,
        problem=problem,
        known_s=step_s,
        known_bytes=known.memory.median_bytes,
        fails=known.fails,
        measured=whole,
        baseline_s=baseline.step_s if baseline else None,
    )
    front = [rows[place] for place in undominated(step_s[rows], -known.memory.median_bytes[rows])]
    shown = [row for place, row in enumerate(rows) if place < TOP or row in measured]
    near = []
    if not shown:  # what fits by its time, then the rest by its size; not what failed to run
        order = np.lexsort((np.where(fits, step_s, table.memory_bytes), ~fits)).tolist()
        near = [row for row in order if row not in failed][:NEAREST]
    grid_gpu_seconds = _grid_gpu_seconds(problem, account.runs, median_s=step_s[fits]) if measured else None
    describe = partial(_describe, problem, predictor=predictor, known=known, measured=measured)
    recommendations = describe(shown)
    answer = None
    if shown:
        best = shown[0]
        answer = answer_of(
            recommendations[0],
            row=best,
            known=known,
            baseline=baseline,
            runs=account.runs,
            as_good=as_good(rows, step=known.step),
            free_memory_bytes=float(table.device_bytes[best] - known.memory.median_bytes[best]),
        )
    return TuneResult(
        id=problem.query.id,
        status="error" if account.error else "ok",
        error=account.error.as_dict() if account.error else None,
        recommendations=recommendations,
        answer=answer,
        axes=effect_of_axes(table.axes, rows, step_s),
        space=SpaceSummary(legal=problem.space.legal, feasible=problem.space.feasible, seconds=account.seconds),
        rejections=problem.space.rejections,
        nearest_misses=describe(near),
        pareto=describe(front),
        search=account.summary(grid_gpu_seconds=grid_gpu_seconds),
    )


def nothing_feasible(
    *, query: Query, problem: TrainingProblem, space: CostedSpace, search_id: str, seconds: float
) -> TuneResult:
    """The result of a search that had nothing to run, with what comes nearest."""
    account = Account(
        search_id=search_id, state=SearchState.SUCCEEDED, runs=(), stopped_because="nothing_feasible", seconds=seconds
    )
    return TuneResult(
        id=query.id,
        recommendations=(),
        space=SpaceSummary(legal=space.legal, feasible=0, seconds=seconds),
        rejections=space.rejections,
        nearest_misses=nearest_recommendations(space.candidates.take(nearest(space, problem=problem)), problem=problem),
        search=account.summary(grid_gpu_seconds=None),
    )


def rank(
    *,
    median_s: Sequence[float] | np.ndarray,
    log_sd: Sequence[float] | np.ndarray,
    eligible: Sequence[int],
    measured_s: Mapping[int, float],
) -> list[int]:
    """Rows best first by their seconds: `measured_s` of what ran as a whole, else `median_s`.

    The first place goes to a measured row unless a prediction beats it by more than one standard deviation: within
    the noise, what was seen to run is the better advice.
    """
    times = {row: measured_s.get(row, float(median_s[row])) for row in {*eligible, *measured_s}}
    order = sorted(times, key=lambda row: (times[row], row))
    best_measured = next((row for row in order if row in measured_s), None)
    if best_measured is not None and order[0] != best_measured:
        ahead = order[: order.index(best_measured)]
        if all(np.log(times[best_measured] / times[row]) <= log_sd[row] for row in ahead):
            order.remove(best_measured)
            order.insert(0, best_measured)
    return order


def simplest_first(
    rows: list[int],
    *,
    problem: TuningProblem,
    known_s: FloatArray,
    known_bytes: FloatArray,
    fails: FloatArray,
    measured: Container[int],
    baseline_s: float | None = None,
) -> list[int]:
    """The rows with the one to try first, as `training.ranking.choice` finds it: of those that take at most NEAR times as long
    as the first and no longer than the baseline, and were measured if that was.
    """
    longest_s = min(NEAR * known_s[rows[0]], baseline_s or np.inf) if rows else 0.0
    near = [row for row in rows if known_s[row] <= longest_s and (row in measured or rows[0] not in measured)]
    if len(near) < 2:
        return rows
    place = simplest(
        problem.search.candidates.take(np.array(near)),
        problem=problem.training,
        total_bytes=known_bytes[near],
        fails=fails[near],
        value_s=known_s[near],
    )
    return [near[place], *(row for row in rows if row != near[place])]


def outcome_of_rows(search: Question, runs: Sequence[RunRecord]) -> dict[int, Measurement]:
    """What was measured of each of the search's rows, by the run that counts."""
    counted = ((search.row(parallel), run.measurement) for parallel, run in standing(runs).items())
    return {row: measurement for row, measurement in counted if row is not None and measurement is not None}


def _describe(
    problem: TuningProblem,
    rows: Sequence[int],
    *,
    predictor: CalibratedPredictor,
    known: KnownRows,
    measured: Mapping[int, Measurement],
) -> tuple[Recommendation, ...]:
    if not rows:
        return ()
    training = problem.training
    candidates = problem.search.candidates.take(np.array(rows, dtype=np.intp))
    costs = training.costs(candidates)
    return tuple(
        Recommendation(
            rank=place + 1,
            parallel=candidates.config(place),  # as it ran, so that pages find its run
            set=dict(training.chosen),
            estimate=estimate_row(place, case=training, costs=costs, candidates=candidates),
            measurement=measured.get(row),
            calibrated_estimate=predictor.estimate(
                place, costs=costs, candidates=candidates, problem=training, known=known.row(row)
            ),
        )
        for place, row in enumerate(rows)
    )


def _grid_gpu_seconds(problem: TuningProblem, runs: Sequence[RunRecord], *, median_s: np.ndarray) -> float | None:
    """Every feasible candidate once, as a whole: start-up as these runs had it, and all steps."""
    if median_s.size == 0:
        return None
    settings = problem.query.search
    one_run = run_gpu_seconds(
        num_gpus=problem.training.cluster.num_gpus,
        step_s=float(np.mean(median_s)),
        startup_s=startup_s(runs, settings=settings, assumed_s=problem.search.assumed_startup_s),
        settings=settings,
    )
    return one_run * float(problem.space.feasible)
