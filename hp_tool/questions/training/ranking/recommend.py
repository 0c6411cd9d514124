"""Rank the training configurations of a query, and compute nearest misses and Pareto fronts."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from hp_tool.domain import bounds
from hp_tool.domain.parallel import divisors
from hp_tool.domain.query import Query, RankBy
from hp_tool.domain.result import Against, Ranking, Recommendation, SpaceSummary
from hp_tool.errors import InputError
from hp_tool.questions.training.calibrated import (
    CalibratedPredictor,
    Calibrations,
    with_unused_reason,
)
from hp_tool.questions.training.problem import TrainingProblem, resolve_training
from hp_tool.questions.training.ranking.best import Best, search_best, search_without_graphs
from hp_tool.questions.training.ranking.choice import (
    choose_rows,
    chosen_recommendations,
    recommendations_of,
)
from hp_tool.questions.training.ranking.knobs import NUM_LAYOUTS, choose_free_knobs, has_free_knobs
from hp_tool.questions.training.ranking.misses import miss_distance, nearest_misses
from hp_tool.questions.training.ranking.rank import (
    CostedRows,
    costed_chunks,
    with_residuals,
)
from hp_tool.questions.training.usual_settings import least_step_s
from hp_tool.space import default_axes
from hp_tool.space.pareto import pareto_optimal

MAX_TOP = 1_000
DYNAMIC_CONTEXT_KEY = "dynamic_context_parallel"
"""Provenance key of the comparison with static context parallelism."""
MAX_TRAININGS = 16
"""Maximum number of combinations of the values listed under `training`. Each is a separate
ranking.
"""


def recommend(
    *, query: Query, top: int = 10, calibrations: Calibrations | None = None
) -> Ranking[Recommendation]:
    """Rank the layouts of a query by expected or predicted step time and return the best `top`.

    Rank 1 is the layout to try first (`training.ranking.choice`). If no configuration is
    acceptable, offload is tried unless the query sets it. If there still is none, the answer
    contains the nearest misses. With `calibrations`, the ranking and the memory fit follow from the
    calibrated estimates, and rows contain both estimates.

    With objective min_gpus, cluster.num_gpus is the maximum. The ranking is then that on the fewest
    devices with an acceptable configuration (`device_counts`).
    """
    if not 1 <= top <= MAX_TOP:
        raise InputError(f"top must be from 1 to {MAX_TOP}, got {top}", field="top")
    start = time.perf_counter()
    best = _best_of_listed_values(query, keep=top, calibrations=calibrations)
    problem, predictor = best.problems[0].plain, best.predictors[0]
    misses: tuple[Recommendation, ...] = ()
    if best.computed and not best.feasible:
        with bounds.repeat_search():
            misses = _nearest_misses(query, best, calibrations=calibrations)
    chosen = choose_rows(best, count=top)
    ranked = chosen_recommendations(chosen)
    if query.parallel.dynamic_context_parallel and ranked:
        ranked = (
            _compare_with_static(ranked[0], query=query, calibrations=calibrations),
            *ranked[1:],
        )
    if predictor is None and calibrations is not None:
        ranked, misses = (
            tuple(
                replace(
                    row,
                    estimate=with_unused_reason(
                        row.estimate, problem=problem, calibrations=calibrations
                    ),
                )
                for row in rows
            )
            for rows in (ranked, misses)
        )
    return Ranking(
        recommendations=ranked,
        space=SpaceSummary(
            legal=best.computed,
            feasible=best.feasible,
            pruned=best.pruned,
            seconds=time.perf_counter() - start,
        ),
        rejections=best.rejections,
        groups=chosen.sizes,
        nearest_misses=misses,
    )


def _compare_with_static(
    row: Recommendation, *, query: Query, calibrations: Calibrations | None
) -> Recommendation:
    """Return the row with a sentence that compares it with the best static layout.

    Dynamic groups exchange only by p2p, whereas static groups may use any exchange. Therefore, the
    gain over the best static layout can be smaller than the gain over the same layout.
    """
    static = replace(query, parallel=replace(query.parallel, dynamic_context_parallel=None))
    with bounds.repeat_search():
        rows = chosen_recommendations(
            choose_rows(_best_of_listed_values(static, keep=1, calibrations=calibrations), count=1)
        )
    if not rows or rows[0].expected_token_s is None or row.expected_token_s is None:
        return row
    best, gain = rows[0], rows[0].expected_token_s / row.expected_token_s
    faster = f"{gain:.2f}x faster" if gain >= 1.0 else f"{1.0 / gain:.2f}x slower"
    exchange = best.parallel.context_parallel_communication or "p2p"
    how = (
        f"exchanges by {exchange}"
        if best.parallel.context_parallel_size > 1
        else "has no context parallelism"
    )
    words = (
        f"dynamic context parallelism (exchange by p2p only) is {faster} than the best static "
        f"layout, which {how}"
    )
    estimates = {
        name: estimate
        for name in ("estimate", "calibrated_estimate")
        if (estimate := getattr(row, name)) is not None
    }
    return replace(
        row,
        **{
            name: replace(each, provenance={**each.provenance, DYNAMIC_CONTEXT_KEY: words})
            for name, each in estimates.items()
        },
    )


def _best_of_listed_values(query: Query, *, keep: int, calibrations: Calibrations | None) -> Best:
    """Return the best candidates over all combinations of the values listed under `training`.

    Offload is tried if no configuration is acceptable without it. Estimates contain the chosen
    values in `provenance.assumed`.
    """
    choices = query.training.choices if query.training is not None else {}
    count = math.prod(map(len, choices.values()))
    if count > MAX_TRAININGS:
        field = f"training.{next(iter(choices))}"
        raise InputError(
            f"the lists under training have {count} combinations; the maximum is {MAX_TRAININGS}",
            field=field,
        )
    queries, parts = [], []
    for values in itertools.product(*choices.values()):
        chosen: dict[str, Any] = dict(zip(choices, values, strict=True))
        one = (
            replace(query, training=replace(query.training, **chosen))
            if query.training is not None and chosen
            else query
        )
        queries.append(one)
        parts.append(_best_of_training(one, chosen, keep, calibrations))
    if not any(part.feasible for part in parts):
        parts = [
            best_offloaded(one, part, keep=keep, calibrations=calibrations)
            for one, part in zip(queries, parts, strict=True)
        ]
    fewest = min(
        (part.problems[0].cluster.num_gpus for part in parts if part.feasible), default=None
    )
    return Best.joined(
        [part for part in parts if fewest in (None, part.problems[0].cluster.num_gpus)]
    )


def _best_of_training(
    query: Query, chosen: Mapping[str, Any], keep: int, calibrations: Calibrations | None
) -> Best:
    """Return the best candidates of one training workload. `chosen` contains its values for keys
    with a list under `training`.
    """
    problem, predictor = _resolve(query, chosen, calibrations)
    keep = max(keep, NUM_LAYOUTS) if has_free_knobs(query, problem) else keep

    def ranked(problem: TrainingProblem, predictor: CalibratedPredictor | None) -> Best:
        if query.objective == "min_gpus":
            return fewest_devices(
                problem=problem, keep=keep, rank_by=query.rank_by, predictor=predictor
            )[1]
        return search_without_graphs(problem, keep=keep, rank_by=query.rank_by, predictor=predictor)

    return _with_free_knobs(
        query, ranked(problem, predictor), problem=problem, ranked=ranked, calibrations=calibrations
    ).with_usual_graphs()


def _resolve(
    query: Query, chosen: Mapping[str, Any], calibrations: Calibrations | None
) -> tuple[TrainingProblem, CalibratedPredictor | None]:
    """Return the query's problem with the chosen values of `training`, and its calibrated
    predictor.

    Without a calibration, the predictor is None, and rows have the usual settings.
    """
    problem = resolve_training(query)
    values = {f"training.{name}": value for name, value in chosen.items()}
    problem = replace(problem, assumed={**problem.assumed, **values}).choosing(values)
    predictor = None if calibrations is None else calibrations(problem)
    return replace(problem, asked=query if predictor is None else None), predictor


def _chosen_values(query: Query, best: Best) -> dict[str, Any]:
    """Return the values of the best candidate, by key: those chosen from lists under `training`,
    and the offload.
    """
    assert query.training is not None
    chosen = best.problems[0].chosen
    names = (*query.training.choices, "offload")
    return {name: chosen[f"training.{name}"] for name in names if f"training.{name}" in chosen}


def _with_training(query: Query, values: Mapping[str, Any]) -> Query:
    assert query.training is not None
    return replace(query, training=replace(query.training, **values))


def _nearest_misses(
    query: Query, best: Best, *, calibrations: Calibrations | None
) -> tuple[Recommendation, ...]:
    """Return the nearest misses, with or without the free settings (`ranking.knobs`)."""
    problem, predictor = best.problems[0].plain, best.predictors[0]
    nearest, distance = nearest_misses(problem, predictor), miss_distance(problem)
    for other in choose_free_knobs(_with_training(query, _chosen_values(query, best)), best):
        misses = nearest_misses(other, None if calibrations is None else calibrations(other))
        if misses and (not nearest or distance(misses[0]) < distance(nearest[0])):
            nearest = misses
    return nearest


def _with_free_knobs(
    query: Query,
    best: Best,
    *,
    problem: TrainingProblem,
    ranked: Callable[[TrainingProblem, CalibratedPredictor | None], Best],
    calibrations: Calibrations | None,
) -> Best:
    """Return the best candidates with the free settings that shorten the step; `best` if none
    does.
    """
    rankings = [best]
    for faster in choose_free_knobs(query, best):
        faster = faster.with_num_gpus(problem.cluster.num_gpus)
        with bounds.repeat_search():
            rankings.append(ranked(faster, None if calibrations is None else calibrations(faster)))
        if rankings[-1].feasible:
            break
    return min((ranking for ranking in rankings if ranking.feasible), key=_sort_key, default=best)


def _sort_key(best: Best) -> tuple[int, float]:
    """Return the sort key of a ranking: number of devices, then the step time of the best
    candidate.
    """
    return best.problems[0].cluster.num_gpus, float(best.value_s[0])


def best_offloaded(
    query: Query, best: Best, *, keep: int, calibrations: Calibrations | None
) -> Best:
    """Return the best candidates with offloaded optimizer states or activations, whichever is
    faster.

    Return `best` if the query sets offload or no candidate is acceptable with it.
    """
    if query.training is None or query.training.offload is not None or not best.computed:
        return best
    offloads: list[Best] = []
    for offload in ("optimizer", "activations"):
        offloaded = replace(query, training=replace(query.training, offload=offload))
        try:
            problem = resolve_training(offloaded)
        except InputError:  # not supported by the framework or the device
            continue
        before = best.problems[0].plain
        problem = replace(
            problem.with_num_gpus(before.cluster.num_gpus),
            asked=None if before.asked is None else offloaded,
            assumed={**before.assumed, **problem.assumed, "training.offload": offload},
            chosen={**before.chosen, "training.offload": offload},
        )
        predictor = None if calibrations is None else calibrations(problem)
        with bounds.repeat_search():
            offloads.append(
                search_best(problem, keep=keep, rank_by=query.rank_by, predictor=predictor)
            )
    return min(
        (one for one in offloads if one.feasible),
        key=lambda one: float(one.value_s[0]),
        default=best,
    )


def pareto_front(
    *, query: Query, against: Against, calibrations: Calibrations | None = None
) -> tuple[Recommendation, ...]:
    """Return the Pareto-optimal configurations in step time and a second objective.

    memory: step time and bytes on the fullest device, fastest first. gpus: expected step time,
    which includes the risk of running out of memory, and number of devices up to cluster.num_gpus,
    fewest devices first. `provenance.num_gpus` of each estimate is the number of devices.
    """
    best = _best_of_listed_values(
        replace(query, objective="throughput"), keep=1, calibrations=calibrations
    )
    if against == "memory":
        return recommendations_of(_memory_front(best))
    chosen = _chosen_values(query, best)
    query = _with_training(query, chosen)
    problem, predictor = _resolve(query, chosen, calibrations)
    keep = NUM_LAYOUTS if has_free_knobs(query, problem) else 1

    def ranked(problem: TrainingProblem, predictor: CalibratedPredictor | None) -> Best:
        return search_best(problem, keep=keep, rank_by="expected", predictor=predictor)

    rows: list[Recommendation] = []
    best_s = float("inf")
    for smaller in _possible_problems(problem):
        best = _with_free_knobs(
            query,
            ranked(smaller, predictor),
            problem=smaller,
            ranked=ranked,
            calibrations=calibrations,
        )
        if best.feasible and best.value_s[0] < best_s:
            best_s = float(best.value_s[0])
            rows += recommendations_of(best.take(np.arange(1)))
    return tuple(replace(row, rank=place) for place, row in enumerate(rows, start=1))


def device_counts(problem: TrainingProblem) -> tuple[int, ...]:
    """Return the numbers of devices, up to the cluster's, that equal t p c d for a layout,
    ascending.

    d divides the global batch size; t, p and c are the values that a ranking on the whole cluster
    tries. Each number is a whole number of nodes, or an equal part of one node.
    """
    cluster, batch = problem.cluster, problem.workload.global_batch_size
    axes = default_axes(query=problem.parallel, case=problem)
    ranks = {
        t * p * c
        for t in axes.tensor_parallel_size
        for p in axes.pipeline_parallel_size
        for c in axes.context_parallel_size
    }
    max_count = cluster.num_gpus
    counts_that_divide: set[int] = set()
    for d in divisors(batch, limit=max_count):
        bounds.check_work()
        counts = (model_ranks * d for model_ranks in ranks if model_ranks * d <= max_count)
        counts_that_divide |= {n for n in counts if cluster.divides_into(n)}
    return tuple(sorted(counts_that_divide | {cluster.num_gpus}))


def fewest_devices(
    *,
    problem: TrainingProblem,
    keep: int,
    rank_by: RankBy = "expected",
    predictor: CalibratedPredictor | None = None,
) -> tuple[TrainingProblem, Best]:
    """Return the problem on the smallest of `device_counts` that has an acceptable configuration,
    and its best candidates. If none has one, return the problem on the whole cluster.
    """
    problem = problem.choosing({"cluster.num_gpus": problem.cluster.num_gpus})
    for smaller in _possible_problems(problem):
        best = search_best(smaller, keep=keep, rank_by=rank_by, predictor=predictor)
        if best.feasible or smaller.cluster.num_gpus == problem.cluster.num_gpus:
            return smaller, best
    return problem, search_best(problem, keep=keep, rank_by=rank_by, predictor=predictor)


def _memory_front(best: Best) -> Best:
    """Return the acceptable candidates that are Pareto-optimal in step time and memory, fastest
    first.

    They are selected from all layouts with the usual axis values and from the rows of `best`.
    """
    predictor = best.predictors[0]
    others = best.take(np.flatnonzero(~np.isin(best.variant, best.bases)))
    parts, variants = [others.rows], [others.variant]
    for number in best.bases:
        problem = best.problems[number]
        rows = best.rows.take(np.flatnonzero(best.variant == number))
        for chunk, _ in costed_chunks(problem=problem, predictor=predictor):
            rows = _acceptable_front(CostedRows.concatenate([rows, chunk]))
        if predictor is not None and len(rows.candidates):
            rows = _acceptable_front(
                with_residuals(rows.candidates, problem=problem, predictor=predictor)[0]
            )
        parts.append(rows)
        variants.append(np.full(len(rows.candidates), number, dtype=others.variant.dtype))
    joined, variant = CostedRows.concatenate(parts), np.concatenate(variants)
    best = replace(
        best, rows=joined, variant=variant, layout=np.zeros_like(variant), value_s=joined.step_s
    )
    return best.take(pareto_optimal(joined.step_s, -joined.memory_total_bytes))


def _acceptable_front(rows: CostedRows) -> CostedRows:
    acceptable = rows.take(np.flatnonzero(rows.acceptable))
    return acceptable.take(pareto_optimal(acceptable.step_s, -acceptable.memory_total_bytes))


def _possible_problems(problem: TrainingProblem) -> Iterator[TrainingProblem]:
    """Yield the problem on each of `device_counts` for which a step at twice the devices' peak
    could meet the deadline and budget.
    """
    for count in device_counts(problem):
        smaller = problem if count == problem.cluster.num_gpus else problem.with_num_gpus(count)
        if least_step_s(smaller) <= smaller.longest_step_s:
            yield smaller
