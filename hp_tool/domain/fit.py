"""Classify how well a configuration fits in memory."""

from __future__ import annotations

from typing import Literal

Fit = Literal["fits", "tight", "too little headroom", "unlikely to fit", "does not fit"]
SAFE_PROBABILITY = 0.01
"""Maximum probability of running out of memory at which a configuration fits. Candidates up to this
probability count as equally safe.
"""
EVEN_PROBABILITY = 0.5
SURE_PROBABILITY = 0.99


def fit_of(*, out_of_memory_probability: float, within_headroom: bool) -> Fit:
    """Return the fit class for a probability of running out of memory.

    Up to SAFE_PROBABILITY the configuration fits; above, it is tight, then unlikely to fit, then it
    does not fit. A configuration that would probably run but leaves less free memory than
    `memory_headroom_fraction` (not `within_headroom`) has too little headroom and is infeasible. A
    configuration that fits or is tight is feasible.
    """
    if out_of_memory_probability > SURE_PROBABILITY:
        return "does not fit"
    if out_of_memory_probability > EVEN_PROBABILITY:
        return "unlikely to fit"
    if not within_headroom:
        return "too little headroom"
    return "tight" if out_of_memory_probability > SAFE_PROBABILITY else "fits"
