"""Fluid model of many configurations under one long series of arrivals.

Its only state is the number n of requests in flight at a scheduler. Requests leave at the rate X(n)
of a closed load of n (see load.py). In a short time t with a arrivals, n therefore grows by a -
X(n) t. The latencies of a request are those of a closed load of n at its arrival, plus the wait for
earlier requests if there is no free slot. Effects of single events, such as prompts that arrive
together or requests of different lengths, are not modelled here. events.py models them for one
configuration at a time.
"""

from dataclasses import dataclass, replace

import numpy as np

from hp_tool.cost.arrays import FloatArray
from hp_tool.cost.serving.candidates import ServingCandidates, ServingCase
from hp_tool.cost.serving.engine import serving_costs
from hp_tool.cost.serving.load import prompt_wait, without_waves

LOADS = 24
"""Number of closed loads for which X(n) and the latencies are computed. Values between them are
interpolated linearly.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Means over all arrivals, for n configurations; shape (n,)."""

    ttft_s: FloatArray
    tpot_s: FloatArray
    in_flight: FloatArray
    """Time average of the number of requests in flight on all schedulers."""
    completed: FloatArray
    """Number of requests that finished before the last arrival."""


def simulate_flow(
    *, case: ServingCase, candidates: ServingCandidates, arrivals: FloatArray, step_s: float
) -> Flow:
    """Simulate consecutive steps of `step_s` seconds. `arrivals` has the number of requests that
    arrive in each step.

    All requests have the case's lengths, and are spread evenly over the schedulers. The result has
    the candidates' shape.
    """
    most, rates, ttfts, tpots = _closed_loads(case, candidates)
    schedulers = candidates.schedulers
    rows, ratio = np.arange(len(candidates)), (LOADS - 1) / np.log(most)
    n = np.zeros(len(candidates))
    ttft, tpot, in_flight, completed = (np.zeros(len(candidates)) for _ in range(4))
    for arrived in arrivals:
        at = np.log(np.clip(n, 1.0, most)) * ratio
        low = np.minimum(at.astype(np.intp), LOADS - 2)
        share = at - low
        rate, first, token = (
            (1.0 - share) * f[rows, low] + share * f[rows, low + 1] for f in (rates, ttfts, tpots)
        )
        ttft += arrived * (first + np.maximum(n - most, 0.0) / rate)
        tpot += arrived * token
        # Requests leave at the rate for the middle of the step; for fewer than one request, at the
        # rate of one in proportion.
        there = n + 0.5 * arrived / schedulers
        left = there * -np.expm1(-rate * step_s / np.maximum(there, 1.0))
        in_flight += there - 0.5 * left
        completed += left
        n += arrived / schedulers - left
    total = max(float(arrivals.sum()), 1.0)
    return Flow(
        ttft_s=ttft / total,
        tpot_s=tpot / total,
        in_flight=in_flight / len(arrivals) * schedulers,
        completed=completed * schedulers,
    )


def _closed_loads(
    case: ServingCase, candidates: ServingCandidates
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return the maximum number of requests that a scheduler runs, shape (n,), and the rate, TTFT
    and TPOT under LOADS closed loads, shape (n, LOADS).

    The loads are spaced geometrically from one request to the maximum.
    """
    independent_case, n = replace(without_waves(case), independent=True), len(candidates)
    alone = serving_costs(case=independent_case, candidates=candidates.with_concurrency(np.ones(n)))
    most = np.maximum(alone.max_running, 1.0 + 1e-9)
    loads = np.exp(np.log(most)[:, None] * np.linspace(0.0, 1.0, LOADS))
    every = candidates.take(np.repeat(np.arange(n), LOADS))
    costs = serving_costs(
        case=independent_case, candidates=every.with_concurrency(loads.ravel() * every.schedulers)
    )
    rates = loads / costs.request_latency_s.reshape(n, LOADS)
    ttft = costs.ttft_s + prompt_wait(case, costs)[0]
    return most, rates, ttft.reshape(n, LOADS), costs.tpot_s.reshape(n, LOADS)
