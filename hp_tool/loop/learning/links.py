"""Link bandwidths fitted to steps whose parts were measured by traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from hp_tool.cost.candidates import Candidates
from hp_tool.domain.measurement_records import MeasurementRecord
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.parts import COMMUNICATION
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.evidence import FloatArray
from hp_tool.loop.learning.evidence import measured_parts
from hp_tool.questions.training.links import Links, with_links
from hp_tool.questions.training.problem import TrainingProblem

Traced = tuple[TrainingProblem, Candidates, dict[str, FloatArray]]
"""A problem, n of its candidates, and their measured seconds by part, each of shape (n,); NaN if
not measured.
"""
Group = tuple[TrainingProblem, Sequence[MeasurementRecord]]
TURNS = 2
"""Number of times that each link's bandwidth is optimized with the other one fixed."""
WIDEST = 3.0
"""Maximum |ln(bandwidth / stated)| in the search."""


def links_of(groups: Iterable[Group]) -> Links:
    """Return link bandwidths relative to the stated ones, fitted to measurements with parts.

    They are 1 without such measurements.
    """
    traced: list[Traced] = []
    for problem, records in groups:
        known = [
            each
            for each in records
            if each.measurement.parts_s and each.measurement.fidelity.is_whole
        ]
        configs = [each.parallel for each in known if isinstance(each.parallel, ParallelConfig)]
        if configs and not problem.kinds:
            traced.append(
                (
                    problem,
                    Candidates.from_configs(configs),
                    measured_parts([each.measurement for each in known]),
                )
            )
    return fitted_links(traced)


def fitted_links(traced: Sequence[Traced]) -> Links:
    """Return the most likely link bandwidths relative to the stated ones; 1 without traced steps.

    ln(bandwidth / stated) ~ N(0, `Traces.link_log_sd`^2). At a given bandwidth, measured part times
    deviate from the cost model's by `Traces.part_scatter_log_sd`. Exposed times are not
    proportional to the bandwidth, because communication is partly overlapped. The cost model is
    therefore evaluated for each bandwidth.
    """
    links = Links()
    if not any(np.isfinite(seconds).any() for _, _, parts in traced for seconds in parts.values()):
        return links
    from scipy.optimize import minimize_scalar

    for _ in range(TURNS):
        for name in ("network", "nvlink"):
            objective = _objective(traced, links, name)
            grid = np.linspace(-WIDEST, WIDEST, 13)
            best = float(grid[np.argmin([objective(each) for each in grid])])
            step = float(grid[1] - grid[0])
            bounds = (best - step, best + step)
            optimum = float(
                minimize_scalar(
                    objective, bounds=bounds, method="bounded", options={"xatol": 1e-3}
                ).x
            )
            links = replace(links, **{name: float(np.exp(optimum))})
    return links


def _objective(traced: Sequence[Traced], links: Links, name: str) -> Callable[[float], float]:
    """Return -2 ln density as a function of one link's log bandwidth, given the other's."""
    figures = assumed().traces

    def improbability(log: float) -> float:
        total = (log / figures.link_log_sd) ** 2
        changed = replace(links, **{name: float(np.exp(log))})
        for problem, candidates, measured in traced:
            parts = with_links(problem, changed).costs(candidates).parts
            step_s = sum(parts.values())
            for part in COMMUNICATION:
                if part not in measured:
                    continue
                # A fully overlapped part has no time to compare, so the minimum fraction is used.
                least = figures.least_part_share * step_s
                ratio = np.log(np.maximum(measured[part], least) / np.maximum(parts[part], least))
                total += float(np.nansum((ratio / figures.part_scatter_log_sd) ** 2))
        return total

    return improbability
