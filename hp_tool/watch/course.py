"""The course of a watched job for a picture: its stretches of steady pace, and the steps that are
kept.
"""

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
    """Steps between two changes of the pace."""

    first_step: int
    """By the trainer's number, where it gives one."""
    last_step: int
    pace: Pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What is remembered of a job's steps: the newest steady ones of its newest stretch, and the
    newest of all, one by one.
    """

    stretches: tuple[Stretch, ...] = ()
    steps: tuple[int, ...] = ()
    """Numbers of the steps that are kept."""
    seconds: tuple[float, ...] = ()


def course_of(record: WatchRecord, sources: Iterable[WatchSource]) -> Course:
    """Return the course of the job after its newest step; empty before its first steady one."""
    if record.state is None:
        return Course()
    job = Job.of(record.state)
    changes, now = job.changes, job.changes.current
    if now is None:
        return Course()
    regimes = [*changes.past, now]
    ends = [each.first - 1 for each in regimes[1:]] + [changes.steps - 1]
    newest = dict(
        zip(range(changes.steps - len(job.numbers), changes.steps), job.numbers, strict=True)
    )

    def number(step: int) -> int:
        """The trainer's number of the job's `step`, counted from 0: known of the newest ones and of
        changes.
        """
        if step in newest:
            return newest[step]
        known = max(
            (at for at in (*job.marks, *newest) if at <= step), default=min(newest, default=step)
        )
        return step + (job.marks.get(known, newest.get(known, known)) - known)

    begun = changes.steps - len(changes.logs)
    kept = {begun + n: math.exp(log_s + job.log_batch) for n, log_s in enumerate(changes.logs)}
    lead = next(
        (source for each in sources if (source := Source.of(each.state)).rank == LEAD), None
    )
    if lead is not None:
        recent = [each[STEP] for each in lead.recent]
        kept |= dict(zip(range(changes.steps - len(recent), changes.steps), recent, strict=True))
    shown = sorted(step for step in kept if 0 <= step < changes.steps)
    return Course(
        stretches=tuple(
            Stretch(
                first_step=number(each.first),
                last_step=number(end),
                pace=_pace(each, job.log_batch),
            )
            for each, end in zip(regimes, ends, strict=True)
        ),
        steps=tuple(number(step) for step in shown),
        seconds=tuple(kept[step] for step in shown),
    )


def _pace(regime: Regime, log_batch: float) -> Pace:
    low, high = math.exp(regime.low + log_batch), math.exp(regime.high + log_batch)
    return Pace(step_s=math.exp(regime.log_s + log_batch), interval=(low, high))
