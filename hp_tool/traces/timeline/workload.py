"""Classify recorded work: training, serving, inference without a serving engine, or unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from hp_tool.traces.timeline.events import KINDS, PHASES, RankEvents

Workload = Literal["training", "serving", "inference", "unknown"]
MIN_TRAINING_SHARE = 0.001
"""Minimum fraction of kernel time in named backward or optimizer kernels that identifies training.

Backward passes take more than half of the kernel time in training, but most of their matmuls have
generic names. Single backward kernels also occur elsewhere.
"""
_FORWARD = [KINDS.index(kind) for kind in ("matmul", "attention", "experts")]


def has_phase(ranks: Sequence[RankEvents], phase: str) -> bool:
    """Return True if any rank's host recorded a span of this phase."""
    return any(bool((rank.phases.phase == PHASES.index(phase)).any()) for rank in ranks)


def has_backward(ranks: Sequence[RankEvents]) -> bool:
    """Return True if a backward pass was recorded, as host spans or named kernels."""
    named_s = sum(rank.signs.seconds["training"] for rank in ranks)
    return (
        has_phase(ranks, "backward") or has_phase(ranks, "recompute") or _is_share(named_s, ranks)
    )


def has_optimizer(ranks: Sequence[RankEvents]) -> bool:
    """Return True if an optimizer step was recorded, as host spans or fused kernels."""
    return has_phase(ranks, "optimizer") or _is_share(
        sum(_seconds(rank, "optimizer") for rank in ranks), ranks
    )


def workload_of(ranks: Sequence[RankEvents]) -> Workload:
    """Return the kind of work. Any backward pass or optimizer step makes it training."""
    if has_backward(ranks) or has_optimizer(ranks):
        return "training"
    if any(rank.signs.serving_span or rank.signs.seconds["serving"] > 0.0 for rank in ranks):
        return "serving"
    return (
        "inference"
        if any(bool(np.isin(rank.kind, _FORWARD).any()) for rank in ranks)
        else "unknown"
    )


def _is_share(seconds: float, ranks: Sequence[RankEvents]) -> bool:
    busy_s = sum(_seconds(rank, kind) for rank in ranks for kind in KINDS if kind != "collective")
    return seconds > 0.0 and seconds >= MIN_TRAINING_SHARE * busy_s


def _seconds(rank: RankEvents, kind: str) -> float:
    rows = rank.kind == KINDS.index(kind)
    return float((rank.end_s[rows] - rank.start_s[rows]).sum())
