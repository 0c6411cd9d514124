"""Requests that arrive at a rate: how many are then in flight (Little's law), and the costs at that concurrency."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hp_tool.cost.inference.arrivals import steady
from hp_tool.cost.inference.candidates import ServingCandidates, ServingNouns
from hp_tool.cost.inference.serving import ServingCosts, serving_costs


def costs_at_rate(
    *, nouns: ServingNouns, candidates: ServingCandidates, requests_per_second: float, memory_headroom_fraction: float = 0.0
) -> ServingCosts:
    """Costs at the smallest concurrency whose completed requests a second reach the rate; shape of the candidates.

    Independent arrivals start in no common wave. Where not even full batches reach the rate, `sustained` is False and the
    rest is of full batches: the true queue grows without end.
    """
    calm = steady(nouns)
    devices = nouns.cluster.num_gpus

    def at(concurrency: np.ndarray) -> tuple[ServingCosts, np.ndarray]:
        loaded = replace(candidates, concurrency=concurrency)
        costs = serving_costs(nouns=calm, candidates=loaded, memory_headroom_fraction=memory_headroom_fraction)
        return costs, costs.output_tokens_per_second_per_gpu * devices / nouns.output_length

    ones = np.ones(len(candidates), dtype=np.int64)
    high = np.ceil(at(ones)[0].max_running * candidates.schedulers).astype(np.int64)
    low = np.zeros_like(high)  # never enough; `high` is enough wherever anything is
    for _ in range(int(high.max(initial=1)).bit_length()):
        middle = np.maximum((low + high) // 2, 1)
        enough = at(middle)[1] >= requests_per_second
        high, low = np.where(enough, middle, high), np.where(enough, low, middle)
    costs, reached = at(high)
    sustained = reached >= requests_per_second
    served = np.minimum(reached, requests_per_second) * nouns.output_length / devices
    return replace(costs, sustained=sustained, output_tokens_per_second_per_gpu=served)
