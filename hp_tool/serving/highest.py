"""The load as an unknown: the highest at which a configuration fits, keeps up and meets the targets.

Latencies never fall as the load grows (tests/serving/test_highest_load.py holds that), so halving finds what trying every load
would.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from hp_tool.cost.arrays import BoolArray, FloatArray, IntArray
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.engine import most_running, serving_costs
from hp_tool.cost.serving.load import steady
from hp_tool.serving.estimates import meets_targets
from hp_tool.serving.problem import CostedRows, Loads, ServingProblem

WAITING = ("ttft_s", "request_latency_s", "ttft_p90_s", "ttft_p99_s")
"""Targets that a queue breaks. Without one of them a load is no higher than what runs at once: more would only wait."""
RATES = 1_000
"""Rates between the ends of a range, geometrically: answers are this fine."""
SLOWEST = 1e-3
"""Lowest rate of a search that names none, of what full batches complete."""
MOST = 1 << 31
Grid: TypeAlias = tuple[IntArray, Callable[[IntArray], FloatArray]]
"""How many loads there are for each candidate, and the k-th of them, ascending."""


def costed_rows(problem: ServingProblem, candidates: ServingCandidates) -> tuple[CostedRows, FloatArray | None]:
    """The costs under the problem's load, or, where that is unknown, each candidate's under its highest, and those loads."""
    loads = highest_loads(problem, candidates)
    return (problem.costed(candidates), None) if loads is None else (_at(problem, candidates, loads), loads)


def highest_loads(problem: ServingProblem, candidates: ServingCandidates) -> FloatArray | None:
    """The highest of the problem's loads that each candidate bears, shape (n,); the lowest, if it bears none. None: the load is
    given."""
    if problem.unknown is None:
        return None
    grid = _by_rate if problem.unknown.by_rate else _by_concurrency
    count, load = grid(problem, problem.unknown, candidates)
    low, high = np.zeros(len(candidates), dtype=np.int64), count  # low is borne, or the lowest; high is not
    for _ in range(int(count.max(initial=1)).bit_length()):
        middle = (low + high) // 2
        borne = bears(_at(problem, candidates, load(middle)))
        low, high = np.where(borne, middle, low), np.where(borne, high, np.maximum(middle, low + 1))
    return load(low)


def bearable_load(problem: ServingProblem, candidate: ServingCandidates) -> float | None:
    """The highest load that one candidate bears, counted as the problem's; None: not even the lowest."""
    if problem.offline or problem.unknown is not None:
        return None
    free = dataclasses.replace(problem, unknown=Loads(by_rate=problem.request_rate_per_second is not None))
    rows, loads = costed_rows(free, candidate)
    return None if loads is None or not bears(rows)[0] else float(loads[0])


def bears(rows: CostedRows) -> BoolArray:
    """Whether each row fits, keeps up with its load and meets the targets."""
    return rows.costs.fits & rows.costs.sustained & meets_targets(rows)


def _at(problem: ServingProblem, candidates: ServingCandidates, loads: FloatArray) -> CostedRows:
    if problem.unknown is not None and problem.unknown.by_rate:
        return problem.costed(candidates, rates=loads)
    return problem.costed(candidates.loaded(loads))


def _by_concurrency(problem: ServingProblem, unknown: Loads, candidates: ServingCandidates) -> Grid:
    if unknown.values is not None:
        return _listed(unknown.values, candidates)
    lowest = unknown.lowest or 1.0
    if unknown.highest is not None:
        highest = np.full(len(candidates), unknown.highest)
    else:
        highest = np.floor(_most_running(problem, candidates)) * candidates.schedulers
        grows = any(getattr(problem.targets, name) is not None for name in WAITING)
        while grows and highest.max(initial=0.0) < MOST:
            borne = bears(_at(problem, candidates, highest))
            grows, highest = bool(borne.any()), np.where(borne, 2.0 * highest, highest)
    return np.maximum(highest - lowest + 1.0, 1.0).astype(np.int64), lambda k: lowest + k


def _by_rate(problem: ServingProblem, unknown: Loads, candidates: ServingCandidates) -> Grid:
    if unknown.values is not None:
        return _listed(unknown.values, candidates)
    if unknown.highest is not None:
        highest = np.full(len(candidates), unknown.highest)
    else:
        full = candidates.loaded(np.ceil(_most_running(problem, candidates)) * candidates.schedulers)
        headroom = problem.constraints.memory_headroom_fraction
        costs = serving_costs(case=steady(problem), candidates=full, memory_headroom_fraction=headroom)
        highest = costs.output_tokens_per_second_per_gpu * problem.cluster.num_gpus / problem.output_length
    ratio = highest / unknown.lowest if unknown.lowest is not None else 1.0 / SLOWEST
    return np.full(len(candidates), RATES), lambda k: highest * ratio ** (k / (RATES - 1.0) - 1.0)


def _listed(values: tuple[float, ...], candidates: ServingCandidates) -> Grid:
    return np.full(len(candidates), len(values)), lambda k: np.array(values)[k]


def _most_running(problem: ServingProblem, candidates: ServingCandidates) -> FloatArray:
    return most_running(
        case=problem, candidates=candidates, memory_headroom_fraction=problem.constraints.memory_headroom_fraction
    )
