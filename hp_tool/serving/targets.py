"""Latencies against targets: quantiles over requests, goodput, what each target bounds, and reasons for missing it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hp_tool.cost.arrays import BoolArray, FloatArray
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.load import Quantiles, open_quantiles, tpot_quantile, ttft_quantile
from hp_tool.domain.query import Targets
from hp_tool.domain.result import Reason
from hp_tool.domain.serving import ServingGoodput, Tail, Tails
from hp_tool.serving.problem import CostedRows, ServingProblem
from hp_tool.units import duration

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
PLACES = (np.arange(200) + 0.5) / 200
"""Requests that stand for all when those within the targets are counted."""


def quantiles(rows: CostedRows, share: float) -> Quantiles:
    """Seconds that `share` of each configuration's requests do not exceed. In a closed load whoever waits longer before the
    first token waits shorter after it, and all requests take as long.
    """
    problem, costs = rows.problem, rows.costs
    if problem.request_rate_per_second is not None:
        return _open(problem, rows.candidates, costs.request_latency_s, share)
    wave, output = problem.wave_share, problem.output_length
    return Quantiles(
        ttft_s=ttft_quantile(costs, share=share, wave_share=wave),
        tpot_s=tpot_quantile(costs, share=share, wave_share=wave, output_length=output),
        request_latency_s=costs.request_latency_s,
    )


def tails(rows: CostedRows, row: int) -> Tails:
    """p50, p90 and p99 of one configuration."""
    found = {name: quantiles(rows, share) for name, share in SHARES.items()}

    def tail(latency: str) -> Tail:
        return Tail(**{name: float(getattr(values, latency)[row]) for name, values in found.items()})

    return Tails(ttft_s=tail("ttft_s"), tpot_s=tail("tpot_s"), request_latency_s=tail("request_latency_s"))


def goodput(rows: CostedRows, row: int) -> ServingGoodput | None:
    """Requests a second and GPU that keep to every bound on single requests; None without targets."""
    bounds = request_bounds(rows.problem.targets)
    if not bounds:
        return None
    kept = np.ones(len(PLACES), dtype=bool)
    found = _requests(rows, row)
    for name, bound in bounds.items():
        kept &= np.broadcast_to(getattr(found, name) <= bound, kept.shape)
    fraction = float(np.mean(kept))
    rate = float(rows.costs.output_tokens_per_second_per_gpu[row]) / rows.problem.output_length
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


def _requests(rows: CostedRows, row: int) -> Quantiles:
    """The requests at PLACES, from the first to be served to the last."""
    if rows.problem.request_rate_per_second is not None:
        each = np.full(len(PLACES), row)
        return _open(rows.problem, rows.candidates.take(each), rows.costs.request_latency_s[each], PLACES)
    at = [quantiles(rows, share) for share in PLACES.tolist()]
    return Quantiles(
        ttft_s=np.array([values.ttft_s[row] for values in at]),
        tpot_s=np.array([values.tpot_s[row] for values in reversed(at)]),
        request_latency_s=np.array([values.request_latency_s[row] for values in at]),
    )


def _open(
    problem: ServingProblem, candidates: ServingCandidates, latency_s: FloatArray, share: float | FloatArray
) -> Quantiles:
    """Quantiles under the load that the request rate keeps in flight (Little's law)."""
    return open_quantiles(
        case=problem,
        candidates=candidates,
        load=(problem.request_rate_per_second or 0.0) * latency_s,
        share=share,
        memory_headroom_fraction=problem.constraints.memory_headroom_fraction,
    )


def bounded_values(rows: CostedRows) -> Iterator[tuple[str, float, FloatArray]]:
    """Each target of the query: its name, its limit, and the predicted values that it bounds, a mean or a quantile."""
    targets = rows.problem.targets
    for name in targets.__slots__:
        limit = getattr(targets, name)
        if limit is None:
            continue
        latency, _, quantile = name.removesuffix("_s").partition("_p")
        if not quantile.isdigit():
            yield name, limit, getattr(rows.costs, name)
        else:
            share = quantiles(rows, int(quantile) / 100.0)
            yield name, limit, share.ttft_s if latency == "ttft" else share.tpot_s


def meets_targets(rows: CostedRows) -> BoolArray:
    """True where every latency target is met."""
    met = np.ones(len(rows.candidates), dtype=bool)
    for _, limit, values in bounded_values(rows):
        met &= values <= limit
    return met


def missed_targets(rows: CostedRows, row: int) -> tuple[Reason, ...]:
    """A reason for each target that the configuration misses, and by how much."""
    reasons = []
    for name, limit, values in bounded_values(rows):
        if (value := float(values[row])) > limit:
            message = f"{name} {duration(value)} is above targets.{name} {duration(limit)} by {value / limit - 1.0:.0%}"
            reasons.append(Reason(code="target_missed", message=message, needed=value, available=limit))
    return tuple(reasons)
