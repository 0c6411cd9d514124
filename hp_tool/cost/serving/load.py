"""Latencies under independent arrivals: a fluctuating load makes individual requests deviate from
the mean.

The n requests in flight at a scheduler leave at the rate X(n) of a closed load of n (the
flow-equivalent server of Chandy, Herzog and Woo, 1975), and arrive at the rate l = X(c) for any n.
Around its mean c, n is then approximately an Ornstein-Uhlenbeck process that relaxes at the rate
X'(c). Its variance v, and the variance v_S of its mean over a stay S = c / l, are

    v = l / X'(c) = c / e,    v_S = v 2 (e - 1 + exp(-e)) / e^2,    e = c X'(c) / X(c)

e is 1 if requests do not slow each other (v = c, as in M/G/inf), and near 0 if the devices are
full. The quantile q of TPOT is its mean under the load c + z sqrt(v_S), where z is the normal
quantile. The quantile of TTFT uses c + z sqrt(v).

Passes have the mean length T, and each contains the prompts that arrived during the previous one,
with P seconds of work each. Their length therefore has the variance r P T / (1 - r^2) with r = l P.
A request that arrives at a random time is more likely to meet a long pass than a short one. It
waits for the rest R of this pass, and then for the prompts in its own pass:

    W = R (1 + 2 r),    R = (T + r P / (1 - r^2)) / 2

The quantile q of this wait is 2 q W (uniform over the rest of the pass), plus the tail of M/D/1, P
/ (2 (1 - r)) ln(r / (1 - q)), if that is positive. A mean latency is the mean of its quantiles over
q from 0 to 1. `open_means` and `open_quantiles` use the same c, v, v_S and W. Not modelled are
bursty arrivals, requests of different lengths, and a load that changes over time.
"""

import math
from dataclasses import dataclass, fields, replace
from statistics import NormalDist

import numpy as np

from hp_tool.cost.arrays import FloatArray, IntArray
from hp_tool.cost.serving.candidates import ServingCandidates, ServingCase
from hp_tool.cost.serving.engine import (
    ServingCosts,
    first_token_wait_seconds,
    most_running,
    serving_costs,
    tokens_per_pass,
)

STEP = 0.05
"""Relative step of the difference quotient for X'(c). The step is below c, because the cache may be
full above c.
"""
LEAST_ELASTICITY = 0.01
NEGLIGIBLE = 1e-9
"""Mean number of waiting requests below which the latency of full batches is not computed."""
_TINY = 1e-300
CERTAIN = 40.0
"""Number of standard deviations that a normal variable is assumed never to exceed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Latencies in seconds that a given fraction of the requests does not exceed; shape (n,)."""

    ttft_s: FloatArray
    tpot_s: FloatArray
    request_latency_s: FloatArray
    """Upper bound: the sum of the quantiles of prefill and of decoding."""


def without_waves(case: ServingCase) -> ServingCase:
    """Return the case for independent arrivals: no requests start together, and prompts are not
    prefilled in groups.
    """
    return replace(case, wave_share=0.0, prefill_group=1.0)


def prompt_wait(case: ServingCase, costs: ServingCosts) -> tuple[FloatArray, FloatArray]:
    """Return W, the mean seconds that a request which arrives at a random time waits for its pass,
    and r, the fraction of the time spent on prompts.

    W excludes the request's own prompt.
    """
    prompt = costs.prompt_s
    # Subtracting the queue from the latency would lose precision if the queue is long.
    served = sum(seconds for name, seconds in costs.parts.items() if name != "queue")
    busy = np.minimum(costs.running / served * prompt, 1.0 - LEAST_ELASTICITY)
    step = costs.tpot_s * tokens_per_pass(case.speculative)
    return 0.5 * (step + busy * prompt / (1.0 - busy**2)) * (1.0 + 2.0 * busy), busy


def load_deviations(load: FloatArray, *, elasticity: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return (sqrt(v), sqrt(v_S)): the standard deviation of the number of requests in flight, and
    of the mean of this number over a request's stay.
    """
    e = elasticity
    moment: FloatArray = np.sqrt(load / e)
    return moment, moment * np.sqrt(2.0 * (e - 1.0 + np.exp(-e))) / e


@dataclass(frozen=True, slots=True, kw_only=True)
class Fluctuation:
    """Load of a scheduler under independent arrivals, and the waits for its passes; shape (n,).

    Means and quantiles of latencies are both computed from these values.
    """

    costs: ServingCosts
    """Costs at the mean load."""
    load: FloatArray
    """Mean number of requests in flight at one scheduler (c)."""
    deviation: FloatArray
    """Standard deviation of the number of requests in flight (sqrt(v))."""
    stay_deviation: FloatArray
    """Standard deviation of the mean number of requests in flight during a request's stay
    (sqrt(v_S)).
    """
    wait_s: FloatArray
    """Mean seconds that a request which arrives at a random time waits for its pass (W)."""
    busy: FloatArray
    """Fraction of the time spent on prompts (r)."""

    @property
    def tail_s(self) -> FloatArray:
        """Return P / (2 (1 - r)), the scale of the waits for earlier prompts that exceed W."""
        return self.costs.prompt_s / (2.0 * (1.0 - self.busy))


def fluctuation(
    *, case: ServingCase, candidates: ServingCandidates, load: FloatArray
) -> Fluctuation:
    """Return how the number of requests in flight fluctuates around `load`, its mean total over all
    schedulers.
    """

    def elasticity(load: FloatArray, costs: ServingCosts) -> FloatArray:
        ratio = (
            _costs_under(case, candidates, (1.0 - STEP) * load).output_tokens_per_second_per_gpu
            / costs.output_tokens_per_second_per_gpu
        )
        return np.clip((1.0 - ratio) / STEP, LEAST_ELASTICITY, 1.0)

    mean = _costs_under(case, candidates, load)
    e = running_e = elasticity(load, mean)
    full = candidates.schedulers * mean.max_running
    # Requests in excess of full batches wait in the queue and do not slow running requests. The
    # queue then fluctuates more than the running requests, whose elasticity is that of full
    # batches.
    if np.any(load > full):
        full_load = np.minimum(load, full)
        running_e = elasticity(full_load, _costs_under(case, candidates, full_load))
        e = np.minimum(e, running_e)
    each = load / candidates.schedulers
    spread = load_deviations(each, elasticity=e)[0]
    stay = load_deviations(each, elasticity=running_e)[1]
    wait, busy = prompt_wait(case, mean)
    return Fluctuation(
        costs=mean, load=each, deviation=spread, stay_deviation=stay, wait_s=wait, busy=busy
    )


def open_quantiles(
    *,
    case: ServingCase,
    candidates: ServingCandidates,
    load: FloatArray,
    share: float | FloatArray,
) -> Quantiles:
    """Return the quantile `share` of the latencies if `load` requests are in flight on average.
    `share` is a single value, or one value per row.
    """
    z = np.vectorize(NormalDist().inv_cdf, otypes=[float])(share)
    around = fluctuation(case=case, candidates=candidates, load=load)

    def costs_at(deviation: FloatArray) -> ServingCosts:
        each = around.load + z * deviation
        return _costs_under(case, candidates, candidates.schedulers * each)

    now, later = costs_at(around.deviation), costs_at(around.stay_deviation).tpot_s
    tail = around.tail_s * np.log(np.maximum(around.busy, 1e-300) / (1.0 - share))
    ttft = now.ttft_s + 2.0 * share * around.wait_s + np.maximum(tail, 0.0)
    return Quantiles(
        ttft_s=ttft, tpot_s=later, request_latency_s=ttft + (case.output_length - 1.0) * later
    )


def open_means(
    *, case: ServingCase, candidates: ServingCandidates, load: FloatArray
) -> ServingCosts:
    """Return the costs if `load` requests are in flight on average. Latencies are the means of
    `open_quantiles` over all quantiles.

    With F slots and n requests in flight, the latencies during a stay depend on m = min(max(n, 1),
    F). The distribution of m is represented by two loads that have the same mean and variance.
    Requests beyond F wait for a slot, as in `serving_costs`. All requests wait W + r P / (2 (1 -
    r)) for their pass and for earlier prompts.
    """
    around = fluctuation(case=case, candidates=candidates, load=load)
    places = around.costs.max_running
    low, high, share = equivalent_loads(around.load, around.stay_deviation, places)
    costs = _interpolate_costs(
        _costs_under(case, candidates, candidates.schedulers * low),
        _costs_under(case, candidates, candidates.schedulers * high),
        share,
    )
    wait = around.wait_s + around.tail_s * around.busy
    if np.any(expected_excess(around.load, around.deviation, places) > NEGLIGIBLE):
        full = _costs_under(case, candidates, candidates.schedulers * places)
        in_transit_s = first_token_wait_seconds(case)
        place_s = (full.request_latency_s - in_transit_s) / places
        without_place = expected_excess(
            around.load, around.deviation, places + in_transit_s / place_s
        )
        wait = wait + place_s * without_place
    latency = costs.request_latency_s + wait
    return replace(
        costs,
        output_tokens_per_second_per_gpu=load / latency * case.output_length / candidates.devices,
        ttft_s=costs.ttft_s + wait,
        request_latency_s=latency,
        parts=costs.parts | {"queue": costs.parts["queue"] + wait},
    )


def equivalent_loads(
    mean: FloatArray, deviation: FloatArray, places: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return (low load, high load, probability of the high load) for a normally distributed n.

    The two loads have the same mean and variance as m = min(max(n, 1), places). Both are between 1
    and `places`.
    """
    # If n is far above `places`, m is `places`; squares of such means would overflow.
    full = mean > places + CERTAIN * deviation
    mean, deviation = (
        np.where(full, places + CERTAIN, mean),
        np.where(full, 1.0, deviation),
    )
    waiting = expected_excess(mean, deviation, places)
    more = expected_excess(mean, deviation, 1.0) - waiting  # E[m - 1]
    square = (
        expected_squared_excess(mean, deviation, 1.0)
        - expected_squared_excess(mean, deviation, places)
        - 2.0 * (places - 1.0) * waiting
    )
    variance = np.maximum(square - more**2, 0.0)
    free = np.maximum(places - 1.0 - more, 0.0)
    above = np.clip(np.sqrt(variance), variance / np.maximum(more, _TINY), free)
    below = np.minimum(variance / np.maximum(above, _TINY), more)
    share = below / np.maximum(above + below, _TINY)
    return 1.0 + more - below, 1.0 + more + above, share


def expected_excess(
    mean: FloatArray, deviation: FloatArray, bound: float | FloatArray
) -> FloatArray:
    """Return E[max(n - bound, 0)] for a normally distributed n."""
    z = (bound - mean) / deviation
    return np.maximum(deviation * (_density(z) - z * _probability_above(z)), 0.0)


def expected_squared_excess(
    mean: FloatArray, deviation: FloatArray, bound: float | FloatArray
) -> FloatArray:
    """Return E[max(n - bound, 0)^2] for a normally distributed n."""
    z = (bound - mean) / deviation
    return np.maximum(deviation**2 * ((1.0 + z * z) * _probability_above(z) - z * _density(z)), 0.0)


def _interpolate_costs(low: ServingCosts, high: ServingCosts, share: FloatArray) -> ServingCosts:
    """Return the costs of the high load, except that latencies and the number of running requests
    are interpolated between both loads. `share` is the weight of the high load.
    """

    def interpolate(first: FloatArray, second: FloatArray) -> FloatArray:
        return first + share * (second - first)

    return replace(
        high,
        ttft_s=interpolate(low.ttft_s, high.ttft_s),
        tpot_s=interpolate(low.tpot_s, high.tpot_s),
        request_latency_s=interpolate(low.request_latency_s, high.request_latency_s),
        prompt_s=interpolate(low.prompt_s, high.prompt_s),
        wave_s=interpolate(low.wave_s, high.wave_s),
        running=interpolate(low.running, high.running),
        parts={name: interpolate(low.parts[name], seconds) for name, seconds in high.parts.items()},
    )


def _costs_under(
    case: ServingCase, candidates: ServingCandidates, load: FloatArray
) -> ServingCosts:
    loaded = candidates.with_concurrency(np.maximum(load, 0.0))
    return serving_costs(case=without_waves(case), candidates=loaded)


def _density(z: FloatArray) -> FloatArray:
    density: FloatArray = np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return density


_erfc = np.vectorize(math.erfc, otypes=[float])


def _probability_above(z: FloatArray) -> FloatArray:
    probability: FloatArray = 0.5 * _erfc(z / math.sqrt(2.0))
    return probability


# Requests that arrive at a rate: the number of requests in flight (Little's law), and the costs at
# that concurrency.


def costs_at_rate(
    *,
    case: ServingCase,
    candidates: ServingCandidates,
    requests_per_second: float | FloatArray,
) -> tuple[ServingCosts, FloatArray]:
    """Return the costs at the smallest concurrency whose throughput reaches the rate, and the mean
    number of requests in flight; both have the candidates' shape.

    The load fluctuates around this mean, because arrivals are independent. If even full batches do
    not reach the rate, `sustained` is False, and the other values are those of full batches. In
    reality, the queue would then grow without limit.
    """
    independent_case = without_waves(case)
    devices = candidates.devices

    def completed(costs: ServingCosts) -> FloatArray:
        return costs.output_tokens_per_second_per_gpu * devices / case.output_length

    def costs_of(concurrency: IntArray) -> ServingCosts:
        return serving_costs(
            case=independent_case, candidates=replace(candidates, concurrency=concurrency)
        )

    most = most_running(case=independent_case, candidates=candidates)
    high = np.ceil(most * candidates.schedulers).astype(np.int64)
    low = np.zeros_like(high)  # never reaches the rate; `high` does if any load does
    for _ in range(int(high.max(initial=1)).bit_length()):
        middle = np.maximum((low + high) // 2, 1)
        enough = completed(costs_of(middle)) >= requests_per_second
        high, low = np.where(enough, middle, high), np.where(enough, low, middle)
    closed = costs_of(high)
    reached = completed(closed)
    load = requests_per_second * (closed.request_latency_s + prompt_wait(case, closed)[0])
    costs = open_means(case=case, candidates=candidates, load=load)
    served = np.minimum(reached, requests_per_second) * case.output_length / devices
    return (
        replace(
            costs, sustained=reached >= requests_per_second, output_tokens_per_second_per_gpu=served
        ),
        load,
    )


# Offline load: all requests are queued at once in the engine's process, so batches are full from
# start to end, and there is no front end.


def without_front_end(case: ServingCase) -> ServingCase:
    """Return the case for an engine without HTTP, tokenization and streaming, whose queue is never
    empty.
    """
    engine = replace(case.engine, request_overhead_s=0.0, stream_overhead_s=0.0, first_token_s=0.0)
    return replace(case, engine=engine, wave_share=0.0, prefill_group=math.inf)


def offline_costs(
    *,
    case: ServingCase,
    candidates: ServingCandidates,
    num_prompts: int | FloatArray | None = None,
) -> ServingCosts:
    """Return the costs if as many requests run as the engine allows, at most `num_prompts`.

    Latencies are measured from admission. More requests are queued than run, so the rate is that of
    full batches; the smaller batches at the end are ignored. All prompts are available from the
    start, so a pass contains as many prompts as requests end in it, or one prompt if that is
    faster.
    """
    alone = without_front_end(case)

    full = most_running(case=alone, candidates=candidates)
    running = full * candidates.schedulers
    loaded = candidates.with_concurrency(
        running if num_prompts is None else np.minimum(running, num_prompts)
    )

    def costs(case: ServingCase) -> ServingCosts:
        return serving_costs(case=case, candidates=loaded)

    many, one = costs(alone), costs(replace(alone, prefill_group=1.0))
    return rows_with_more_tokens(many, one)


def rows_with_more_tokens(first: ServingCosts, second: ServingCosts) -> ServingCosts:
    """Return, for each row, the costs that have more tokens per second."""
    better = second.output_tokens_per_second_per_gpu > first.output_tokens_per_second_per_gpu
    if not np.any(better):
        return first
    chosen = {
        each.name: np.where(better, getattr(second, each.name), getattr(first, each.name))
        for each in fields(ServingCosts)
        if each.name not in ("parts", "bytes")
    }
    parts = {
        name: np.where(better, second.parts[name], seconds) for name, seconds in first.parts.items()
    }
    return replace(first, parts=parts, **chosen)


# Quantiles of latency under a closed load of equal lengths. A fraction w of the requests starts
# together with the others of its batch, and waits between zero and the prefill of the whole batch.
# The others wait only for their group. So TTFT is a base plus X, where X is 0 with probability
# 1 - w, and otherwise uniform up to twice its mean. A request that waits longer before its first
# token waits less after it, so all requests have the same latency.


def ttft_quantile(
    *, ttft_s: FloatArray, wave_s: FloatArray, share: float | FloatArray, wave_share: float
) -> FloatArray:
    """Return the quantile `share` of the time to first token, in seconds.

    `ttft_s` is the mean, and `wave_s` is the part of it during which requests that start together
    wait for each other. Shapes broadcast.
    """
    return ttft_s + (_wave_quantile(share, wave_share) - 1.0) * wave_s


def tpot_quantile(
    *,
    tpot_s: FloatArray,
    wave_s: FloatArray,
    share: float | FloatArray,
    wave_share: float,
    output_length: int,
) -> FloatArray:
    """Return the quantile `share` of the seconds per output token.

    The slowest requests are those that started first.
    """
    if output_length < 2:
        return np.zeros(np.broadcast_shapes(tpot_s.shape, np.shape(share)))
    return tpot_s + (1.0 - _wave_quantile(1.0 - share, wave_share)) * wave_s / (output_length - 1.0)


def _wave_quantile(share: float | FloatArray, wave_share: float) -> FloatArray:
    """Return the quantile of X divided by its mean."""
    w = min(wave_share, 1.0)
    late = np.maximum(share - (1.0 - w), 0.0)
    return 2.0 * late / w**2 if w > 0.0 else np.ones_like(late)
