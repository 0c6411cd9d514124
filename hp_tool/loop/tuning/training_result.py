"""The candidates of a training search after its runs: ranking, answer, comparison with the
baseline.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hp_tool.cost.breakdown import estimate_row
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.legality import legality
from hp_tool.cost.legality_reasons import explain
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.answer import Answer, Baseline, get_verdict
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import Query
from hp_tool.domain.records import RunRecord
from hp_tool.domain.result import Estimate, Recommendation
from hp_tool.loop.calibration import Calibration
from hp_tool.loop.calibration.evidence import FloatArray
from hp_tool.loop.search.account import run_gpu_seconds, startup_s
from hp_tool.loop.search.fidelity import repeats
from hp_tool.loop.search.noise import measured_steps
from hp_tool.loop.tuning.answer import (
    KnownBaseline,
    compared_with,
    described_baseline,
    foreseen,
    gains_of,
    saved_parts,
)
from hp_tool.loop.tuning.known import KnownRows, as_good, known_rows
from hp_tool.loop.tuning.result import Ranked, outcome_of_rows, rank
from hp_tool.questions.training.calibrated import CONFIDENCE, CalibratedPredictor
from hp_tool.questions.training.evaluate import resolve_config
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.questions.training.ranking.choice import choose_simplest
from hp_tool.questions.training.ranking.exact import NEAR_RATIO
from hp_tool.space.pareto import pareto_optimal

if TYPE_CHECKING:
    from hp_tool.loop.tuning.problem import TuningProblem


def baseline_config(query: Query, problem: TrainingProblem) -> ParallelConfig | None:
    """Return the configuration in `search.baseline`; None if the query has none.

    Raises:
        InputError: It is illegal.
    """

    def reasons(config: ParallelConfig) -> str:
        code = int(legality(case=problem, candidates=Candidates.alone(config)))
        return (
            "; ".join(reason.message for reason in explain(code, case=problem, config=config))
            if code
            else ""
        )

    resolve = partial(
        resolve_config, num_gpus=problem.cluster.num_gpus, framework=problem.workload.framework
    )
    return described_baseline(query, resolve=resolve, reasons=reasons)


def ranked_trainings(
    problem: TuningProblem, *, calibration: Calibration, runs: Sequence[RunRecord]
) -> Ranked:
    """Return the candidates of a training search; those whose step misses max_days or max_cost are
    not acceptable.
    """
    table = problem.search.table
    outcomes = outcome_of_rows(problem.search, runs)
    measured = {row: outcome for row, outcome in outcomes.items() if outcome.status == "ok"}
    failed = outcomes.keys() - measured.keys()
    known = known_rows(search=problem.search, calibration=calibration, runs=runs)
    step_s, limit_s = known.step.median_s, problem.training.longest_step_s
    fits = known.memory.fit_probability(table.usable_bytes) >= 0.5
    predictor = CalibratedPredictor(calibration=calibration)
    baseline = _baseline(problem, predictor=predictor, known=known, runs=runs)
    rows = [
        row
        for row in np.flatnonzero(step_s <= limit_s).tolist()
        if row in measured or (fits[row] and row not in failed)
    ]
    whole = {row: float(step_s[row]) for row in rows if known.ran[row]}
    rows = rank(median_s=step_s, log_sd=known.step.log_sd, eligible=rows, measured_s=whole)
    rows = simplest_first(
        rows,
        problem=problem,
        known_s=step_s,
        known_bytes=known.memory.median_bytes,
        fails=known.fails,
        measured=whole,
        baseline_s=baseline.known[0] if baseline else None,
    )
    # What fits by its time, then the rest by its size; not what failed to run.
    near = np.lexsort((np.where(fits, step_s, table.memory_bytes), ~fits)).tolist()
    return Ranked(
        order=rows,
        near=[row for row in near if row not in failed],
        front=[
            rows[place] for place in pareto_optimal(step_s[rows], -known.memory.median_bytes[rows])
        ],
        measured=measured,
        seconds=step_s,
        legal=problem.space.legal,
        feasible=problem.space.feasible,
        rejections=problem.space.rejections,
        grid_gpu_seconds=_grid_gpu_seconds(problem, runs, median_s=step_s[fits])
        if measured
        else None,
        describe=partial(
            _describe,
            problem,
            predictor=predictor,
            known=known,
            measured=measured,
            repeated=_ranges(problem, runs),
        ),
        answer=partial(_answer, problem, rows=rows, known=known, baseline=baseline, runs=runs),
    )


def simplest_first(
    rows: list[int],
    *,
    problem: TuningProblem,
    known_s: FloatArray,
    known_bytes: FloatArray,
    fails: FloatArray,
    measured: Container[int],
    baseline_s: float | None = None,
) -> list[int]:
    """Return the rows with the simplest near-optimal one first, as `training.ranking.choice`
    selects it.

    Candidates take at most NEAR times as long as the first and no longer than the baseline. If the
    first was measured, they were measured too.
    """
    longest_s = min(NEAR_RATIO * known_s[rows[0]], baseline_s or np.inf) if rows else 0.0
    near = [
        row
        for row in rows
        if known_s[row] <= longest_s and (row in measured or rows[0] not in measured)
    ]
    if len(near) < 2:
        return rows
    place = choose_simplest(
        problem.search.candidates.take(np.array(near)),
        problem=problem.training,
        total_bytes=known_bytes[near],
        fails=fails[near],
        value_s=known_s[near],
    )
    return [near[place], *(row for row in rows if row != near[place])]


def _describe(
    problem: TuningProblem,
    rows: Sequence[int],
    *,
    predictor: CalibratedPredictor,
    known: KnownRows,
    measured: Mapping[int, Measurement],
    repeated: Mapping[int | None, tuple[float, float]],
) -> tuple[Recommendation, ...]:
    if not rows:
        return ()
    training = problem.training
    candidates = problem.search.candidates.take(np.array(rows, dtype=np.intp))
    costs = training.costs(candidates)
    return tuple(
        Recommendation(
            rank=place + 1,
            parallel=candidates.config(place),  # as it ran, so that pages find its run
            set=dict(training.chosen),
            estimate=estimate_row(place, case=training, costs=costs, candidates=candidates),
            measurement=measured.get(row),
            measured_range_s=repeated.get(row),
            calibrated_estimate=predictor.estimate(
                place, costs=costs, candidates=candidates, problem=training, known=known.row(row)
            ),
        )
        for place, row in enumerate(rows)
    )


def _ranges(
    problem: TuningProblem, runs: Sequence[RunRecord]
) -> dict[int | None, tuple[float, float]]:
    """Return (fastest, slowest) by row of configurations that ran more than once as a whole."""
    several = {config: one for config, one in repeats(runs).items() if one.num_runs > 1}
    return {
        problem.search.row(config): (one.low_s, one.high_s)
        for config, one in several.items()
        if isinstance(config, ParallelConfig)
    }


def _baseline(
    problem: TuningProblem,
    *,
    predictor: CalibratedPredictor,
    known: KnownRows,
    runs: Sequence[RunRecord],
) -> KnownBaseline[ParallelConfig, Estimate] | None:
    """Return the configuration to compare with; it need not be a candidate."""
    training = problem.training
    config, source = compared_with(baseline_config(problem.query, training), runs)
    if not isinstance(config, ParallelConfig):
        return None
    row, one = problem.search.row(config), Candidates.from_configs([config])
    own = None if row is None else known.row(row)
    estimate = predictor.estimate(
        0, costs=training.costs(one), candidates=one, problem=training, known=own
    )
    assert estimate.time is not None and estimate.intervals is not None  # legal
    low, high = estimate.intervals.step_s
    log_sd = (
        float(known.step.log_sd[row])
        if row is not None
        else math.log(high / low) / (2.0 * NORMAL_QUANTILE)
    )
    return KnownBaseline(
        parallel=config, source=source, estimate=estimate, known=(estimate.time.step_s, log_sd)
    )


def _answer(
    problem: TuningProblem,
    best: Recommendation,
    *,
    rows: Sequence[int],
    known: KnownRows,
    baseline: KnownBaseline[ParallelConfig, Estimate] | None,
    runs: Sequence[RunRecord],
) -> Answer:
    row, estimate = rows[0], best.preferred_estimate
    assert estimate.time is not None and estimate.intervals is not None
    succeeded = [run for run in runs if run.status == "ok"]
    measured = repeats(runs).get(best.parallel) if best.measurement is not None else None
    low_s, high_s = (
        float(bound[0])
        for bound in known.alone.take(np.array([row])).interval(confidence=CONFIDENCE)
    )
    low, high = (float(bound[0]) for bound in known.step.take(np.array([row])).interval())
    # It may also be in the slow regime, which the standard deviation of the regular one excludes.
    own = float(known.step.median_s[row]), math.log(high / low) / (2.0 * NORMAL_QUANTILE)
    steps = measured_steps(runs, kind=problem.training.cluster.gpu.kind)
    gains = (
        () if baseline is None else gains_of(best.parallel, own, baseline=baseline, measured=steps)
    )
    gain = gains[0] if gains else None
    answer = Answer(
        parallel=best.parallel,
        set=best.set,
        step_s=estimate.time.step_s,
        step_s_interval=estimate.intervals.step_s,
        source="calibrated" if succeeded else "predicted",
        known_from_runs=len(succeeded),
        measured=measured,
        outside=measured is not None and not low_s <= measured.step_s <= high_s,
        as_good=as_good(rows, step=known.step),
        free_memory_bytes=float(
            problem.search.table.device_bytes[row] - known.memory.median_bytes[row]
        ),
        out_of_memory_probability=float(known.fails[row]),
        baseline=None
        if baseline is None or gain is None
        else _saved(estimate, baseline, factor=gain.factor),
        gain=gain,
        gains=gains,
        clearly_better=None if gain is None else gain.clear,
        foreseen=None
        if measured is None
        else foreseen(measured, runs=[run for run in runs if run.parallel == best.parallel]),
        calibrated_step_s_interval=(low_s, high_s),
    )
    return replace(answer, verdict=get_verdict(answer))


def _saved(
    best: Estimate, baseline: KnownBaseline[ParallelConfig, Estimate], *, factor: float
) -> Baseline:
    before = baseline.estimate.time
    assert best.time is not None and before is not None

    def saved(whole: float | None) -> float | None:
        return None if whole is None else whole * (factor - 1.0)

    return Baseline(
        parallel=baseline.parallel,
        source=baseline.source,
        step_s=before.step_s,
        speedup=factor,
        saved_days=saved(best.calendar_days),
        saved_cost=saved(best.cost),
        saved_parts_s=saved_parts(before.parts_s, best.time.parts_s),
    )


def _grid_gpu_seconds(
    problem: TuningProblem, runs: Sequence[RunRecord], *, median_s: np.ndarray
) -> float | None:
    """Return the cost of running every feasible candidate once, as a whole: observed start-up and
    all steps.
    """
    if median_s.size == 0:
        return None
    settings = problem.query.search
    seen_s = startup_s(runs, settings=settings)
    one_run = run_gpu_seconds(
        num_gpus=problem.training.cluster.num_gpus,
        step_s=float(np.mean(median_s)),
        startup_s=problem.search.assumed_startup_s if seen_s is None else seen_s,
        settings=settings,
    )
    return one_run * float(problem.space.feasible)
