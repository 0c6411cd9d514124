"""Limits of a training: max_days and max_cost as a longest step time, the reasons for missing them, and a step's minimum."""

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
    """The step time at which max_days or max_cost is just met; infinity without either. With training.reliability both
    include the time that failures cost.
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
    """A lower bound of the step time: its model FLOPs at BEYOND_PEAK times the devices' datasheet peak."""
    cluster, workload = problem.cluster, problem.workload
    work = token_flops(problem.model, workload).model * step_tokens(workload)
    peak = max(peak_flops(kind.gpu, precision=workload.precision) for kind in cluster.kinds or (cluster,))
    return work / (BEYOND_PEAK * peak * cluster.num_gpus)


def missed_targets(estimate: Estimate, problem: TrainingProblem) -> tuple[Reason, ...]:
    """A reason for each limit that the estimate exceeds: its value, the limit, and the parts of a step it goes into."""
    reasons = []
    for name, limit in (("max_days", problem.constraints.max_days), ("max_cost", problem.constraints.max_cost)):
        if limit is None:
            continue
        value = estimate.calendar_days if name == "max_days" else estimate.cost
        if value is not None and value > limit:
            missed = f"{name.removeprefix('max_')} {value:,.1f} is above constraints.{name} {limit:,.1f}"
            message = missed + _in_parts(estimate, value)
            reasons.append(Reason(code="target_missed", message=message, needed=value, available=limit))
    return tuple(reasons)


def _in_parts(estimate: Estimate, value: float) -> str:
    """`: compute 18.1, pipeline bubble 2.3`: the value divided like the step's time, largest part first."""
    if estimate.time is None:
        return ""
    shares = {name.replace("_", " "): seconds / estimate.time.step_s for name, seconds in estimate.time.parts_s.items()}
    largest = sorted(shares.items(), key=lambda item: -item[1])
    return ": " + ", ".join(f"{name} {share * value:,.1f}" for name, share in largest if share >= 0.01)


def with_missed_targets(estimate: Estimate, problem: TrainingProblem) -> Estimate:
    """The estimate with a reason for each limit that it misses; it is infeasible if there is one."""
    missed = missed_targets(estimate, problem)
    return replace(estimate, feasible=False, reasons=estimate.reasons + missed) if missed else estimate
