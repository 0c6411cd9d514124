"""A training search: its inputs, and the state of its candidates after its runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from hp_tool.cluster.trainers.command import trainer_of, unset_settings
from hp_tool.cost.breakdown import estimate_row
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.legality import legality
from hp_tool.cost.legality_reasons import explain_violations
from hp_tool.cost.uncertainty import ALLOCATABLE_FRACTION, NORMAL_QUANTILE
from hp_tool.domain.answer import Answer, Baseline
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Launcher, Store
from hp_tool.domain.profiling import unsupported_training
from hp_tool.domain.query import Query
from hp_tool.domain.records import RunRecord
from hp_tool.domain.result import Estimate, Recommendation
from hp_tool.loop.calibration import Calibration, Evidence, MemoryPrediction, StepPrediction
from hp_tool.loop.calibration.evidence import BoolArray, FloatArray
from hp_tool.loop.calibration.posterior import memory_posterior, repeat_log_sd, step_posterior
from hp_tool.loop.learning.evidence import stored_evidence
from hp_tool.loop.learning.make import calibrate_series
from hp_tool.loop.learning.series import Series
from hp_tool.loop.search.account import run_gpu_seconds, startup_s
from hp_tool.loop.search.fidelity import combine_repeats
from hp_tool.loop.search.noise import spread_of
from hp_tool.loop.search.problem import SearchProblem
from hp_tool.loop.tuning.answer import (
    KnownBaseline,
    choose_baseline,
    described_baseline,
    prediction_before_run,
    saved_parts,
)
from hp_tool.loop.tuning.clusters import with_trainer
from hp_tool.loop.tuning.searched import Medians, Searched, outcome_of_rows, own_runs
from hp_tool.questions.training.calibrated import CONFIDENCE, CalibratedPredictor, KnownRow
from hp_tool.questions.training.evaluate import resolve_config
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.questions.training.ranking.choice import choose_simplest
from hp_tool.questions.training.ranking.exact import NEAR_RATIO
from hp_tool.questions.training.ranking.rank import CostedSpace
from hp_tool.questions.training.usual_settings import assume_usual
from hp_tool.space.pareto import pareto_optimal


@dataclass(frozen=True, kw_only=True)
class TuningProblem(Searched):
    """A training search: the cost model's problem and the question of the search."""

    search: SearchProblem
    training: TrainingProblem
    space: CostedSpace
    unrun: tuple[TrainingProblem, ...] = ()
    """Problems with usual settings that `recommend` assumes but the runs do not have, in the order
    in which it tries them. A layout uses the first one that it supports.
    """

    def unrun_settings(self, candidate: Candidates) -> dict[str, Any] | None:
        """Return the usual settings that `recommend` assumes for a candidate but runs lack.

        Also return which of them the runs cannot have, and the predicted step time with them in
        seconds. Return None if there are no such settings.
        """
        for problem in self.unrun:
            usual = problem.usual
            if usual is None or not usual.belong(candidate, problem=problem).all():
                continue
            if (trainer := trainer_of(self.query)) is not None:
                lacking = unset_settings(trainer, problem=problem, parallel=candidate.config(0))
            else:
                gpu = problem.cluster.gpu.name
                unsupported = unsupported_training(
                    model=problem.model, training=problem.workload, gpu=gpu
                )
                lacking = tuple(dict.fromkeys(path for path, _ in unsupported))
            return {
                "set": dict(usual.set),
                "lacking": list(lacking),
                "by_command": trainer is not None,
                "step_s_with": float(problem.costs(candidate).row(0).step_s),
            }
        return None

    @property
    def legal(self) -> int:
        return len(self.space.candidates)

    def launched(self, launcher: Launcher) -> Launcher:
        return with_trainer(self.query, launcher, problem=self.training)

    def load_evidence(
        self, store: Store, *, series: Series, without_search: str | None = None
    ) -> Evidence:
        release = self.training.workload.framework_version
        return stored_evidence(
            store=store, series=series, release=release, without_search=without_search
        )

    def keep(self, store: Store) -> None:
        # Unlike in the search's own evidence, reduced runs are not extrapolated here.
        calibrate_series(store=store, series=self.series)

    def medians(
        self, store: Store, *, calibration: Calibration, runs: Sequence[RunRecord], owner: str
    ) -> StepMedians:
        search, kind = self.search, self.search.cluster.gpu.kind
        alone = search.table.predict_step(calibration)
        memory = search.table.predict_memory(calibration)
        timed = own_runs(search, runs, shown=_step)
        step = step_posterior(alone, runs=timed, kind=kind)
        whole = own_runs(
            search, runs, shown=lambda run: _step(run) if run.fidelity.is_whole else None
        )
        return StepMedians(
            problem=self,
            runs=runs,
            seconds=step.median_s,
            log_sd=step.log_sd,
            outcomes=outcome_of_rows(search, runs),
            predictor=CalibratedPredictor(calibration=calibration),
            alone=alone,
            step=step,
            memory=memory_posterior(memory, runs=own_runs(search, runs, shown=_peak)),
            is_whole=np.isin(np.arange(len(search.table)), whole.rows),
            repeat_log_sd=repeat_log_sd(timed, kind=kind),
        )


def baseline_config(query: Query, problem: TrainingProblem) -> ParallelConfig | None:
    """Return the configuration in `search.baseline`; None if the query has none.

    Raises:
        InputError: The configuration is illegal.
    """

    def reasons(config: ParallelConfig) -> str:
        code = int(legality(case=problem, candidates=Candidates.alone(config)))
        return (
            "; ".join(
                reason.message for reason in explain_violations(code, case=problem, config=config)
            )
            if code
            else ""
        )

    resolve = partial(
        resolve_config, num_gpus=problem.cluster.num_gpus, framework=problem.workload.framework
    )
    return described_baseline(query, resolve=resolve, reasons=reasons)


@dataclass(frozen=True, kw_only=True)
class StepMedians(Medians[ParallelConfig, Estimate]):
    """Rows of a training search. Rows that miss max_days or max_cost are not acceptable."""

    problem: TuningProblem
    predictor: CalibratedPredictor
    alone: StepPrediction
    """Calibrated prediction, before it is combined with a row's own runs."""
    step: StepPrediction
    memory: MemoryPrediction
    """Predicted allocated memory in bytes."""
    is_whole: BoolArray
    """(n,) True if a complete run of the row succeeded."""
    repeat_log_sd: float
    """Standard deviation of ln(seconds) between repeated runs of a row."""

    @cached_property
    def fails(self) -> FloatArray:
        """Return the probability of running out of memory, (n,); 0 for rows that ran completely."""
        fits = self.memory.fit_probability(
            ALLOCATABLE_FRACTION * self.problem.search.table.device_bytes
        )
        return np.where(self.is_whole, 0.0, 1.0 - fits)

    @cached_property
    def fits(self) -> BoolArray:
        """Return a mask of the rows that probably fit within the headroom, shape (n,)."""
        usable = self.problem.search.table.usable_bytes
        return np.asarray(self.memory.fit_probability(usable) >= 0.5)

    @cached_property
    def acceptable(self) -> list[int]:
        soon = np.flatnonzero(self.seconds <= self.problem.training.longest_step_s).tolist()
        return [
            row
            for row in soon
            if row in self.measured or (self.fits[row] and row not in self.outcomes)
        ]

    @cached_property
    def ran(self) -> Collection[int]:
        return set(np.flatnonzero(self.is_whole).tolist())

    @property
    def near(self) -> list[int]:
        # First the rows that fit, by time, then the others by size. Rows that failed are omitted.
        size = np.where(self.fits, self.seconds, self.problem.search.table.memory_bytes)
        order = np.lexsort((size, ~self.fits)).tolist()
        return [row for row in order if row in self.measured or row not in self.outcomes]

    @property
    def front(self) -> list[int]:
        rows = self.order
        best = pareto_optimal(self.seconds[rows], -self.memory.median_bytes[rows])
        return [rows[place] for place in best]

    @property
    def space(self) -> tuple[int, int, dict[str, int]]:
        space = self.problem.space
        return space.legal, space.feasible, space.rejections

    @property
    def grid_gpu_seconds(self) -> float | None:
        """Return the GPU-seconds of one complete run of every feasible candidate.

        It includes the observed start-up time and all steps.
        """
        if not self.measured or not self.fits.any():
            return None
        settings = self.problem.query.search
        seen_s = startup_s(self.runs, settings=settings)
        one_run = run_gpu_seconds(
            num_gpus=self.problem.training.cluster.num_gpus,
            step_s=float(np.mean(self.seconds[self.fits])),
            startup_s=self.problem.search.assumed_startup_s if seen_s is None else seen_s,
            settings=settings,
        )
        return one_run * float(self.problem.space.feasible)

    def preferred(self, rows: list[int]) -> list[int]:
        return simplest_first(
            rows,
            problem=self.problem,
            known_s=self.seconds,
            known_bytes=self.memory.median_bytes,
            fails=self.fails,
            measured=self.ran,
            baseline_s=self.baseline.known[0] if self.baseline else None,
        )

    def row(self, row: int) -> KnownRow:
        """Return the estimate of one row. Its interval is that of another run."""
        one, ran = np.array([row]), bool(self.is_whole[row])
        step = self.step.take(one)
        if ran:
            step = replace(step, log_sd=np.hypot(step.log_sd, self.repeat_log_sd))
        return KnownRow(step=step, memory=self.memory.take(one), ran=ran)

    def known(self, row: int) -> tuple[float, float]:
        """Return the (seconds, log_sd) of a row. log_sd includes the slow regime."""
        low, high = (float(bound[0]) for bound in self.step.take(np.array([row])).interval())
        return float(self.seconds[row]), math.log(high / low) / (2.0 * NORMAL_QUANTILE)

    @cached_property
    def baseline(self) -> KnownBaseline[ParallelConfig, Estimate] | None:
        training = self.problem.training
        config, source = choose_baseline(baseline_config(self.problem.query, training), self.runs)
        if not isinstance(config, ParallelConfig):
            return None
        row, one = self.problem.search.row(config), Candidates.from_configs([config])
        own = None if row is None else self.row(row)
        estimate = self.predictor.estimate(
            0, costs=training.costs(one), candidates=one, problem=training, known=own
        )
        assert estimate.time is not None and estimate.intervals is not None  # Legal.
        low, high = estimate.intervals.step_s
        log_sd = (
            float(self.log_sd[row])
            if row is not None
            else math.log(high / low) / (2.0 * NORMAL_QUANTILE)
        )
        return KnownBaseline(
            parallel=config, source=source, estimate=estimate, known=(estimate.time.step_s, log_sd)
        )

    def describe(self, rows: Sequence[int]) -> tuple[Recommendation, ...]:
        if not rows:
            return ()
        search, training = self.problem.search, self.problem.training
        candidates = search.candidates.take(np.array(rows, dtype=np.intp))
        costs = training.costs(candidates)
        ranges = {
            search.row(config): (one.low_s, one.high_s)
            for config, one in combine_repeats(self.runs).items()
            if one.num_runs > 1
        }
        estimates = []
        for place in range(len(rows)):
            estimate = estimate_row(place, case=training, costs=costs, candidates=candidates)
            unrun = self.problem.unrun_settings(candidates.take(np.array([place])))
            if unrun is not None:
                estimate = replace(estimate, provenance={**estimate.provenance, "unrun": unrun})
            estimates.append(estimate)
        estimates = assume_usual(estimates, candidates=candidates, problem=training)
        return tuple(
            Recommendation(
                rank=place + 1,
                parallel=candidates.config(place),  # As it ran, so that pages find its run.
                set=dict(training.chosen),
                estimate=estimates[place],
                measurement=self.measured.get(row),
                measured_range_s=ranges.get(row),
                calibrated_estimate=self.predictor.estimate(
                    place, costs=costs, candidates=candidates, problem=training, known=self.row(row)
                ),
            )
            for place, row in enumerate(rows)
        )

    def described(self, best: Recommendation, **common: Any) -> Answer:
        row, estimate, measured = self.order[0], best.preferred_estimate, common["measured"]
        assert estimate.time is not None and estimate.intervals is not None
        low, high = self.alone.take(np.array([row])).interval(confidence=CONFIDENCE)
        interval_s = float(low[0]), float(high[0])
        before = [run for run in self.runs if run.parallel == best.parallel]
        device_bytes, gain = self.problem.search.table.device_bytes, common["gain"]
        return Answer(
            **common,
            set=best.set,
            step_s=estimate.time.step_s,
            step_s_interval=estimate.intervals.step_s,
            source="calibrated" if common["known_from_runs"] else "predicted",
            outside=measured is not None and not interval_s[0] <= measured.step_s <= interval_s[1],
            free_memory_bytes=float(device_bytes[row] - self.memory.median_bytes[row]),
            out_of_memory_probability=float(self.fails[row]),
            baseline=_saved(estimate, self.baseline, factor=gain.factor) if self.baseline else None,
            foreseen=None if measured is None else prediction_before_run(measured, runs=before),
            calibrated_step_s_interval=interval_s,
        )


def simplest_first(
    rows: list[int],
    *,
    problem: TuningProblem,
    known_s: FloatArray,
    known_bytes: FloatArray,
    fails: FloatArray,
    measured: Collection[int],
    baseline_s: float | None = None,
) -> list[int]:
    """Return the rows, with the simplest near-optimal one first; see `training.ranking.choice`.

    Near-optimal rows take at most NEAR_RATIO times as long as the first row and no longer than the
    baseline. If the first row was measured, only measured rows are considered.
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


def _step(measurement: Measurement) -> tuple[float, float] | None:
    """Return the step time of the complete configuration in seconds, and its log deviation.

    For reduced runs, the deviation includes the extrapolation error.
    """
    if measurement.objective_s is None:
        return None
    if measurement.extrapolated_step_s_interval is None:
        return measurement.objective_s, spread_of(measurement)
    low, high = measurement.extrapolated_step_s_interval
    return measurement.objective_s, math.log(high / low) / (2.0 * NORMAL_QUANTILE)


def _peak(measurement: Measurement) -> tuple[float, float] | None:
    """Return the peak bytes of a complete run; None for a reduced run, whose need differs."""
    peak = measurement.peak_memory_bytes
    return (float(peak), 0.0) if peak and measurement.fidelity.is_whole else None
