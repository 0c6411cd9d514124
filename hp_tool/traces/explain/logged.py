"""A step as Megatron's timers split it, beside its prediction: coarser than a trace, and without a
profiler.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hp_tool.domain.parts import PARTS, PER_MICRO_BATCH, STEP_KEYS
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.units import duration
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.timers import TimedStep
from hp_tool.questions import schema
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.traces.explain.findings import LEAST_SHARE, Finding
from hp_tool.traces.explain.parts import StepPart, step_parts
from hp_tool.traces.timeline.faults import LEAST_SHARE as LEAST_FAULT

COMPUTING = ("forward-compute", "backward-compute")
GRADIENTS = (
    "all-grads-sync",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "non-tensor-parallel-grads-all-reduce",
)
LONGEST = 1.05
"""Of the step: a timer's share, of rounding and of the moments at which ranks print; one that is
longer is not of this step.
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
"""What timers tell apart, and the parts of a prediction that each holds; those of timers that were
not printed are in `rest`. `passes`: forward and backward, with what is exchanged within a layer;
with timers of level 1 alone, `passes_and_pipeline`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerSpread:
    """One timer over all ranks."""

    timer: str
    shortest_s: float | None
    """None where the log has the longest alone."""
    longest_s: float
    longest_rank: int | None
    """None where the log does not name ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedExplanation:
    """Where a step's seconds went, as far as timers tell."""

    id: str | None = None
    """The query's."""
    status: Literal["ok"] = "ok"
    steps: int
    """Prints of the timers."""
    step_s: float
    """The one of median length; all figures are of it."""
    parts: tuple[StepPart, ...]
    """Of GROUPS."""
    timers: tuple[TimerSpread, ...]
    findings: tuple[Finding, ...]
    """In words, by seconds."""
    estimate: Estimate | None = None
    query: dict[str, Any] | None = None


def explain_log(steps: Sequence[TimedStep], *, query: Query | None = None) -> LoggedExplanation:
    """Explain the step of median length. Raises HpToolError for a query that cannot be predicted,
    InputError for timers that are longer than the step.
    """
    step = sorted(steps, key=lambda each: each.step_s)[(len(steps) - 1) // 2]
    _check(step)
    measured_s = parts(step)
    estimate = None if query is None else _estimate(query)
    timed = {part for name in measured_s if name != "rest" for part in GROUPS[name]}
    of_part = GROUPS | {"rest": tuple(part for part in STEP_KEYS if part not in timed)}
    rows = step_parts(measured_s, estimate, covers=of_part)
    sentences = sorted(
        [*_slow(step), *_differences(rows, step.step_s)], key=lambda each: -each.seconds
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


def parts(step: TimedStep) -> dict[str, float]:
    """Seconds by GROUPS, each of the rank where its timers are longest; the sum is the step. What
    no timer told is in `rest`.

    Gradients are exchanged within the timer forward-backward, parameters within optimizer.
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
    name = max(step.longest_s, key=lambda each: step.longest_s[each])
    if step.longest_s[name] > LONGEST * step.step_s:
        raise InputError(
            f"the timer {name} tells {duration(step.longest_s[name])} of a step of "
            f"{duration(step.step_s)}: it is not of this "
            "step; give the log as Megatron printed it",
            field="trace",
        )


def _computing(step: TimedStep) -> float:
    """Seconds of both passes on the rank where they are longest; where no rank is known, at most
    that.
    """
    by_rank = _by_rank(step)
    return max(by_rank.values()) if by_rank else sum(step.longest_s[name] for name in COMPUTING)


def _by_rank(step: TimedStep) -> dict[int, float]:
    """Seconds of both passes by rank, of ranks that have both."""
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


def _slow(step: TimedStep) -> Iterator[Finding]:
    """The rank whose passes take longer than the median rank's; without ranks, how far the longest
    is from the shortest.
    """
    stages = "It is slow, or its stage has more work."
    if by_rank := _by_rank(step):
        rank = max(by_rank, key=lambda each: by_rank[each])
        more = by_rank[rank] - statistics.median(by_rank.values())
        words = (
            f"Rank {rank} takes {duration(more)} longer for its passes than the median rank. "
            f"{stages}"
        )
    else:
        more = sum(
            step.longest_s[name] - step.shortest_s[name]
            for name in COMPUTING
            if name in step.shortest_s
        )
        words = (
            f"A rank takes up to {duration(more)} longer for its passes than another. {stages} "
            "--timing-log-option all names it."
        )
    if more >= LEAST_FAULT * step.step_s:
        yield Finding(seconds=more, text=words)


def _differences(rows: Sequence[StepPart], step_s: float) -> Iterator[Finding]:
    for row in rows:
        more = row.excess_s
        if row.predicted_s is not None and more >= LEAST_SHARE * step_s:
            words = PARTS[row.name].in_words
            yield Finding(
                seconds=more,
                text=f"{words[:1].upper()}{words[1:]}: {duration(more)} longer than predicted "
                f"({duration(row.measured_s)}, predicted {duration(row.predicted_s)}).",
            )


def _estimate(query: Query) -> Estimate:
    if query.kind != "training":
        raise UnsupportedError(
            "logs of serving are not explained; give a training query", field="query"
        )
    estimate = resolve_configuration(query).estimate(with_fixes=False)
    if estimate.time is None:
        reason = estimate.reasons[0]
        raise InputError(
            f"this configuration cannot have run: {reason.message}",
            field="parallel",
            code=reason.code,
        )
    return estimate
