"""Calibrated step times with intervals: log-normal, plus a slow regime for runs that stall."""

from dataclasses import dataclass

import numpy as np

from hp_tool.loop.calibration.evidence import FloatArray, IntArray

HALVINGS = 40
"""Bisection steps. For an interval of a dozen e-folds, the relative error is 1e-10."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRegime:
    """Slow regime of n configurations that may stall; see `regimes`."""

    probability: FloatArray
    """(n,) stall probabilities."""
    step_s: FloatArray
    """(n,) median step time in seconds if the run stalls."""
    log_sd: float = 0.7
    """Standard deviation of ln(step time) if the run stalls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointSteps:
    """Joint distribution of ln(step_s) of m configurations without stalls.

    It is normal under each of K explanations.
    """

    weight: FloatArray
    """(K,) probabilities."""
    mean: FloatArray
    """(K, m) means of ln(step_s)."""
    covariance: FloatArray
    """(K, m, m) covariances of the component shared by all runs of a configuration."""
    noise: FloatArray
    """(K, m) variances of the component that differs between configurations or between single runs.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """Predicted step times of n configurations.

    They are log-normal in the regular regime. If runs stalled, there is also a slower regime.
    """

    regular_s: FloatArray
    """(n,) median step time without stalls, in seconds."""
    log_sd: FloatArray
    """(n,) standard deviation of ln(step_s) without stalls, from parameter uncertainty and
    unexplained effects.
    """
    slow: SlowRegime | None = None
    usual_slow_share: FloatArray | float = 0.0
    """(n,) typical fraction of stalled runs that is already included in `log_sd`."""

    @property
    def median_s(self) -> FloatArray:
        """Return the median of the more likely regime, shape (n,)."""
        return (
            self.regular_s
            if self.slow is None
            else np.where(self.slow.probability < 0.5, self.regular_s, self.slow.step_s)
        )

    def take(self, rows: IntArray) -> "StepPrediction":
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
        """Return (n,) stall probabilities."""
        return (
            self.usual_slow_share + np.zeros_like(self.regular_s)
            if self.slow is None
            else self.slow.probability
        )

    def interval(self, *, confidence: float = 0.9) -> tuple[FloatArray, FloatArray]:
        """Return (low, high), (n,) each, which contain the step time with this probability."""
        return self.quantile(0.5 - confidence / 2), self.quantile(0.5 + confidence / 2)

    def quantile(self, probability: float) -> FloatArray:
        """Return the seconds that a step does not exceed with this probability, shape (n,)."""
        from scipy.special import ndtr, ndtri

        regular = np.asarray(self.regular_s * np.exp(ndtri(probability) * self.log_sd))
        if self.slow is None:
            return regular
        # Bisect between the smallest and largest possible values.
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
