"""Simulate a trace on one configuration, event by event, for the latencies of single requests.

Requests are assigned to schedulers in turn. Only the first scheduler is simulated; its requests
represent all requests.
"""

import math
from dataclasses import replace

import numpy as np

from hp_tool.cost.arrays import FloatArray
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.events import Served, simulate_requests
from hp_tool.cost.serving.fluid import simulate_flow
from hp_tool.cost.serving.passes import pass_table
from hp_tool.domain.measurement import Tail, Tails
from hp_tool.domain.result import Reason
from hp_tool.domain.serving import InferenceEstimate, ServingGoodput
from hp_tool.domain.targets import quantile_fraction
from hp_tool.questions.serving.estimates import (
    estimate_row,
    request_bounds,
    target_quantiles,
    target_reasons,
)
from hp_tool.questions.serving.intervals import serving_intervals
from hp_tool.questions.serving.problem import CostedRows, ServingProblem

MAX_SIMULATED_REQUESTS = 5_000
"""Maximum number of simulated requests per scheduler. Simulating them takes about a second."""
NUM_FLUID_STEPS = 2_000
"""Number of time steps in the fluid model of a trace."""


def simulate_trace(rows: CostedRows) -> InferenceEstimate:
    """Return the estimate of one legal configuration under the trace of its problem.

    It has no latencies if the model does not fit in memory or the load is not sustained.
    """
    problem, trace = rows.problem, rows.problem.trace
    assert trace is not None
    untargeted = replace(rows, problem=replace(problem, targets=type(problem.targets)()))
    estimate = estimate_row(untargeted, 0, spread=False)
    if estimate.ttft_s is None:
        return estimate
    schedulers = int(rows.candidates.schedulers[0])
    served = _simulate_first_scheduler(rows, schedulers=schedulers)
    n, end_s = len(served.finish_s), float(served.finish_s.max())
    several = served.output_tokens > 1
    latencies = {
        "ttft_s": served.ttft_s,
        "tpot_s": served.tpot_s[several] if several.any() else np.zeros(1),
        "request_latency_s": served.request_latency_s,
    }
    means = {name: float(values.mean()) for name, values in latencies.items()}
    tokens_s = float(served.output_tokens.sum()) * schedulers / end_s
    throughput, rate = tokens_s / problem.cluster.num_gpus, n * schedulers / end_s
    concurrency = problem.concurrency or rate * means["request_latency_s"]
    assert estimate.output_tokens_per_second_per_gpu is not None
    cost_ratio = estimate.output_tokens_per_second_per_gpu / throughput
    output, prices = estimate.cost_per_million_output_tokens, estimate.cost_per_million_tokens
    reasons = _missed_targets(problem, latencies, means)
    first_s = means["ttft_s"]
    return replace(
        estimate,
        feasible=not reasons,
        reasons=reasons,
        ttft_s=first_s,
        tpot_s=means["tpot_s"],
        request_latency_s=means["request_latency_s"],
        parts_s={"first_token": first_s, "decode": means["request_latency_s"] - first_s},
        output_tokens_per_second_per_gpu=throughput,
        output_tokens_per_second_per_user=1.0 / means["tpot_s"] if means["tpot_s"] > 0.0 else None,
        request_rate_per_second=rate,
        concurrency=concurrency,
        users=math.floor(concurrency + rate * problem.think_time_s + 1e-6),
        running_requests=min(estimate.running_requests or concurrency, concurrency),
        preemptions_per_request=served.preemptions / n,
        cost_per_million_output_tokens=None if output is None else output * cost_ratio,
        cost_per_million_tokens=prices
        and replace(prices, input=prices.input * cost_ratio, output=prices.output * cost_ratio),
        tails=Tails(**{name: _latency_tail(values, problem) for name, values in latencies.items()}),
        goodput=_simulated_goodput(problem, served, rate=rate),
        intervals=serving_intervals(first_s, means["tpot_s"], throughput, problem),
        provenance=estimate.provenance | {"load": _describe_trace(problem, n * schedulers)},
    )


def _latency_tail(seconds: FloatArray, problem: ServingProblem) -> Tail:
    others = (
        (name, float(np.quantile(seconds, quantile_fraction(name))))
        for name in target_quantiles(problem.targets)
    )
    return replace(Tail.from_values(seconds.tolist()), others=tuple(others))


def flow_latencies(
    problem: ServingProblem, candidates: ServingCandidates
) -> tuple[FloatArray, FloatArray]:
    """Return the mean TTFT and TPOT of each candidate under the trace, by the fluid model, shape
    (n,) each.

    The fluid model accounts for bursts, but all requests have the mean lengths.
    """
    arrival = arrivals_s(problem)
    assert arrival is not None
    counts, edges = np.histogram(arrival, bins=NUM_FLUID_STEPS)
    latencies = simulate_flow(
        case=problem,
        candidates=candidates,
        arrivals=counts.astype(np.float64),
        step_s=float(edges[1] - edges[0]),
    )
    return latencies.ttft_s, latencies.tpot_s


def arrivals_s(problem: ServingProblem) -> FloatArray | None:
    """Return the arrival times of the trace's requests in seconds, scaled to the problem's rate;
    None for a closed load.
    """
    trace, rate = problem.trace, problem.request_rate_per_second
    assert trace is not None
    if problem.concurrency is not None or rate is None:
        return None
    if trace.arrival_s is None:
        return np.cumsum(np.random.default_rng(0).exponential(1.0 / rate, len(trace.input_tokens)))
    return trace.arrival_s * ((trace.rate_per_second or rate) / rate)


def _simulate_first_scheduler(rows: CostedRows, *, schedulers: int) -> Served:
    problem, trace = rows.problem, rows.problem.trace
    assert trace is not None
    n, arrival = len(trace.input_tokens), arrivals_s(problem)
    mine = slice(0, min(n, MAX_SIMULATED_REQUESTS * schedulers), schedulers)
    return simulate_requests(
        table=pass_table(case=problem, candidates=rows.candidates),
        input_tokens=trace.input_tokens[mine],
        output_tokens=trace.output_tokens[mine],
        arrival_s=None if arrival is None else arrival[mine],
        concurrency=None
        if problem.concurrency is None
        else max(round(problem.concurrency / schedulers), 1),
        think_s=problem.think_time_s,
        cached_tokens=trace.prefix_tokens[mine],
    )


def _missed_targets(
    problem: ServingProblem, latencies: dict[str, FloatArray], means: dict[str, float]
) -> tuple[Reason, ...]:
    reasons: list[Reason] = []
    for name, latency, quantile, limit in problem.targets.limits():
        value = (
            means[latency]
            if quantile is None
            else float(np.quantile(latencies[latency], quantile_fraction(quantile)))
        )
        reasons += target_reasons(name, value=value, limit=limit)
    return tuple(reasons)


def _simulated_goodput(
    problem: ServingProblem, served: Served, *, rate: float
) -> ServingGoodput | None:
    if not (bounds := request_bounds(problem.targets)):
        return None
    within = np.all([getattr(served, name) <= bound for name, bound in bounds.items()], axis=0)
    share = float(within.mean())
    return ServingGoodput(
        fraction=share, requests_per_second_per_gpu=share * rate / problem.cluster.num_gpus
    )


def _describe_trace(problem: ServingProblem, requests: int) -> str:
    trace = problem.trace
    assert trace is not None
    how = f"{problem.request_rate_per_second or 0.0:.4g} requests/s"
    if problem.concurrency is not None:
        how = f"{problem.concurrency} requests in flight"
    shown = min(requests, len(trace.input_tokens))
    return f"trace {trace.name}, {how}, {shown:,} of {len(trace.input_tokens):,} requests simulated"
