"""When a series of step times became slower or faster, by three tests with thresholds from one run
length.

- A level shift: the CUSUM tests of `levels`, against a reference that follows the newest steady
  steps. An alarm waits until the change has lasted `Watch.least_slow_steps`, so that a pause for
  evaluation is none.
- A creep: the newest steps are `Watch.creep` above the lowest median that the regime had, twice
  what a daily wave of 3 % spans; or three quarters of that above the oldest steps that are kept, if
  noise does not drift as far (`drift_sd`).
- Recurring slow steps: the test of `recurring`.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from hp_tool.loop.assumptions import assumed
from hp_tool.watch.slowdowns.baseline import (
    DIGITS,
    Baseline,
    correlation_bound,
    share_beyond,
    upper_bound,
)
from hp_tool.watch.slowdowns.baseline import REACH as REACH
from hp_tool.watch.slowdowns.levels import Level, drift_sd
from hp_tool.watch.slowdowns.recurring import MISSES, Recurring, Run

REGIMES = 64
"""Changes that are remembered, the newest ones: a job that changes more often is told by its
newest.
"""
LEARN_EVERY = 16
"""Steady steps after which weights are taken anew."""
LONG_BASELINE = 256
"""Steps of a baseline whose noise is remembered."""
LONGEST_PAUSE = 12
"""Slow steps in a row that may be a pause for evaluation."""
FEW = 6.0
"""Independent steps from which a baseline's noise is hardly known: its deviation counts 1 + (FEW /
their number)^2 times.
"""
SHORT_CREEP = 0.75
"""Part of `Watch.creep` that the newest steps may be slower by than the oldest that are kept."""
CREEP_EVERY = 32
"""Steps between two tests of a creep."""
MOST_WAITING = 256
"""Steps after which a doubt that led to no alarm ends: they were the job's own way."""
Kind = Literal["start", "shift", "creep", "recurring", "faster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Steps between two changes."""

    first: int
    """Number of its first step."""
    alarm: int
    """Number of the step at which the change to it was seen; of the first regime the end of its
    baseline.
    """
    log_s: float
    """Median ln seconds of the newest steady steps, of at most `Watch.baseline_steps`."""
    low: float
    high: float
    """90 % interval of the median."""
    mean_log_s: float
    """ln of their mean seconds."""
    mean_reach: float = 0.0
    """Half of the 90 % interval of the mean, in ln."""
    kind: Kind = "start"
    """Which change it began with."""
    period: int = 0
    """Of recurring slow steps; 0: none recur."""


@dataclass(slots=True, kw_only=True)
class Changes:
    """The detector of one series; its memory is bounded whatever the number of steps."""

    steps: int = 0
    """Steps seen."""
    first: int = 0
    """Number of the current regime's first step."""
    alarm: int = 0
    kind: Kind = "start"
    period: int = 0
    baseline: Baseline = field(default_factory=Baseline)
    levels: list[Level] = field(default_factory=list)
    recurring: Recurring = field(default_factory=Recurring)
    waiting: list[float] = field(default_factory=list)
    """ln seconds since all scores were zero: they join the baseline once these are zero again, or
    begin the next regime.
    """
    lowest: float = math.inf
    """The lowest median of the regime's baselines: a creep is told against it."""
    past: list[Regime] = field(default_factory=list)
    unlearnt: int = 0
    """Steady steps since weights were taken."""
    noise: tuple[float, float] = (0.0, 0.0)
    """Standard deviation of the steady steps, and the correlation of the signs of consecutive
    ones.
    """
    noise_before: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Both of the regime before, and the steps that they are known from: a job's noise outlasts a
    change of its pace.
    """
    most_in_rows: float = 0.0
    """The largest such correlation of a long baseline: some hundred steps of noise that remembers
    show too little of it.
    """
    slow_bound: float = 1.0
    """Upper bound of the share of slow steps, for recurring ones."""

    @property
    def threshold(self) -> float:
        """h of each level: all of them together give one false alarm in `false_alarm_steps` steps
        at most.
        """
        return math.log(assumed().watch.false_alarm_steps * 2 * len(assumed().watch.slowdowns))

    @property
    def settled(self) -> bool:
        """Whether the regime has the steps that a test needs."""
        return len(self.baseline) >= assumed().watch.least_baseline_steps

    def add(self, step_s: Sequence[float]) -> list[Regime]:
        """Take the next step times, seconds, and return the regimes that they ended."""
        return [
            ended
            for seconds in step_s
            if (ended := self._add(round(math.log(seconds), DIGITS))) is not None
        ]

    def _add(self, log_s: float) -> Regime | None:
        number, self.steps = self.steps, self.steps + 1
        if number < assumed().watch.warmup_steps:
            self.first = number + 1
            return None
        if not self.settled:
            self.baseline.add(log_s)
            self.alarm = self.alarm if self.past else number
            if self.settled:
                self._learn()
                self._recall(number)
            return None
        residual = log_s - self.baseline.reference
        run = self.recurring.add(residual, number, p0=self.slow_bound)
        quiet, alarming = self._scores(residual, number)
        if alarming is not None:
            kind: Kind = "shift" if alarming.log_shift > 0.0 else "faster"
            return self._begin(alarming.since, [*self.waiting, log_s], number, kind=kind)
        if run is not None:
            return self._recurs(*run, log_s=log_s, number=number)
        if self.recurring.ended(residual, number):
            return self._begin(
                number + 1 - MISSES * self.period,
                [*self.baseline.logs, *self.waiting, log_s],
                number,
                kind="faster",
            )
        self.waiting.append(log_s)
        if quiet or len(self.waiting) >= MOST_WAITING:
            self._join(number)
        return self._creeps(number) if number % CREEP_EVERY == 0 else None

    def _join(self, number: int) -> None:
        """Count the waiting steps as steady ones."""
        for each in self.waiting:
            self.baseline.add(each)
        self.unlearnt += len(self.waiting)
        self.waiting.clear()
        for level in self.levels:
            level.score, level.since = 0.0, number + 1
        if self.unlearnt >= max(LEARN_EVERY, len(self.baseline) // 8):
            self._learn()

    def _scores(self, residual: float, number: int) -> tuple[bool, Level | None]:
        """Return whether all scores are zero after a step, and the level with the highest one that
        must be told.
        """
        threshold, quiet, alarming = self.threshold, True, None
        for level in self.levels:
            if level.gain and level.step(residual, number):
                quiet = False
                if level.score >= threshold and self._stands_out(level, residual, number):
                    alarming = (
                        level if alarming is None or level.score > alarming.score else alarming
                    )
        return quiet, alarming

    def _stands_out(self, level: Level, residual: float, number: int) -> bool:
        """Return whether a level's change has lasted long enough, and is beyond what the noise
        drifts by.
        """
        lasted, figures = number + 1 - level.since, assumed().watch
        needed, creep = figures.least_slow_steps, math.log1p(figures.creep)
        least = creep / 2.0 if lasted > figures.reference_steps else 0.0
        if level.log_shift < 0.0 and self.kind in ("start", "faster"):
            least = SHORT_CREEP * creep  # nothing was slow, and the reference follows
        if lasted < needed or (lasted > 2 * needed and lasted % 4):
            return False
        reference = self.baseline.reference
        newest = min(lasted, figures.reference_steps)
        sign = math.copysign(1.0, level.log_shift)
        since = [
            *(sign * (each - reference) for each in self.waiting[1 - newest :]),
            sign * residual,
        ]
        # The longest pause and the steps before it have their largest value before the pause, or
        # after it.
        outside_pause = sorted(since[-needed:])[needed - LONGEST_PAUSE - 1]
        steps = min(len(self.baseline), figures.reference_steps)
        return min(statistics.median(since), outside_pause) > max(least, self._drift(newest, steps))

    def _recurs(self, period: int, run: Run, *, log_s: float, number: int) -> Regime:
        """Begin the regime of a pattern; its steps are in the baseline already."""
        steps = [*self.baseline.logs, *self.waiting, log_s]
        return self._begin(
            max(run.first, number + 1 - len(steps)), steps, number, kind="recurring", period=period
        )

    def _creeps(self, number: int) -> Regime | None:
        """Begin a regime if the newest steps have crept away from the lowest median, or from the
        oldest steps that are kept.
        """
        steps, creep = assumed().watch.reference_steps, math.log1p(assumed().watch.creep)
        logs = [*self.baseline.logs, *self.waiting]
        if len(logs) < 2 * steps:
            return None
        self.lowest = min(self.lowest, self.baseline.median)
        oldest = min(len(logs) // 2, len(logs) - steps)
        newest_log_s = statistics.median(logs[-steps:])
        beyond = newest_log_s - statistics.median(logs[:oldest])
        if newest_log_s - self.lowest <= creep and beyond <= max(
            SHORT_CREEP * creep, self._drift(steps, oldest)
        ):
            return None
        return self._begin(number + 1 - steps, logs[-steps:], number, kind="creep")

    def _drift(self, steps: int, reference_steps: int) -> float:
        """Return how far a median of steps drifts from a reference by chance, once in the run
        length of all tests together.

        Of n steps one median is independent, so that each may be beyond with probability n / (run
        length x tests). The noise itself is known from as many independent steps as the baseline
        has: (1 - r) / (1 + r) of its length.
        """
        sd, in_rows, length = max(
            (*self.noise, len(self.baseline)), self.noise_before, key=lambda each: each[2]
        )
        r = correlation_bound(max(in_rows, self.most_in_rows), int(length))
        independent = length * (1.0 - r) / (1.0 + r)
        tests = 2 * len(assumed().watch.slowdowns)
        z = statistics.NormalDist().inv_cdf(
            1.0 - steps / (assumed().watch.false_alarm_steps * tests)
        )
        return (
            z
            * (1.0 + (FEW / independent) ** 2)
            * drift_sd(steps, sd=sd, correlation=r, reference_steps=reference_steps)
        )

    def _recall(self, number: int) -> None:
        """Show the test of recurring steps those that the baseline began with."""
        begun = number + 1 - len(self.baseline)
        if not self.past:
            self.recurring.begun = begun
        self.recurring.was_slow = False
        self.recurring.runs.clear()
        for place, residual in enumerate(self.baseline.residuals):
            self.recurring.add(residual, begun + place, p0=1.0)

    def _learn(self) -> None:
        """Take the levels' weights from the baseline."""
        if not self.levels:
            self.levels = [
                Level(log_shift=sign * math.log1p(each), since=self.steps)
                for each in assumed().watch.slowdowns
                for sign in (1.0, -1.0)
            ]
        ordered = sorted(self.baseline.residuals)
        self.noise = self.baseline.noise()
        if len(self.baseline) >= LONG_BASELINE:
            self.most_in_rows = max(self.most_in_rows, self.noise[1])
        for level in self.levels:
            level.learn(self.baseline, ordered=ordered)
        slow = math.log1p(assumed().watch.slowdowns[-1]) / 2.0
        self.slow_bound = upper_bound(share_beyond(ordered, slow, above=True), len(ordered))
        self.unlearnt = 0

    def _begin(
        self, since: int, recent: list[float], number: int, *, kind: Kind, period: int = 0
    ) -> Regime:
        """Begin a regime with the step `since`; return the one before. `recent`: ln seconds of the
        newest steps.
        """
        ended = self.current
        assert ended is not None
        self.past = [*self.past, ended][-REGIMES:]
        self.noise_before = (*self.noise, len(self.baseline))
        self.first, self.alarm, self.kind, self.period = since, number, kind, period
        self.baseline, self.levels, self.waiting, self.lowest, self.slow_bound = (
            Baseline(),
            [],
            [],
            math.inf,
            1.0,
        )
        self.recurring.active = [period, since % period, 0] if period else []
        for log_s in recent[since - number - 1 :]:
            self.baseline.add(log_s)
        if self.settled:
            self._learn()
            self._recall(number)
        return ended

    @property
    def regimes(self) -> list[Regime]:
        """All regimes that are remembered, the current one last."""
        now = self.current
        return self.past if now is None else [*self.past, now]

    @property
    def current(self) -> Regime | None:
        """The regime that the newest step is of; None during warm-up."""
        if not len(self.baseline):
            return None
        low, high = self.baseline.interval()
        mean_log_s, mean_reach = self.baseline.mean()
        return Regime(
            first=self.first,
            alarm=self.alarm,
            log_s=self.baseline.median,
            low=low,
            high=high,
            mean_log_s=mean_log_s,
            mean_reach=mean_reach,
            kind=self.kind,
            period=self.period,
        )

    def state(self) -> dict[str, Any]:
        """Return everything that the detector remembers, as JSON's types."""
        return {
            "steps": self.steps,
            "first": self.first,
            "alarm": self.alarm,
            "kind": self.kind,
            "period": self.period,
            "baseline": self.baseline.logs,
            "residuals": self.baseline.residuals,
            "levels": [[each.gain, each.loss, each.score, each.since] for each in self.levels],
            "recurring": self.recurring.state(),
            "waiting": self.waiting,
            "lowest": None if math.isinf(self.lowest) else self.lowest,
            "past": [
                [
                    each.first,
                    each.alarm,
                    each.log_s,
                    each.low,
                    each.high,
                    each.mean_log_s,
                    each.mean_reach,
                    each.kind,
                    each.period,
                ]
                for each in self.past
            ],
            "unlearnt": self.unlearnt,
            "noise": list(self.noise),
            "noise_before": list(self.noise_before),
            "most_in_rows": self.most_in_rows,
            "slow_bound": self.slow_bound,
        }

    @classmethod
    def of(cls, state: dict[str, Any]) -> Self:
        """Return the detector that had this state. One that an earlier edition stored takes its
        weights anew.
        """
        logs = [round(float(each), DIGITS) for each in state["baseline"]]
        past = [
            Regime(
                first=first,
                alarm=alarm,
                log_s=log_s,
                low=low,
                high=high,
                **dict(
                    zip(
                        ("mean_log_s", "mean_reach", "kind", "period"),
                        rest or (log_s,),
                        strict=False,
                    )
                ),
            )
            for first, alarm, log_s, low, high, *rest in state["past"]
        ]
        restored = cls(
            steps=int(state["steps"]),
            first=int(state["first"]),
            alarm=int(state["alarm"]),
            waiting=[float(each) for each in state["waiting"]],
            past=past,
        )
        if "levels" not in state:
            for log_s in logs:
                restored.baseline.add(log_s)
            if restored.settled:
                restored._learn()
                restored._recall(restored.steps - len(restored.waiting) - 1)
            return restored
        restored.baseline = Baseline.of(logs, [float(each) for each in state["residuals"]])
        signed = [
            sign * math.log1p(each) for each in assumed().watch.slowdowns for sign in (1.0, -1.0)
        ]
        restored.levels = [
            Level(log_shift=shift, gain=gain, loss=loss, score=score, since=since)
            for shift, (gain, loss, score, since) in zip(signed, state["levels"], strict=False)
        ]
        restored.recurring = Recurring.of(state["recurring"])
        restored.kind, restored.period = state["kind"], int(state["period"])
        restored.lowest = math.inf if state["lowest"] is None else float(state["lowest"])
        restored.noise = (float(state["noise"][0]), float(state["noise"][1]))
        sd, in_rows, length = state["noise_before"]
        restored.noise_before = (float(sd), float(in_rows), float(length))
        restored.most_in_rows = float(state["most_in_rows"])
        restored.unlearnt, restored.slow_bound = int(state["unlearnt"]), float(state["slow_bound"])
        return restored
