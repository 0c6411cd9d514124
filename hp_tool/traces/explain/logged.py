"""Explain a step from Megatron's timers. They are coarser than a trace but need no profiler."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hp_tool.domain.parts import PARTS, PER_MICRO_BATCH, STEP_KEYS
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.units import capitalize_first, format_duration
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.timers import TimedStep
from hp_tool.questions import schema
from hp_tool.questions.training.usual_settings import answer_with_usual_settings
from hp_tool.traces.explain.findings import MIN_SAVED_FRACTION, Finding
from hp_tool.traces.explain.parts import StepPart, step_parts
from hp_tool.traces.timeline.faults import MIN_FAULT_SHARE

COMPUTING = ("forward-compute", "backward-compute")
GRADIENTS = (
    "all-grads-sync",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "non-tensor-parallel-grads-all-reduce",
)
MAX_TIMER_SHARE = 1.05
"""Maximum ratio of a timer to the step time. It exceeds 1 because times are rounded and ranks print
at different times. A longer timer belongs to another step.
"""
_LAYERS = (*PER_MICRO_BATCH, "offload")
_PIPELINE = ("pipeline_bubble", "pipeline_p2p")
GROUPS: dict[str, tuple[str, ...]] = {
    "passes": _LAYERS,
    "pipeline": _PIPELINE,
    "passes_and_pipeline": (*_LAYERS, *_PIPELINE),
    "data_parallel": ("data_parallel",),
    "optimizer": ("optimizer",),
    "rest": ("overhead",),
}
"""Predicted parts in each group that timers can distinguish. `passes` is forward and backward,
including communication within layers. With level-1 timers, `passes_and_pipeline` is used
instead. Parts without a printed timer belong to `rest`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerSpread:
    """The range of one timer over all ranks."""

    timer: str
    shortest_s: float | None
    """Minimum in seconds; None if the log prints only the maximum."""
    longest_s: float
    longest_rank: int | None
    """Rank with the maximum; None if the log does not name ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedExplanation:
    """Seconds of a step by group of parts, as far as timers distinguish them."""

    id: str | None = None
    """The query's id."""
    status: Literal["ok"] = "ok"
    steps: int
    """Number of steps for which timers were printed."""
    step_s: float
    """Median step time in seconds. All metrics describe this step."""
    parts: tuple[StepPart, ...]
    """One entry per group in GROUPS."""
    timers: tuple[TimerSpread, ...]
    findings: tuple[Finding, ...]
    """Findings as sentences, sorted by lost seconds."""
    estimate: Estimate | None = None
    query: dict[str, Any] | None = None


def explain_log(steps: Sequence[TimedStep], *, query: Query | None = None) -> LoggedExplanation:
    """Explain the step of median length.

    Raises:
        HpToolError: The query cannot be predicted.
        InputError: A timer is longer than the step.
    """
    step = sorted(steps, key=lambda timed: timed.step_s)[(len(steps) - 1) // 2]
    _check(step)
    measured_s = logged_parts(step)
    estimate = None if query is None else _estimate(query)
    timed_parts = {part for name in measured_s if name != "rest" for part in GROUPS[name]}
    covers = GROUPS | {"rest": tuple(part for part in STEP_KEYS if part not in timed_parts)}
    rows = step_parts(measured_s, estimate, covers=covers)
    sentences = sorted(
        [*_slow_rank(step), *_differences(rows, step.step_s)], key=lambda finding: -finding.seconds
    )
    return LoggedExplanation(
        id=None if query is None else query.id,
        steps=len(steps),
        step_s=step.step_s,
        parts=rows,
        timers=tuple(_spread(step, name) for name in step.longest_s),
        findings=tuple(sentences),
        estimate=estimate,
        query=None if query is None else schema.query_mapping(query),
    )


def logged_parts(step: TimedStep) -> dict[str, float]:
    """Return the step's seconds by group in GROUPS.

    Each timer is taken from the rank where it is longest. Their sum is the step time, and `rest` is
    the time that no timer covers. Megatron's timer forward-backward includes the gradient exchange,
    and its timer optimizer includes the parameter exchange.
    """
    longest = step.longest_s
    both_s = min(
        longest.get("forward-backward", sum(longest.get(name, 0.0) for name in COMPUTING)),
        step.step_s,
    )
    optimizer_s = min(longest.get("optimizer", 0.0), step.step_s - both_s)
    gradients_s = min(sum(longest.get(name, 0.0) for name in GRADIENTS), both_s)
    gathered_s = min(longest.get("params-all-gather", 0.0), optimizer_s)
    passes_s = both_s - gradients_s
    seconds: dict[str, float] = {}
    if all(name in longest for name in COMPUTING):
        seconds["passes"] = min(_computing(step), passes_s)
        seconds["pipeline"] = passes_s - seconds["passes"]
    elif "forward-backward" in longest:
        seconds["passes_and_pipeline"] = passes_s
    if not longest.keys().isdisjoint((*GRADIENTS, "params-all-gather")):
        seconds["data_parallel"] = gradients_s + gathered_s
    if "optimizer" in longest:
        seconds["optimizer"] = optimizer_s - gathered_s
    seconds["rest"] = step.step_s - sum(seconds.values())
    return seconds


def _check(step: TimedStep) -> None:
    name = max(step.longest_s, key=lambda timer: step.longest_s[timer])
    if step.longest_s[name] > MAX_TIMER_SHARE * step.step_s:
        raise InputError(
            f"Timer {name} is {format_duration(step.longest_s[name])}, longer than the step "
            f"({format_duration(step.step_s)}), so it belongs to another step. Pass Megatron's "
            f"complete "
            "log.",
            field="trace",
        )


def _computing(step: TimedStep) -> float:
    """Return the longest forward + backward time of any rank in seconds.

    This is an upper bound if ranks are not named.
    """
    by_rank = _pass_seconds_by_rank(step)
    return max(by_rank.values()) if by_rank else sum(step.longest_s[name] for name in COMPUTING)


def _pass_seconds_by_rank(step: TimedStep) -> dict[int, float]:
    forward, backward = (step.ranks_s.get(name, {}) for name in COMPUTING)
    return {rank: seconds + backward[rank] for rank, seconds in forward.items() if rank in backward}


def _spread(step: TimedStep, name: str) -> TimerSpread:
    ranks = step.ranks_s.get(name)
    return TimerSpread(
        timer=name,
        shortest_s=step.shortest_s.get(name),
        longest_s=step.longest_s[name],
        longest_rank=max(ranks, key=lambda rank: ranks[rank]) if ranks else None,
    )


def _slow_rank(step: TimedStep) -> Iterator[Finding]:
    """Yield how much slower the slowest rank is than the median rank.

    If ranks are not named, it is compared with the fastest rank.
    """
    stages = "It is slow, or its stage has more work."
    if by_rank := _pass_seconds_by_rank(step):
        rank = max(by_rank, key=lambda one: by_rank[one])
        more = by_rank[rank] - statistics.median(by_rank.values())
        words = (
            f"Rank {rank} takes {format_duration(more)} longer for its passes than the median "
            f"rank. "
            f"{stages}"
        )
    else:
        more = sum(
            step.longest_s[name] - step.shortest_s[name]
            for name in COMPUTING
            if name in step.shortest_s
        )
        words = (
            f"A rank takes up to {format_duration(more)} longer for its passes than another. "
            f"{stages} "
            "--timing-log-option all names it."
        )
    if more >= MIN_FAULT_SHARE * step.step_s:
        yield Finding(seconds=more, text=words)


def _differences(rows: Sequence[StepPart], step_s: float) -> Iterator[Finding]:
    for row in rows:
        more = row.excess_s
        if row.predicted_s is not None and more >= MIN_SAVED_FRACTION * step_s:
            words = PARTS[row.name].in_words
            yield Finding(
                seconds=more,
                text=f"{capitalize_first(words)}: {format_duration(more)} longer than predicted "
                f"({format_duration(row.measured_s)}, predicted "
                f"{format_duration(row.predicted_s)}).",
            )


def _estimate(query: Query) -> Estimate:
    if query.kind != "training":
        raise UnsupportedError("explain supports training queries only", field="query")
    _, estimate = answer_with_usual_settings(query)
    if estimate.time is None:
        reason = estimate.reasons[0]
        raise InputError(
            f"The query's configuration cannot run: {reason.message}",
            field="parallel",
            code=reason.code,
        )
    return estimate
