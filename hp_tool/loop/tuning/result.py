"""Result of a search, and its account of runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hp_tool.domain.answer import Answer, ServingAnswer
from hp_tool.domain.query import Query, SearchSettings
from hp_tool.domain.records import RunRecord
from hp_tool.domain.result import Recommendation, SpaceSummary
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.domain.states import SearchState
from hp_tool.errors import HpToolError
from hp_tool.loop.search.account import spent_by
from hp_tool.questions.schema import query_mapping
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.questions.training.ranking.misses import nearest_recommendations, nearest_rows
from hp_tool.questions.training.ranking.rank import CostedSpace

TOP = 10
"""Number of recommendations in a result, not counting additional measured configurations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSummary:
    """Cost of a search and the reason for its end."""

    id: str
    state: SearchState
    profile_runs: int
    """Number of actual runs that ended with a measurement, whether or not they succeeded."""
    gpu_seconds: float
    """Devices x wall seconds of all runs. The last run may exceed the budget, because only its
    expected time is checked.
    """
    budget_gpu_seconds: float | None = None
    """Budget of the search; None if unlimited."""
    grid_gpu_seconds: float | None
    """Predicted cost of running every feasible candidate, in GPU-seconds; None without a successful
    run.
    """
    stopped_because: str
    expected_gain_fraction: float | None = None
    """Expected saving from the best four further runs, as a fraction of the best step time; None if
    not computed.
    """
    queue_s: float = 0.0
    """Seconds that jobs waited for devices. Waiting is free."""
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
    """Infeasible configurations that exceed memory, days, cost or latency by the least, if nothing
    is recommended.
    """
    answer: Answer | ServingAnswer | None = None
    """Figures of the first recommendation; None if nothing is recommended."""
    axes: dict[str, dict[str, float]] = field(default_factory=dict)
    """Shortest step time (serving: request latency) for each value of each axis. It shows the cost
    of fixing an axis to a value.
    """
    pareto: tuple[Recommendation, ...] = ()
    """Configurations on the Pareto front of step time and peak memory, fastest first. They have
    measured values if they ran.
    """
    query: dict[str, Any]
    """The query, so that rows can be exported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The runs of a search, and how it ended."""

    search_id: str
    state: SearchState
    runs: Sequence[RunRecord]
    stopped_because: str
    seconds: float
    """Seconds spent enumerating and costing the search space."""
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
            space.take(nearest_rows(space, problem=problem)), problem=problem
        ),
        search=account.summary(settings=query.search, grid_gpu_seconds=None),
    )
