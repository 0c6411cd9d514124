"""CUSUM tests of one level each: are all steps slower, or faster, by so much?

For a level d (5 %, 10 %, ... of ln time) the test sees one bit of a step: is ln t above the
reference by more than d / 2? The residuals of the baseline give p0 = P(bit) as it is and p1 =
P(bit) were all steps slower by d. Page's CUSUM of the likelihood ratio,

    S <- max(0, S + (ln p1 / p0 if the bit is set, else ln (1 - p1) / (1 - p0)) / V),        an alarm if S >= h,

needs no distribution: a checkpoint that takes minutes counts as one bit, as a step 6 % late does.
With p0 an upper bound of the bit's probability (Wilson 1927, Journal of the American Statistical
Association 22) and independent bits, exp(S) is a supermartingale while nothing changes, so the mean
run to a false alarm of one level is at least e^h (Lorden 1971, Annals of Mathematical Statistics
42, theorem 2): h = ln(run length x levels). Slow steps that come in rows tell less each: for bits
whose correlation falls as r^k with the distance k the variance of a sum is V = (1 + r) / (1 - r)
times that of independent ones (Bartlett 1946, Journal of the Royal Statistical Society B 8). r is
what is left of the correlation in the baseline after one standard error, 1 / sqrt(n). The change
begins where S was last zero (Page 1954, Biometrika 41).

Noise with a long memory drifts away from its reference for many steps, which p0 does not foresee.
An alarm therefore needs the median residual since the change to exceed what such a median drifts by
(`drift_sd`) once in the run length.
"""  # noqa: E501

import math
from dataclasses import dataclass

from hp_tool.watch.slowdowns.baseline import (
    NORMAL_QUARTILES,
    Baseline,
    correlation,
    share_beyond,
    upper_bound,
)

MOST_CORRELATION = 0.98
LEAST_LIMIT = 0.85
"""Standard deviations of the residuals that a level's limit is at least: noise hides smaller
changes.
"""


@dataclass(slots=True, kw_only=True)
class Level:
    """The CUSUM of one level; `log_shift` below zero looks for a job that became faster."""

    log_shift: float
    gain: float = 0.0
    """ln(p1 / p0) / V; 0: the noise hides a change of this size."""
    loss: float = 0.0
    score: float = 0.0
    since: int = 0
    """Number of the step after the last at which the score was zero."""

    @property
    def limit(self) -> float:
        """ln seconds beyond the reference at which the bit is set: half the shift."""
        return self.log_shift / 2.0

    def learn(self, baseline: Baseline, *, ordered: list[float]) -> None:
        """Take the weights of both bits from the baseline. `ordered`: its residuals, sorted."""
        shift, n = self.log_shift, len(ordered)
        p0 = upper_bound(share_beyond(ordered, self.limit, above=shift > 0.0), n)
        usual = share_beyond(ordered, self.limit - shift, above=shift > 0.0)
        p1 = (usual * n + 1.0) / (
            n + 2.0
        )  # decides how soon a change is seen, not how often none is
        quartiles = ordered[3 * n // 4] - ordered[n // 4]
        if p1 <= p0 or abs(self.limit) < LEAST_LIMIT * quartiles / NORMAL_QUARTILES:
            self.gain, self.loss = 0.0, 0.0
            return
        in_rows = correlation([self.sets(each) for each in baseline.residuals]) - 1.0 / math.sqrt(n)
        r = min(max(in_rows, 0.0), MOST_CORRELATION)
        inflation = (1.0 + r) / (1.0 - r)
        self.gain, self.loss = (
            math.log(p1 / p0) / inflation,
            math.log((1.0 - p1) / (1.0 - p0)) / inflation,
        )

    def sets(self, residual: float) -> bool:
        """Return the bit of a step at this distance from the reference."""
        return residual > self.limit if self.log_shift > 0.0 else residual < self.limit

    def step(self, residual: float, number: int) -> float:
        """Return the score after the step of this number."""
        self.score += self.gain if self.sets(residual) else self.loss
        if self.score <= 0.0:
            self.score, self.since = 0.0, number + 1
        return self.score


def drift_sd(n: int, *, sd: float, correlation: float, reference_steps: int) -> float:
    """Return the standard deviation of the median of n steps less that of `reference_steps` others,
    of noise that remembers.

    The median of n normal variables of standard deviation s whose correlation falls as r^k has the
    variance (s^2 / n) sum over
    |k| < n of (1 - |k| / n) asin(r^|k|): the covariance of two signs is (2 / pi) asin of that of the variables, and the density
    at the median is 1 / (s sqrt(2 pi)). For r = 0 that is the known (pi / 2) s^2 / n.
    """  # noqa: E501
    return sd * math.sqrt(
        _median_variance(n, correlation) + _median_variance(reference_steps, correlation)
    )


def _median_variance(n: int, r: float) -> float:
    total, power = math.pi / 2.0, 1.0
    for k in range(1, n):
        power *= r
        if power < 1e-3:
            break
        total += 2.0 * (1.0 - k / n) * math.asin(power)
    return total / n
