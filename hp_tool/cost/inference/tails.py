"""Quantiles of latency under a closed load of equal lengths: requests differ by their place in the wave they start with.

A share w of the requests starts together with the others of its batch and waits anywhere between nothing and the whole
wave W; the others wait for their group alone. So TTFT is a base plus X, X = 0 with probability 1 - w, else uniform on (0, W).
What a request waits before its first token it does not lose after it: the latency in all is the same.
"""

from __future__ import annotations

import numpy as np

from hp_tool.cost.candidates import FloatArray
from hp_tool.cost.inference.serving import ServingCosts


def ttft_quantile(costs: ServingCosts, *, share: float, wave_share: float) -> FloatArray:
    """Seconds that `share` of the requests do not exceed; shape (n,)."""
    return _base(costs, wave_share) + _place(share, wave_share) * costs.wave_s


def tpot_quantile(costs: ServingCosts, *, share: float, wave_share: float, output_length: int) -> FloatArray:
    """The same of the time per output token: slowest are those that started first."""
    if output_length < 2:
        return np.zeros(len(costs.tpot_s))
    ttft = _base(costs, wave_share) + _place(1.0 - share, wave_share) * costs.wave_s
    return (costs.request_latency_s - ttft) / (output_length - 1.0)


def _base(costs: ServingCosts, wave_share: float) -> FloatArray:
    """TTFT of a request that starts with no wave, so that the mean over all is ttft_s."""
    w = min(wave_share, 1.0)
    return np.maximum(costs.ttft_s - 0.5 * w * costs.wave_s, 0.0)


def _place(share: float, wave_share: float) -> float:
    """Quantile of X / W."""
    w = min(wave_share, 1.0)
    return max(share - (1.0 - w), 0.0) / w if w > 0.0 else 0.0
