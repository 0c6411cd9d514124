"""The answer of a search: what its first recommendation takes and saves, what is as good, and what each axis decides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from hp_tool.calibration.evidence import FloatArray
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.legality import legality
from hp_tool.cost.legality_reasons import explain
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.answer import Answer, Baseline
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import Query
from hp_tool.domain.records import RunRecord
from hp_tool.domain.result import Estimate, Recommendation
from hp_tool.domain.serving import RunConfig
from hp_tool.errors import InputError
from hp_tool.search.fidelity import repeats
from hp_tool.search.planner import standard_error_s
from hp_tool.training.calibrated import CalibratedPredictor
from hp_tool.training.evaluate import resolve_config
from hp_tool.training.problem import TrainingProblem

FIELD = "search.baseline"


def baseline_config(query: Query, problem: TrainingProblem) -> ParallelConfig | None:
    """The configuration that `search.baseline` describes; None where the query has none. Raises InputError if it is illegal."""
    if query.search.baseline is None:
        return None
    try:
        config = resolve_config(query.search.baseline, num_gpus=problem.cluster.num_gpus, framework=problem.workload.framework)
    except InputError as error:
        raise InputError(error.message, field=(error.field or "").replace("parallel", FIELD, 1) or FIELD) from None
    if code := int(legality(case=problem, candidates=Candidates.alone(config))):
        reasons = "; ".join(reason.message for reason in explain(code, case=problem, config=config))
        raise InputError(f"the baseline is not legal: {reasons}", field=FIELD, code="illegal_baseline")
    return config


def answer_of(
    best: Recommendation,
    *,
    query: Query,
    problem: TrainingProblem,
    predictor: CalibratedPredictor,
    runs: Sequence[RunRecord],
    as_good: int,
    free_memory_bytes: float,
    out_of_memory_probability: float,
) -> Answer:
    """The answer whose configuration is the first row of the result."""
    estimate = best.calibrated_estimate or best.estimate
    assert estimate.time is not None
    groups = repeats(runs)
    succeeded = [run for run in runs if run.status == "ok"]
    measured = groups.get(best.parallel) if best.measurement is not None else None
    interval = None if estimate.intervals is None else estimate.intervals.step_s
    return Answer(
        parallel=best.parallel,
        step_s=estimate.time.step_s,
        step_s_interval=interval,
        source="calibrated" if succeeded else "predicted",
        known_from_runs=len(succeeded),
        measured=measured,
        outside=measured is not None and interval is not None and not interval[0] <= measured.step_s <= interval[1],
        as_good=as_good,
        free_memory_bytes=free_memory_bytes,
        out_of_memory_probability=out_of_memory_probability,
        baseline=_baseline(estimate, query=query, problem=problem, predictor=predictor, first=next(iter(succeeded), None)),
    )


def _baseline(
    best: Estimate, *, query: Query, problem: TrainingProblem, predictor: CalibratedPredictor, first: RunRecord | None
) -> Baseline | None:
    config = baseline_config(query, problem)
    asked = config is not None
    if config is None and first is not None and isinstance(first.parallel, ParallelConfig):
        config = first.parallel
    if config is None:
        return None
    one = Candidates.from_configs([config])
    known = predictor.estimate(0, costs=problem.costs(one), candidates=one, problem=problem)
    assert known.time is not None and best.time is not None
    seconds, saved_s = best.time.step_s, known.time.step_s - best.time.step_s

    def saved(whole: float | None) -> float | None:
        return None if whole is None else whole * saved_s / seconds

    names = dict.fromkeys((*known.time.parts_s, *best.time.parts_s))
    return Baseline(
        parallel=config,
        source="search.baseline" if asked else "first run",
        step_s=known.time.step_s,
        speedup=known.time.step_s / seconds,
        saved_days=saved(best.calendar_days),
        saved_cost=saved(best.cost),
        saved_parts_s={name: known.time.parts_s.get(name, 0.0) - best.time.parts_s.get(name, 0.0) for name in names},
    )


def alike(rows: Sequence[int], *, known_s: FloatArray, log_sd: FloatArray, noise: Mapping[int | None, float]) -> int:
    """How many rows after the first cannot be told apart from it: the 90 % interval of the ratio of step times holds 1.

    `noise`: relative standard error of the measured rows, which have it in place of `log_sd`.
    """
    sds = np.array([noise.get(row, log_sd[row]) for row in rows])
    distances = np.abs(np.log(known_s[rows] / known_s[rows[0]]))
    return int(np.count_nonzero(distances[1:] <= NORMAL_QUANTILE * np.hypot(sds[1:], sds[0])))


def noise_of(runs: Sequence[RunRecord]) -> dict[RunConfig, float]:
    """Relative standard error of each measured configuration: of its steps, and of its runs if it ran more than once."""
    of_steps: dict[RunConfig, float] = {}
    for run in runs:
        if run.status == "ok" and run.measurement is not None:
            of_steps[run.parallel] = max(of_steps.get(run.parallel, 0.0), standard_error_s(run.measurement))
    return {
        parallel: max(of_steps[parallel] / group.step_s, math.log(group.high_s / group.low_s) / 2)
        for parallel, group in repeats(runs).items()
    }


def effect_of_axes(
    axes: Mapping[str, Sequence[int | bool | str]], rows: Sequence[int], step_s: FloatArray
) -> dict[str, dict[str, float]]:
    """Shortest step time among `rows` by the value of each axis: what holding on to that value costs."""
    found: dict[str, dict[str, float]] = {}
    for name, values in axes.items():
        best: dict[str, float] = {}
        for row in rows:
            best[str(values[row])] = min(best.get(str(values[row]), math.inf), float(step_s[row]))
        if len(best) > 1:
            found[name] = best
    return found
