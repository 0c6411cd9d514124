"""When a series of step times became slower or faster: CUSUM tests on exceedances, with thresholds from the run length.

For each level d (5 %, 10 %, ... of ln time) the test sees one bit of a step: is ln t above the baseline's median by more than
d / 2? A baseline of the regime's first steps gives p0 = P(bit) as it is and p1 = P(bit) were all steps slower by d. Page's
CUSUM of the likelihood ratio,

    S <- max(0, S + (ln p1 / p0 where the bit is set, else ln (1 - p1) / (1 - p0))),        an alarm where S >= h,

needs no distribution: a checkpoint that takes minutes counts as one bit, as a step 6 % late does. With p0 an upper bound of
P(bit | the past), exp(S) is a supermartingale while nothing changes, so the mean run to a false alarm of one level is at least
e^h (Lorden 1971, Annals of Mathematical Statistics 42, theorem 2): h = ln(run length x levels). p0 is the larger one of a
Wilson bound of the share of set bits and the share that follows a set bit, which is higher where slow steps come in rows.
The change begins where S was last zero (Page 1954, Biometrika 41).
"""

import itertools
import math
import statistics
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from hp_tool.assumptions import assumed

REACH = 1.645
"""Standard deviations to either end of an interval of 90 %."""
DOUBT = 2.33
"""Standard deviations of p0's bound: a baseline shows too small a share in one case of a hundred."""
REGIMES = 64
"""Changes that are remembered, the newest ones: a job that changes more often is told by its newest."""


@dataclass(slots=True, kw_only=True)
class Baseline:
    """The first steps of a regime: ln seconds in their order, and sorted."""

    logs: list[float] = field(default_factory=list)
    ordered: list[float] = field(default_factory=list)

    def add(self, log_s: float) -> None:
        self.logs.append(log_s)
        insort(self.ordered, log_s)

    def __len__(self) -> int:
        return len(self.logs)

    @property
    def median(self) -> float:
        return statistics.median(self.ordered)

    def interval(self) -> tuple[float, float]:
        """90 % interval of the median, from order statistics: ranks n / 2 -+ 1.645 sqrt(n) / 2."""
        n = len(self.ordered)
        reach = REACH * math.sqrt(n) / 2.0
        low, high = math.floor(n / 2.0 - reach), math.ceil(n / 2.0 + reach)
        return self.ordered[max(low, 0)], self.ordered[min(high, n - 1)]


@dataclass(slots=True, kw_only=True)
class Level:
    """The CUSUM of one level; `log_shift` below zero looks for a job that became faster."""

    log_shift: float
    limit: float = math.inf
    """ln seconds at which the bit is set: the median and half the shift."""
    gain: float = 0.0
    """ln p1 / p0; 0: the noise hides a change of this size."""
    loss: float = 0.0
    score: float = 0.0
    since: int = 0
    """Number of the step after the last at which the score was zero."""

    def learn(self, baseline: Baseline) -> None:
        """Take the weights of both bits from the baseline."""
        shift, median, n = self.log_shift, baseline.median, len(baseline)
        self.limit = median + shift / 2.0
        rare = _beyond(baseline.ordered, self.limit, shift)
        usual = _beyond(baseline.ordered, self.limit - shift, shift)
        pairs = [self._sets(log_s) for log_s in baseline.logs]
        in_rows = sum(first and second for first, second in itertools.pairwise(pairs))
        p0 = max(_upper(rare / n, n), in_rows / (sum(pairs) + 2.0))
        p1 = (usual + 1.0) / (n + 2.0)  # decides how soon a change is seen, not how often none is
        told_apart = p1 > p0
        self.gain, self.loss = (math.log(p1 / p0), math.log((1.0 - p1) / (1.0 - p0))) if told_apart else (0.0, 0.0)

    def _sets(self, log_s: float) -> bool:
        return log_s > self.limit if self.log_shift > 0.0 else log_s < self.limit

    def step(self, log_s: float, number: int) -> float:
        """The score after the step of this number."""
        self.score += self.gain if self._sets(log_s) else self.loss
        if self.score <= 0.0:
            self.score, self.since = 0.0, number + 1
        return self.score


def _beyond(ordered: Sequence[float], limit: float, shift: float) -> int:
    return len(ordered) - bisect_right(ordered, limit) if shift > 0.0 else bisect_left(ordered, limit)


def _upper(share: float, n: int) -> float:
    """Wilson's upper bound of a probability from its share of n draws, below 1."""
    centre = share + DOUBT**2 / (2.0 * n)
    reach = DOUBT * math.sqrt(share * (1.0 - share) / n + (DOUBT / (2.0 * n)) ** 2)
    return min((centre + reach) / (1.0 + DOUBT**2 / n), 1.0 - 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Steps between two changes."""

    first: int
    """Number of its first step."""
    alarm: int
    """Number of the step at which the change to it was seen; of the first regime the end of its baseline."""
    log_s: float
    """Median ln seconds of the steps seen so far, of at most `Watch.baseline_steps`."""
    low: float
    high: float
    """90 % interval of the median."""


@dataclass(slots=True, kw_only=True)
class Changes:
    """The detector of one series; its memory is bounded whatever the number of steps."""

    steps: int = 0
    """Steps seen."""
    first: int = 0
    """Number of the current regime's first step."""
    alarm: int = 0
    baseline: Baseline = field(default_factory=Baseline)
    levels: list[Level] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    """ln seconds since all scores were zero: they join the baseline once these are zero again, or begin the next regime."""
    past: list[Regime] = field(default_factory=list)
    learnt: int = 0
    """Steps of the baseline that the levels' weights were taken from."""

    @property
    def threshold(self) -> float:
        """h of each level: all of them together give one false alarm in `false_alarm_steps` steps at most."""
        return math.log(assumed().watch.false_alarm_steps * 2 * len(assumed().watch.slowdowns))

    @property
    def settled(self) -> bool:
        """Whether the regime has the steps that a test needs."""
        return len(self.baseline) >= assumed().watch.least_baseline_steps

    def add(self, step_s: Sequence[float]) -> list[Regime]:
        """Take the next step times, seconds, and return the regimes that they ended."""
        return [ended for seconds in step_s if (ended := self._add(math.log(seconds))) is not None]

    def _add(self, log_s: float) -> Regime | None:
        number, self.steps = self.steps, self.steps + 1
        if number < assumed().watch.warmup_steps:
            self.first = number + 1
            return None
        if not self.settled:
            self.baseline.add(log_s)
            self.alarm = self.alarm if self.past else number
            self._learn()
            return None
        threshold, quiet, alarming = self.threshold, True, None
        for level in self.levels:
            if level.gain and level.step(log_s, number):
                quiet = False
                if level.score >= threshold and (alarming is None or level.score > alarming.score):
                    alarming = level
        if alarming is not None:
            return self._begin(alarming.since, [*self.waiting, log_s], number)
        room = assumed().watch.baseline_steps - len(self.baseline)
        if quiet:
            for each in (*self.waiting, log_s)[: max(room, 0)]:
                self.baseline.add(each)
            self.waiting.clear()
            if room > 0 and len(self.baseline) >= min(self.learnt + 16, assumed().watch.baseline_steps):
                self._learn()
        else:
            self.waiting.append(log_s)
            del self.waiting[: -assumed().watch.baseline_steps]
        return None

    def _learn(self) -> None:
        """Take the levels' weights from the baseline, where it has steps enough."""
        if not self.settled:
            return
        if not self.levels:
            self.levels = [
                Level(log_shift=sign * math.log1p(each), since=self.steps)
                for each in assumed().watch.slowdowns
                for sign in (1.0, -1.0)
            ]
        for level in self.levels:
            level.learn(self.baseline)
        self.learnt = len(self.baseline)

    def _begin(self, since: int, recent: list[float], number: int) -> Regime:
        """Begin a regime with the step `since`; return the one before."""
        ended = self.current
        assert ended is not None
        self.past = [*self.past, ended][-REGIMES:]
        self.first, self.alarm = since, number
        self.baseline, self.levels, self.waiting = Baseline(), [], []
        for log_s in recent[since - number - 1 :]:
            self.baseline.add(log_s)
        self._learn()
        return ended

    @property
    def current(self) -> Regime | None:
        """The regime that the newest step is of; None during warm-up."""
        if not len(self.baseline):
            return None
        low, high = self.baseline.interval()
        return Regime(first=self.first, alarm=self.alarm, log_s=self.baseline.median, low=low, high=high)

    def state(self) -> dict[str, Any]:
        """Everything that the detector remembers, as JSON's types."""
        return {
            "steps": self.steps,
            "first": self.first,
            "alarm": self.alarm,
            "baseline": self.baseline.logs,
            "scores": [[each.score, each.since] for each in self.levels],
            "waiting": self.waiting,
            "past": [[each.first, each.alarm, each.log_s, each.low, each.high] for each in self.past],
            "learnt": self.learnt,
        }

    @classmethod
    def of(cls, state: dict[str, Any]) -> Self:
        """The detector that had this state."""
        logs = [float(each) for each in state["baseline"]]
        restored = cls(
            steps=int(state["steps"]),
            first=int(state["first"]),
            alarm=int(state["alarm"]),
            waiting=[float(each) for each in state["waiting"]],
            past=[
                Regime(first=first, alarm=alarm, log_s=log_s, low=low, high=high)
                for first, alarm, log_s, low, high in state["past"]
            ],
        )
        learnt = int(state["learnt"])
        restored.baseline = Baseline(logs=logs[:learnt], ordered=sorted(logs[:learnt]))
        restored._learn()
        for log_s in logs[learnt:]:
            restored.baseline.add(log_s)
        for level, (score, since) in zip(restored.levels, state["scores"], strict=True):
            level.score, level.since = float(score), int(since)
        return restored
