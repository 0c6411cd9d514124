"""Answer single queries and lines of batches, for the command line, HTTP, pages and Python."""

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from hp_tool.cost.candidates import Candidates
from hp_tool.domain import bounds
from hp_tool.domain.prices import NotRanked
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Front, Recommendation, SpaceSummary
from hp_tool.domain.sensitivity import Sensitivity
from hp_tool.domain.serving import InferenceEstimate, PoolRecommendation, ServingRecommendation
from hp_tool.errors import HpToolError
from hp_tool.questions import schema
from hp_tool.questions.problem import problem_of
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.questions.training.evaluate import CostedRow, ResolvedConfiguration

log = logging.getLogger(__name__)

Task = Literal["estimate", "recommend"]
T = TypeVar("T")
Line = bytes | HpToolError
"""A line of a batch, or the error raised while reading it."""
Read = Callable[[bytes], Query]

MIN_BATCH_CONFIGURATIONS = 8
"""Minimum number of configurations of one problem that are computed together as arrays. Fewer
configurations are computed faster one by one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateAnswer:
    """The estimate of one configuration.

    A configuration that does not fit also has status `ok`, with `feasible: false` and the reasons.
    """

    id: str | None
    """Id of the query."""
    status: Literal["ok"] = "ok"
    estimate: Estimate | InferenceEstimate
    query: dict[str, Any] | None = None
    """The query without default values, from which the answer can be exported; None in batches."""
    calibrated_estimate: Estimate | None = None
    """Estimate corrected by measurements on this cluster; None without measurements."""

    @property
    def preferred_estimate(self) -> Estimate | InferenceEstimate:
        """The calibrated estimate if there is one, else the estimate."""
        return self.calibrated_estimate or self.estimate

    def __repr__(self) -> str:
        return f"<EstimateAnswer: {self.preferred_estimate!r}>"

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks show."""
        from hp_tool.wording.html import estimate_html

        return estimate_html(self.estimate, self.calibrated_estimate)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendAnswer:
    """The best configurations, best first."""

    id: str | None
    """Id of the query."""
    status: Literal["ok"] = "ok"
    recommendations: tuple[Recommendation, ...] | tuple[ServingRecommendation, ...]
    space: SpaceSummary
    rejections: dict[str, int]
    """Number of rejected candidates by reason."""
    groups: tuple[int, ...] = ()
    """Training: number of layouts in each group, up to the last group shown."""
    nearest_misses: tuple[Recommendation, ...] | tuple[ServingRecommendation, ...] = ()
    """Nearest misses if no configuration is acceptable. Their estimates contain the reasons.

    They have the smallest excess of memory, days or cost, or the smallest miss of a target. For a
    list of request rates, these are the nearest misses for each rate that no configuration
    sustains.
    """
    pareto: tuple[Recommendation, ...] | None = None
    """Pareto-optimal configurations for two objectives; None unless requested."""
    throughput_front: tuple[ServingRecommendation, ...] | None = None
    """Pareto-optimal configurations in tokens per second per user and per GPU.

    Set for inference queries with pareto "throughput" or an open concurrency.
    """
    sensitivity: Sensitivity | None = None
    """How the step time of the first row depends on the number of devices, the axes and the
    hardware; None unless requested.
    """
    disaggregated: tuple[PoolRecommendation, ...] | None = None
    """Separate pools for prefill and decoding; None unless the query sets
    inference.disaggregated.
    """
    not_ranked: tuple[NotRanked, ...] = ()
    """Machines that have no row, and the reasons, for a query that compares several machines."""
    query: dict[str, Any] | None = None
    """The query, as in EstimateAnswer."""

    def __repr__(self) -> str:
        best = f"; best: {self.recommendations[0]!r}" if self.recommendations else ""
        return (
            f"<RecommendAnswer: {len(self.recommendations)} of {self.space.feasible:,} "
            f"acceptable configurations{best}>"
        )

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks show."""
        from hp_tool.wording.html import recommendations_html

        return recommendations_html(
            self.recommendations, space=self.space, misses=self.nearest_misses
        )


def answer_estimate(
    query: Query,
    *,
    configuration: ResolvedConfiguration | None = None,
    with_fixes: bool = True,
    with_query: bool = True,
    calibrations: Calibrations | None = None,
) -> EstimateAnswer:
    """Return the answer to a query for one configuration.

    Args:
        configuration: Configuration of the training query, if it was already resolved or costed.
        with_fixes: Add fixes for an infeasible configuration, and the setting that would narrow the
            interval most.
        calibrations: Calibrations of clusters; None: use only the cost model.

    Raises:
        HpToolError: The query cannot be answered.
    """
    problem = problem_of(query, configuration=configuration)
    estimate, calibrated = problem.estimate(with_fixes=with_fixes, calibrations=calibrations)
    mapping = schema.query_mapping(query) if with_query else None
    return EstimateAnswer(
        id=query.id, estimate=estimate, calibrated_estimate=calibrated, query=mapping
    )


def answer_recommend(
    query: Query,
    *,
    top: int,
    with_query: bool = True,
    calibrations: Calibrations | None = None,
    pareto: Front | None = None,
    sensitivity: bool = False,
) -> RecommendAnswer:
    """Return the answer to a query for a ranking of configurations.

    Args:
        pareto: Add the Pareto front of step time and memory ("memory") or number of devices
            ("gpus"); for serving, of tokens per second per user and per GPU ("throughput").
        sensitivity: Add the sensitivity of the first row of a training query.

    Raises:
        HpToolError: The query cannot be answered.
    """
    ranking, beside = problem_of(query).answer(
        top=top, pareto=pareto, sensitivity=sensitivity, calibrations=calibrations
    )
    rows = ranking.recommendations
    if query.training is not None and query.training.total_tokens:
        from hp_tool.questions.machines.answers import (
            with_training_totals,  # Imported here because most queries do not need it.
        )

        rows = tuple(
            with_training_totals(row, query=query) if isinstance(row, Recommendation) else row
            for row in rows
        )
    return RecommendAnswer(
        id=query.id,
        recommendations=rows,
        space=ranking.space,
        rejections=ranking.rejections,
        groups=ranking.groups,
        nearest_misses=ranking.nearest_misses,
        pareto=beside.pareto,
        throughput_front=beside.throughput_front,
        sensitivity=beside.sensitivity,
        disaggregated=beside.disaggregated,
        not_ranked=beside.not_ranked,
        query=schema.query_mapping(query) if with_query else None,
    )


def answer_lines(
    lines: Sequence[Line],
    *,
    task: Task,
    top: int,
    read: Read = schema.parse_query,
    calibrations: Calibrations | None = None,
) -> list[str]:
    """Return an answer for each line. It is the same as if the line were answered alone.

    Estimates of one problem are computed together, which is several times faster. Therefore pass a
    few dozen lines at a time. Estimates have no fixes and no `narrowest`, which would take longer
    than the rest of a batch.
    """

    def begin(line: Line) -> ResolvedConfiguration | str:
        if isinstance(line, HpToolError):
            raise line
        bounds.reset_counts()
        query = read(line)
        if task == "recommend":
            return schema.to_json(
                answer_recommend(query, top=top, with_query=False, calibrations=calibrations)
            )
        return problem_of(query).configuration or estimate(query)

    def estimate(query: Query, configuration: ResolvedConfiguration | None = None) -> str:
        answer = answer_estimate(
            query,
            configuration=configuration,
            with_fixes=False,
            with_query=False,
            calibrations=calibrations,
        )
        return schema.to_json(answer)

    begun = [_answer_or_error(line, partial(begin, line)) for line in lines]
    costed = iter(
        cost_together([each for each in begun if isinstance(each, ResolvedConfiguration)])
    )
    return [
        each
        if isinstance(each, str)
        else _answer_or_error(line, partial(estimate, each.query, next(costed)))
        for line, each in zip(lines, begun, strict=True)
    ]


def cost_together(configurations: Sequence[ResolvedConfiguration]) -> list[ResolvedConfiguration]:
    """Return the configurations, with their costs if they were computed together as arrays.

    Costs are not computed for illegal configurations, for fewer than MIN_BATCH_CONFIGURATIONS
    configurations of one problem, or if the computation raises an error.
    """
    costed = list(configurations)
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for place, configuration in enumerate(configurations):
        if configuration.reasons:
            continue
        try:
            groups[configuration.problem_key()].append(place)
        except TypeError:  # A mapping in the query describes the model or the device.
            continue
    for places in groups.values():
        if len(places) < MIN_BATCH_CONFIGURATIONS:
            continue
        candidates = Candidates.from_configs(configurations[place].config for place in places)
        try:
            costs = configurations[places[0]].problem.costs(candidates)
        except HpToolError:  # Costing them one by one finds the one that fails.
            continue
        except Exception:
            log.exception("candidates could not be costed together")
            continue
        for index, place in enumerate(places):
            costed[place] = replace(
                costed[place], row=CostedRow(index=index, candidates=candidates, costs=costs)
            )
    return costed


def _answer_or_error(line: Line, answer: Callable[[], T]) -> T | str:
    """Return the result of `answer`. If it raises an error, return the error as a JSON answer."""
    try:
        return answer()
    except HpToolError as error:
        return error_line(line, error)
    except Exception:  # A bug triggered by one query must not lose the answers to the others.
        log.exception("unhandled error on a batch line")
        return error_line(line, HpToolError("an internal error occurred; it has been logged"))


def error_line(line: Line, error: HpToolError) -> str:
    """Return the JSON answer for a line that failed. It contains the line's id if the id can be
    parsed.
    """
    try:
        data = json.loads(line) if isinstance(line, bytes) else None
        identity = data.get("id") if isinstance(data, dict) else None
    except (ValueError, RecursionError):
        identity = None
    return json.dumps(
        {
            "id": identity if isinstance(identity, str) else None,
            "status": "error",
            "error": error.as_dict(),
        }
    )
