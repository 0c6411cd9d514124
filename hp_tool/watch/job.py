"""State of a watched job: the change detector, and times by rank that indicate causes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, Self

from hp_tool.domain.bounds import check_work
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
from hp_tool.watch.words import cause_sentences, verdict_sentences

BASELINE_STEPS, RECENT_STEPS = 64, 32
"""Numbers of first and of newest steps stored per rank."""
STEP = "step"
MAX_PARTS = 16
MAX_PART_NAME_CHARS = 512
"""Maximum total length of the part names of a step. Further parts are dropped."""
BURST_GAPS = 1.5
"""Slow bursts count as over when none occurred for this multiple of the gap between the last two.
"""
BATCH_TOLERANCE = 0.01
"""Relative difference up to which two batch sizes count as equal."""


@dataclass(slots=True, kw_only=True)
class Source:
    """State of one process of a job."""

    rank: int = 0
    host: str | None = None
    last_seq: int = 0
    """Sequence number of the last report received from the process."""
    steps: int = 0
    dropped: int = 0
    seen: int = 0
    """Number of job steps at this process's last report. It orders the processes of a restarted
    rank.
    """
    usual: list[dict[str, float]] = field(default_factory=list)
    """Seconds by part for the first steps after warm-up. They are later replaced by their medians.
    """
    recent: list[dict[str, float]] = field(default_factory=list)
    """Seconds by part for the newest steps."""

    def take(self, batch: StepBatch) -> list[StepReport]:
        """Update the state with a batch. Return the reports that are new."""
        self.rank, self.host, self.dropped = (
            batch.rank,
            batch.host,
            max(self.dropped, batch.dropped),
        )
        fresh = sorted(
            {report.seq: report for report in batch.reports if report.seq > self.last_seq}.values(),
            key=lambda report: report.seq,
        )
        for report in fresh:
            self.last_seq, self.steps = report.seq, self.steps + 1
            if self.steps <= assumed().watch.warmup_steps:
                continue
            parts = {STEP: report.step_s, **_limited_parts(report.parts_s)}
            if self.steps <= assumed().watch.warmup_steps + BASELINE_STEPS:
                self.usual.append(parts)
            if len(self.usual) >= BASELINE_STEPS:
                self.usual = [_medians(self.usual)]
            self.recent = [*self.recent[1 - RECENT_STEPS :], parts]
        return fresh

    def state(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {
            name: getattr(self, name)
            for name in ("rank", "host", "last_seq", "steps", "dropped", "seen", "usual", "recent")
        }

    @classmethod
    def of(cls, state: dict[str, Any]) -> Self:
        """Restore a process from its stored state."""
        return cls(**state)


def _limited_parts(parts_s: dict[str, float]) -> dict[str, float]:
    """Return the first parts of a step, limited by MAX_PARTS and MAX_PART_NAME_CHARS."""
    lengths = accumulate(map(len, parts_s))
    named = [
        item
        for item, length in zip(parts_s.items(), lengths, strict=True)
        if length <= MAX_PART_NAME_CHARS
    ]
    return dict(named[:MAX_PARTS])


@dataclass(slots=True)
class _Ranks:
    """Median times by rank: first steps of its first process, newest steps of its last process.

    Processes are added one at a time, because those of a large job do not fit in memory together.
    """

    newest: int
    """Number of steps since the pace changed."""
    dropped: int = 0
    first: dict[int, tuple[int, dict[str, float]]] = field(default_factory=dict)
    """By rank: the number of job steps at its first process's last report, and that process's
    medians.
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
            self.first[rank] = source.seen, _without_step(_medians(source.usual))
        if rank not in self.last or source.seen >= self.last[rank][0]:
            self.last[rank] = (
                source.seen,
                _without_step(_medians(source.recent[-max(min(self.newest, RECENT_STEPS), 1) :])),
            )

    def times(self) -> list[RankTimes]:
        return [
            RankTimes(rank=rank, before=self.first[rank][1], after=self.last[rank][1])
            for rank in sorted(self.first)
        ]


def _medians(steps: list[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for parts in steps for name in parts})
    return {name: statistics.median(parts.get(name, 0.0) for parts in steps) for name in names}


def _without_step(medians: dict[str, float]) -> dict[str, float]:
    """Return the parts except the entire step, unless that is the only part reported."""
    return {name: seconds for name, seconds in medians.items() if name != STEP} or medians


@dataclass(slots=True, kw_only=True)
class Job:
    """A watched job. Memory use is proportional to its number of processes, not of steps."""

    changes: Changes = field(default_factory=Changes)
    numbers: list[int] = field(default_factory=list)
    """Step numbers of the newest steps, as reported by the trainer."""
    marks: dict[int, int] = field(default_factory=dict)
    """The trainer's step number by detector step, at the start and alarm of each regime."""
    unit: Literal["samples", "tokens"] | None = None
    """Unit of the work per step; None until a step reports it."""
    first_work: float = 1.0
    """Work of the first step that reports it. Step times are normalized to this amount."""
    newest_work: float = 1.0

    def add(self, reports: list[StepReport]) -> bool:
        """Add steps of the lead rank. Return True if the pace changed."""
        changed = False
        for report in reports:
            number = self.changes.steps
            self.numbers = [
                *self.numbers[-assumed().watch.baseline_steps :],
                number if report.step is None else report.step,
            ]
            if self.changes.add([report.step_s / self._relative_work(report)]):
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
        """Return a step's work relative to the first step's.

        Steps that omit it repeat the last value.
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
        """Return the verdict after the newest step.

        Args:
            expected: Predicted pace, if known.
            sources: All processes of the job.
        """
        now = self.changes.current
        ranks = _Ranks(newest=0 if now is None else self.changes.steps - now.first)
        for source in sources:
            check_work()
            ranks.add(source)
        counts: dict[str, Any] = {
            "steps": self.changes.steps,
            "dropped": ranks.dropped,
            "ranks": max(len(ranks.ranks), 1),
            "expected": expected,
        }
        if now is None or (not self.changes.settled and not self.changes.past):
            return Verdict(status="learning", **counts)
        before = min(self.changes.past, key=lambda regime: regime.log_s, default=None)
        slowdown = (
            None
            if before is None
            else self._find_slowdown(before, now) or self._find_recurring_slowdown(before, now)
        )
        batch = self.log_batch
        lag = (
            None
            if expected is None or not self._comparable(expected)
            else _find_lag(now, expected, batch=batch)
        )
        causes: tuple[Cause, ...] = ()
        if slowdown is not None:
            step_s = math.exp(now.log_s + batch)
            causes = cause_sentences(
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
            now=_regime_pace(now, batch=batch),
            was=None if before is None else _regime_pace(before, batch=batch),
            slowdown=slowdown,
            lag=lag,
            causes=causes,
            loss_per_day=None if factor is None else _daily_loss(factor, expected),
            **counts,
        )
        return replace(verdict, text=verdict_sentences(verdict))

    def steady_step_s(self, expected: Expected | None, *, steps: int) -> float | None:
        """Return the step time of a job whose pace and batch never changed, in seconds.

        Return None if the job has fewer than `steps` steady steps, or a batch other than the
        expected one.
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
        """Natural logarithm of the newest step's work relative to the first step's."""
        return math.log(self.newest_work / self.first_work)

    def _comparable(self, expected: Expected) -> bool:
        """Return False if the job's batch size is known to differ from the expected one."""
        if self.unit != "samples" or expected.samples is None:
            return True
        return abs(self.newest_work / expected.samples - 1.0) < BATCH_TOLERANCE

    def _find_slowdown(self, before: Regime, now: Regime) -> Slowdown | None:
        """Return the slowdown relative to the fastest earlier pace; None if it is over."""
        log, reach = now.log_s - before.log_s, math.hypot(_half_width(now), _half_width(before))
        slower = [regime for regime in self.changes.regimes if regime.first > before.first]
        if (
            log < _min_log_slowdown()
            or log <= reach
            or not any(regime.kind in ("shift", "creep") for regime in slower)
        ):
            return None
        is_above = all(regime.log_s > before.log_s + log / 4.0 for regime in slower)
        first = slower[0] if is_above else now
        rises = sum(b.log_s > a.log_s for a, b in zip([before, *slower], slower, strict=False))
        rises *= not any(regime.kind == "faster" for regime in slower)
        growing = now.kind == "creep" or rises > 2 or grows(self.changes.logs)
        return self._make_slowdown(
            log, reach, first=first, now=now, shape="growing" if growing else "sudden"
        )

    def _find_recurring_slowdown(self, before: Regime, now: Regime) -> Slowdown | None:
        """Return the slowdown from recurring slow steps or bursts at an unchanged median.

        Bursts count as recurring if two of them have ended and the time since the last one is at
        most BURST_GAPS times the gap between them.
        """
        if now.kind == "recurring":
            log, reach = (
                now.mean_log_s - before.mean_log_s,
                math.hypot(now.mean_reach, before.mean_reach),
            )
            slowdown = self._make_slowdown(log, reach, first=now, now=now, shape="recurring")
            return None if log < _min_log_slowdown() else replace(slowdown, period=now.period)
        regimes = self.changes.regimes
        slow = [
            n
            for n, regime in enumerate(regimes[:-1])
            if regime.kind == "shift" and regime.log_s - before.log_s >= _min_log_slowdown()
        ]
        if len(slow) < 2:
            return None
        last_two = [regimes[n] for n in slow[-2:]]
        ended = regimes[slow[-1] + 1].first
        if self.changes.steps - ended > BURST_GAPS * (last_two[1].first - last_two[0].first):
            return None
        ends = [regime.first for regime in regimes[slow[-2] + 1 :]] + [self.changes.steps]
        spans = [
            (end - regime.first, regime)
            for end, regime in zip(ends, regimes[slow[-2] :], strict=True)
        ]
        mean_s = sum(steps * math.exp(regime.mean_log_s) for steps, regime in spans) / sum(
            steps for steps, _ in spans
        )
        log, reach = (
            math.log(mean_s) - before.mean_log_s,
            math.hypot(before.mean_reach, last_two[0].mean_reach),
        )
        slowdown = self._make_slowdown(
            log, reach, first=last_two[0], now=last_two[1], shape="recurring"
        )
        return None if log < _min_log_slowdown() else slowdown

    def _make_slowdown(
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
        """Return the state as JSON types."""
        work = {"unit": self.unit, "first_work": self.first_work, "newest_work": self.newest_work}
        return {
            "changes": self.changes.state(),
            "numbers": self.numbers,
            "marks": list(self.marks.items()),
            **work,
        }

    @classmethod
    def of(cls, state: dict[str, Any]) -> Self:
        """Restore a job from its stored state."""
        return cls(
            changes=Changes.of(state["changes"]),
            numbers=list(state["numbers"]),
            marks={int(at): int(number) for at, number in state["marks"]},
            unit=state.get("unit"),
            first_work=float(state.get("first_work", 1.0)),
            newest_work=float(state.get("newest_work", 1.0)),
        )


def _half_width(regime: Regime) -> float:
    return (regime.high - regime.low) / 2.0


def _min_log_slowdown() -> float:
    """Return the smallest reported slowdown as a logarithm: half of `Watch.least_slowdown`."""
    return math.log1p(assumed().watch.least_slowdown) / 2.0


def _regime_pace(regime: Regime, *, batch: float = 0.0) -> Pace:
    """Return the pace of a regime.

    Args:
        regime: The regime.
        batch: ln of the newest step's work relative to the first step's.
    """
    low, high = math.exp(regime.low + batch), math.exp(regime.high + batch)
    return Pace(step_s=math.exp(regime.log_s + batch), interval=(low, high))


def _find_lag(now: Regime, expected: Expected, *, batch: float = 0.0) -> Lag | None:
    """Return how much slower than expected the job is; None if chance may explain it.

    `Watch.unlikely_sds` is the threshold.
    """
    low, high = (math.log(seconds) for seconds in expected.interval)
    sd = math.hypot((high - low) / 2.0, _half_width(now)) / REACH
    log = now.log_s + batch - math.log(expected.step_s)
    beyond = now.log_s + batch - high > (assumed().watch.unlikely_sds - REACH) * sd
    return (
        Lag(factor=math.exp(log), interval=(math.exp(log - REACH * sd), math.exp(log + REACH * sd)))
        if beyond
        else None
    )


def _daily_loss(factor: float, expected: Expected | None) -> Loss:
    hours = SECONDS_PER_DAY / SECONDS_PER_HOUR * (1.0 - 1.0 / factor)
    if expected is None:
        return Loss(hours=hours)
    price = expected.price_per_gpu_hour
    gpu_hours = hours * expected.num_gpus
    return Loss(hours=hours, gpu_hours=gpu_hours, cost=None if price is None else gpu_hours * price)
