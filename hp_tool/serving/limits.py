"""Latency targets: which predicted figure each bounds, and which candidates meet them all."""

from __future__ import annotations

import numpy as np

from hp_tool.cost.arrays import BoolArray, FloatArray
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.engine import ServingCosts
from hp_tool.serving.problem import ServingProblem
from hp_tool.serving.tails import quantiles


def meets_targets(costs: ServingCosts, *, candidates: ServingCandidates, problem: ServingProblem) -> BoolArray:
    """True where every latency target is met."""
    met = np.ones(len(costs.ttft_s), dtype=bool)
    for name in problem.targets.__slots__:
        limit = getattr(problem.targets, name)
        if limit is not None:
            met &= target_values(name, costs=costs, candidates=candidates, problem=problem) <= limit
    return met


def target_values(name: str, *, costs: ServingCosts, candidates: ServingCandidates, problem: ServingProblem) -> FloatArray:
    """The predicted values that target `name` bounds: a mean, or a quantile such as ttft_p99_s."""
    latency, _, quantile = name.removesuffix("_s").partition("_p")
    if not quantile.isdigit():
        values: FloatArray = getattr(costs, name)
        return values
    found = quantiles(int(quantile) / 100.0, costs=costs, candidates=candidates, problem=problem)
    return found.ttft_s if latency == "ttft" else found.tpot_s
