"""A calibrated step time with its interval: log-normal, beside a second regime where runs stall."""

from dataclasses import dataclass

import numpy as np

from hp_tool.loop.calibration.evidence import FloatArray, IntArray

HALVINGS = 40
"""Of an interval of a dozen e-folds: to a relative 1e-10."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRegime:
    """n configurations that may stall; see `regimes`."""

    probability: FloatArray
    """(n,)"""
    step_s: FloatArray
    """(n,) median seconds where it stalls."""
    log_sd: float = 0.7
    """Scatter of a stalled step about that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """n step times: log-normal in the regular regime; a second, slower one of its own probability
    where runs have shown one.
    """

    regular_s: FloatArray
    """(n,) median where nothing stalls."""
    log_sd: FloatArray
    """(n,) standard deviation of ln(step_s) there: unknown parameters and what none of them
    explains.
    """
    slow: SlowRegime | None = None
    usual_slow_share: FloatArray | float = 0.0
    """(n,) that usually stalls, where no run says more: `log_sd` has it in it."""

    @property
    def median_s(self) -> FloatArray:
        """(n,) of the likelier regime."""
        return (
            self.regular_s
            if self.slow is None
            else np.where(self.slow.probability < 0.5, self.regular_s, self.slow.step_s)
        )

    def take(self, rows: IntArray) -> "StepPrediction":
        """Those of some rows."""
        slow = self.slow and SlowRegime(
            probability=self.slow.probability[rows],
            step_s=self.slow.step_s[rows],
            log_sd=self.slow.log_sd,
        )
        usual = self.usual_slow_share + np.zeros_like(self.regular_s)
        return StepPrediction(
            regular_s=self.regular_s[rows],
            log_sd=self.log_sd[rows],
            slow=slow,
            usual_slow_share=usual[rows],
        )

    @property
    def slow_probability(self) -> FloatArray:
        """(n,)"""
        return (
            self.usual_slow_share + np.zeros_like(self.regular_s)
            if self.slow is None
            else self.slow.probability
        )

    def interval(self, *, confidence: float = 0.9) -> tuple[FloatArray, FloatArray]:
        """(low, high), each (n,): should hold the measured step time with this probability."""
        return self.quantile(0.5 - confidence / 2), self.quantile(0.5 + confidence / 2)

    def quantile(self, probability: float) -> FloatArray:
        """(n,) seconds that the step takes at most with this probability."""
        from scipy.special import ndtr, ndtri

        regular = np.asarray(self.regular_s * np.exp(ndtri(probability) * self.log_sd))
        if self.slow is None:
            return regular
        # Two regimes have no closed form: halve the interval between the least and the most it can
        # be.
        log_regular, log_slow, share = (
            np.log(self.regular_s),
            np.log(self.slow.step_s),
            self.slow.probability,
        )
        low = np.minimum(np.log(regular), log_slow) - 10.0 * self.slow.log_sd
        high = np.maximum(np.log(regular), log_slow) + 10.0 * self.slow.log_sd
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            usual = ndtr((middle - log_regular) / self.log_sd)
            below = (1.0 - share) * usual + share * ndtr(
                (middle - log_slow) / self.slow.log_sd
            ) < probability
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return np.asarray(np.exp(high), dtype=np.float64)
