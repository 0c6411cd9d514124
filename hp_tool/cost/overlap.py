"""Overlap of communication with compute as a query sets it: settings replace fitted constants."""

import dataclasses
from typing import Any

from hp_tool.domain.efficiency import FrameworkEfficiency
from hp_tool.domain.switches import OVERLAPS
from hp_tool.domain.workload import OverlapSpec
from hp_tool.errors import UnsupportedError

MERGED = "expert_parallel"
"""If on, it is not a fraction of a pass: see `moe.overlap_with_other_pass`."""


def with_overlap(
    framework: FrameworkEfficiency, *, overlap: OverlapSpec | None, newest: FrameworkEfficiency
) -> FrameworkEfficiency:
    """Return the framework's constants under a query's switches.

    Off overlaps nothing. On overlaps the measured fraction, or that of the newest measured software
    (`newest`) if the runs of these constants overlapped none.

    Raises:
        UnsupportedError: There is no measurement.
    """
    if overlap is None:
        return framework
    changed: dict[str, Any] = {}
    for field, kind in OVERLAPS.items():
        is_on = getattr(overlap, field)
        if is_on is None or (is_on and field == MERGED):
            continue
        shares = {
            name: (getattr(framework, name) or getattr(newest, name)) if is_on else 0.0
            for name in kind.constants
        }
        if is_on and not any(shares.values()):
            raise UnsupportedError(
                f"training.overlap.{field}: true is not modelled: no measured run of "
                f"{framework.framework} hides it; "
                "leave it out",
                field=f"training.overlap.{field}",
            )
        changed |= shares
    return dataclasses.replace(framework, **changed)
