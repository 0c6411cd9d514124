"""Latency targets: which predicted figure each bounds, and which candidates meet them all."""

from __future__ import annotations

import numpy as np

from hp_tool.cost.candidates import BoolArray, FloatArray
from hp_tool.cost.inference.serving import ServingCosts
from hp_tool.cost.inference.tails import tpot_quantile, ttft_quantile
from hp_tool.serving.problem import ServingProblem


def meets_targets(costs: ServingCosts, problem: ServingProblem) -> BoolArray:
    """True where every latency target is met."""
    met = np.ones(len(costs.ttft_s), dtype=bool)
    for name in problem.targets.__slots__:
        limit = getattr(problem.targets, name)
        if limit is not None:
            met &= target_values(name, costs=costs, problem=problem) <= limit
    return met


def target_values(name: str, *, costs: ServingCosts, problem: ServingProblem) -> FloatArray:
    """The predicted values that target `name` bounds: a mean, or a quantile such as ttft_p99_s."""
    latency, _, quantile = name.removesuffix("_s").partition("_p")
    if not quantile.isdigit():
        values: FloatArray = getattr(costs, name)
        return values
    share, wave = int(quantile) / 100.0, problem.wave_share
    if latency == "ttft":
        return ttft_quantile(costs, share=share, wave_share=wave)
    return tpot_quantile(costs, share=share, wave_share=wave, output_length=problem.nouns.output_length)
