"""Parts of a step: groups with a fitted factor, and factors on single parts measured by traces."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hp_tool.domain.parts import PARTS, STEP_KEYS
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.evidence import Evidence, FloatArray

GROUPS = ("compute", "attention", "communication", "memory_bound")


def part_factors(logs: FloatArray) -> dict[str, float]:
    """Return the measured / predicted time of each part from `part_logs`.

    Empty if there are none.
    """
    return dict(zip(STEP_KEYS, np.exp(logs).tolist(), strict=True)) if len(logs) else {}


def apply_trace_factors(
    parts_s: Mapping[str, FloatArray], logs: FloatArray
) -> Mapping[str, FloatArray]:
    """Multiply the parts by the factors measured by traces."""
    factors = part_factors(logs)
    return (
        {name: seconds * factors.get(name, 1.0) for name, seconds in parts_s.items()}
        if factors
        else parts_s
    )


def part_logs(evidence: Evidence) -> FloatArray:
    """Return ln f_p for each of STEP_KEYS, shape (parts,), from traces; empty without traces.

    f_p is the factor on part p. r_p is the mean over n runs of ln(measured / predicted) for a part
    that takes at least 1% of the step. With s, the scatter of r_p between configurations
    (`Traces.part_scatter_log_sd`),

        ln f_p = r_p max(0, 1 - s^2 / (n r_p^2)),

    the positive-part estimator of James and Stein (1961). A part within the scatter keeps its
    prediction; a part that is several times slower gets nearly its measured ratio. What all parts
    have in common is corrected by the step times of the same runs. The bubble has the factor of
    compute.
    """
    figures, step_s = assumed().traces, sum(evidence.parts_s.values())
    logs = np.full(len(STEP_KEYS), np.nan)
    for part in evidence.measured_parts_s.keys() & evidence.parts_s.keys():
        measured_s, predicted_s = evidence.measured_parts_s[part], evidence.parts_s[part]
        rows = (measured_s > 0.0) & (predicted_s > figures.least_part_share * step_s)
        if PARTS[part].measured and rows.any():
            ratio = np.sort(np.log(measured_s[rows] / predicted_s[rows])).mean()
            noise = figures.part_scatter_log_sd**2 / rows.sum()
            logs[STEP_KEYS.index(part)] = ratio * max(0.0, 1.0 - noise / max(ratio**2, noise))
    logs[STEP_KEYS.index("pipeline_bubble")] = logs[STEP_KEYS.index("compute")]
    return np.nan_to_num(logs) if np.isfinite(logs).any() else np.empty(0)
