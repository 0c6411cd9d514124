"""Detect recurring slow steps. They reduce throughput without changing the median.

A step is slow if it is 22% above the reference, and isolated if the preceding step is not slow. For
each period P up to LONGEST_PERIOD and each phase, the test counts consecutive isolated slow steps
at distance P. If p0 is an upper bound for the probability of an isolated slow step, then chance
produces k in a row with a probability of at most p0^k, for a given step and period. Requiring k
ln(1 / p0) >= ln(run length x periods) keeps the mean time to a false alarm at the run length (union
bound). A period that exists from the start of the job, such as that of its checkpoints, raises no
alarm.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Self

from hp_tool.loop.assumptions import assumed

SLOW_STEP = math.log(1.5) / 2.0
"""Minimum ln(step time / reference) of a slow step."""
SHORTEST_PERIOD, LONGEST_PERIOD = 2, 25
MIN_HITS = 4
OWN_HITS, OWN_PERIODS = 3, 3
"""A period is part of the job's normal behavior if OWN_HITS consecutive slow steps occur within
OWN_PERIODS periods of its start.
"""
MISSES = 5
"""A pattern has ended after this many consecutive due steps that are not slow."""


@dataclass(slots=True, kw_only=True)
class Run:
    """Consecutive slow steps at one period and phase."""

    first: int
    hits: int
    excess: float
    """Sum of their excess times, as multiples of the reference."""
    p0: float
    """Upper bound for the probability of an isolated slow step when the run began."""


@dataclass(slots=True, kw_only=True)
class Recurring:
    """Test for recurring slow steps. Its memory is bounded by the number of periods."""

    begun: int = 0
    """Index of the first step."""
    runs: dict[tuple[int, int], Run] = field(default_factory=dict)
    """Current runs by (period, phase)."""
    own: list[int] = field(default_factory=list)
    """Periods that have existed since the job's start."""
    was_slow: bool = False
    active: list[int] = field(default_factory=list)
    """[period, phase, consecutive misses] of the last reported pattern; empty if there is none."""

    def add(self, residual: float, number: int, *, p0: float) -> tuple[int, Run] | None:
        """Add a step. Return the period and run of a pattern that should be reported, or None."""
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
            is_known = period in self.own or bool(self.active and period % self.active[0] == 0)
            if alarm is None and not is_known and self._is_significant(period, run):
                alarm = period, run
        return alarm

    @staticmethod
    def _is_significant(period: int, run: Run) -> bool:
        periods = LONGEST_PERIOD - SHORTEST_PERIOD + 1
        needed = math.log(assumed().watch.false_alarm_steps * periods)
        costs = run.excess / run.hits / period
        return (
            run.hits >= MIN_HITS
            and run.hits * -math.log(run.p0) >= needed
            and costs >= assumed().watch.least_slowdown
        )

    def ended(self, residual: float, number: int) -> bool:
        """Return True if the last reported pattern ends with this step."""
        if not self.active or number % self.active[0] != self.active[1]:
            return False
        slow = residual > SLOW_STEP
        self.active[2] = 0 if slow else self.active[2] + 1
        return self.active[2] >= MISSES

    def state(self) -> dict[str, Any]:
        """Return the state as JSON types."""
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
        """Restore the test from its stored state."""
        runs = {
            (int(period), int(phase)): Run(
                first=int(first), hits=int(hits), excess=float(excess), p0=float(p0)
            )
            for period, phase, first, hits, excess, p0 in state["runs"]
        }
        plain = {name: state[name] for name in ("begun", "was_slow")}
        return cls(runs=runs, own=list(state["own"]), active=list(state["active"]), **plain)
