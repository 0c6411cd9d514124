"""Overlap of communication with compute, as set by a query. The query's settings replace fitted
constants.
"""

import dataclasses
from typing import Any

from hp_tool.domain.efficiency import FrameworkEfficiency
from hp_tool.domain.switches import OVERLAPS
from hp_tool.domain.workload import OverlapSpec
from hp_tool.errors import UnsupportedError

MERGED = "expert_parallel"
"""Overlap setting that hides communication by merging passes instead of by a fixed fraction
(`moe.overlap_with_other_pass`).
"""


def with_overlap(
    framework: FrameworkEfficiency, *, overlap: OverlapSpec | None, newest: FrameworkEfficiency
) -> FrameworkEfficiency:
    """Return the framework's constants with the query's overlap settings applied.

    A disabled overlap hides nothing. An enabled overlap hides the measured fraction. If the runs to
    which the constants were fitted had no overlap, it hides the fraction measured for the newest
    software (`newest`).

    Raises:
        UnsupportedError: The overlap was never measured.
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
                f"training.overlap.{field}: true is not supported, because no measured run of "
                f"{framework.framework} overlaps it; "
                "remove it",
                field=f"training.overlap.{field}",
            )
        changed |= shares
    return dataclasses.replace(framework, **changed)
