"""The result of a search: its candidates ranked by one estimate each, of calibration and own
runs.
"""

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
from hp_tool.questions.training.ranking.misses import NEAREST, nearest, nearest_recommendations
from hp_tool.questions.training.ranking.rank import CostedSpace

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
    """Devices x wall seconds of all runs. The last one may pass the budget: only its expected time
    is held against that.
    """
    budget_gpu_seconds: float | None = None
    """What the search might spend; None without a limit."""
    grid_gpu_seconds: float | None
    """What running every feasible candidate would have cost, by the calibrated prediction; None
    where nothing succeeded.
    """
    stopped_because: str
    expected_gain_fraction: float | None = None
    """Saving expected of another run, as a share of the best step time; None where it was not
    computed.
    """
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
    """Where nothing is recommended: the infeasible configurations that lack least of memory, days,
    money or latency.
    """
    answer: Answer | ServingAnswer | None = None
    """The first recommendation in figures; None where nothing is recommended."""
    axes: dict[str, dict[str, float]] = field(default_factory=dict)
    """Step time (of serving: request latency) known of the best configuration with each value of an
    axis: what holding on to that value costs.
    """
    pareto: tuple[Recommendation, ...] = ()
    """What no other beats in both step time and memory of the fullest device, measured where it
    ran; fastest first.
    """
    query: dict[str, Any] | None = None
    """What was asked, so that a row can be exported; None in results of earlier versions."""


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

    def summary(self, *, settings: SearchSettings, grid_gpu_seconds: float | None) -> SearchSummary:
        """What the search cost."""
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
    """The candidates of a search as its runs leave them, by row, and how they are shown."""

    order: list[int]
    """Acceptable ones, the one to try first."""
    near: list[int]
    """Others, those that lack least first."""
    front: list[int]
    """What no other beats in two objectives, where this kind of search shows it."""
    measured: Mapping[int, Measurement]
    """Of runs that worked."""
    seconds: FloatArray
    """(n,) known of a step or a request."""
    legal: int
    feasible: int
    rejections: dict[str, int]
    grid_gpu_seconds: float | None
    """Devices x seconds that running every candidate would have cost; None where nothing tells
    it.
    """
    describe: Callable[[Sequence[int]], tuple[Any, ...]]
    """The recommendations of some rows, ranked in their order."""
    answer: Callable[[Any], Answer | ServingAnswer]
    """The first row in figures, from its recommendation."""


def make_result(
    ranked: Ranked, *, query: Query, table: CandidateTable, account: Account
) -> TuneResult:
    """Describe the first rows, and all that ran; where nothing is acceptable, what comes
    nearest.
    """
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
        nearest_misses=() if shown else ranked.describe(ranked.near[:NEAREST]),
        pareto=ranked.describe(ranked.front),
        search=account.summary(settings=query.search, grid_gpu_seconds=ranked.grid_gpu_seconds),
    )


def nothing_feasible(
    *, query: Query, problem: TrainingProblem, space: CostedSpace, search_id: str, seconds: float
) -> TuneResult:
    """The result of a search that had nothing to run, with what comes nearest."""
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
            space.candidates.take(nearest(space, problem=problem)), problem=problem
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
    """Rows best first by their seconds: `measured_s` of what ran as a whole, else `median_s`.

    The first place goes to a measured row unless a prediction beats it by more than one standard
    deviation of their ratio: within the noise, what was seen to run is the better advice.
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
    """What was measured of each of the search's rows, by the run that counts."""
    counted = ((search.row(parallel), run.measurement) for parallel, run in standing(runs).items())
    return {
        row: measurement
        for row, measurement in counted
        if row is not None and measurement is not None
    }
