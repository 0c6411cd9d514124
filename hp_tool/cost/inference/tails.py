"""Quantiles of latency under a closed load of equal lengths: requests differ by their place in the wave they start with.

A share w of the requests starts together with the others of its batch and waits anywhere between nothing and the whole of
it; the others wait for their group alone. So TTFT is a base plus X, X = 0 with probability 1 - w, else uniform up to twice
its mean. What a request waits before its first token it does not lose after it: the latency in all is the same.
"""

from __future__ import annotations

import numpy as np

from hp_tool.cost.elementwise import FloatArray
from hp_tool.cost.inference.serving import ServingCosts


def ttft_quantile(costs: ServingCosts, *, share: float, wave_share: float) -> FloatArray:
    """Seconds that `share` of the requests do not exceed; shape (n,)."""
    return costs.ttft_s + (_place(share, wave_share) - 1.0) * costs.wave_s


def tpot_quantile(costs: ServingCosts, *, share: float, wave_share: float, output_length: int) -> FloatArray:
    """The same of the time per output token: slowest are those that started first."""
    if output_length < 2:
        return np.zeros(len(costs.tpot_s))
    return costs.tpot_s + (1.0 - _place(1.0 - share, wave_share)) * costs.wave_s / (output_length - 1.0)


def _place(share: float, wave_share: float) -> float:
    """Quantile of X over its mean."""
    w = min(wave_share, 1.0)
    return 2.0 * max(share - (1.0 - w), 0.0) / w**2 if w > 0.0 else 1.0
