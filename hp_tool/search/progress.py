"""Where a search stands, as its record tells it while it runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from hp_tool.domain.records import JsonObject, RunRecord
from hp_tool.search.planner import leader
from hp_tool.search.spending import spent_by


def progress_of(runs: Sequence[RunRecord], *, budget_runs: int, expected_gain: float | None) -> JsonObject:
    """What its runs have cost and the best of them; `expected_gain` is what another one is expected to win, as a share of the
    best step time."""
    spent = spent_by(runs)
    best, best_step_s = leader(runs) or (None, None)
    return {
        "profile_runs": spent.profile_runs,
        "budget_runs": budget_runs,
        "gpu_seconds": spent.gpu_seconds,
        "best_run_id": best.id if best else None,
        "best_step_s": best_step_s,
        "best_parallel": asdict(best.parallel) if best else None,
        "expected_gain_fraction": expected_gain,
    }


def finite(expected_gain: float) -> float | None:
    """JSON knows no infinity, which stands for: nothing was measured yet."""
    return expected_gain if math.isfinite(expected_gain) else None
