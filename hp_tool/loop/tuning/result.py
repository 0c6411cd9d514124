"""The result of a search: candidates ranked by estimates from calibration and own runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from hp_tool.domain.answer import Answer, ServingAnswer
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.query import Query, SearchSettings
from hp_tool.domain.records import RunRecord
from hp_tool.domain.result import Recommendation, SpaceSummary
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.domain.states import SearchState
from hp_tool.errors import HpToolError
from hp_tool.loop.calibration.evidence import FloatArray
from hp_tool.loop.search.account import spent_by
from hp_tool.loop.search.fidelity import standing
from hp_tool.loop.search.problem import Question
from hp_tool.loop.search.table import CandidateTable
from hp_tool.loop.tuning.answer import effect_of_axes
from hp_tool.questions.schema import query_mapping
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.questions.training.ranking.misses import (
    NUM_NEAREST,
    nearest_recommendations,
    nearest_rows,
)
from hp_tool.questions.training.ranking.rank import CostedSpace

TOP = 10
"""Number of recommendations in a result; further measured configurations are added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSummary:
    """Cost and end of a search."""

    id: str
    state: SearchState
    profile_runs: int
    """Real runs that ended with a measurement, successful or not."""
    gpu_seconds: float
    """Devices x wall seconds of all runs; the last run may exceed the budget, because only its
    expected time is checked.
    """
    budget_gpu_seconds: float | None = None
    """Budget of the search; None without a limit."""
    grid_gpu_seconds: float | None
    """Predicted cost of running every feasible candidate; None without a successful run."""
    stopped_because: str
    expected_gain_fraction: float | None = None
    """Expected saving of another run, as a fraction of the best step time; None if not computed."""
    queue_s: float = 0.0
    """Seconds for which jobs waited for devices, which cost nothing."""
    reduced_runs: int = 0
    """Number of runs without all replicas, micro-batches or layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The ranked answer with measurements, its space, and the search's summary."""

    id: str | None
    """Id of the query."""
    status: Literal["ok", "error"] = "ok"
    """error: no run succeeded, and recommendations are only predicted."""
    error: dict[str, str | None] | None = None
    """{code, message, field}"""
    recommendations: tuple[Recommendation, ...] | tuple[ServingRecommendation, ...]
    space: SpaceSummary
    rejections: dict[str, int]
    search: SearchSummary
    nearest_misses: tuple[Recommendation, ...] | tuple[ServingRecommendation, ...] = ()
    """Infeasible configurations with the smallest gap in memory, days, cost or latency, if nothing
    is recommended.
    """
    answer: Answer | ServingAnswer | None = None
    """The first recommendation's figures; None if nothing is recommended."""
    axes: dict[str, dict[str, float]] = field(default_factory=dict)
    """Shortest step time (serving: request latency) by value of each axis: the cost of fixing that
    value.
    """
    pareto: tuple[Recommendation, ...] = ()
    """Pareto-optimal configurations in step time and memory of the fullest device, fastest first;
    measured if they ran.
    """
    query: dict[str, Any] | None = None
    """The query, so that rows can be exported; None in results of earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The runs and the end of a search."""

    search_id: str
    state: SearchState
    runs: Sequence[RunRecord]
    stopped_because: str
    seconds: float
    """Seconds for enumerating and costing the space."""
    expected_gain_fraction: float | None = None
    error: HpToolError | None = None

    def summary(self, *, settings: SearchSettings, grid_gpu_seconds: float | None) -> SearchSummary:
        """Return the cost of the search."""
        spent = spent_by(self.runs)
        return SearchSummary(
            id=self.search_id,
            state=self.state,
            profile_runs=spent.profile_runs,
            gpu_seconds=spent.gpu_seconds,
            budget_gpu_seconds=settings.budget_gpu_seconds,
            queue_s=spent.queue_s,
            grid_gpu_seconds=grid_gpu_seconds,
            stopped_because=self.stopped_because,
            expected_gain_fraction=self.expected_gain_fraction,
            reduced_runs=sum(
                run.measurement is not None and not run.fidelity.is_whole for run in self.runs
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """The candidates of a search after its runs, by row."""

    order: list[int]
    """Acceptable rows, best first."""
    near: list[int]
    """Other rows, smallest gap first."""
    front: list[int]
    """Pareto-optimal rows in two objectives, if this kind of search has them."""
    measured: Mapping[int, Measurement]
    """Measurements of successful runs."""
    seconds: FloatArray
    """(n,) posterior seconds of a step or a request."""
    legal: int
    feasible: int
    rejections: dict[str, int]
    grid_gpu_seconds: float | None
    """Devices x seconds of running every candidate; None if unknown."""
    describe: Callable[[Sequence[int]], tuple[Any, ...]]
    """Returns the recommendations of rows, in their order."""
    answer: Callable[[Any], Answer | ServingAnswer]
    """Returns the answer from the first row's recommendation."""


def make_result(
    ranked: Ranked, *, query: Query, table: CandidateTable, account: Account
) -> TuneResult:
    """Describe the first rows and all that ran; if nothing is acceptable, the nearest misses."""
    shown = [row for place, row in enumerate(ranked.order) if place < TOP or row in ranked.measured]
    recommendations = ranked.describe(shown)
    return TuneResult(
        id=query.id,
        query=query_mapping(query),
        status="error" if account.error else "ok",
        error=account.error.as_dict() if account.error else None,
        recommendations=recommendations,
        answer=ranked.answer(recommendations[0]) if shown else None,
        axes=effect_of_axes(table.axes, ranked.order, ranked.seconds),
        space=SpaceSummary(legal=ranked.legal, feasible=ranked.feasible, seconds=account.seconds),
        rejections=ranked.rejections,
        nearest_misses=() if shown else ranked.describe(ranked.near[:NUM_NEAREST]),
        pareto=ranked.describe(ranked.front),
        search=account.summary(settings=query.search, grid_gpu_seconds=ranked.grid_gpu_seconds),
    )


def nothing_feasible(
    *, query: Query, problem: TrainingProblem, space: CostedSpace, search_id: str, seconds: float
) -> TuneResult:
    """Return the result of a search without feasible candidates, with the nearest misses."""
    account = Account(
        search_id=search_id,
        state=SearchState.SUCCEEDED,
        runs=(),
        stopped_because="nothing_feasible",
        seconds=seconds,
    )
    return TuneResult(
        id=query.id,
        query=query_mapping(query),
        recommendations=(),
        space=SpaceSummary(legal=space.legal, feasible=0, seconds=seconds),
        rejections=space.rejections,
        nearest_misses=nearest_recommendations(
            space.candidates.take(nearest_rows(space, problem=problem)), problem=problem
        ),
        search=account.summary(settings=query.search, grid_gpu_seconds=None),
    )


def rank(
    *,
    median_s: Sequence[float] | np.ndarray,
    log_sd: Sequence[float] | np.ndarray,
    eligible: Sequence[int],
    measured_s: Mapping[int, float],
) -> list[int]:
    """Rank rows by their seconds: `measured_s` of whole runs, else `median_s`.

    A measured row is first unless a prediction is better by more than one standard deviation of
    their ratio: within the noise, a configuration that ran is preferable.
    """
    times = {row: measured_s.get(row, float(median_s[row])) for row in {*eligible, *measured_s}}
    order = sorted(times, key=lambda row: (times[row], row))
    best_measured = next((row for row in order if row in measured_s), None)
    if best_measured is not None and order[0] != best_measured:
        ahead = order[: order.index(best_measured)]
        if all(
            np.log(times[best_measured] / times[row])
            <= np.hypot(log_sd[row], log_sd[best_measured])
            for row in ahead
        ):
            order.remove(best_measured)
            order.insert(0, best_measured)
    return order


def outcome_of_rows(search: Question, runs: Sequence[RunRecord]) -> dict[int, Measurement]:
    """Return the measurement of each of the search's rows, from its relevant run."""
    counted = ((search.row(parallel), run.measurement) for parallel, run in standing(runs).items())
    return {
        row: measurement
        for row, measurement in counted
        if row is not None and measurement is not None
    }
