"""Step times of a watched job, for charts: periods of steady pace, and the newest steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hp_tool.domain.watch import Pace
from hp_tool.domain.watch_records import WatchRecord, WatchSource
from hp_tool.watch.job import STEP, Job, Source
from hp_tool.watch.reports import LEAD
from hp_tool.watch.slowdowns.changes import Regime


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Consecutive steps at one pace."""

    first_step: int
    """First step number, as numbered by the trainer if it reports numbers."""
    last_step: int
    pace: Pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Stretches and newest steps of a job, for the current baseline and the lead rank."""

    stretches: tuple[Stretch, ...] = ()
    steps: tuple[int, ...] = ()
    """Step numbers of `seconds`."""
    seconds: tuple[float, ...] = ()

    def seconds_after(self, step: int) -> float:
        """Return the total seconds of all steps after `step`, each at the pace of its stretch."""
        return sum(
            each.pace.step_s * max(0, each.last_step - max(each.first_step - 1, step))
            for each in self.stretches
        )


def summarize_course(record: WatchRecord, sources: Iterable[WatchSource]) -> Course:
    """Return the stretches and newest steps of a job. Empty before its first steady step."""
    if record.state is None:
        return Course()
    job = Job.of(record.state)
    changes, current = job.changes, job.changes.current
    if current is None:
        return Course()
    regimes = [*changes.past, current]
    ends = [regime.first - 1 for regime in regimes[1:]] + [changes.steps - 1]
    newest = dict(
        zip(range(changes.steps - len(job.numbers), changes.steps), job.numbers, strict=True)
    )

    def number(step: int) -> int:
        """Convert the job's step index (from 0) to the trainer's step number.

        It is extrapolated from a step whose number is known.
        """
        if step in newest:
            return newest[step]
        nearest = max(
            (at for at in (*job.marks, *newest) if at <= step), default=min(newest, default=step)
        )
        return step + (job.marks.get(nearest, newest.get(nearest, nearest)) - nearest)

    first = changes.steps - len(changes.logs)
    seconds = {first + n: math.exp(log_s + job.log_batch) for n, log_s in enumerate(changes.logs)}
    lead = next((source for row in sources if (source := Source.of(row.state)).rank == LEAD), None)
    if lead is not None:
        recent = [parts[STEP] for parts in lead.recent]
        seconds |= dict(zip(range(changes.steps - len(recent), changes.steps), recent, strict=True))
    shown = sorted(step for step in seconds if 0 <= step < changes.steps)
    return Course(
        stretches=tuple(
            Stretch(
                first_step=number(regime.first),
                last_step=number(end),
                pace=_regime_pace(regime, job.log_batch),
            )
            for regime, end in zip(regimes, ends, strict=True)
        ),
        steps=tuple(number(step) for step in shown),
        seconds=tuple(seconds[step] for step in shown),
    )


def _regime_pace(regime: Regime, log_batch: float) -> Pace:
    low, high = math.exp(regime.low + log_batch), math.exp(regime.high + log_batch)
    return Pace(step_s=math.exp(regime.log_s + log_batch), interval=(low, high))
