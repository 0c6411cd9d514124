"""Cost the space of serving configurations, and make recommendations from its best rows."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import BoolArray, FloatArray
from hp_tool.cost.legality import MEMORY
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.engine import ServingCosts
from hp_tool.cost.serving.legality import REASONS, explain
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain import bounds
from hp_tool.domain.query import Query
from hp_tool.domain.serving import InferenceEstimate, ServingConfig, ServingRecommendation
from hp_tool.questions.serving.estimates import (
    OVERLOADED,
    QUEUED,
    estimate_row,
    has_forbidden_queue,
    meets_targets,
    worst_miss,
)
from hp_tool.questions.serving.highest_load import cost_rows, sustainable_load
from hp_tool.questions.serving.intervals import ratio_log_sd
from hp_tool.questions.serving.problem import CostedRows, ServingProblem
from hp_tool.questions.training.ranking.rank import group_numbers
from hp_tool.space.serving import serving_space

TIE_MARGIN = 0.1
"""Relative advantage that a layout without measured runs of its kind needs to rank above one with
such runs. It is the mean error on measured kinds.
"""
NUM_NEAREST = 3
CHUNK = 12_288
"""Number of candidates costed at once: large enough for numpy, small enough for the CPU cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedSpace:
    """All legal candidates with their scores. Arrays have shape (n,)."""

    candidates: ServingCandidates
    score: FloatArray
    """Ranking criterion; lower is better."""
    acceptable: BoolArray
    """Whether the candidate fits in memory, sustains its load and meets the targets, without queued
    requests if queueing is forbidden.
    """
    tpot_s: FloatArray
    output_tokens_per_second_per_gpu: FloatArray
    loads: FloatArray | None
    """Load of each candidate; None if the query sets a single load."""
    rejections: dict[str, int]

    def best(self, count: int) -> NDArray[np.intp]:
        """Return the indices of the `count` best acceptable candidates, best first.

        The first one has measured runs of its kind, unless a candidate without such runs is better
        by more than TIE_MARGIN.
        """
        rows = np.flatnonzero(self.acceptable)
        ranked: NDArray[np.intp] = rows[np.argsort(self.score[rows], kind="stable")]
        measured = ranked[~is_unmeasured(self.candidates)[ranked]]
        if len(measured) and measured[0] != ranked[0]:
            best, known = self.score[ranked[0]], self.score[measured[0]]
            farther = best / (1.0 + TIE_MARGIN) if best < 0.0 else best * (1.0 + TIE_MARGIN)
            if known <= farther:
                ranked = np.concatenate([measured[:1], ranked[ranked != measured[0]]])
        return ranked[:count]

    def better_unmeasured(self, first: int) -> tuple[int, float] | None:
        """Return the acceptable candidate with the best score, and its advantage over the candidate
        `first`; None if `first` is the best.
        """
        rows = np.flatnonzero(self.acceptable)
        best = int(rows[np.argmin(self.score[rows])])
        if best == first or self.score[best] == self.score[first]:
            return None
        ratio = float(self.score[best] / self.score[first])
        return best, ratio - 1.0 if self.score[best] < 0.0 else 1.0 - ratio


def is_unmeasured(candidates: ServingCandidates) -> BoolArray:
    """Return a mask of layouts without measured runs of their kind: replicas with pipeline
    parallelism.
    """
    pipelines: BoolArray = candidates.pipeline_parallel_size > 1
    return pipelines


def cost_space(
    *, query: Query, problem: ServingProblem, concurrency: tuple[int, ...] = ()
) -> CostedSpace:
    """Enumerate the legal candidates and cost them in chunks, at each `concurrency` or under the
    load of the problem.
    """
    concurrency = concurrency or (problem.concurrency or 1,)
    candidates, rejections = serving_space(
        query=query.parallel, case=problem, concurrency=concurrency
    )
    n = len(candidates)
    score, tpot, throughput = (np.empty(n) for _ in range(3))
    loads = None if problem.unknown is None else np.empty(n)
    fits, sustained, met, waits = (np.empty(n, dtype=bool) for _ in range(4))
    for rows, costed, bearable in costed_chunks(candidates, problem=problem):
        costs = costed.costs
        fits[rows], sustained[rows], met[rows] = costs.fits, costs.sustained, meets_targets(costed)
        waits[rows] = has_forbidden_queue(costed)
        score[rows] = _candidate_scores(costs, query.objective, problem)
        tpot[rows], throughput[rows] = costs.tpot_s, costs.output_tokens_per_second_per_gpu
        if loads is not None and bearable is not None:
            loads[rows] = bearable
    reasons = {
        MEMORY: ~fits,
        OVERLOADED: fits & ~sustained,
        "target_missed": fits & sustained & ~met,
        QUEUED: fits & sustained & met & waits,
    }
    for code, turned_away in reasons.items():
        if count := int(np.count_nonzero(turned_away)):
            rejections[code] = count
    return CostedSpace(
        candidates=candidates,
        score=score,
        acceptable=fits & sustained & met & ~waits,
        tpot_s=tpot,
        output_tokens_per_second_per_gpu=throughput,
        loads=loads,
        rejections=rejections,
    )


def costed_chunks(
    candidates: ServingCandidates, *, problem: ServingProblem
) -> Iterator[tuple[slice, CostedRows, FloatArray | None]]:
    """Yield (slice of the candidates, costs, loads) in chunks. Loads are None if the problem has a
    single load.
    """
    for first in range(0, len(candidates), CHUNK):
        rows = slice(first, first + CHUNK)
        chunk = candidates.take(rows)
        bounds.check_work(done=len(chunk))
        yield rows, *cost_rows(problem, chunk)


def nearest_misses(
    space: CostedSpace, *, problem: ServingProblem
) -> tuple[ServingRecommendation, ...]:
    """Return the candidates that come nearest to meeting the targets, each with the highest load
    that it sustains.
    """
    if not len(space.candidates):
        return _common_rejection(problem) if "request_too_long" in space.rejections else ()
    rows = nearest_rows(space.candidates, problem=problem)
    bearable = [
        sustainable_load(problem, space.candidates.take(slice(row, row + 1)))
        for row in rows.tolist()
    ]
    misses = recommendations_of_rows(space, rows, problem=problem)
    return tuple(
        replace(row, estimate=replace(row.estimate, highest_load=load))
        for row, load in zip(misses, bearable, strict=True)
    )


def _common_rejection(problem: ServingProblem) -> tuple[ServingRecommendation, ...]:
    """Return one layout with the reason if all layouts are illegal because requests are too long
    for the model.
    """
    config = ServingConfig(data_parallel_size=problem.cluster.num_gpus)
    code = 1 << REASONS.index("request_too_long")
    reasons = explain(
        code,
        model=problem.model,
        num_gpus=problem.cluster.num_gpus,
        config=config,
        longest_request=problem.longest_request,
    )
    estimate = InferenceEstimate(feasible=False, reasons=reasons, parallel=config)
    return (
        ServingRecommendation(rank=1, parallel=config, set=dict(problem.chosen), estimate=estimate),
    )


def nearest_rows(candidates: ServingCandidates, *, problem: ServingProblem) -> NDArray[np.intp]:
    """Return the indices of the nearest unacceptable candidates.

    Candidates that only miss targets come first, by their largest ratio to a target. Then follow
    those that do not sustain the rate, by throughput, and those that do not fit, by memory.
    """
    kind, factor = np.empty(len(candidates)), np.empty(len(candidates))
    for rows, costed, _ in costed_chunks(candidates, problem=problem):
        costs = costed.costs
        kind[rows] = np.where(costs.fits, np.where(costs.sustained, 0.0, 1.0), 2.0)
        wanted = (
            costs.bytes.capacity - costs.bytes.kv_capacity,
            1.0 / costs.output_tokens_per_second_per_gpu,
        )
        factor[rows] = np.where(
            costs.fits, np.where(costs.sustained, worst_miss(costed), wanted[1]), wanted[0]
        )
    return np.lexsort((factor, kind))[:NUM_NEAREST]


def with_groups(
    rows: Sequence[ServingRecommendation], *, problem: ServingProblem, objective: str | None
) -> tuple[ServingRecommendation, ...]:
    """Return ranked rows with their groups. Rows are grouped by the figure that ranks them."""
    figure = objective if objective in ("ttft", "tpot") else "throughput"
    bound = NORMAL_QUANTILE * ratio_log_sd(problem, figure=figure)
    by_latency = problem.request_rate_per_second is not None or (
        problem.unknown is not None and problem.unknown.by_rate
    )
    name = (
        f"{figure}_s"
        if figure != "throughput"
        else "request_latency_s"
        if by_latency
        else "output_tokens_per_second_per_gpu"
    )

    def alike(row: ServingRecommendation, first: ServingRecommendation) -> bool:
        one, other = (getattr(each.estimate, name) for each in (row, first))
        return bool(
            one == other or (one > 0.0 and other > 0.0 and abs(math.log(one / other)) <= bound)
        )

    groups = group_numbers(rows, alike=alike)
    return tuple(replace(row, group=group) for row, group in zip(rows, groups, strict=True))


def _candidate_scores(
    costs: ServingCosts, objective: str | None, problem: ServingProblem
) -> FloatArray:
    """Return the score of each candidate; lower is better. The objectives min_gpus and cost compare
    throughputs on the same devices.
    """
    if objective == "ttft":
        return costs.ttft_s
    if objective == "tpot":
        return costs.tpot_s
    if problem.request_rate_per_second is not None:  # all have the same throughput
        return costs.request_latency_s
    return -costs.output_tokens_per_second_per_gpu


def recommendations_of_rows(
    space: CostedSpace, rows: NDArray[np.intp], *, problem: ServingProblem
) -> tuple[ServingRecommendation, ...]:
    """Return recommendations for the candidates `rows`, in their order, each under its own load."""
    ranking = []
    for place, row in enumerate(rows.tolist()):
        one = space.candidates.take(slice(row, row + 1))
        costed = (
            problem.cost_candidates(one)
            if space.loads is None
            else problem.cost_candidate_at(float(space.loads[row]), one)
        )
        ranking.append(recommendation_of(place + 1, one, estimate_row(costed, 0), problem))
    return tuple(ranking)


def best_recommendations(
    space: CostedSpace, *, top: int, problem: ServingProblem
) -> tuple[ServingRecommendation, ...]:
    """Return recommendations for the `top` best candidates.

    If a candidate without measured runs of its kind scores better than the first one, it is
    recorded in the provenance of the first one.
    """
    best = space.best(top)
    rows = recommendations_of_rows(space, best, problem=problem)
    passed = space.better_unmeasured(int(best[0])) if len(best) else None
    if passed is None:
        return rows
    first, better = rows[0].estimate, space.candidates.config(passed[0])
    unmeasured = {"parallel": better, "better_by_fraction": passed[1]}
    estimate = replace(first, provenance={**first.provenance, "passed_over": unmeasured})
    return (replace(rows[0], estimate=estimate), *rows[1:])


def recommendation_of(
    rank: int, candidate: ServingCandidates, estimate: InferenceEstimate, problem: ServingProblem
) -> ServingRecommendation:
    return ServingRecommendation(
        rank=rank, parallel=candidate.config(0), set=dict(problem.chosen), estimate=estimate
    )
