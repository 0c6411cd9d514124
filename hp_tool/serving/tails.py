"""Latencies of single requests: quantiles of many configurations, and the requests of one that keep to all targets."""

from __future__ import annotations

import numpy as np

from hp_tool.cost.arrays import FloatArray
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.engine import ServingCosts
from hp_tool.cost.serving.load import Quantiles, open_quantiles, tpot_quantile, ttft_quantile
from hp_tool.domain.query import Targets
from hp_tool.domain.serving import ServingGoodput, Tail, Tails
from hp_tool.serving.problem import ServingProblem

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
PLACES = (np.arange(200) + 0.5) / 200
"""Requests that stand for all when those within the targets are counted."""


def quantiles(share: float, *, costs: ServingCosts, candidates: ServingCandidates, problem: ServingProblem) -> Quantiles:
    """Seconds that `share` of each configuration's requests do not exceed. In a closed load whoever waits longer before the
    first token waits shorter after it, and all requests take as long.
    """
    if problem.request_rate_per_second is not None:
        return _open(share, costs=costs, candidates=candidates, problem=problem)
    wave, output = problem.wave_share, problem.case.output_length
    return Quantiles(
        ttft_s=ttft_quantile(costs, share=share, wave_share=wave),
        tpot_s=tpot_quantile(costs, share=share, wave_share=wave, output_length=output),
        request_latency_s=costs.request_latency_s,
    )


def tails(row: int, *, costs: ServingCosts, candidates: ServingCandidates, problem: ServingProblem) -> Tails:
    """p50, p90 and p99 of one configuration."""
    found = {name: quantiles(q, costs=costs, candidates=candidates, problem=problem) for name, q in SHARES.items()}

    def tail(latency: str) -> Tail:
        return Tail(**{name: float(getattr(values, latency)[row]) for name, values in found.items()})

    return Tails(ttft_s=tail("ttft_s"), tpot_s=tail("tpot_s"), request_latency_s=tail("request_latency_s"))


def goodput(row: int, *, costs: ServingCosts, candidates: ServingCandidates, problem: ServingProblem) -> ServingGoodput | None:
    """Requests a second and GPU that keep to every bound on single requests; None without targets."""
    bounds = request_bounds(problem.targets)
    if not bounds:
        return None
    kept = np.ones(len(PLACES), dtype=bool)
    found = _requests(row, costs=costs, candidates=candidates, problem=problem)
    for name, bound in bounds.items():
        kept &= np.broadcast_to(getattr(found, name) <= bound, kept.shape)
    fraction = float(np.mean(kept))
    rate = float(costs.output_tokens_per_second_per_gpu[row]) / problem.case.output_length
    return ServingGoodput(fraction=fraction, requests_per_second_per_gpu=fraction * rate)


def request_bounds(targets: Targets) -> dict[str, float]:
    """What each latency of a single request may be: the tighter of its p90 and p99 targets, or, without those, the mean's."""
    bounds = {}
    for name in ("ttft_s", "tpot_s", "request_latency_s"):
        stem = name.removesuffix("_s")
        named = [getattr(targets, f"{stem}_{quantile}_s", None) for quantile in ("p90", "p99")]
        given = [limit for limit in named if limit is not None] or [getattr(targets, name)]
        if given[0] is not None:
            bounds[name] = min(given)
    return bounds


def _requests(row: int, *, costs: ServingCosts, candidates: ServingCandidates, problem: ServingProblem) -> Quantiles:
    """The requests at PLACES, from the first to be served to the last."""
    if problem.request_rate_per_second is not None:
        rows = np.full(len(PLACES), row)
        return _open(PLACES, costs=costs, candidates=candidates.take(rows), problem=problem, rows=rows)
    at = [quantiles(q, costs=costs, candidates=candidates, problem=problem) for q in PLACES.tolist()]
    return Quantiles(
        ttft_s=np.array([values.ttft_s[row] for values in at]),
        tpot_s=np.array([values.tpot_s[row] for values in reversed(at)]),
        request_latency_s=np.array([values.request_latency_s[row] for values in at]),
    )


def _open(
    share: float | FloatArray,
    *,
    costs: ServingCosts,
    candidates: ServingCandidates,
    problem: ServingProblem,
    rows: np.ndarray | None = None,
) -> Quantiles:
    """Under the load that the rate keeps in flight (Little's law). `rows` of the costs are the candidates; None: all."""
    latency = costs.request_latency_s if rows is None else costs.request_latency_s[rows]
    return open_quantiles(
        case=problem.case,
        candidates=candidates,
        load=(problem.request_rate_per_second or 0.0) * latency,
        share=share,
        memory_headroom_fraction=problem.constraints.memory_headroom_fraction,
    )
