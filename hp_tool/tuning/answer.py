"""The answer of a search: what its first recommendation takes and saves, what is as good, and what each axis decides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hp_tool.calibration.evidence import FloatArray
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.legality import legality
from hp_tool.cost.legality_reasons import explain
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.answer import Answer, Baseline, BaselineSource
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import Query
from hp_tool.domain.records import RunRecord
from hp_tool.domain.result import Estimate, Recommendation
from hp_tool.errors import InputError
from hp_tool.search.fidelity import repeats
from hp_tool.search.problem import Question
from hp_tool.training.calibrated import CONFIDENCE, CalibratedPredictor
from hp_tool.training.evaluate import resolve_config
from hp_tool.training.problem import TrainingProblem
from hp_tool.tuning.known import KnownRows, gain_of

FIELD = "search.baseline"
SOURCES: tuple[BaselineSource, BaselineSource] = ("search.baseline", "first run")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBaseline:
    """The configuration that an answer is compared with, by the same estimate."""

    config: ParallelConfig
    source: BaselineSource
    estimate: Estimate
    step_s: float
    log_sd: float


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


def baseline_of(
    query: Query,
    *,
    problem: TrainingProblem,
    search: Question,
    predictor: CalibratedPredictor,
    known: KnownRows,
    runs: Sequence[RunRecord],
) -> KnownBaseline | None:
    """What the answer is compared with: `search.baseline`, which need not be a candidate, else the first run that worked."""
    config, source = baseline_config(query, problem), SOURCES[0]
    if config is None:
        first = next((run.parallel for run in runs if run.status == "ok"), None)
        config, source = first if isinstance(first, ParallelConfig) else None, SOURCES[1]
    if config is None:
        return None
    row, one = search.row(config), Candidates.from_configs([config])
    estimate = predictor.estimate(
        0,
        costs=problem.costs(one),
        candidates=one,
        problem=problem,
        known=None if row is None else known.row(row),
    )
    assert estimate.time is not None and estimate.intervals is not None  # legal
    step_s, (low, high) = estimate.time.step_s, estimate.intervals.step_s
    log_sd = float(known.step.log_sd[row]) if row is not None else math.log(high / low) / (2.0 * NORMAL_QUANTILE)
    return KnownBaseline(config=config, source=source, estimate=estimate, step_s=step_s, log_sd=log_sd)


def answer_of(
    best: Recommendation,
    *,
    row: int,
    known: KnownRows,
    baseline: KnownBaseline | None,
    runs: Sequence[RunRecord],
    as_good: int,
    free_memory_bytes: float,
) -> Answer:
    """The answer whose configuration is the first of the result, which is the table's `row`."""
    estimate = best.calibrated_estimate or best.estimate
    assert estimate.time is not None and estimate.intervals is not None
    succeeded = [run for run in runs if run.status == "ok"]
    measured = repeats(runs).get(best.parallel) if best.measurement is not None else None
    low_s, high_s = (float(bound[0]) for bound in known.alone.take(np.array([row])).interval(confidence=CONFIDENCE))
    gain = None
    if baseline is not None:
        own = float(known.step.median_s[row]), float(known.step.log_sd[row])
        same = baseline.config == best.parallel
        gain = gain_of(own, baseline=(baseline.step_s, baseline.log_sd), against=baseline.source, same=same)
    return Answer(
        parallel=best.parallel,
        set=best.set,
        step_s=estimate.time.step_s,
        step_s_interval=estimate.intervals.step_s,
        source="calibrated" if succeeded else "predicted",
        known_from_runs=len(succeeded),
        measured=measured,
        outside=measured is not None and not low_s <= measured.step_s <= high_s,
        as_good=as_good,
        free_memory_bytes=free_memory_bytes,
        out_of_memory_probability=float(known.fails[row]),
        baseline=None if baseline is None else _baseline(estimate, baseline),
        gain=gain,
        clearly_better=None if gain is None else gain.clear,
        calibrated_step_s_interval=(low_s, high_s),
    )


def _baseline(best: Estimate, baseline: KnownBaseline) -> Baseline:
    before = baseline.estimate.time
    assert best.time is not None and before is not None
    seconds, saved_s = best.time.step_s, before.step_s - best.time.step_s

    def saved(whole: float | None) -> float | None:
        return None if whole is None else whole * saved_s / seconds

    names = dict.fromkeys((*before.parts_s, *best.time.parts_s))
    return Baseline(
        parallel=baseline.config,
        source=baseline.source,
        step_s=before.step_s,
        speedup=before.step_s / seconds,
        saved_days=saved(best.calendar_days),
        saved_cost=saved(best.cost),
        saved_parts_s={name: before.parts_s.get(name, 0.0) - best.time.parts_s.get(name, 0.0) for name in names},
    )


def effect_of_axes(
    axes: Mapping[str, Sequence[int | bool | str]], rows: Sequence[int], step_s: FloatArray
) -> dict[str, dict[str, float]]:
    """Shortest step time among `rows` by the value of each axis: what holding on to that value costs."""
    effects: dict[str, dict[str, float]] = {}
    for name, values in axes.items():
        best: dict[str, float] = {}
        for row in rows:
            best[str(values[row])] = min(best.get(str(values[row]), math.inf), float(step_s[row]))
        if len(best) > 1:
            effects[name] = best
    return effects
