"""Chances and intervals in words: how a configuration fits, and what would narrow the interval of its step time."""

from hp_tool.domain.result import Estimate
from hp_tool.units import GIB, duration, gib

LEAST = 1e-4
NAMES = {"training.framework_version": "the release"}
"""Keys of a query as people call them."""
RESERVED = "blocks that the allocator holds in reserve, and gives back before it fails, come on top"


def risk(probability: float) -> str:
    """Return a chance of running out of memory as `3.2 %`, `0.15 %`, `below 0.01 %`."""
    if probability < LEAST:
        return f"below {100 * LEAST:g} %"
    if probability > 1.0 - LEAST:
        return f"above {100 * (1.0 - LEAST):g} %"
    return f"{100 * probability:.1f} %" if probability >= 0.00995 else f"{100 * probability:.2g} %"


def chance(estimate: Estimate) -> str:
    """Return `3.2 % chance of running out of memory`; empty where the estimate has none."""
    fails = estimate.out_of_memory_probability
    return "" if fails is None else f"{risk(fails)} chance of running out of memory"


def needs(estimate: Estimate) -> str:
    """Return the interval of memory with what it is of and what its top does not count; empty without one."""
    if estimate.intervals is None or estimate.memory is None:
        return ""
    low, high = estimate.intervals.memory_total_bytes
    device = "" if estimate.memory.device_bytes is None else f" of the device's {gib(estimate.memory.device_bytes)}"
    between = f"{low / GIB:.1f} to {gib(high)}{device} are allocated with {estimate.intervals.confidence:.0%} confidence"
    reserved = estimate.intervals.memory_reserved_bytes
    return f"{between}; {RESERVED}" + (f", up to {gib(reserved[1])} in all" if reserved else "")


def narrower(estimate: Estimate) -> str:
    """Return `name the release (training.framework_version: 26.08): 21 s to 32 s instead of 15 s to 44 s`; empty where nothing
    unsaid widens the interval of the step time.
    """
    if estimate.narrowest is None or estimate.intervals is None:
        return ""
    values = ", ".join(f"{NAMES.get(path, path)} ({path}: {value})" for path, value in estimate.narrowest.set.items())
    ends = (" to ".join(map(duration, each)) for each in (estimate.narrowest.step_s, estimate.intervals.step_s))
    return f"name {values}: {' instead of '.join(ends)}"
