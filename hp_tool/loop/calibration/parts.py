"""Parts of a step: the groups with fitted factors, and factors on single parts measured by
traces.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hp_tool.domain.parts import PARTS, STEP, STEP_KEYS
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.evidence import Evidence, FloatArray
from hp_tool.loop.calibration.fitting import Prior

GROUPS = ("compute", "attention", "communication", "memory_bound")


def part_factors(logs: FloatArray) -> dict[str, float]:
    """Return measured / predicted seconds by part, from `part_logs`; empty without traces."""
    return dict(zip(STEP_KEYS, np.exp(logs).tolist(), strict=True)) if len(logs) else {}


def as_traced(parts_s: Mapping[str, FloatArray], logs: FloatArray) -> Mapping[str, FloatArray]:
    """Return the parts multiplied by the factors from traces."""
    factors = part_factors(logs)
    return (
        {name: seconds * factors.get(name, 1.0) for name, seconds in parts_s.items()}
        if factors
        else parts_s
    )


def part_logs(evidence: Evidence, *, prior: Prior) -> FloatArray:
    """Return the posterior means of ln f_p, where f_p is the factor on each of STEP_KEYS, shape
    (parts,); empty without traces.

    ln f_p = a + d_g + e_p with the device's a and the group's d_g as in `StepTimeFit`, and e_p for
    each part, because links and kernels differ within a group: N(0, K), K_pq = sd(a)^2 + [same
    group] sd(d)^2 + [p = q] sd(e)^2. A run observes ln measured - ln predicted of each part that is
    at least 1% of its step, with the deviation `Traces.part_scatter_log_sd`: E(ln f) = K_.o (K_oo +
    S)^-1 mean, with S the deviation's square over the number of runs.
    """
    figures = assumed().traces
    whole_s = np.sum(list(evidence.parts_s.values()), axis=0) if evidence.parts_s else np.empty(0)
    known: dict[int, FloatArray] = {}
    for place, part in enumerate(STEP_KEYS):
        if (
            not PARTS[part].measured
            or part not in evidence.measured_parts_s
            or part not in evidence.parts_s
        ):
            continue
        measured_s, predicted_s = evidence.measured_parts_s[part], evidence.parts_s[part]
        rows = (measured_s > 0.0) & (predicted_s > figures.least_part_share * whole_s)
        if rows.any():
            known[place] = np.sort(np.log(measured_s[rows] / predicted_s[rows]))
    if not known:
        return np.empty(0)
    groups = np.array([part.factor for part in STEP])
    same = groups[:, None] == groups
    covariance = (
        prior.common_log_sd**2
        + same * prior.group_log_sd**2
        + np.eye(len(same)) * figures.part_log_sd**2
    )
    places = np.array(list(known))
    noise = figures.part_scatter_log_sd**2 / np.array([len(each) for each in known.values()])
    means = np.array([each.mean() for each in known.values()])
    logs = covariance[:, places] @ np.linalg.solve(
        covariance[np.ix_(places, places)] + np.diag(noise), means
    )
    compute, bubble, overhead = (
        STEP_KEYS.index(part) for part in ("compute", "pipeline_bubble", "overhead")
    )
    logs[bubble], logs[overhead] = logs[compute], 0.0
    return np.asarray(logs)
