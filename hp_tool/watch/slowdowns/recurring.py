"""Single slow steps that recur: every tenth step four times as long costs 30 % of the throughput
and moves no median.

A step is slow if it is 22% above the reference, and isolated if the step before it is not slow. For
each period P up to LONGEST_PERIOD and each phase the number of isolated slow steps in a row at
distance P is counted. With p0 an upper bound of an isolated slow step's probability, k in a row
come by chance with p0^k at any one step and period: k ln(1 / p0) >= ln(run length x periods) keeps
the mean run to a false alarm (the union bound). A period that a job has from its start on, as that
of its checkpoints, is its own and never an alarm.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Self

from hp_tool.loop.assumptions import assumed

SLOW_STEP = math.log(1.5) / 2.0
"""ln of a slow step over the reference, at least."""
SHORTEST_PERIOD, LONGEST_PERIOD = 2, 25
LEAST_HITS = 4
OWN_HITS, OWN_PERIODS = 3, 3
"""Slow steps in a row that make a period the job's own, if they begin within so many periods of its
start.
"""
MISSES = 5
"""Steps that are not slow where one was due, in a row, after which a pattern has ended."""


@dataclass(slots=True, kw_only=True)
class Run:
    """Slow steps in a row at one period and phase."""

    first: int
    hits: int
    excess: float
    """Sum of their seconds beyond the reference, in references."""
    p0: float
    """Bound of an isolated slow step's probability when the run began."""


@dataclass(slots=True, kw_only=True)
class Recurring:
    """The test of recurring slow steps; its memory is bounded by the periods."""

    begun: int = 0
    """Number of the first step that was seen."""
    runs: dict[tuple[int, int], Run] = field(default_factory=dict)
    """By period and phase, those with a hit."""
    own: list[int] = field(default_factory=list)
    """Periods that the job has from its start on."""
    was_slow: bool = False
    active: list[int] = field(default_factory=list)
    """Period, phase and misses in a row of the pattern that was told last; empty: none."""

    def add(self, residual: float, number: int, *, p0: float) -> tuple[int, Run] | None:
        """Take a step; return period and run of a pattern that must be told."""
        slow = residual > SLOW_STEP
        isolated, self.was_slow = slow and not self.was_slow, slow
        alarm = None
        for period in range(SHORTEST_PERIOD, LONGEST_PERIOD + 1):
            key = (period, number % period)
            if not isolated:
                if not slow and key in self.runs:
                    del self.runs[key]
                continue
            run = self.runs.get(key)
            if run is None:
                run = self.runs[key] = Run(first=number, hits=0, excess=0.0, p0=p0)
            run.hits += 1
            run.excess += math.exp(min(residual, 10.0)) - 1.0
            if (
                run.hits >= OWN_HITS
                and run.first < self.begun + OWN_PERIODS * period
                and period not in self.own
            ):
                self.own.append(period)
            known = period in self.own or bool(self.active and period % self.active[0] == 0)
            if alarm is None and not known and self._tells(period, run):
                alarm = period, run
        return alarm

    @staticmethod
    def _tells(period: int, run: Run) -> bool:
        periods = LONGEST_PERIOD - SHORTEST_PERIOD + 1
        needed = math.log(assumed().watch.false_alarm_steps * periods)
        costs = run.excess / run.hits / period
        return (
            run.hits >= LEAST_HITS
            and run.hits * -math.log(run.p0) >= needed
            and costs >= assumed().watch.least_slowdown
        )

    def ended(self, residual: float, number: int) -> bool:
        """Return whether the pattern that was told last has ended with this step."""
        if not self.active or number % self.active[0] != self.active[1]:
            return False
        slow = residual > SLOW_STEP
        self.active[2] = 0 if slow else self.active[2] + 1
        return self.active[2] >= MISSES

    def state(self) -> dict[str, Any]:
        """Return everything that is remembered, as JSON's types."""
        runs = [
            [*key, run.first, run.hits, run.excess, run.p0]
            for key, run in sorted(self.runs.items())
        ]
        return {
            "begun": self.begun,
            "runs": runs,
            "own": self.own,
            "was_slow": self.was_slow,
            "active": self.active,
        }

    @classmethod
    def of(cls, state: dict[str, Any]) -> Self:
        """Return the test that had this state."""
        runs = {
            (int(period), int(phase)): Run(
                first=int(first), hits=int(hits), excess=float(excess), p0=float(p0)
            )
            for period, phase, first, hits, excess, p0 in state["runs"]
        }
        known = {name: state[name] for name in ("begun", "was_slow")}
        return cls(runs=runs, own=list(state["own"]), active=list(state["active"]), **known)
