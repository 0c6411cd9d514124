"""One job under watch: the detector of its step times, and of each rank the little that tells
causes apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, Self

from hp_tool.domain.bounds import check
from hp_tool.domain.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from hp_tool.domain.watch import (
    Cause,
    Expected,
    Lag,
    Loss,
    Pace,
    Shape,
    Slowdown,
    StepBatch,
    StepReport,
    Verdict,
)
from hp_tool.loop.assumptions import assumed
from hp_tool.watch.slowdowns.causes import RankTimes, grows
from hp_tool.watch.slowdowns.changes import REACH, Changes, Regime
from hp_tool.watch.words import causes_of, sentences

USUAL, RECENT = 64, 32
"""Steps of a rank that are kept from its beginning, and of its end."""
STEP = "step"
MOST_PARTS = 16
MAX_PART_NAME_CHARS = 512
"""Characters that the names of a step's parts may have together; later parts are not kept."""
BURST_GAPS = 1.5
"""Distances between two slow bursts after which they no longer recur."""
BATCH_TOLERANCE = 0.01
"""Relative difference up to which two batches are one size."""


@dataclass(slots=True, kw_only=True)
class Source:
    """What is kept of one process of the job."""

    rank: int = 0
    host: str | None = None
    last_seq: int = 0
    """Reports up to this one were taken."""
    steps: int = 0
    dropped: int = 0
    seen: int = 0
    """Steps that the job had when this process reported last: it orders the lives of a rank."""
    usual: list[dict[str, float]] = field(default_factory=list)
    """Seconds by part of its first steps after the warm-up; once it has all of them, their medians
    alone.
    """
    recent: list[dict[str, float]] = field(default_factory=list)
    """Those of its newest steps."""

    def take(self, batch: StepBatch) -> list[StepReport]:
        """Return the reports that are new, and keep what tells causes apart; sent again, none
        is.
        """
        self.rank, self.host, self.dropped = (
            batch.rank,
            batch.host,
            max(self.dropped, batch.dropped),
        )
        fresh = sorted(
            {each.seq: each for each in batch.reports if each.seq > self.last_seq}.values(),
            key=lambda each: each.seq,
        )
        for each in fresh:
            self.last_seq, self.steps = each.seq, self.steps + 1
            if self.steps <= assumed().watch.warmup_steps:
                continue
            parts = {STEP: each.step_s, **_kept_parts(each.parts_s)}
            if self.steps <= assumed().watch.warmup_steps + USUAL:
                self.usual.append(parts)
            if len(self.usual) >= USUAL:
                self.usual = [_medians(self.usual)]
            self.recent = [*self.recent[1 - RECENT :], parts]
        return fresh

    def state(self) -> dict[str, Any]:
        """Everything that is remembered, as JSON's types."""
        return {
            name: getattr(self, name)
            for name in ("rank", "host", "last_seq", "steps", "dropped", "seen", "usual", "recent")
        }

    @classmethod
    def of(cls, state: dict[str, Any]) -> Self:
        """The process that had this state."""
        return cls(**state)


def _kept_parts(parts_s: dict[str, float]) -> dict[str, float]:
    """Return the first parts of a step, up to the limits on their number and their names."""
    lengths = accumulate(map(len, parts_s))
    named = [
        item
        for item, length in zip(parts_s.items(), lengths, strict=True)
        if length <= MAX_PART_NAME_CHARS
    ]
    return dict(named[:MOST_PARTS])


@dataclass(slots=True)
class _Ranks:
    """Medians of each rank: of its first steps, in its first life, and of the newest ones, in its
    last.

    It takes one process at a time, because all of a large job do not fit into memory at once.
    """

    newest: int
    """Steps since the change."""
    dropped: int = 0
    first: dict[int, tuple[int, dict[str, float]]] = field(default_factory=dict)
    """By rank: steps that the job had at the first life's newest report, and the medians of that
    life.
    """
    last: dict[int, tuple[int, dict[str, float]]] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)

    def add(self, source: Source) -> None:
        rank = source.rank
        self.dropped += source.dropped
        self.ranks.add(rank)
        if source.host is not None:
            self.hosts[rank] = source.host
        if not source.usual or not source.recent:
            return
        if rank not in self.first or source.seen < self.first[rank][0]:
            self.first[rank] = source.seen, _own_parts(_medians(source.usual))
        if rank not in self.last or source.seen >= self.last[rank][0]:
            self.last[rank] = (
                source.seen,
                _own_parts(_medians(source.recent[-max(min(self.newest, RECENT), 1) :])),
            )

    def times(self) -> list[RankTimes]:
        return [
            RankTimes(rank=rank, before=self.first[rank][1], after=self.last[rank][1])
            for rank in sorted(self.first)
        ]


def _medians(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the median seconds of each part."""
    names = sorted({name for each in steps for name in each})
    return {name: statistics.median(each.get(name, 0.0) for each in steps) for name in names}


def _own_parts(medians: dict[str, float]) -> dict[str, float]:
    """Return the parts without the whole step, which counts where no part is reported."""
    return {name: seconds for name, seconds in medians.items() if name != STEP} or medians


@dataclass(slots=True, kw_only=True)
class Job:
    """A job under watch. Its memory is bounded by its number of processes, whatever the number of
    steps.
    """

    changes: Changes = field(default_factory=Changes)
    numbers: list[int] = field(default_factory=list)
    """The trainer's numbers of the newest steps."""
    marks: dict[int, int] = field(default_factory=dict)
    """The trainer's number of each step at which a regime began or was told, by the detector's."""
    unit: Literal["samples", "tokens"] | None = None
    """Of the work of a step; None until one reports it."""
    first_work: float = 1.0
    """Work of the first step that reported it: steps are judged as if all had so much."""
    newest_work: float = 1.0

    def add(self, reports: list[StepReport]) -> bool:
        """Take the next steps of the job's first rank; return whether its pace changed."""
        changed = False
        for each in reports:
            number = self.changes.steps
            self.numbers = [
                *self.numbers[-assumed().watch.baseline_steps :],
                number if each.step is None else each.step,
            ]
            if self.changes.add([each.step_s / self._relative_work(each)]):
                changed = True
                first = self.changes.first
                self.marks |= {
                    at: self.numbers[at - number - 1]
                    for at in (first, number)
                    if number - at < len(self.numbers)
                }
                self.marks = dict(sorted(self.marks.items())[-256:])
        return changed

    def _relative_work(self, report: StepReport) -> float:
        """Return the work of a step over that of the first one; a step that does not report it has
        as much as the last.
        """
        if self.unit is None:
            self.unit = (
                "tokens"
                if report.tokens is not None
                else "samples"
                if report.samples is not None
                else None
            )
            self.first_work = self.newest_work = (
                (report.tokens or report.samples or 1.0) if self.unit else 1.0
            )
        if self.unit is not None:
            self.newest_work = getattr(report, self.unit) or self.newest_work
        return self.newest_work / self.first_work

    def verdict(self, *, expected: Expected | None, sources: Iterable[Source]) -> Verdict:
        """What is to be said after the newest step. `sources`: all processes, the first rank
        included.
        """
        now = self.changes.current
        ranks = _Ranks(newest=0 if now is None else self.changes.steps - now.first)
        for source in sources:
            check()
            ranks.add(source)
        seen: dict[str, Any] = {
            "steps": self.changes.steps,
            "dropped": ranks.dropped,
            "ranks": max(len(ranks.ranks), 1),
            "expected": expected,
        }
        if now is None or (not self.changes.settled and not self.changes.past):
            return Verdict(status="learning", **seen)
        before = min(self.changes.past, key=lambda each: each.log_s, default=None)
        slowdown = (
            None if before is None else self._slowdown(before, now) or self._recurring(before, now)
        )
        batch = self.log_batch
        lag = (
            None
            if expected is None or not self._comparable(expected)
            else _lag(now, expected, batch=batch)
        )
        causes: tuple[Cause, ...] = ()
        if slowdown is not None:
            step_s = math.exp(now.log_s + batch)
            causes = causes_of(
                ranks.times(), hosts=ranks.hosts, factor=slowdown.factor, step_s=step_s
            )
        factor = (
            slowdown.factor if slowdown is not None else lag.factor if lag is not None else None
        )
        verdict = Verdict(
            status="slower_than_it_was"
            if slowdown
            else "slower_than_it_should_be"
            if lag
            else "as_expected",
            now=_pace(now, batch=batch),
            was=None if before is None else _pace(before, batch=batch),
            slowdown=slowdown,
            lag=lag,
            causes=causes,
            loss_per_day=None if factor is None else _loss(factor, expected),
            **seen,
        )
        return replace(verdict, text=sentences(verdict))

    def steady_step_s(self, expected: Expected | None, *, steps: int) -> float | None:
        """Return the pace of a job that never changed, after so many steady steps of one batch,
        which is the expectation's.
        """
        now = self.changes.current
        if (
            now is None
            or self.changes.past
            or len(self.changes.logs) < steps
            or self.newest_work != self.first_work
        ):
            return None
        return math.exp(now.log_s) if expected is None or self._comparable(expected) else None

    @property
    def log_batch(self) -> float:
        """ln of the newest step's work over the first one's, which all steps are judged by."""
        return math.log(self.newest_work / self.first_work)

    def _comparable(self, expected: Expected) -> bool:
        """Return whether a step has the batch that the expectation is of, as far as both are
        known.
        """
        if self.unit != "samples" or expected.samples is None:
            return True
        return abs(self.newest_work / expected.samples - 1.0) < BATCH_TOLERANCE

    def _slowdown(self, before: Regime, now: Regime) -> Slowdown | None:
        """Return the slowdown against the fastest pace before; None if the job is back at it."""
        log, reach = now.log_s - before.log_s, math.hypot(_reach(now), _reach(before))
        slower = [each for each in self.changes.regimes if each.first > before.first]
        if (
            log < _least()
            or log <= reach
            or not any(each.kind in ("shift", "creep") for each in slower)
        ):
            return None
        first = slower[0] if all(each.log_s > before.log_s + log / 4.0 for each in slower) else now
        rises = sum(b.log_s > a.log_s for a, b in zip([before, *slower], slower, strict=False))
        rises *= not any(each.kind == "faster" for each in slower)
        growing = now.kind == "creep" or rises > 2 or grows(self.changes.logs)
        return self._told(
            log, reach, first=first, now=now, shape="growing" if growing else "sudden"
        )

    def _recurring(self, before: Regime, now: Regime) -> Slowdown | None:
        """Return the slowdown of a job whose median step is as it was: slow steps or bursts that
        recur.

        Bursts: two slow regimes ended, and since the last one no longer than one and a half times
        the distance of both.
        """
        if now.kind == "recurring":
            log, reach = (
                now.mean_log_s - before.mean_log_s,
                math.hypot(now.mean_reach, before.mean_reach),
            )
            slowdown = self._told(log, reach, first=now, now=now, shape="recurring")
            return None if log < _least() else replace(slowdown, period=now.period)
        regimes = self.changes.regimes
        slow = [
            n
            for n, each in enumerate(regimes[:-1])
            if each.kind == "shift" and each.log_s - before.log_s >= _least()
        ]
        if len(slow) < 2:
            return None
        last_two = [regimes[n] for n in slow[-2:]]
        ended = regimes[slow[-1] + 1].first
        if self.changes.steps - ended > BURST_GAPS * (last_two[1].first - last_two[0].first):
            return None
        ends = [each.first for each in regimes[slow[-2] + 1 :]] + [self.changes.steps]
        spans = [
            (end - each.first, each) for end, each in zip(ends, regimes[slow[-2] :], strict=True)
        ]
        mean_s = sum(steps * math.exp(each.mean_log_s) for steps, each in spans) / sum(
            steps for steps, _ in spans
        )
        log, reach = (
            math.log(mean_s) - before.mean_log_s,
            math.hypot(before.mean_reach, last_two[0].mean_reach),
        )
        slowdown = self._told(log, reach, first=last_two[0], now=last_two[1], shape="recurring")
        return None if log < _least() else slowdown

    def _told(
        self, log: float, reach: float, *, first: Regime, now: Regime, shape: Shape
    ) -> Slowdown:
        return Slowdown(
            factor=math.exp(log),
            interval=(math.exp(log - reach), math.exp(log + reach)),
            since_step=self.marks.get(first.first, first.first),
            told_step=self.marks.get(
                now.alarm if shape == "recurring" else first.alarm, first.alarm
            ),
            shape=shape,
        )

    def state(self) -> dict[str, Any]:
        """Everything that is remembered, as JSON's types."""
        known = {"unit": self.unit, "first_work": self.first_work, "newest_work": self.newest_work}
        return {
            "changes": self.changes.state(),
            "numbers": self.numbers,
            "marks": list(self.marks.items()),
            **known,
        }

    @classmethod
    def of(cls, state: dict[str, Any]) -> Self:
        """The job that had this state."""
        return cls(
            changes=Changes.of(state["changes"]),
            numbers=list(state["numbers"]),
            marks={int(at): int(number) for at, number in state["marks"]},
            unit=state.get("unit"),
            first_work=float(state.get("first_work", 1.0)),
            newest_work=float(state.get("newest_work", 1.0)),
        )


def _reach(regime: Regime) -> float:
    return (regime.high - regime.low) / 2.0


def _least() -> float:
    """Return the smallest ln slowdown that is told: half of `Watch.least_slowdown`."""
    return math.log1p(assumed().watch.least_slowdown) / 2.0


def _pace(regime: Regime, *, batch: float = 0.0) -> Pace:
    """Return the pace of a regime. `batch`: ln of the newest step's work over the first one's."""
    low, high = math.exp(regime.low + batch), math.exp(regime.high + batch)
    return Pace(step_s=math.exp(regime.log_s + batch), interval=(low, high))


def _lag(now: Regime, expected: Expected, *, batch: float = 0.0) -> Lag | None:
    """Return how much slower than expected; None if that may be chance, in one job of a hundred or
    more.
    """
    low, high = (math.log(each) for each in expected.interval)
    sd = math.hypot((high - low) / 2.0, _reach(now)) / REACH
    log = now.log_s + batch - math.log(expected.step_s)
    beyond = now.log_s + batch - high > (assumed().watch.unlikely_sds - REACH) * sd
    return (
        Lag(factor=math.exp(log), interval=(math.exp(log - REACH * sd), math.exp(log + REACH * sd)))
        if beyond
        else None
    )


def _loss(factor: float, expected: Expected | None) -> Loss:
    hours = SECONDS_PER_DAY / SECONDS_PER_HOUR * (1.0 - 1.0 / factor)
    if expected is None:
        return Loss(hours=hours)
    price = expected.price_per_gpu_hour
    gpu_hours = hours * expected.num_gpus
    return Loss(hours=hours, gpu_hours=gpu_hours, cost=None if price is None else gpu_hours * price)
