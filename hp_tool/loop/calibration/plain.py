"""A single factor on every step, used if held-out runs do not support a fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.evidence import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFactor:
    """Normal distribution of ln(step / predicted) of every configuration."""

    log_factor: float
    log_sd: float
    """Standard deviation of a held-out run."""


def plain_factor(
    *, excess: FloatArray, left_out_correction: FloatArray, slow: FloatArray
) -> PlainFactor | None:
    """Return the factor if a fit calls many of (n,) runs stalls and a factor predicts held-out runs
    better.

    None if the fit is better. The factor is the mean of the runs and of one run that agrees with
    the prediction. Squared errors of stalls are limited to that of a typical stall. Otherwise a fit
    that calls every second run a stall would predict the rest well, but no future run.

    Args:
        excess: ln(measured / predicted) of the runs.
        left_out_correction: Prediction of each by the fit to the other runs.
        slow: Probability that each run stalled.
    """
    figures, most = assumed().step_time, assumed().stalls.mean_log_excess
    runs = len(excess)
    if runs < figures.plain_least_runs or slow.mean() < figures.plain_stalled_share:
        return None
    others = (excess.sum() - excess) / runs  # n - 1 runs and the prior one
    fitted, plain = (
        float(np.mean(np.minimum(np.abs(error), most) ** 2))
        for error in (excess - left_out_correction, excess - others)
    )
    if plain >= fitted:
        return None
    return PlainFactor(log_factor=float(excess.sum() / (runs + 1)), log_sd=float(np.sqrt(plain)))
