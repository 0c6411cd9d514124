"""Answers to a query, or to lines of them: the same for a command, a request body, a page and
Python.
"""

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
"""A line, or in its place why there is none."""
Read = Callable[[bytes], Query]

MIN_ARRAY = 8
"""Configurations of one problem from which on an array costs less than as many plain numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateAnswer:
    """What one configuration needs. One that does not fit is `ok` too: `feasible: false` with its
    reasons.
    """

    id: str | None
    """The query's."""
    status: Literal["ok"] = "ok"
    estimate: Estimate | InferenceEstimate
    query: dict[str, Any] | None = None
    """The query without its defaults: with it the answer can be exported. None in batches."""
    calibrated_estimate: Estimate | None = None
    """The estimate corrected by measurements on this cluster; None if there are none."""

    @property
    def known(self) -> Estimate | InferenceEstimate:
        """What is known of it: the calibrated estimate, if there is one."""
        return self.calibrated_estimate or self.estimate

    def __repr__(self) -> str:
        return f"<EstimateAnswer: {self.known!r}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from hp_tool.wording.html import estimate_html

        return estimate_html(self.estimate, self.calibrated_estimate)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendAnswer:
    """The best configurations by the cost model, best first."""

    id: str | None
    """The query's."""
    status: Literal["ok"] = "ok"
    recommendations: tuple[Recommendation, ...] | tuple[ServingRecommendation, ...]
    space: SpaceSummary
    rejections: dict[str, int]
    """How many candidates each reason ruled out."""
    groups: tuple[int, ...] = ()
    """Trainings: how many layouts each group has, up to the last that is shown."""
    nearest_misses: tuple[Recommendation, ...] | tuple[ServingRecommendation, ...] = ()
    """If nothing is acceptable: what lacks least of memory, days or money, or of targets, each
    estimate with its reasons; and of each rate of a list that nothing bears.
    """
    pareto: tuple[Recommendation, ...] | None = None
    """Configurations that no other beats in two objectives at once; None unless asked for."""
    throughput_front: tuple[ServingRecommendation, ...] | None = None
    """Inference, asked for as pareto "throughput" or under an unknown concurrency: what no other
    beats in tokens per second for a user and for a GPU.
    """
    sensitivity: Sensitivity | None = None
    """What the first row depends on: numbers of devices, axes, hardware; None unless asked for."""
    disaggregated: tuple[PoolRecommendation, ...] | None = None
    """Separate pools for prefill and decoding; None unless inference.disaggregated asks for
    them.
    """
    not_ranked: tuple[NotRanked, ...] = ()
    """Of several machines, those without a row, and why."""
    query: dict[str, Any] | None = None
    """As in EstimateAnswer."""

    def __repr__(self) -> str:
        best = f"; best: {self.recommendations[0]!r}" if self.recommendations else ""
        return (
            f"<RecommendAnswer: {len(self.recommendations)} of {self.space.feasible:,} "
            f"acceptable configurations{best}>"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from hp_tool.wording.html import recommendations_html

        return recommendations_html(
            self.recommendations, space=self.space, misses=self.nearest_misses
        )


def estimate_answer(
    query: Query,
    *,
    configuration: ResolvedConfiguration | None = None,
    with_fixes: bool = True,
    with_query: bool = True,
    calibrations: Calibrations | None = None,
) -> EstimateAnswer:
    """The answer to a query of one configuration. Raises HpToolError.

    `configuration`: the training query's, if it was resolved or costed earlier. `with_fixes`: also
    the fixes of an infeasible one, and what would narrow the interval of its step time.
    `calibrations`: what is known of clusters; None leaves the cost model alone.
    """
    problem = problem_of(query, configuration=configuration)
    estimate, calibrated = problem.estimate(with_fixes=with_fixes, calibrations=calibrations)
    mapping = schema.query_mapping(query) if with_query else None
    return EstimateAnswer(
        id=query.id, estimate=estimate, calibrated_estimate=calibrated, query=mapping
    )


def recommend_answer(
    query: Query,
    *,
    top: int,
    with_query: bool = True,
    calibrations: Calibrations | None = None,
    pareto: Front | None = None,
    sensitivity: bool = False,
) -> RecommendAnswer:
    """The answer to a query of many configurations. Raises HpToolError.

    `pareto`: also the Pareto front of step time against memory or gpus; for serving that of tokens
    per second for a user and for a GPU ("throughput"). `sensitivity`: also what the answer of a
    training depends on.
    """
    ranking, beside = problem_of(query).answer(
        top=top, pareto=pareto, sensitivity=sensitivity, calibrations=calibrations
    )
    rows = ranking.recommendations
    if query.training is not None and query.training.total_tokens:
        from hp_tool.questions.machines.answers import (
            with_the_whole,  # which most questions do not need
        )

        rows = tuple(
            with_the_whole(row, query=query) if isinstance(row, Recommendation) else row
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
    """An answer for each line, the same as if it were the only one. Estimates that differ in their
    configuration alone are costed together, which is several times faster: pass a few dozen lines
    at a time.

    Estimates come without fixes and `narrowest`, which would cost more than the rest of a batch
    together.
    """

    def begin(line: Line) -> ResolvedConfiguration | str:
        if isinstance(line, HpToolError):
            raise line
        bounds.begin_again()
        query = read(line)
        if task == "recommend":
            return schema.to_json(
                recommend_answer(query, top=top, with_query=False, calibrations=calibrations)
            )
        return problem_of(query).configuration or estimate(query)

    def estimate(query: Query, configuration: ResolvedConfiguration | None = None) -> str:
        answer = estimate_answer(
            query,
            configuration=configuration,
            with_fixes=False,
            with_query=False,
            calibrations=calibrations,
        )
        return schema.to_json(answer)

    begun = [_or_its_error(line, partial(begin, line)) for line in lines]
    costed = iter(
        cost_together([each for each in begun if isinstance(each, ResolvedConfiguration)])
    )
    return [
        each
        if isinstance(each, str)
        else _or_its_error(line, partial(estimate, each.query, next(costed)))
        for line, each in zip(lines, begun, strict=True)
    ]


def cost_together(configurations: Sequence[ResolvedConfiguration]) -> list[ResolvedConfiguration]:
    """The configurations, with their costs where they were computed as one array. Those stay
    without that are illegal, that are too few of one problem, or among which one breaks the costs
    of all.
    """
    costed = list(configurations)
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for place, configuration in enumerate(configurations):
        if configuration.reasons:
            continue
        try:
            groups[configuration.problem_key()].append(place)
        except TypeError:  # a model or a device described in the query, as a mapping
            continue
    for places in groups.values():
        if len(places) < MIN_ARRAY:
            continue
        candidates = Candidates.from_configs(configurations[place].config for place in places)
        try:
            costs = configurations[places[0]].problem.costs(candidates)
        except HpToolError:  # costing each alone shows whose it is
            continue
        except Exception:
            log.exception("candidates could not be costed together")
            continue
        for index, place in enumerate(places):
            costed[place] = replace(
                costed[place], row=CostedRow(index=index, candidates=candidates, costs=costs)
            )
    return costed


def _or_its_error(line: Line, answer: Callable[[], T]) -> T | str:
    """What `answer` returns, or the error it raises as the line's answer."""
    try:
        return answer()
    except HpToolError as error:
        return error_line(line, error)
    except Exception:  # a bug that one query finds must not take the answers of all others with it
        log.exception("unhandled error on a batch line")
        return error_line(line, HpToolError("an internal error occurred; it has been logged"))


def error_line(line: Line, error: HpToolError) -> str:
    """The answer of a line that cannot be answered, with the id it came with if that can be
    read.
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
