"""Level shifts: are the newest n steps slower or faster than the steps before them?

Steps are AR(1) noise y about the reference; from a shift d on, about the reference plus d.
Generalized least squares estimates d from the shocks y[t] - r y[t - 1], in which the shift is d
once and (1 - r) d in each later step. The more noise is correlated, the more the first step
counts. `shift_sds` is the estimate in standard errors, and so the generalized likelihood ratio test
of d = 0. Outliers are missing values: a shock across a gap of g steps is y[t] - r^g y[t - g], with
(1 - r^2g) / (1 - r^2) times a shock's variance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hp_tool.watch.slowdowns.noise import OUTLIER_SDS, Noise, median_variance

STEPS_BEFORE = 4
"""Steps before the shift that are searched for one that is not an outlier."""


def shift_sds(
    residuals: Sequence[float], n: int, *, limit: float, noise: Noise, reference_steps: int
) -> float:
    """Return the shift of the newest n residuals, in standard errors of its estimate.

    Args:
        residuals: ln step times minus the reference.
        n: Number of newest steps.
        limit: Newest steps above this are outliers; earlier ones above OUTLIER_SDS.
        noise: Noise of the series.
        reference_steps: Number of steps in the reference median.
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
