"""The plan that a budget buys: as asked, on the fewest devices for a deadline, or as much as a time allows."""

from __future__ import annotations

import math
from dataclasses import replace

from hp_tool.budgets.plan import Plan, Planner
from hp_tool.cost.roofline import peak_flops
from hp_tool.units import SECONDS_PER_DAY

CLOSE = 0.02
"""Days off the budget at which tokens fill the rest."""
MAX_PLANS = 24
_SMALLER = 4.0
"""Factor on compute after a model that fits nowhere."""


def solved(planner: Planner, *, flops: float | None) -> Plan:
    """The plan of 6 N D = `flops`; None: of what the time allows."""
    days = planner.query.days
    if flops is None:
        assert days is not None
        return _filled(planner, days=days)
    return planner.timed(planner.of_flops(flops), deadline_days=days)


def _filled(planner: Planner, *, days: float) -> Plan:
    """The largest plan by the law that the cluster does in so many calendar days.

    Compute and throughput settle together: the compute of a plan times the budget over its days is the next one's. The first
    is what the devices would do at their peak, so an upper bound. Shapes are coarse, and memory may end the way up; so the
    tokens then fill the time of the nearest plan that fits.
    """
    assert planner.cluster is not None
    peak = peak_flops(planner.cluster.gpu, precision=planner.query.precision)
    flops = peak * planner.cluster.num_gpus * days * SECONDS_PER_DAY
    low, high = 0.0, math.inf
    best, nearest = None, math.inf
    for _ in range(MAX_PLANS):
        plan = planner.timed(planner.of_flops(flops))
        following = flops / _SMALLER
        if (needed := plan.effective_days) is None:
            high = flops
        else:
            share = days / needed
            low, high = (flops, high) if share >= 1.0 else (low, flops)
            following = flops * share
            if abs(math.log(share)) < nearest:
                best, nearest = plan, abs(math.log(share))
        if nearest <= CLOSE or high <= low * (1.0 + CLOSE):
            break
        flops = following if low < following < high else math.sqrt(low * high)
    if best is None:
        return plan
    assert best.effective_days is not None
    tokens = best.tokens * days / best.effective_days
    return planner.timed(replace(best, workload=replace(best.workload, total_tokens=tokens)))
