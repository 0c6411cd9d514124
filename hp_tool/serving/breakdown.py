"""One row of serving costs as the full estimate a user reads: memory, latencies with tails and intervals, reasons."""

from __future__ import annotations

import math
from dataclasses import replace

from hp_tool.cost.legality import MEMORY
from hp_tool.cost.serving.operations import seen_tokens
from hp_tool.cost.uncertainty import simplified
from hp_tool.domain.result import Reason
from hp_tool.domain.serving import InferenceEstimate, ServingIntervals, ServingMemory
from hp_tool.serving.problem import CostedRows, ServingProblem
from hp_tool.serving.targets import goodput, missed_targets, tails
from hp_tool.units import SECONDS_PER_HOUR, gib

OVERLOADED = "overloaded"
"""The reason of a configuration that cannot keep up with the load's request rate."""
CONFIDENCE = 0.9
_Z90 = 1.645
_UNMEASURED = 2.0
"""Intervals widen by this if the GPU's or the engine version's constants are borrowed from another."""


def estimate_row(rows: CostedRows, row: int) -> InferenceEstimate:
    """The estimate of one legal configuration; without latencies where the model does not fit."""
    costs, candidates, problem = rows.costs, rows.candidates, rows.problem
    memory = _memory(rows, row)
    schedulers, fits = int(candidates.schedulers[row]), bool(costs.fits[row])
    static = InferenceEstimate(
        feasible=False,
        parallel=candidates.config(row),
        replicas=int(candidates.replicas[row]),
        memory=memory,
        max_concurrency=int(costs.max_running[row]) * schedulers if fits else 0,
        max_concurrency_without_preemption=_without_preemption(rows, row) if fits else 0,
        provenance=_provenance(problem),
    )
    if not fits or not costs.sustained[row]:
        reason = _overloaded(rows, row) if fits else _too_large(rows, row, memory)
        return replace(static, reasons=(reason,))
    ttft, tpot = float(costs.ttft_s[row]), float(costs.tpot_s[row])
    throughput = float(costs.output_tokens_per_second_per_gpu[row])
    latency = float(costs.request_latency_s[row])
    price = problem.cluster.price_per_gpu_hour
    reasons = missed_targets(rows, row)
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
        request_rate_per_second=throughput * problem.cluster.num_gpus / problem.output_length,
        running_requests=min(float(costs.running[row]) * schedulers, float(problem.concurrency or math.inf)),
        kv_cache_limited=bool(costs.kv_limited[row]),
        cost_per_million_output_tokens=None if price is None else price / SECONDS_PER_HOUR / throughput * 1e6,
        tails=tails(rows, row),
        goodput=goodput(rows, row),
        intervals=_intervals(ttft, tpot, throughput, problem),
    )


def _memory(rows: CostedRows, row: int) -> ServingMemory:
    problem, parts = rows.problem, rows.costs.bytes
    whole = problem.input_length + problem.engine.kv_reserved_output_fraction * problem.output_length
    tokens = seen_tokens(problem.model, whole)
    room = float(parts.kv_capacity[row])
    used = min(float(rows.costs.running[row]) * tokens * float(parts.kv_per_token[row]), max(room, 0.0))
    fixed = {f"{name}_bytes": float(getattr(parts, name)[row]) for name in ("weights", "activations", "logits", "overhead")}
    return ServingMemory(
        total_bytes=sum(fixed.values()) + used,
        capacity_bytes=parts.capacity,
        worst_stage=0,
        **fixed,
        kv_cache_bytes=used,
        kv_cache_capacity_bytes=max(room, 0.0),
    )


def _request_bytes(rows: CostedRows, row: int) -> float:
    """Keys and values of one whole request, prompt and answer."""
    problem = rows.problem
    return seen_tokens(problem.model, problem.input_length + problem.output_length) * float(rows.costs.bytes.kv_per_token[row])


def _without_preemption(rows: CostedRows, row: int) -> int:
    """Requests that find room for prompt and answer even if all are at their last token."""
    fitting = max(float(rows.costs.bytes.kv_capacity[row]), 0.0) / _request_bytes(rows, row)
    return int(min(fitting, float(rows.candidates.max_num_seqs[row]))) * int(rows.candidates.schedulers[row])


def _too_large(rows: CostedRows, row: int, memory: ServingMemory) -> Reason:
    """Weights, working set and one whole request are the least an engine needs."""
    one = _request_bytes(rows, row)
    working = memory.activations_bytes + memory.logits_bytes
    needed = memory.weights_bytes + working + memory.overhead_bytes + one
    message = (
        f"needs {gib(needed)}, has {gib(memory.capacity_bytes)}: weights {gib(memory.weights_bytes)}, keys and values of one "
        f"request {gib(one)}, working set {gib(working)}, engine {gib(memory.overhead_bytes)}; "
        "raise tensor_parallel_size or pipeline_parallel_size, or choose a narrower precision"
    )
    return Reason(code=MEMORY, message=message, needed=needed, available=memory.capacity_bytes)


def _overloaded(rows: CostedRows, row: int) -> Reason:
    """Full batches, and still requests come faster than they leave."""
    problem = rows.problem
    wanted = problem.request_rate_per_second or 0.0
    reached = float(rows.costs.output_tokens_per_second_per_gpu[row]) * problem.cluster.num_gpus / problem.output_length
    message = (
        f"completes {reached:,.2f} requests a second at most, {wanted:,.2f} arrive; "
        f"about {math.ceil(problem.cluster.num_gpus * wanted / reached)} devices of this layout would keep up"
    )
    return Reason(code=OVERLOADED, message=message, needed=wanted, available=reached)


def _intervals(ttft: float, tpot: float, throughput: float, problem: ServingProblem) -> ServingIntervals:
    engine, gpu = problem.engine, problem.profile.gpu
    width = _Z90 * (1.0 if engine.measured and gpu.measured else _UNMEASURED)

    def interval(value: float, log_sd: float) -> tuple[float, float]:
        return value * math.exp(-width * log_sd), value * math.exp(width * log_sd)

    return ServingIntervals(
        confidence=CONFIDENCE,
        ttft_s=interval(ttft, engine.ttft_log_sd),
        tpot_s=interval(tpot, engine.tpot_log_sd),
        output_tokens_per_second_per_gpu=interval(throughput, engine.throughput_log_sd),
        source=engine.fitted_on,
    )


def _provenance(problem: ServingProblem) -> dict[str, object]:
    return {
        "model": problem.model.name,
        "gpu": problem.cluster.gpu.name,
        "num_gpus": problem.cluster.num_gpus,
        "gpu_efficiency": problem.profile.gpu.gpu,
        "gpu_efficiency_measured": problem.profile.gpu.measured,
        "engine_efficiency": f"{problem.engine.engine} {problem.engine.version}",
        "engine_efficiency_measured": problem.engine.measured,
        "load": f"closed, {problem.concurrency} requests in flight, equal lengths"
        if problem.concurrency is not None
        else f"open, {problem.request_rate_per_second} requests a second, independent arrivals, equal lengths",
        "matmul_precision": problem.compute_precision,
        "weight_bytes_each": problem.weight_bytes,
        "kv_element_bytes": problem.kv_element_bytes,
        "price_per_gpu_hour": problem.cluster.price_per_gpu_hour,
        **simplified(problem.model),
    }
