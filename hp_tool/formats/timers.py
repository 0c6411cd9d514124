"""Read the timers that Megatron-LM prints into its log with --timing-log-level 1 or 2.

Source: `Timers` of megatron/core/timers.py and `training_log` of megatron/training/training.py
(Megatron Core 0.17.1 to 0.19.2). Each timer waits for its device. Timers of level 1 start
together on all ranks by default.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hp_tool.cluster.logs import MAX_LINE, MAX_STEPS, LogFacts, read_line
from hp_tool.errors import InputError

NAMES = frozenset(
    {
        *(
            "forward-backward",
            "all-grads-sync",
            "layernorm-grads-all-reduce",
            "embedding-grads-all-reduce",
        ),
        *("non-tensor-parallel-grads-all-reduce", "params-all-gather", "optimizer"),
        *("batch-generator", "forward-compute", "backward-compute"),
    }
)
"""Timers that are read. All other timers of a step are parts of these."""
MAX_RANKS = 16_384
INSPECTED_BYTES = 16 * 2**20
"""Number of bytes at the start of a file in which a log is recognized."""
_SIGNS = (b"across ranks (ms):", b"elapsed time per iteration (ms):")
"""Text in logs with timers, and in logs without, which the reader reports as missing."""
_NUMBER = r"(\d{1,12}\.\d{1,6})"
_MIN_MAX_LINE = re.compile(rf"([a-z][a-z-]+) \.+: \({_NUMBER}, {_NUMBER}\)\s*$")
_MAX_LINE = re.compile(rf"([a-z][a-z-]+) \.+: {_NUMBER}\s*$")
_OLD_LINE = re.compile(rf"([a-z][a-z-]+): {_NUMBER}")
_RENAMED = {"backward-params-all-reduce": "all-grads-sync"}
_NAME_LINE = re.compile(r"(?:^|\s)([a-z][a-z-]+):\s*$")
_RANK_LINE = re.compile(rf"rank\s+(\d{{1,6}}): {_NUMBER}\s*$")


@dataclass(slots=True, kw_only=True)
class TimedStep:
    """The timers that Megatron printed together, in seconds per step."""

    step_s: float
    longest_s: dict[str, float] = field(default_factory=dict)
    """Longest time over all ranks in seconds, by timer."""
    shortest_s: dict[str, float] = field(default_factory=dict)
    """Shortest time over all ranks in seconds, by timer; empty if only the longest was printed."""
    ranks_s: dict[str, dict[int, float]] = field(default_factory=dict)
    """Time in seconds by timer and rank, for --timing-log-option all."""


def is_log(path: Path) -> bool:
    """Return True if a file starts like a Megatron log."""
    try:
        with path.open("rb") as stream:
            beginning = stream.read(INSPECTED_BYTES)
            return any(sign in beginning for sign in _SIGNS)
    except OSError:
        return False  # The reader reports the error.


def read_timers(path: Path, *, name: str | None = None) -> list[TimedStep]:
    """Return the steps in a log with their timers.

    The first step is dropped if others follow, because its timers average over too many iterations.
    `name` is the file name in errors.

    Raises:
        InputError: No step has a timer.
    """
    with path.open(encoding="utf-8", errors="replace") as stream:
        steps = [step for step in _timed_steps(_read_lines(stream)) if step.longest_s]
    if not steps:
        message = (
            f"{path if name is None else name} has no timers of steps: run with --timing-log-level "
            "2 --timing-log-option all; "
            "hp-tool watch and import --log read step times alone"
        )
        raise InputError(message, field="trace", code="no_trace")
    return steps[1:] or steps


def _read_lines(stream: Iterable[str]) -> Iterator[str]:
    return (line[:MAX_LINE].rstrip() for line in stream)


def _timed_steps(lines: Iterable[str]) -> Iterator[TimedStep]:
    """Yield each step with a step time, and the timers in the lines that follow."""
    facts, step, name = LogFacts(), None, ""
    for line in lines:
        count = len(facts.step_s)
        read_line(line, facts, reader="megatron-lm")
        if len(facts.step_s) > count:
            if step is not None:
                yield step
            if len(facts.step_s) >= MAX_STEPS:
                return
            step, name = TimedStep(step_s=facts.step_s[-1]), ""
        elif step is not None:
            name = _read_timer(line, step, name)
    if step is not None:
        yield step


def _read_timer(line: str, step: TimedStep, name: str) -> str:
    """Add the timer in a line to a step; return the timer that the next line continues."""
    # Older releases print a single line, on the last rank.
    if line.lstrip().startswith("time (ms) |"):
        for named in _OLD_LINE.finditer(line):
            timer = _RENAMED.get(named[1], named[1])
            if timer in NAMES:
                step.longest_s[timer] = float(named[2]) / 1e3
    elif (both := _MIN_MAX_LINE.search(line)) and both[1] in NAMES:
        step.shortest_s[both[1]], step.longest_s[both[1]] = (
            float(both[2]) / 1e3,
            float(both[3]) / 1e3,
        )
    elif (match := _MAX_LINE.search(line)) and match[1] in NAMES:
        step.longest_s[match[1]] = float(match[2]) / 1e3
    elif (of_rank := _RANK_LINE.search(line)) and name and int(of_rank[1]) < MAX_RANKS:
        value = float(of_rank[2]) / 1e3
        step.ranks_s.setdefault(name, {})[int(of_rank[1])] = value
        step.shortest_s[name] = min(value, step.shortest_s.get(name, value))
        step.longest_s[name] = max(value, step.longest_s.get(name, value))
        return name
    elif heading := _NAME_LINE.search(line):
        return heading[1] if heading[1] in NAMES else ""
    return ""
