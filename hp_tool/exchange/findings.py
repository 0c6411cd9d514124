"""What a recorded training lost, in sentences, the most seconds first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hp_tool.timeline import Fault
from hp_tool.units import duration

LEAST_SHARE = 0.02
"""Share of a step below which a part's difference to its prediction is not worth a sentence."""
PARTS = {
    "compute": "matmuls and their neighbours",
    "attention": "attention",
    "recompute": "recomputation",
    "tensor_parallel": "tensor-parallel communication",
    "context_parallel": "context-parallel communication",
    "expert_parallel": "expert all-to-all",
    "pipeline_bubble": "the pipeline's bubble",
    "pipeline_p2p": "transfers between stages",
    "data_parallel": "data-parallel communication",
    "optimizer": "the optimizer",
    "offload": "copies between device and host",
    "overhead": "time in which nothing runs",
}
_LINKS = ("tensor_parallel", "context_parallel", "expert_parallel", "pipeline_p2p", "data_parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sentence."""

    seconds: float
    """Of the step."""
    words: str


class Suggested(Protocol):
    """What a suggestion must say."""

    @property
    def change(self) -> str: ...
    @property
    def part(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def seconds_interval(self) -> tuple[float, float]: ...


def findings(
    *,
    faults: Sequence[Fault],
    differences: Sequence[tuple[str, float, float]],
    suggestions: Sequence[Suggested],
    step_s: float,
) -> tuple[Finding, ...]:
    """Return the sentences. `differences`: (part, measured seconds, predicted seconds)."""
    sentences = [Finding(seconds=fault.seconds, words=_of_fault(fault)) for fault in faults]
    by_part = {each.part: each for each in reversed(suggestions)}
    for part, measured_s, predicted_s in differences:
        more = measured_s - predicted_s
        if more < LEAST_SHARE * step_s:
            continue
        words = _of_difference(part, measured_s, predicted_s) + _of_change(by_part.get(part))
        sentences.append(Finding(seconds=more, words=words))
    return tuple(sorted(sentences, key=lambda sentence: -sentence.seconds))


def _of_fault(fault: Fault) -> str:
    seconds = duration(fault.seconds)
    group = f"ranks {', '.join(map(str, fault.ranks[:8]))}{', ...' if len(fault.ranks) > 8 else ''}"
    factor = f"{fault.factor:.2f}" if fault.factor is not None else ""
    match fault.kind:
        case "slow_rank":
            return f"rank {fault.rank} takes {factor} times as long for the same kernels as others: {seconds} a step"
        case "unequal_work":
            return f"rank {fault.rank} has {factor} times the mean work: {seconds} a step; give its stage fewer layers"
        case "host_gap":
            whose = "every rank" if fault.rank is None else f"rank {fault.rank}"
            return f"nothing runs on {whose} for {seconds} a step in long gaps: its host does something else, as loading data"
        case "exposed_communication":
            return f"nothing hides {PARTS[fault.part or '']}: {seconds} a step"
        case "slow_link":
            return f"{PARTS[fault.part or '']} of {group} takes {factor} times as long as in other groups: {seconds} a step"


def _of_difference(part: str, measured_s: float, predicted_s: float) -> str:
    more = duration(measured_s - predicted_s)
    words = f"{PARTS[part]}: {more} longer than predicted ({duration(measured_s)} against {duration(predicted_s)})"
    if part in _LINKS and predicted_s > 0.0:
        words += f", {predicted_s / measured_s:.0%} of the bandwidth it should have if all else is as predicted"
    return words


def _of_change(change: Suggested | None) -> str:
    return "" if change is None else f"; {change.change} would win {win(change)}"


def win(change: Suggested) -> str:
    """`about 1.4 s (1.2 s to 1.6 s)`."""
    low, high = (f"{'-' * (seconds < 0.0)}{duration(abs(seconds))}" for seconds in change.seconds_interval)
    return f"about {duration(change.seconds)} ({low} to {high})"
