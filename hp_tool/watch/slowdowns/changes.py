"""Detect changes in step times by three tests. One run length determines all thresholds.

- Level shift: compares the newest 17 to 68 steps with a reference that follows earlier steps. Up to
  12 of 17 steps far above the others count as an evaluation pause and are ignored.
- Creep: the newest steps exceed the lowest median of the regime by `Watch.creep`, which is twice
  the span of a 3% daily wave. They may also exceed the oldest stored steps by 60% of that, if noise
  cannot drift as far (`Noise.drift`).
- Recurring slow steps: see `recurring`.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Literal, Self

from hp_tool.loop.assumptions import assumed
from hp_tool.watch.slowdowns.baseline import DIGITS, Baseline, upper_bound
from hp_tool.watch.slowdowns.baseline import REACH as REACH
from hp_tool.watch.slowdowns.noise import OUTLIER_SDS, Noise, median_variance, t_quantile
from hp_tool.watch.slowdowns.recurring import MISSES, SLOW_STEP, Recurring

MAX_REGIMES = 64
"""Maximum number of stored regimes. Older ones are dropped."""
NOISE_UPDATE_STEPS = 16
"""Number of steady steps between noise estimates."""
SHIFT_STEPS = (17, 20, 34, 51, 68)
"""Window lengths tested for a shift, in newest steps. The shortest is just above the longest pause;
longer ones detect smaller shifts.
"""
MAX_PAUSE_STEPS = 12
"""Maximum length of an evaluation pause in slow steps."""
PERSISTENT_STEPS = 8
"""Number of newest steps that must show the new pace, with at most one exception."""
SHORT_CREEP_FRACTION = 0.6
"""Fraction of `Watch.creep` by which the newest steps must exceed the oldest stored ones."""
CREEP_TEST_STEPS = 32
"""Number of steps between creep tests."""
Kind = Literal["start", "shift", "creep", "recurring", "faster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """A run of consecutive steps with one pace."""

    first: int
    """Index of its first step."""
    alarm: int
    """Index of the step at which the change was detected. In the first regime, this is the end of
    the baseline.
    """
    log_s: float
    """Median ln step time of the newest steady steps, at most `Watch.baseline_steps`."""
    low: float
    high: float
    """Bounds of the median's 90% interval, in ln seconds."""
    mean_log_s: float
    """ln of the mean step time in seconds."""
    mean_reach: float = 0.0
    """Half-width of the mean's 90% interval, in ln seconds."""
    kind: Kind = "start"
    """Kind of change that started the regime."""
    period: int = 0
    """Period of recurring slow steps in steps; 0 if there are none."""


@dataclass(slots=True, kw_only=True)
class Changes:
    """Change detector for one series of step times, with bounded memory."""

    steps: int = 0
    """Number of steps added."""
    first: int = 0
    """Index of the current regime's first step."""
    alarm: int = 0
    kind: Kind = "start"
    period: int = 0
    baseline: Baseline = field(default_factory=Baseline)
    recurring: Recurring = field(default_factory=Recurring)
    waiting: list[float] = field(default_factory=list)
    """ln step times of the newest steps, which are still under test. They later join this regime's
    baseline or the next one's.
    """
    lowest: float = math.inf
    """Lowest baseline median in the regime, for the creep test."""
    past: list[Regime] = field(default_factory=list)
    unlearnt: int = 0
    """Number of steady steps since the last noise estimate."""
    noise: Noise | None = None
    noise_before: Noise | None = None
    """Noise of the previous regime."""
    slow_bound: float = 1.0
    """Upper bound of the fraction of isolated slow steps, for the recurring test."""

    @property
    def logs(self) -> list[float]:
        """ln step times of the regime's newest steps."""
        return [*self.baseline.logs, *self.waiting]

    @property
    def settled(self) -> bool:
        """True if the regime has enough steps for the tests."""
        return len(self.baseline) >= assumed().watch.least_baseline_steps

    def add(self, step_s: Sequence[float]) -> list[Regime]:
        """Add step times in seconds. Return the regimes that ended with them."""
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
            self._add_steady(log_s)
            self.alarm = self.alarm if self.past else number
            if self.settled:
                self._replay_baseline(number)
            return None
        residual = log_s - self.baseline.reference
        run = self.recurring.add(residual, number, p0=self.slow_bound)
        self.waiting.append(log_s)
        sign = self._direction()
        if (lasted := self._detect_shift(sign)) is not None:
            return self._begin(number + 1 - lasted, number, kind="shift" if sign > 0 else "faster")
        if run is not None:
            period, pattern = run
            return self._begin(
                max(pattern.first, number + 1 - len(self.logs)),
                number,
                kind="recurring",
                period=period,
            )
        if self.recurring.ended(residual, number):
            return self._begin(number + 1 - MISSES * self.period, number, kind="faster")
        doubts = sign or len(self.baseline) > 2 * SHIFT_STEPS[-1]
        while len(self.waiting) > (
            SHIFT_STEPS[-1] if doubts else max(SHIFT_STEPS[1], len(self.baseline) // 2)
        ):
            self._add_steady(self.waiting.pop(0))
        return self._detect_creep(number) if number % CREEP_TEST_STEPS == 0 else None

    def _add_steady(self, log_s: float) -> None:
        self.baseline.add(log_s)
        self.unlearnt += 1
        if self.settled and (
            self.noise is None or self.unlearnt >= max(NOISE_UPDATE_STEPS, len(self.baseline) // 8)
        ):
            self._estimate_noise()

    def _direction(self) -> int:
        """Return 1 if the newest steps are slower than the reference, -1 if faster, else 0."""
        newest, reference = sorted(self.waiting[-PERSISTENT_STEPS:]), self.baseline.reference
        least = least_faster = math.log1p(assumed().watch.least_slowdown) / 2.0
        if self.kind in ("start", "faster"):
            # So far nothing was slow, and the reference follows gradual changes.
            least_faster = SHORT_CREEP_FRACTION * math.log1p(assumed().watch.creep)
        if len(newest) < PERSISTENT_STEPS:
            return 0
        return (
            1
            if newest[1] - reference > least
            else -1
            if newest[-2] - reference < -least_faster
            else 0
        )

    def _detect_shift(self, sign: int) -> int | None:
        """Return how many steps ago a shift in direction `sign` began; None without a shift."""
        if not sign or len(self.waiting) < SHIFT_STEPS[0]:
            return None
        noise, reference, reference_steps = (
            self._noise,
            self.baseline.reference,
            self.baseline.reference_steps,
        )
        residuals = [
            log_s - reference for log_s in [*self.baseline.logs[-STEPS_BEFORE:], *self.waiting]
        ]
        outside_pause = (SHIFT_STEPS[0] - MAX_PAUSE_STEPS) // 2
        window = sorted(residuals[-SHIFT_STEPS[0] :])
        limit = window[outside_pause if sign > 0 else -1 - outside_pause] + OUTLIER_SDS * noise.sd

        def sds(n: int) -> float:
            return sign * shift_sds(
                residuals, n, limit=limit, noise=noise, reference_steps=reference_steps
            )

        required = t_quantile(
            1.0 / (assumed().watch.false_alarm_steps * 2 * len(SHIFT_STEPS)), noise.steps
        )
        if max(sds(n) for n in SHIFT_STEPS if n <= len(self.waiting)) < required:
            return None
        return max(range(PERSISTENT_STEPS, len(self.waiting) + 1), key=sds)

    def _detect_creep(self, number: int) -> Regime | None:
        """Begin a regime if the newest steps crept above the lowest median or the oldest steps.

        Return the regime that ended; None without creep.
        """
        steps, creep, logs = (
            assumed().watch.reference_steps,
            math.log1p(assumed().watch.creep),
            self.logs,
        )
        if len(logs) < 2 * steps:
            return None
        self.lowest = min(self.lowest, self.baseline.median)
        oldest = min(len(logs) // 2, len(logs) - steps)
        newest_log_s = statistics.median(logs[-steps:])
        beyond = newest_log_s - statistics.median(logs[:oldest])
        # n steps contain about one independent median, so each may exceed the drift with
        # probability n / run length.
        drift = self._noise.drift(
            steps, oldest, probability=steps / assumed().watch.false_alarm_steps
        )
        if newest_log_s - self.lowest <= creep and beyond <= max(
            SHORT_CREEP_FRACTION * creep, drift
        ):
            return None
        return self._begin(number + 1 - steps, number, kind="creep")

    @property
    def _noise(self) -> Noise:
        """Noise of this regime, or of the previous one if that one was longer and noisier.

        Noise usually does not change with the pace.
        """
        assert self.noise is not None
        before = self.noise_before
        return (
            self.noise
            if before is None or before.steps < self.noise.steps or before.sd < self.noise.sd
            else before
        )

    def _replay_baseline(self, number: int) -> None:
        first = number + 1 - len(self.baseline)
        if not self.past:
            self.recurring.begun = first
        self.recurring.was_slow = False
        self.recurring.runs.clear()
        for place, log_s in enumerate(self.baseline.logs):
            self.recurring.add(log_s - self.baseline.reference, first + place, p0=1.0)

    def _estimate_noise(self) -> None:
        self.noise = Noise.of(self.baseline.logs)
        limit = self.baseline.median + SLOW_STEP
        slow = [log_s > limit for log_s in self.baseline.logs]
        isolated = sum(now and not before for before, now in itertools.pairwise([False, *slow]))
        self.slow_bound = upper_bound(isolated / len(slow), len(slow))
        self.unlearnt = 0

    def _begin(self, since: int, number: int, *, kind: Kind, period: int = 0) -> Regime:
        """Begin a regime at step `since`. Return the regime that ended."""
        steps = since - number - 1
        before, recent = self.logs[:steps], self.logs[steps:]
        self.past = [*self.past, self._regime(before or recent)][-MAX_REGIMES:]
        self.noise_before = self._noise
        self.first, self.alarm, self.kind, self.period = since, number, kind, period
        self.baseline, self.noise, self.waiting, self.lowest, self.slow_bound = (
            Baseline(),
            None,
            [],
            math.inf,
            1.0,
        )
        self.recurring.active = [period, since % period, 0] if period else []
        for log_s in recent:
            self._add_steady(log_s)
        if self.settled:
            self._replay_baseline(number)
        return self.past[-1]

    @property
    def regimes(self) -> list[Regime]:
        """All stored regimes, the current one last."""
        now = self.current
        return self.past if now is None else [*self.past, now]

    @property
    def current(self) -> Regime | None:
        """Regime of the newest step; None during warm-up."""
        return self._regime(self.logs) if self.logs else None

    def _regime(self, logs: list[float]) -> Regime:
        steady = Baseline(logs=logs)
        low, high = steady.interval()
        mean_log_s, mean_reach = steady.mean()
        return Regime(
            first=self.first,
            alarm=self.alarm,
            log_s=steady.median,
            low=low,
            high=high,
            mean_log_s=mean_log_s,
            mean_reach=mean_reach,
            kind=self.kind,
            period=self.period,
        )

    def state(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {
            "steps": self.steps,
            "first": self.first,
            "alarm": self.alarm,
            "kind": self.kind,
            "period": self.period,
            "baseline": self.baseline.logs,
            "recurring": self.recurring.state(),
            "waiting": self.waiting,
            "lowest": None if math.isinf(self.lowest) else self.lowest,
            "past": [list(astuple(regime)) for regime in self.past],
            "unlearnt": self.unlearnt,
            "noise": None if self.noise is None else self.noise.state(),
            "noise_before": None if self.noise_before is None else self.noise_before.state(),
            "slow_bound": self.slow_bound,
        }

    @classmethod
    def of(cls, state: dict[str, Any]) -> Self:
        """Restore a detector from its stored state."""
        logs = [round(float(log_s), DIGITS) for log_s in state["baseline"]]
        past = [
            Regime(**dict(zip(Regime.__slots__, regime, strict=True))) for regime in state["past"]
        ]
        restored = cls(
            steps=int(state["steps"]),
            first=int(state["first"]),
            alarm=int(state["alarm"]),
            kind=state["kind"],
            period=int(state["period"]),
            recurring=Recurring.of(state["recurring"]),
            past=past,
        )
        restored.baseline = Baseline(logs=logs)
        restored.waiting = [float(log_s) for log_s in state["waiting"]]
        restored.lowest = math.inf if state["lowest"] is None else float(state["lowest"])
        restored.noise, restored.noise_before = (
            None if noise is None else Noise.from_state(noise)
            for noise in (state["noise"], state["noise_before"])
        )
        restored.unlearnt, restored.slow_bound = int(state["unlearnt"]), float(state["slow_bound"])
        return restored


STEPS_BEFORE = 4
"""Number of steps before a shift among which the last one that is not an outlier is searched."""


def shift_sds(
    residuals: Sequence[float], n: int, *, limit: float, noise: Noise, reference_steps: int
) -> float:
    """Return the shift of the newest n residuals in multiples of its standard error.

    Args:
        residuals: ln step times minus the reference.
        n: Number of newest steps.
        limit: Newest steps above this are outliers. For earlier steps, the limit is OUTLIER_SDS.
        noise: Noise of the series.
        reference_steps: Number of steps that determine the reference.
    """
    r, variance = noise.correlation_bound, noise.sd**2
    information = weighted = reference_weight = 0.0
    first = len(residuals) - n
    last, last_value = -1, 0.0
    for place in range(max(first - STEPS_BEFORE, 0), first):
        if residuals[place] <= OUTLIER_SDS * noise.sd:
            last, last_value = place, residuals[place]
    before = last >= 0
    for place in range(first, len(residuals)):
        value = residuals[place]
        if value > limit:
            continue
        power = r ** (place - last) if last >= 0 else 0.0
        shock, shock_variance = value - power * last_value, variance * (1.0 - power * power)
        seen = 1.0 if before else 1.0 - power
        information += seen * seen / shock_variance
        weighted += seen * shock / shock_variance
        reference_weight += seen * (1.0 - power) / shock_variance
        last, last_value, before = place, value, False
    if not information:  # Each of the newest steps is an outlier.
        return 0.0
    reference_error = (
        (reference_weight / information) ** 2 * variance * median_variance(reference_steps, r)
    )
    return weighted / information / math.sqrt(1.0 / information + reference_error)
