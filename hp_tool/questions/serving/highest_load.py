"""Find the highest load at which a configuration fits in memory, sustains the load and meets the
targets.

Latencies never decrease as the load grows (tests/serving/test_highest_load.py), so bisection gives
the same result as trying every load.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from hp_tool.cost.arrays import BoolArray, FloatArray, IntArray
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.engine import most_running, serving_costs
from hp_tool.cost.serving.load import without_waves
from hp_tool.domain.targets import Targets
from hp_tool.questions.serving.estimates import has_forbidden_queue, meets_targets
from hp_tool.questions.serving.problem import QUEUE_LATENCIES, CostedRows, Loads, ServingProblem

NUM_RATES = 1_000
"""Number of request rates in a range, spaced geometrically. It is the resolution of an answer."""
MIN_RATE_FRACTION = 1e-3
"""Lowest request rate of an unbounded search, as a fraction of the throughput of full batches."""
MAX_LOADS = 1 << 31


def cost_rows(
    problem: ServingProblem, candidates: ServingCandidates
) -> tuple[CostedRows, FloatArray | None]:
    """Return the costs of candidates, and their loads. The load is that of the problem (None), or
    the highest load of each candidate if the load is open.
    """
    loads = highest_loads(problem, candidates)
    return (
        (problem.cost_candidates(candidates), None)
        if loads is None
        else (_cost_at_loads(problem, candidates, loads), loads)
    )


def highest_loads(problem: ServingProblem, candidates: ServingCandidates) -> FloatArray | None:
    """Return the highest of the problem's loads that each candidate sustains, or the lowest load if
    it sustains none, shape (n,).

    Return None if the problem has a single load.
    """
    if problem.unknown is None:
        return None
    most = max_loads(problem, candidates, by_rate=problem.unknown.by_rate)
    return search_highest(
        problem.unknown,
        targets=problem.targets,
        most=most,
        is_sustained=lambda loads: sustains_load(_cost_at_loads(problem, candidates, loads)),
    )


def max_loads(
    problem: ServingProblem, candidates: ServingCandidates, *, by_rate: bool
) -> FloatArray:
    """Return the maximum number of running requests of each candidate or, with `by_rate`, the
    requests per second that it completes in full batches, shape (n,).
    """
    running = most_running(case=problem, candidates=candidates)
    if not by_rate:
        return np.floor(running) * candidates.schedulers.astype(np.float64)
    full = candidates.with_concurrency(np.ceil(running) * candidates.schedulers)
    costs = serving_costs(case=without_waves(problem), candidates=full)
    return costs.output_tokens_per_second_per_gpu * candidates.devices / problem.output_length


def search_highest(
    unknown: Loads,
    *,
    targets: Targets,
    most: FloatArray,
    is_sustained: Callable[[FloatArray], BoolArray],
) -> FloatArray:
    """Return, for each row, the highest load at which `is_sustained` is true, or the lowest load if
    there is none.

    `most` is the maximum number of running requests, or the requests per second of full batches.
    """
    count, load = _loads_to_try(unknown, targets=targets, most=most, is_sustained=is_sustained)
    low, high = (
        np.zeros(len(most), dtype=np.int64),
        count,
    )  # `low` is sustained, or is the lowest load; `high` is not sustained.
    for _ in range(int(count.max(initial=1)).bit_length()):
        middle = (low + high) // 2
        enough = is_sustained(load(middle))
        low, high = (
            np.where(enough, middle, low),
            np.where(enough, high, np.maximum(middle, low + 1)),
        )
    return load(low)


def _loads_to_try(
    unknown: Loads,
    *,
    targets: Targets,
    most: FloatArray,
    is_sustained: Callable[[FloatArray], BoolArray],
) -> tuple[IntArray, Callable[[IntArray], FloatArray]]:
    """Return the loads to try for each row, as `load_grid` does.

    If the query does not bound the load and a target limits TTFT or request latency, the highest
    load of a row is doubled until no row sustains it. Without such a target, it is the maximum
    number of running requests, because further requests would only queue.
    """
    top = most if unknown.highest is None else np.full(len(most), unknown.highest)
    open_ended = unknown.values is None and unknown.highest is None and not unknown.by_rate
    grows = open_ended and any(latency in QUEUE_LATENCIES for _, latency, _, _ in targets.limits())
    while grows and top.max(initial=0.0) < MAX_LOADS:
        enough = is_sustained(top)
        grows, top = bool(enough.any()), np.where(enough, 2.0 * top, top)
    return load_grid(unknown, top=top)


def load_grid(
    unknown: Loads, *, top: FloatArray
) -> tuple[IntArray, Callable[[IntArray], FloatArray]]:
    """Return the number of loads per row, and a function that returns the k-th load in ascending
    order.

    The loads are those of the query, or extend up to `top`.
    """
    n = len(top)
    if unknown.values is not None:
        values = np.array(unknown.values)
        return np.full(n, len(values)), lambda k: values[k]
    if unknown.by_rate:
        ratio = (
            top / unknown.lowest
            if unknown.lowest is not None
            else np.full(n, 1.0 / MIN_RATE_FRACTION)
        )
        return np.full(n, NUM_RATES), lambda k: top * ratio ** (k / (NUM_RATES - 1.0) - 1.0)
    lowest = unknown.lowest or 1.0
    return np.maximum(top - lowest + 1.0, 1.0).astype(np.int64), lambda k: lowest + k


def sustainable_load(problem: ServingProblem, candidate: ServingCandidates) -> float | None:
    """Return the highest load that one candidate sustains, in the unit of the problem's load; None
    if there is none.
    """
    if problem.offline or problem.unknown is not None:
        return None
    free = dataclasses.replace(
        problem, unknown=Loads(by_rate=problem.request_rate_per_second is not None)
    )
    rows, loads = cost_rows(free, candidate)
    return None if loads is None or not sustains_load(rows)[0] else float(loads[0])


def sustains_load(rows: CostedRows) -> BoolArray:
    """Return a mask of rows that fit in memory, sustain their load and meet the targets, without
    queued requests if queueing is forbidden.
    """
    return rows.costs.fits & rows.costs.sustained & meets_targets(rows) & ~has_forbidden_queue(rows)


def _cost_at_loads(
    problem: ServingProblem, candidates: ServingCandidates, loads: FloatArray
) -> CostedRows:
    if problem.unknown is not None and problem.unknown.by_rate:
        return problem.cost_candidates(candidates, rates=loads)
    return problem.cost_candidates(candidates.with_concurrency(loads))
