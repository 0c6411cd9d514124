"""When a run has told enough before its last step: its time is known well, or is hopeless against the best so far."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hp_tool.domain.measurement import ProfileRequest

MIN_STEPS = 4
"""The median lies between the shortest and the longest of n steps with probability 1 - 2^(1-n): 7 in 8 for four."""


def why_stop(request: ProfileRequest, times_s: Sequence[float]) -> str | None:
    """Why no further step is needed after these (warm-up included), in words for the measurement's cause; None: go on.

    Every rank asks with the same times, those of the slowest rank, so that all stop together.
    """
    measured = times_s[request.warmup_steps :]
    if not measured or len(measured) >= request.steps:
        return None
    done = f"stopped after {len(measured)} of {request.steps} steps"
    if request.longest_step_s is not None and min(measured) > request.longest_step_s:
        return f"{done}: {min(measured):.4g} s is beyond {request.longest_step_s:.4g} s, hopeless against the best so far"
    median = statistics.median(measured)
    spread = (max(measured) - min(measured)) / median
    if request.step_tolerance_fraction is not None and len(measured) >= MIN_STEPS and spread <= request.step_tolerance_fraction:
        return f"{done}: all within {spread:.2%}"
    return None
