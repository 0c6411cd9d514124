"""Whether a configuration fits, in a word for its probability of running out of memory."""

from __future__ import annotations

from typing import Literal

Fit = Literal["fits", "tight", "too little headroom", "unlikely to fit", "does not fit"]
SAFE_PROBABILITY = 0.01
"""Chance of running out of memory up to which a configuration fits, and up to which candidates
count as equally safe.
"""
EVEN_PROBABILITY = 0.5
SURE_PROBABILITY = 0.99


def fit_of(*, out_of_memory_probability: float, within_headroom: bool) -> Fit:
    """Return the word for a chance of running out of memory.

    Up to SAFE it fits, up to EVEN it is tight, up to SURE unlikely to fit, beyond that it does not.
    What would rather run than not, but leaves less free than `memory_headroom_fraction` asks for
    (not `within_headroom`), has too little headroom: such a configuration is infeasible, one that
    fits or is tight is not.
    """
    if out_of_memory_probability > SURE_PROBABILITY:
        return "does not fit"
    if out_of_memory_probability > EVEN_PROBABILITY:
        return "unlikely to fit"
    if not within_headroom:
        return "too little headroom"
    return "tight" if out_of_memory_probability > SAFE_PROBABILITY else "fits"
