"""A single factor on every step, which is used if the runs contradict the full fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.evidence import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFactor:
    """Normal distribution of ln(step / predicted), common to all configurations."""

    log_factor: float
    log_sd: float
    """Standard deviation of a run that was left out of the fit."""


def plain_factor(
    *, excess: FloatArray, left_out_correction: FloatArray, stated_log_sd: float
) -> PlainFactor | None:
    """Return a single factor if n runs contradict the fit; None if they support it.

    The runs contradict the fit if more than half of them are outside the cost model's 90% interval,
    placed around the prediction by a fit to the other runs. The factor is the mean of ln(measured /
    predicted) over the runs without the fastest and the slowest one, plus one additional run that
    agrees with the prediction.

    Args:
        excess: ln(measured / predicted) of the runs, shape (n,).
        left_out_correction: Correction of each run by the fit to the other runs, shape (n,).
        stated_log_sd: Standard deviation of `excess` stated by the cost model.
    """
    runs, error = len(excess), np.median(np.abs(excess - left_out_correction))
    if runs < assumed().step_time.plain_least_runs or error < NORMAL_QUANTILE * stated_log_sd:
        return None
    others = np.array([_mean_excess(np.delete(excess, run)) for run in range(runs)])
    log_sd = float(np.sqrt(np.mean((excess - others) ** 2)))
    return PlainFactor(log_factor=_mean_excess(excess), log_sd=log_sd)


def _mean_excess(excess: FloatArray) -> float:
    return float(np.sort(excess)[1:-1].sum() / (len(excess) - 1))
