"""Predicted step times: a regular regime, and where it is known of, a slow one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hp_tool.calibration.evidence import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRegime:
    """n configurations that may stall; see `residual`."""

    probability: FloatArray
    """(n,)"""
    step_s: FloatArray
    """(n,) median seconds where it stalls."""
    log_sd: float = 0.7
    """Scatter of a stalled step about that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """n step times: log-normal (Student-t in the logarithm) in the regular regime; a second, slower one of its own
    probability where runs have shown one.
    """

    regular_s: FloatArray
    """(n,) median where nothing stalls."""
    log_sd: FloatArray
    """(n,) standard deviation of ln(step_s) there: unknown multipliers and what no multiplier explains."""
    degrees_of_freedom: float
    slow: SlowRegime | None = None

    @property
    def median_s(self) -> FloatArray:
        """(n,) of both regimes together."""
        return self.regular_s if self.slow is None else self.quantile(0.5)

    @property
    def slow_probability(self) -> FloatArray:
        """(n,)"""
        return np.zeros_like(self.regular_s) if self.slow is None else self.slow.probability

    def interval(self, *, confidence: float = 0.9) -> tuple[FloatArray, FloatArray]:
        """(low, high), each (n,): should hold the measured step time with this probability."""
        return self.quantile(0.5 - confidence / 2), self.quantile(0.5 + confidence / 2)

    def quantile(self, probability: float) -> FloatArray:
        """(n,) seconds that the step takes at most with this probability. The slow regime lies above the regular one, so
        the first 1 - P(slow) of all outcomes are the regular ones.
        """
        from scipy.special import ndtri, stdtrit

        if self.slow is None:
            return np.asarray(self.regular_s * np.exp(stdtrit(self.degrees_of_freedom, probability) * self.log_sd))
        regular = 1.0 - self.slow.probability
        within = np.clip(probability / regular, 1e-9, 1.0 - 1e-9)
        beyond = np.clip((probability - regular) / self.slow.probability, 1e-9, 1.0 - 1e-9)
        usual = self.regular_s * np.exp(stdtrit(self.degrees_of_freedom, within) * self.log_sd)
        stalled = self.slow.step_s * np.exp(ndtri(beyond) * self.slow.log_sd)
        return np.asarray(np.where(probability < regular, usual, np.maximum(stalled, self.regular_s)), dtype=np.float64)
