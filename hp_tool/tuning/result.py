"""A search's answer: every candidate ranked by what is now known, measured ones by their measured time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hp_tool.calibration import Calibration
from hp_tool.correction import Correction, corrected_estimate
from hp_tool.cost.breakdown import estimate_row
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.query import Query
from hp_tool.domain.records import RunRecord, SearchState
from hp_tool.domain.result import Recommendation, SpaceSummary
from hp_tool.errors import HpToolError
from hp_tool.ranking import CostedSpace
from hp_tool.search.coordinator import spent_by
from hp_tool.targets import longest_step_s
from hp_tool.tuning.problem import TuningProblem

TOP = 10
"""Recommendations in a result; measured configurations beyond it are added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSummary:
    """What a search cost, and why it ended."""

    id: str
    state: SearchState
    profile_runs: int
    """Real runs that ended with a measurement, good or bad."""
    gpu_seconds: float
    """Devices x wall seconds of all runs."""
    grid_gpu_seconds: float | None
    """What running every feasible candidate would have cost, by the calibrated prediction; None where nothing succeeded."""
    stopped_because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The ranked answer with measurements, the space it was found in, and the search's account."""

    id: str | None
    """The query's."""
    status: Literal["ok", "error"] = "ok"
    """error: no run succeeded; what is recommended is only predicted."""
    error: dict[str, str | None] | None = None
    """{code, message, field}"""
    recommendations: tuple[Recommendation, ...]
    space: SpaceSummary
    rejections: dict[str, int]
    search: SearchSummary


def make_result(
    *,
    problem: TuningProblem,
    runs: Sequence[RunRecord],
    calibration: Calibration,
    search_id: str,
    state: SearchState,
    stopped_because: str,
    seconds: float,
    error: HpToolError | None = None,
) -> TuneResult:
    """Rank and describe. A result can be made at any moment of a search.

    What is known by now to miss max_days or max_cost is not recommended, measured or not.
    """
    table = problem.search.table
    measured, failed = _by_row(problem, runs)
    step = calibration.predict_step(parts_s=table.parts_s, layer_passes=table.layer_passes)
    fits = calibration.predict_memory(memory_bytes=table.memory_bytes).fit_probability(table.usable_bytes) >= 0.5
    limit_s = longest_step_s(problem.training)
    eligible = np.flatnonzero(fits & (step.median_s <= limit_s)).tolist()
    rows = rank(
        median_s=step.median_s,
        log_sd=step.log_sd,
        eligible=[row for row in eligible if row not in failed and row not in measured],
        measured_s={row: m.step_s for row, m in measured.items() if m.step_s is not None and m.step_s <= limit_s},
    )
    shown = [row for place, row in enumerate(rows) if place < TOP or row in measured]
    spent = spent_by(list(runs))
    return TuneResult(
        id=problem.query.id,
        status="error" if error else "ok",
        error=error.as_dict() if error else None,
        recommendations=_describe(problem, shown, calibration=calibration, measured=measured),
        space=SpaceSummary(legal=problem.space.legal, feasible=problem.space.feasible, seconds=seconds),
        rejections=problem.space.rejections,
        search=SearchSummary(
            id=search_id,
            state=state,
            profile_runs=spent.profile_runs,
            gpu_seconds=spent.gpu_seconds,
            grid_gpu_seconds=_grid_gpu_seconds(problem, list(measured.values()), median_s=step.median_s[fits]),
            stopped_because=stopped_because,
        ),
    )


def nothing_feasible(*, query: Query, space: CostedSpace, search_id: str, seconds: float) -> TuneResult:
    """The result of a search that had nothing to run."""
    return TuneResult(
        id=query.id,
        recommendations=(),
        space=SpaceSummary(legal=space.legal, feasible=0, seconds=seconds),
        rejections=space.rejections,
        search=SearchSummary(
            id=search_id,
            state=SearchState.SUCCEEDED,
            profile_runs=0,
            gpu_seconds=0.0,
            grid_gpu_seconds=None,
            stopped_because="nothing_feasible",
        ),
    )


def rank(
    *,
    median_s: Sequence[float] | np.ndarray,
    log_sd: Sequence[float] | np.ndarray,
    eligible: Sequence[int],
    measured_s: Mapping[int, float],
) -> list[int]:
    """Rows best first: measured ones by their seconds, others by the calibrated median.

    The first place goes to a measured row unless a prediction beats it by more than one standard deviation: within
    the noise, what was seen to run is the better advice.
    """
    times = {row: measured_s.get(row, float(median_s[row])) for row in {*eligible, *measured_s}}
    order = sorted(times, key=lambda row: (times[row], row))
    best_measured = next((row for row in order if row in measured_s), None)
    if best_measured is not None and order[0] != best_measured:
        ahead = order[: order.index(best_measured)]
        if all(np.log(times[best_measured] / times[row]) <= log_sd[row] for row in ahead):
            order.remove(best_measured)
            order.insert(0, best_measured)
    return order


def _by_row(problem: TuningProblem, runs: Sequence[RunRecord]) -> tuple[dict[int, Measurement], set[int]]:
    """Successful measurements by row, and the rows whose runs failed."""
    measured: dict[int, Measurement] = {}
    failed: set[int] = set()
    for run in runs:
        row = problem.search.row(run.parallel)
        if row is None or run.measurement is None:
            continue
        if run.measurement.status == "ok":
            measured[row] = run.measurement
        else:
            failed.add(row)
    return measured, failed - set(measured)


def _describe(
    problem: TuningProblem, rows: Sequence[int], *, calibration: Calibration, measured: Mapping[int, Measurement]
) -> tuple[Recommendation, ...]:
    training = problem.training
    candidates = problem.search.candidates.take(np.array(rows, dtype=np.intp))
    costs = training.costs(candidates)
    nouns = {"model": training.model, "cluster": training.cluster, "workload": training.workload, "profile": training.profile}
    correction = Correction(calibration=calibration)
    described = []
    for place, row in enumerate(rows):
        estimate = estimate_row(place, costs=costs, candidates=candidates, **nouns)  # type: ignore[arg-type]
        described.append(
            Recommendation(
                rank=place + 1,
                parallel=candidates.config(place),
                estimate=estimate,
                measurement=measured.get(row),
                calibrated_estimate=corrected_estimate(
                    place, costs=costs, candidates=candidates, problem=training, correction=correction
                ),
            )
        )
    return tuple(described)


def _grid_gpu_seconds(problem: TuningProblem, measured: Sequence[Measurement], *, median_s: np.ndarray) -> float | None:
    """Every feasible candidate once: start-up as these runs had it, and as many steps as they ran."""
    settings = problem.query.search
    steps = settings.steps + settings.warmup_steps
    startup = [m.wall_s - steps * m.step_s for m in measured if m.wall_s is not None and m.step_s is not None]
    if not startup or median_s.size == 0:
        return None
    one_run_s = max(float(np.median(startup)), 0.0) + steps * float(np.mean(median_s))
    return one_run_s * problem.training.cluster.num_gpus * float(problem.space.feasible)
