"""What a training must keep to: max_days and max_cost as a longest step time, those that a prediction misses, and the least
that a step takes.
"""

from __future__ import annotations

from dataclasses import replace

from hp_tool.cost.flops import step_tokens, token_flops
from hp_tool.cost.goodput import goodput
from hp_tool.cost.roofline import peak_flops
from hp_tool.domain.result import Estimate, Reason
from hp_tool.training.problem import TrainingProblem
from hp_tool.units import SECONDS_PER_DAY, SECONDS_PER_HOUR

BEYOND_PEAK = 2.0
"""Kernels skip the causal half of attention at most."""


def longest_step_s(problem: TrainingProblem) -> float:
    """The step time at which max_days or max_cost is just met; infinity without either. With training.reliability both count
    the time that failures cost.
    """
    tokens = problem.workload.total_tokens
    if tokens is None:
        return float("inf")
    kept = goodput(case=problem)
    steps = tokens / step_tokens(problem.workload) / (1.0 if kept is None else kept.fraction)
    limits = [float("inf")]
    if problem.constraints.max_days is not None:
        limits.append(problem.constraints.max_days * SECONDS_PER_DAY / steps)
    if problem.constraints.max_cost is not None and problem.cluster.price_per_gpu_hour:
        hours = problem.constraints.max_cost / (problem.cluster.price_per_gpu_hour * problem.cluster.num_gpus)
        limits.append(hours * SECONDS_PER_HOUR / steps)
    return min(limits)


def least_step_s(problem: TrainingProblem) -> float:
    """No step is faster than its model FLOPs at BEYOND_PEAK times what the devices' datasheets say."""
    cluster, workload = problem.cluster, problem.workload
    work = token_flops(problem.model, workload).model * step_tokens(workload)
    peak = max(peak_flops(kind.gpu, precision=workload.precision) for kind in cluster.kinds or (cluster,))
    return work / (BEYOND_PEAK * peak * cluster.num_gpus)


def missed_targets(result: Estimate, problem: TrainingProblem) -> tuple[Reason, ...]:
    """The limits above which the prediction is: each with its value, the limit, and what the time goes into."""
    reasons = []
    for name, value, limit in (
        ("max_days", result.calendar_days, problem.constraints.max_days),
        ("max_cost", result.cost, problem.constraints.max_cost),
    ):
        if value is not None and limit is not None and value > limit:
            missed = f"{name.removeprefix('max_')} {value:,.1f} is above constraints.{name} {limit:,.1f}"
            message = missed + _in_parts(result, value)
            reasons.append(Reason(code="target_missed", message=message, needed=value, available=limit))
    return tuple(reasons)


def _in_parts(result: Estimate, value: float) -> str:
    """`: compute 18.1, pipeline bubble 2.3`: the value shared out as the step's time is, from the largest part down."""
    if result.time is None:
        return ""
    shares = {name.replace("_", " "): seconds / result.time.step_s for name, seconds in result.time.parts_s.items()}
    largest = sorted(shares.items(), key=lambda item: -item[1])
    return ": " + ", ".join(f"{name} {share * value:,.1f}" for name, share in largest if share >= 0.01)


def with_missed_targets(found: Estimate, problem: TrainingProblem) -> Estimate:
    """The estimate, infeasible where it misses a limit, each of those among its reasons."""
    missed = missed_targets(found, problem)
    if not missed:
        return found
    return replace(found, feasible=False, reasons=found.reasons + missed)
