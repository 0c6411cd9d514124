"""Describe findings about recorded training steps as sentences, sorted by lost seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hp_tool.domain.parts import COMMUNICATION, PARTS
from hp_tool.domain.units import capitalize_first, format_duration
from hp_tool.traces.explain.parts import StepPart
from hp_tool.traces.timeline import Fault
from hp_tool.traces.timeline.faults import MIN_FAULT_SHARE

MIN_SAVED_FRACTION = 0.02
"""Differences below this fraction of a step are not reported."""
_WORKLOADS = {
    "serving": "This is a serving trace: it has kernels or steps of a serving engine and no "
    "backward pass.",
    "inference": "This is an inference trace: it has no backward pass and no optimizer step.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding about a recorded training."""

    seconds: float
    """Seconds of the step affected by the finding."""
    text: str
    set: Mapping[str, Any] | None = None
    """Suggested query changes by path; None if there are none."""


class Suggested(Protocol):
    """Attributes required of a suggestion."""

    @property
    def change(self) -> str: ...
    @property
    def part(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def seconds_interval(self) -> tuple[float, float]: ...
    @property
    def changed(self) -> Mapping[str, Any]: ...


def findings(
    *,
    faults: Sequence[Fault],
    parts: Sequence[StepPart],
    suggestions: Sequence[Suggested],
    step_s: float,
    exposed_s: Mapping[str, float] | None = None,
    workload: str = "training",
    compared: bool = False,
    recorded_ranks: int = 1,
    unknown: Sequence[str] = (),
    unknown_s: float = 0.0,
) -> tuple[Finding, ...]:
    """Return the findings, sorted by seconds.

    Args:
        faults: Faults that cost at least a tenth of the step.
        parts: Parts of the step.
        suggestions: Configuration changes, with the seconds that each one saves.
        step_s: Step time in seconds.
        exposed_s: Exposed communication by part, from `timeline.exposed_s`.
        workload: Recorded work, from `workload_of`.
        compared: True if a training query is given.
        recorded_ranks: Number of ranks. With a single rank, waits for other ranks count as
            communication.
        unknown: Names of the longest unknown kernels.
        unknown_s: Seconds of the step in unknown kernels.
    """
    sentences = [Finding(seconds=fault.seconds, text=_fault_text(fault)) for fault in faults]
    if (words := _WORKLOADS.get(workload)) is not None:
        warning = " The query trains, so the comparison is meaningless." if compared else ""
        sentences.append(Finding(seconds=step_s, text=words + warning))
    if unknown_s >= MIN_SAVED_FRACTION * step_s:
        sentences.append(Finding(seconds=unknown_s, text=_unknown_text(unknown, unknown_s, step_s)))
    longer = {part.name for part in parts if part.excess_s >= MIN_SAVED_FRACTION * step_s}
    exposed = {part: seconds for part, seconds in (exposed_s or {}).items() if part not in longer}
    sentences += _exposed_findings(exposed, faults, step_s=step_s, recorded_ranks=recorded_ranks)
    by_part = {suggestion.part: suggestion for suggestion in reversed(suggestions)}
    for part in parts:
        if part.name not in longer or part.name == "unknown" or part.predicted_s is None:
            continue
        suggested = by_part.get(part.name)
        text = _difference_text(part.name, part.measured_s, part.predicted_s) + _change_text(
            suggested
        )
        sentences.append(
            Finding(
                seconds=part.excess_s,
                text=text,
                set=None if suggested is None else suggested.changed,
            )
        )
    return tuple(sorted(sentences, key=lambda sentence: -sentence.seconds))


def _unknown_text(names: Sequence[str], seconds: float, step_s: float) -> str:
    longest = f" (longest: {', '.join(name[:60] for name in names[:2])})" if names else ""
    return (
        f"Unknown kernels take {seconds / step_s:.0%} of the step, {format_duration(seconds)}: "
        f"no rule "
        f"tells whether they compute or communicate{longest}."
    )


def _exposed_findings(
    exposed_s: Mapping[str, float], faults: Sequence[Fault], *, step_s: float, recorded_ranks: int
) -> Iterator[Finding]:
    """Yield exposed communication that takes a tenth of the step or more.

    Communication that a fault explains is omitted.
    """
    waits = ", including waits for ranks that were not recorded" if recorded_ranks == 1 else ""
    for part, seconds in exposed_s.items():
        named = [fault for fault in faults if fault.part == part]
        rest_s = seconds - sum(fault.seconds for fault in named)
        if rest_s < MIN_FAULT_SHARE * step_s or any(
            fault.kind == "exposed_communication" for fault in named
        ):
            continue
        what = capitalize_first(PARTS[part].in_words)
        shown = f"{what} is exposed for {rest_s / step_s:.0%} of the step"
        yield Finding(
            seconds=rest_s,
            text=f"{shown}: {format_duration(rest_s)} in which nothing computes{waits}.",
        )


def _fault_text(fault: Fault) -> str:
    seconds = format_duration(fault.seconds)
    group = f"ranks {', '.join(map(str, fault.ranks[:8]))}{', ...' if len(fault.ranks) > 8 else ''}"
    factor = f"{fault.factor:.2f}" if fault.factor is not None else ""
    match fault.kind:
        case "slow_rank":
            return (
                f"Rank {fault.rank} takes {factor} times as long as other ranks for the same "
                f"kernels: {seconds} per step."
            )
        case "unequal_work":
            return (
                f"Rank {fault.rank} has {factor} times the mean work: {seconds} per step. Give its "
                "stage fewer layers."
            )
        case "host_gap":
            whose = "Every rank" if fault.rank is None else f"Rank {fault.rank}"
            return (
                f"{whose} is idle for {seconds} per step in long gaps: its host is busy, for "
                "example with loading data."
            )
        case "exposed_communication":
            return f"Nothing hides {PARTS[fault.part or ''].in_words}: {seconds} per step."
        case "slow_link":
            what = capitalize_first(PARTS[fault.part or ""].in_words)
            return (
                f"{what} of {group} takes {factor} times as long as in other groups: {seconds} per "
                "step."
            )


def _difference_text(part: str, measured_s: float, predicted_s: float) -> str:
    more = format_duration(measured_s - predicted_s)
    words = (
        f"{capitalize_first(PARTS[part].in_words)}: {more} longer than predicted "
        f"({format_duration(measured_s)}, predicted {format_duration(predicted_s)})"
    )
    if part in COMMUNICATION and predicted_s > 0.0:
        words += (
            f", {predicted_s / measured_s:.0%} of the expected bandwidth if all else is as "
            "predicted"
        )
    return words


def _change_text(change: Suggested | None) -> str:
    return "." if change is None else f". {change.change} saves {saving_words(change)}."


def saving_words(change: Suggested) -> str:
    """Format the time that a change saves, such as `about 1.4 s (1.2 s to 1.6 s)`."""
    low, high = (
        f"{'-' * (seconds < 0.0)}{format_duration(abs(seconds))}"
        for seconds in change.seconds_interval
    )
    return f"about {format_duration(change.seconds)} ({low} to {high})"
