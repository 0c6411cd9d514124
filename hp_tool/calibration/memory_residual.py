"""Memory that a factor and an overhead do not explain: a Gaussian process over configurations.

ln(measured / corrected prediction) = g(x) + noise. Much of g is the allocator's: blocks of a size that no other tensor of
the step asks for again stay reserved, so that twice the micro-batch takes 1.3 or 1.9 times the memory, alike for configurations
alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hp_tool.calibration.evidence import BoolArray, FloatArray
from hp_tool.calibration.features import scaled
from hp_tool.calibration.process import Process, most_likely
from hp_tool.calibration.robust import doubts

AMPLITUDE, LENGTH = 0.1, 1.5
"""Prior medians of g's standard deviation and of its correlation length, in units of the features' scales."""
_HYPERPRIOR_LOG_SD = np.array([0.4, 0.4, 0.4])
_ARRAYS = ("points", "residual", "doubt")


@dataclass(frozen=True, kw_only=True)
class MemoryResidual:
    """n runs whose peak is known, or known to be more than the device holds."""

    names: tuple[str, ...]
    points: FloatArray
    """(n, k) features in units of their scales."""
    residual: FloatArray
    """(n,) ln(measured / corrected prediction)."""
    doubt: FloatArray
    """(n,) variance beyond the noise: of runs that ran out, whose peak is not known, and of outliers."""
    amplitude: float
    length: float
    noise: float
    """Standard deviation of one run about g."""
    scale: float
    """How far runs were from what the others said of them, in units of what was to be expected, at least 1."""

    @cached_property
    def _process(self) -> Process:
        parameters = (self.amplitude, self.length, self.noise)
        return Process(points=self.points, values=self.residual, doubt=self.doubt, parameters=parameters)

    def predict(self, features: Mapping[str, FloatArray]) -> tuple[FloatArray, FloatArray]:
        """Mean of ln(needed / corrected prediction) of n configurations, and its variance, one run's noise included."""
        mean, variance = self._process.predict(scaled(features, self.names))
        return mean, self.scale**2 * variance

    def left_out(self) -> FloatArray:
        """(n,) ln(measured / what all the other runs say of each)."""
        return self.residual - self._process.leave_one_out()[0]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        arrays = {name: getattr(self, name).tolist() for name in _ARRAYS}
        return {"names": list(self.names), **arrays, **{n: getattr(self, n) for n in ("amplitude", "length", "noise", "scale")}}

    @staticmethod
    def from_dict(payload: Mapping[str, Any]) -> MemoryResidual:
        """The fit that `to_dict` wrote."""
        arrays = {name: np.asarray(payload[name], dtype=np.float64) for name in _ARRAYS}
        return MemoryResidual(**{**payload, **arrays, "names": tuple(payload["names"])})


def fit_memory_residual(
    *,
    features: Mapping[str, FloatArray],
    log_measured: FloatArray,
    log_predicted: FloatArray,
    ran_out: BoolArray,
    noise_log_sd: float,
    degrees_of_freedom: float,
) -> MemoryResidual:
    """Hyperparameters by maximum marginal likelihood under log-normal priors; `log_measured` of a run that ran out is the
    device's capacity.

    Such a run needed at least that: it counts with that, or with what is predicted where this is more, as one of which
    nobody knows by how much. Outliers, judged by what the other runs say of them, count the less the further off they are.
    scale^2 = max(1, (nu + sum z^2) / (nu + n)) over the runs measured, with z the standardised distance from what the others
    say.
    """
    names = tuple(sorted(features))
    points = scaled(features, names)
    residual = log_measured - log_predicted
    residual = np.where(ran_out, np.maximum(residual, 0.0), residual)
    unknown = np.where(ran_out, AMPLITUDE**2, 0.0)
    start = (AMPLITUDE, LENGTH, noise_log_sd)

    def process(doubt: FloatArray) -> Process:
        parameters = most_likely(
            points=points, values=residual, doubt=doubt, start=start, prior=start, prior_log_sd=_HYPERPRIOR_LOG_SD
        )
        return Process(points=points, values=residual, doubt=doubt, parameters=parameters)

    def distance(found: Process) -> FloatArray:
        mean, variance = found.leave_one_out()
        return (residual - mean) / np.sqrt(variance)

    found = process(unknown)
    found = process(unknown + doubts(distance(found), noise=found.parameters[-1]))
    z = distance(found)[~ran_out]
    amplitude, length, noise = found.parameters
    return MemoryResidual(
        names=names,
        points=points,
        residual=residual,
        doubt=found.doubt,
        amplitude=amplitude,
        length=length,
        noise=noise,
        scale=max(1.0, float(np.sqrt((degrees_of_freedom + z @ z) / (degrees_of_freedom + len(z))))),
    )
