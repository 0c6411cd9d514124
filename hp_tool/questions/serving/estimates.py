"""Estimates of serving configurations, and the comparison of their latencies with targets."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from hp_tool.catalog.efficiency import version_key
from hp_tool.catalog.releases import release_age
from hp_tool.cost.arrays import BoolArray, FloatArray
from hp_tool.cost.legality import MEMORY
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.experts import imbalance
from hp_tool.cost.serving.load import Quantiles, open_quantiles, tpot_quantile, ttft_quantile
from hp_tool.cost.serving.memory import ServingBytes, serving_bytes
from hp_tool.cost.serving.operations import cached_tokens, requests_in_cache, shared_tokens
from hp_tool.cost.uncertainty import simplified_fields
from hp_tool.domain.measurement import Tail, Tails
from hp_tool.domain.result import Reason
from hp_tool.domain.serving import (
    CacheTokens,
    InferenceEstimate,
    KvCache,
    ServingGoodput,
    ServingMemory,
    TokenPrices,
)
from hp_tool.domain.targets import Targets, quantile_fraction
from hp_tool.domain.units import SECONDS_PER_HOUR, format_gib
from hp_tool.questions.serving.drafters import drafter_sentence
from hp_tool.questions.serving.intervals import familiarity_of, mixers_log_sds, serving_intervals
from hp_tool.questions.serving.prefixes import resume_sentence
from hp_tool.questions.serving.problem import CostedRows, ServingProblem
from hp_tool.wording.words import missed_words

OVERLOADED = "overloaded"
"""Reason code of a configuration that cannot sustain the request rate."""
RECENT_RELEASES = 2
"""Maximum number of minor releases by which constants may be behind the newest release without a
note about their age.
"""
NO_QUEUE = (
    "no request waits for a free place in a batch, because no target limits TTFT or request latency"
)
"""Sentence in answers with the fewest devices for a given concurrency."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
"""Latency quantiles in every answer."""
QUEUED = "queued"
"""Reason code of a configuration whose requests wait for a slot although the query forbids
queueing.
"""
WEIGHTS_LOG_SD = 0.02
"""Half-width of the 90% interval of the weights' size, as a fraction. Some tensors are padded or
have a wider precision.
"""
UNLIKE_MODEL_LOG_SD = 0.15
"""Half-width of the 90% interval of the cache size, as a fraction, for models whose layers cache
different numbers of tokens. The error is up to 8% on rows with all settings known. Releases pad and
count such layers differently.
"""
KERNELS_ALONE = " (timed kernels alone)"
QUEUE_POSITIONS = (np.arange(200) + 0.5) / 200
"""Quantiles of the requests that represent all requests in the goodput."""


def estimate_row(rows: CostedRows, row: int, *, spread: bool = True) -> InferenceEstimate:
    """Return the estimate of one legal configuration. It has no latencies if the model does not fit
    in memory or the rate is not sustained.

    `spread`: add latency quantiles.
    """
    costs, candidates, problem = rows.costs, rows.candidates, rows.problem
    memory = _memory(rows, row)
    schedulers, fits = int(candidates.schedulers[row]), bool(costs.fits[row])
    static = InferenceEstimate(
        feasible=False,
        parallel=candidates.config(row),
        replicas=int(candidates.replicas[row]),
        memory=memory,
        kv_cache=kv_cache(problem, candidates, row),
        max_concurrency=int(costs.max_running[row]) * schedulers if fits else 0,
        max_concurrency_without_preemption=_requests_without_preemption(rows, row) if fits else 0,
        provenance=_provenance(problem),
    )
    if not fits or not costs.sustained[row]:
        reason = _overload_reason(rows, row) if fits else _memory_reason(rows, row, memory)
        return replace(static, reasons=(reason,))
    ttft, tpot = float(costs.ttft_s[row]), float(costs.tpot_s[row])
    throughput = float(costs.output_tokens_per_second_per_gpu[row])
    latency = float(costs.request_latency_s[row])
    rate = throughput * problem.cluster.num_gpus / problem.output_length
    concurrency = problem.concurrency or rate * latency
    reasons = (*missed_targets(rows, row), *_queue_reasons(rows, row))
    return replace(
        static,
        feasible=not reasons,
        reasons=reasons,
        ttft_s=ttft,
        tpot_s=tpot,
        request_latency_s=latency,
        parts_s={name: float(seconds[row]) for name, seconds in costs.parts.items()},
        output_tokens_per_second_per_gpu=throughput,
        output_tokens_per_second_per_user=1.0 / tpot if tpot > 0.0 else None,
        request_rate_per_second=rate,
        concurrency=concurrency,
        users=math.floor(concurrency + rate * problem.think_time_s + 1e-6),
        running_requests=min(
            float(costs.running[row]) * schedulers, float(problem.concurrency or math.inf)
        ),
        expert_imbalance=_expert_imbalance(rows, row),
        kv_cache_limited=bool(costs.kv_limited[row]),
        **_token_prices(rows, row),
        tails=latency_tails(rows, row) if spread else None,
        goodput=serving_goodput(rows, row),
        intervals=serving_intervals(
            ttft, tpot, throughput, problem, mixers=mixers_log_sds(rows, row)
        ),
        familiarity=familiarity_of(problem),
    )


def _token_prices(rows: CostedRows, row: int) -> dict[str, Any]:
    """Return the cost per million tokens. It is divided between input and output by the time of
    prefill and of decoding.
    """
    problem, costs = rows.problem, rows.costs
    hourly = problem.cluster.price_per_gpu_hour
    if hourly is None:
        return {}
    output = hourly / SECONDS_PER_HOUR / float(costs.output_tokens_per_second_per_gpu[row]) * 1e6
    prompts = float(costs.running[row] * costs.prompt_s[row])
    share = prompts / (prompts + float(costs.parts["decode"][row]))
    by_input = share * output * problem.output_length / problem.input_length
    return {
        "cost_per_million_output_tokens": output,
        "cost_per_million_tokens": TokenPrices(input=by_input, output=(1.0 - share) * output),
    }


def _expert_imbalance(rows: CostedRows, row: int) -> float | None:
    if rows.problem.model.num_experts is None:
        return None
    one = rows.candidates.take(slice(row, row + 1))
    return float(
        imbalance(rows.problem, one, rows.costs.running[row] / one.pipeline_parallel_size)[0]
    )


def _memory(rows: CostedRows, row: int) -> ServingMemory:
    problem, parts = rows.problem, rows.costs.bytes
    whole = (
        problem.input_length + problem.engine.kv_reserved_output_fraction * problem.output_length
    )
    room, running = float(parts.kv_capacity[row]), float(rows.costs.running[row])
    tokens = running * _cache_tokens(rows, row, whole)
    if running > problem.prefix_groups:
        t = rows.candidates.tensor_parallel_size[row : row + 1]
        tokens -= (running - problem.prefix_groups) * float(np.ravel(shared_tokens(problem, t))[0])
    used = min(tokens * float(parts.kv_per_token[row]), max(room, 0.0))
    fixed = {
        f"{name}_bytes": float(getattr(parts, name)[row])
        for name in ("weights", "activations", "logits", "overhead")
    }
    return ServingMemory(
        total_bytes=sum(fixed.values()) + used,
        capacity_bytes=parts.capacity,
        worst_stage=0,
        **fixed,
        kv_cache_bytes=used,
        kv_cache_capacity_bytes=max(room, 0.0),
    )


def kv_cache(problem: ServingProblem, candidates: ServingCandidates, row: int) -> KvCache:
    """Return the size of the KV cache of one replica."""
    one = candidates.take(slice(row, row + 1))
    parts = serving_bytes(problem, one)
    longest = problem.model.max_position_embeddings or problem.longest_request

    # For its longest request, vLLM reserves a window and a complete pass in each windowed layer.
    chunk = float(one.max_num_batched_tokens[0]) * (problem.engine.working_set == "profiled")

    def request_bytes(tokens: float) -> float:
        cached = cached_tokens(problem, one.tensor_parallel_size, tokens, chunk=chunk)
        return float(np.ravel(cached * parts.kv_per_token)[0])

    room, groups = float(parts.kv_capacity[0]), int(one.attention_data_parallel_size[0])
    doubt = math.hypot(problem.engine.reserve_doubt_bytes, WEIGHTS_LOG_SD * parts.weights[0])
    alike = not any(
        kind.sliding_window is not None or kind.is_recurrent for _, kind in problem.model.kinds
    )
    if not alike:
        doubt = math.hypot(doubt, UNLIKE_MODEL_LOG_SD * room)
    low, expected, high = (
        max(int((room + off) / request_bytes(longest) * longest), 0) for off in (-doubt, 0.0, doubt)
    )
    return KvCache(
        tokens=CacheTokens(low=groups * low, expected=groups * expected, high=groups * high),
        bytes_per_device=max(room, 0.0),
        max_context=min(longest, expected),
        requests=groups * int(_requests_at_last_token(problem, one, 0, parts)),
        alike=alike,
    )


def _request_bytes(rows: CostedRows, row: int) -> float:
    """Return the cache bytes of one complete request of the load, or of the longest request for
    which the engine requires room, whichever is larger.
    """
    problem = rows.problem
    whole = max(problem.input_length + problem.output_length, problem.room_at_start)
    tokens = _cache_tokens(rows, row, whole)
    return tokens * float(rows.costs.bytes.kv_per_token[row])


def _cache_tokens(rows: CostedRows, row: int, tokens: float) -> float:
    t = rows.candidates.tensor_parallel_size[row : row + 1]
    return float(np.ravel(cached_tokens(rows.problem, t, tokens))[0])


def _requests_at_last_token(
    problem: ServingProblem, candidates: ServingCandidates, row: int, parts: ServingBytes
) -> float:
    """Return how many requests of the load fit in the cache while they generate their last
    token.
    """
    t = candidates.tensor_parallel_size[row : row + 1]
    room = np.maximum(parts.kv_capacity[row : row + 1], 0.0) / parts.kv_per_token[row : row + 1]
    length = problem.input_length + problem.output_length
    return float(np.ravel(requests_in_cache(problem, t, room, length))[0])


def _requests_without_preemption(rows: CostedRows, row: int) -> int:
    """Return how many requests can run without preemption, even if all of them generate their last
    token at the same time.
    """
    problem, parts = rows.problem, rows.costs.bytes
    fitting = _requests_at_last_token(problem, rows.candidates, row, parts)
    return int(min(fitting, float(rows.candidates.max_num_seqs[row]))) * int(
        rows.candidates.schedulers[row]
    )


def _memory_reason(rows: CostedRows, row: int, memory: ServingMemory) -> Reason:
    one = _request_bytes(rows, row)
    working = memory.activations_bytes + memory.logits_bytes
    needed = memory.weights_bytes + working + memory.overhead_bytes + one
    start = rows.problem.room_at_start
    longest = f" of {start:,} tokens (inference.max_model_len)" if start else ""
    message = (
        f"needs {format_gib(needed)}, has {format_gib(memory.capacity_bytes)}: weights "
        f"{format_gib(memory.weights_bytes)}, keys and values of one "
        f"request{longest} {format_gib(one)}, working set {format_gib(working)}, engine "
        f"{format_gib(memory.overhead_bytes)}; "
        "raise tensor_parallel_size or pipeline_parallel_size, or choose a lower precision"
    )
    return Reason(code=MEMORY, message=message, needed=needed, available=memory.capacity_bytes)


def _overload_reason(rows: CostedRows, row: int) -> Reason:
    problem = rows.problem
    wanted = problem.request_rate_per_second or 0.0
    reached = (
        float(rows.costs.output_tokens_per_second_per_gpu[row])
        * problem.cluster.num_gpus
        / problem.output_length
    )
    message = (
        f"completes at most {reached:,.2f} requests/s, but {wanted:,.2f} arrive; "
        f"about {math.ceil(problem.cluster.num_gpus * wanted / reached):,} devices in this layout "
        "would sustain them"
    )
    return Reason(code=OVERLOADED, message=message, needed=wanted, available=reached)


def _provenance(problem: ServingProblem) -> dict[str, object]:
    return {
        "model": problem.model.name,
        "gpu": problem.cluster.gpu.name,
        "num_gpus": problem.cluster.num_gpus,
        "gpu_efficiency": problem.profile.gpu.gpu,
        "gpu_efficiency_measured": problem.profile.gpu.measured,
        **engine_provenance(problem),
        "load": _describe_load(problem),
        **({} if problem.may_queue else {"queue": NO_QUEUE}),
        "matmul_precision": problem.compute_precision,
        "weight_bytes_each": problem.weight_bytes,
        **(
            {
                "expert_matmul_precision": problem.expert_precision,
                "expert_weight_bytes_each": problem.expert_bytes,
            }
            if problem.model.num_experts
            else {}
        ),
        "kv_element_bytes": problem.kv_element_bytes,
        **(
            {}
            if problem.resumes is None
            else {"prefix_states": resume_sentence(problem, problem.resumes)}
        ),
        "price_per_gpu_hour": problem.cluster.price_per_gpu_hour,
        **simplified_fields(problem.model),
    }


def engine_provenance(problem: ServingProblem) -> dict[str, object]:
    """Return the release and the age of the constants, the release that the query names if it has
    no constants, a draft model that is not counted, and the precision of the weights.
    """
    engine = problem.engine
    uncounted = drafter_sentence(problem.speculative, problem.drafter)
    return {
        "engine_efficiency": f"{engine.engine} "
        f"{engine.version}{KERNELS_ALONE * engine.kernels_alone}",
        "constants_release": engine.version,
        **_constants_age(engine.engine, engine.version),
        **({"engine_version": problem.engine_version} if _has_no_constants(problem) else {}),
        "engine_efficiency_measured": engine.measured and not engine.kernels_alone,
        "precision": problem.precision,
        **({} if uncounted is None else {"drafter": uncounted}),
        **({"assumed": dict(problem.assumed)} if problem.assumed else {}),
    }


def _constants_age(engine: str, release: str) -> dict[str, object]:
    """Return the age of constants that are more than RECENT_RELEASES minor releases old; otherwise
    empty.
    """
    age = release_age(engine, release)
    if age is None or age.minor_releases <= RECENT_RELEASES:
        return {}
    return {"constants_age": dataclasses.asdict(age)}


def _has_no_constants(problem: ServingProblem) -> bool:
    named = problem.engine_version
    return named is not None and version_key(named) != version_key(problem.engine.version)


def _describe_load(problem: ServingProblem) -> str:
    if problem.offline:
        how_many = (
            "more requests than run at once"
            if problem.num_prompts is None
            else f"{problem.num_prompts} requests"
        )
        return f"offline, {how_many} queued at once, latencies from admission, equal lengths"
    if problem.concurrency is not None and problem.think_time_s > 0.0:
        return (
            f"closed, {problem.concurrency} requests in flight, {problem.think_time_s:g} s "
            "between requests, equal lengths"
        )
    if problem.concurrency is not None:
        return f"closed, {problem.concurrency} requests in flight, equal lengths"
    return (
        f"open, {problem.request_rate_per_second} requests/s, independent arrivals, equal lengths"
    )


def latency_quantiles(rows: CostedRows, share: float) -> Quantiles:
    """Return the latencies that a fraction `share` of each configuration's requests does not
    exceed.

    In a closed load, all requests have the same total latency. Therefore, a request with a late
    first token has a shorter time per output token.
    """
    if rows.in_flight is not None:
        return _open_quantiles(rows.problem, rows.candidates, rows.in_flight, share)
    return _closed_quantiles(rows, slice(None), share)


def latency_tails(rows: CostedRows, row: int) -> Tails:
    """Return p50, p90 and p99 of one configuration, and the quantiles used by targets."""
    names = (*QUANTILES, *target_quantiles(rows.problem.targets))
    return tails_of_row(
        {name: latency_quantiles(rows, quantile_fraction(name)) for name in names}, row
    )


def tails_of_row(by_quantile: Mapping[str, Quantiles], row: int) -> Tails:
    """Return the latencies of one row by quantile, including QUANTILES."""

    def tail(latency: str) -> Tail:
        seconds = {
            name: float(getattr(values, latency)[row]) for name, values in by_quantile.items()
        }
        return Tail(
            **{name: seconds[name] for name in QUANTILES},
            others=tuple(pair for pair in seconds.items() if pair[0] not in QUANTILES),
        )

    return Tails(
        ttft_s=tail("ttft_s"), tpot_s=tail("tpot_s"), request_latency_s=tail("request_latency_s")
    )


def serving_goodput(rows: CostedRows, row: int) -> ServingGoodput | None:
    """Return the rate of requests per second per GPU that meet all limits on single requests; None
    without targets.
    """
    bounds = request_bounds(rows.problem.targets)
    if not bounds:
        return None
    kept = np.ones(len(QUEUE_POSITIONS), dtype=bool)
    requests = _request_latencies(rows, row)
    for name, bound in bounds.items():
        kept &= np.broadcast_to(getattr(requests, name) <= bound, kept.shape)
    fraction = float(np.mean(kept))
    rate = float(rows.costs.output_tokens_per_second_per_gpu[row]) / rows.problem.output_length
    return ServingGoodput(fraction=fraction, requests_per_second_per_gpu=fraction * rate)


def target_quantiles(targets: Targets) -> tuple[str, ...]:
    """Return the quantiles used by targets that are not in every answer, ascending."""
    names = {quantile for _, _, quantile, _ in targets.limits() if quantile is not None}
    return tuple(sorted(names - QUANTILES.keys(), key=quantile_fraction))


def request_bounds(targets: Targets) -> dict[str, float]:
    """Return the limit of each latency for a single request.

    It is the tightest target on a quantile of this latency or, without any, the target on its mean.
    """
    bounds: dict[str, dict[bool, float]] = {}
    for _, latency, quantile, limit in targets.limits():
        of_latency = bounds.setdefault(latency, {})
        of_latency[quantile is None] = min(limit, of_latency.get(quantile is None, math.inf))
    return {
        latency: by_mean.get(False, by_mean.get(True, math.inf))
        for latency, by_mean in bounds.items()
    }


def _request_latencies(rows: CostedRows, row: int) -> Quantiles:
    """Return the latencies of the requests at QUEUE_POSITIONS, in service order."""
    if rows.in_flight is not None:
        each = np.full(len(QUEUE_POSITIONS), row)
        return _open_quantiles(
            rows.problem, rows.candidates.take(each), rows.in_flight[each], QUEUE_POSITIONS
        )
    latencies = _closed_quantiles(rows, slice(row, row + 1), QUEUE_POSITIONS)
    return replace(
        latencies, tpot_s=latencies.tpot_s[::-1]
    )  # The last request served waits shortest between tokens.


def _closed_quantiles(rows: CostedRows, part: slice, share: float | FloatArray) -> Quantiles:
    """Return latency quantiles under a closed load. The shapes of the rows in `part` and of `share`
    are broadcast.
    """
    costs, output, wave = (
        rows.costs,
        rows.problem.output_length,
        0.0 if rows.problem.offline else rows.problem.wave_share,
    )
    wave_s = costs.wave_s[part]
    return Quantiles(
        ttft_s=ttft_quantile(
            ttft_s=costs.ttft_s[part], wave_s=wave_s, share=share, wave_share=wave
        ),
        tpot_s=tpot_quantile(
            tpot_s=costs.tpot_s[part],
            wave_s=wave_s,
            share=share,
            wave_share=wave,
            output_length=output,
        ),
        request_latency_s=costs.request_latency_s[part],
    )


def _open_quantiles(
    problem: ServingProblem,
    candidates: ServingCandidates,
    in_flight: FloatArray,
    share: float | FloatArray,
) -> Quantiles:
    """Return latency quantiles for independent arrivals with `in_flight` requests in flight on
    average.
    """
    return open_quantiles(
        case=problem,
        candidates=candidates,
        load=in_flight,
        share=share,
    )


def bounded_values(rows: CostedRows) -> Iterator[tuple[str, float, FloatArray]]:
    """Yield (name, limit, predicted values) of each target. The values are means or quantiles."""
    for name, latency, quantile, limit in rows.problem.targets.limits():
        yield (
            name,
            limit,
            getattr(
                rows.costs
                if quantile is None
                else latency_quantiles(rows, quantile_fraction(quantile)),
                latency,
            ),
        )


def meets_targets(rows: CostedRows) -> BoolArray:
    """Return a mask of the rows that meet all latency targets."""
    met = np.ones(len(rows.candidates), dtype=bool)
    for _, limit, values in bounded_values(rows):
        met &= values <= limit
    return met


def has_forbidden_queue(rows: CostedRows) -> BoolArray:
    """Return a mask of the rows whose requests wait for a slot although the query forbids
    queueing.
    """
    if rows.problem.may_queue:
        return np.zeros(len(rows.candidates), dtype=bool)
    return _load_over_room(rows) > 1.0


def _load_over_room(rows: CostedRows) -> FloatArray:
    """Return the number of requests in flight divided by the maximum number of running requests,
    shape (n,).
    """
    ratio: FloatArray = rows.candidates.concurrency / (
        rows.costs.max_running * rows.candidates.schedulers
    )
    return ratio


def _queue_reasons(rows: CostedRows, row: int) -> tuple[Reason, ...]:
    if not has_forbidden_queue(rows)[row]:
        return ()
    in_flight = int(rows.candidates.concurrency[row])
    room = int(rows.costs.max_running[row] * rows.candidates.schedulers[row])
    message = (
        f"runs {room:,} of {in_flight:,} requests at once; the others wait. Set "
        "targets.ttft_s to allow a queue"
    )
    return (Reason(code=QUEUED, message=message, needed=in_flight, available=room),)


def worst_miss(rows: CostedRows) -> FloatArray:
    """Return the largest ratio of a predicted value to its target, or of requests in flight to
    slots if queueing is forbidden, shape (n,).
    """
    worst = np.zeros(len(rows.candidates)) if rows.problem.may_queue else _load_over_room(rows)
    for _, limit, values in bounded_values(rows):
        worst = np.maximum(worst, values / limit)
    return worst


def missed_targets(rows: CostedRows, row: int) -> tuple[Reason, ...]:
    """Return a reason for each target that the configuration misses."""
    reasons: list[Reason] = []
    for name, limit, values in bounded_values(rows):
        reasons += target_reasons(name, value=float(values[row]), limit=limit)
    return tuple(reasons)


def target_reasons(name: str, *, value: float, limit: float) -> tuple[Reason, ...]:
    """Return a reason if a value exceeds its target, else an empty tuple."""
    if value <= limit:
        return ()
    message = missed_words(name, value=value, limit=limit)
    return (Reason(code="target_missed", message=message, needed=value, available=limit),)
