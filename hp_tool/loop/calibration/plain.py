"""A single factor on every step, used if left-out runs do not support a full fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.evidence import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFactor:
    """Normal distribution of ln(step / predicted), common to all configurations."""

    log_factor: float
    log_sd: float
    """Standard deviation of a left-out run."""


def plain_factor(
    *, excess: FloatArray, left_out_correction: FloatArray, slow: FloatArray
) -> PlainFactor | None:
    """Return a single factor if the fit classifies many of n runs as stalled and the factor
    predicts left-out runs better.

    Returns None if the fit is better. The factor is the mean over the runs and one additional run
    that agrees with the prediction. Squared errors of stalls are limited to that of a typical
    stall. Otherwise a fit that classifies every second run as stalled would predict the rest well,
    but no future run.

    Args:
        excess: ln(measured / predicted) of the runs, shape (n,).
        left_out_correction: Prediction of each run by the fit to the other runs, shape (n,).
        slow: Probability that each run stalled, shape (n,).
    """
    figures, most = assumed().step_time, assumed().stalls.mean_log_excess
    runs = len(excess)
    if runs < figures.plain_least_runs or slow.mean() < figures.plain_stalled_share:
        return None
    others = (excess.sum() - excess) / runs  # n - 1 runs and the prior run.
    fitted, plain = (
        float(np.mean(np.minimum(np.abs(error), most) ** 2))
        for error in (excess - left_out_correction, excess - others)
    )
    if plain >= fitted:
        return None
    return PlainFactor(log_factor=float(excess.sum() / (runs + 1)), log_sd=float(np.sqrt(plain)))
