"""How a configuration fits, in words: the chance of running out of memory, and the interval that it comes from."""

from hp_tool.domain.result import Estimate
from hp_tool.units import GIB, gib

LEAST = 1e-4
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
