"""One factor on every step: what stands in for a fit that its own left-out runs do not support."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.evidence import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFactor:
    """ln(step / predicted) of every configuration."""

    log_factor: float
    log_sd: float
    """Of a run that was left out."""


def plain_factor(
    *, excess: FloatArray, left_out_correction: FloatArray, slow: FloatArray
) -> PlainFactor | None:
    """Return the factor where a fit calls many of (n,) runs stalls, and a factor tells runs that it
    did not see better; None where the fit stands.

    `excess`: ln(measured / predicted) of the runs; `left_out_correction`: what the fit to the
    others says of each; `slow`: the probability that it stalled. The factor is the mean of the runs
    and of one that agrees with the prediction. Errors count by their squares, those of stalls no
    more than a usual one: a fit that calls every other run a stall tells the rest well, and no run
    that is to come.
    """
    figures, most = assumed().step_time, assumed().stalls.mean_log_excess
    runs = len(excess)
    if runs < figures.plain_least_runs or slow.mean() < figures.plain_stalled_share:
        return None
    others = (excess.sum() - excess) / runs  # n - 1 runs, and the one that agrees
    fitted, plain = (
        float(np.mean(np.minimum(np.abs(error), most) ** 2))
        for error in (excess - left_out_correction, excess - others)
    )
    if plain >= fitted:
        return None
    return PlainFactor(log_factor=float(excess.sum() / (runs + 1)), log_sd=float(np.sqrt(plain)))
