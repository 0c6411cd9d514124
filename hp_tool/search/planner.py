"""Which run comes next: a retry, the proof of a leader that was only seen reduced, or what the sampler proposes."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

from optuna.trial import Trial

from hp_tool.assumptions import assumed
from hp_tool.calibration import Calibration
from hp_tool.domain.digests import configuration_digest
from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.records import REUSED, JsonObject, RunRecord, RunState
from hp_tool.domain.serving import RunConfig
from hp_tool.search.account import Spent, open_runs, run_gpu_seconds, spent_by, startup_s, why_stop
from hp_tool.search.acquisition import Proposal
from hp_tool.search.fidelity import EXTRAPOLATION_RATIO, WHOLE, Reduction, leader, num_gpus
from hp_tool.search.problem import Question
from hp_tool.search.rivals import DIGEST, RIVALS, configurations, num_jobs
from hp_tool.search.study import StudyProjection

CONFIRMATION = "confirmation"
"""Why a run was chosen: the best so far was only seen reduced."""

REPEAT = "repeat"
"""Why a run was chosen: noise leaves open whether the leader leads."""
_MEDIAN_EFFICIENCY = math.sqrt(math.pi / 2)
"""Standard error of a median by that of a mean, for normal noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRun:
    """A run worth doing."""

    parallel: RunConfig
    fidelity: Fidelity
    predicted: JsonObject
    trial: Trial | None = None
    """The study's, where the sampler proposed it."""
    calibration: Calibration | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """No further run, and why."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Decides from everything that has run so far; the same runs give the same decision."""

    problem: Question
    projection: StudyProjection
    available_gpus: int
    """Devices that the launcher can give one job."""
    reusable: Mapping[str, str]
    """Ids of stored measurements that stand for runs, by configuration digest."""

    def decide(self, runs: Sequence[RunRecord], proposal: Proposal | None) -> NextRun | Nothing:
        """The next run, or why there is none. Open runs count in the budgets as if they had ended."""
        again = to_try_again(runs)
        if again is not None:
            return NextRun(parallel=again.parallel, fidelity=again.fidelity, predicted=again.predicted)
        settings, spent = self.problem.settings, spent_by(runs)
        waiting, jobs = configurations(open_runs(runs)), num_jobs(runs)
        average_s = spent.gpu_seconds / jobs if jobs else 0.0
        started = Spent(
            profile_runs=spent.profile_runs + waiting, gpu_seconds=spent.gpu_seconds + len(open_runs(runs)) * average_s
        )
        reason = why_stop(settings=settings, spent=started, next_run_gpu_seconds=average_s, proposal=proposal)
        if not waiting:
            if confirmation := self._confirmation(runs, started, average_s=average_s, stopping=reason is not None):
                return confirmation
            enough = reason in ("no_expected_gain", "space_exhausted")
            if enough and self._affordable(started, average_s) and (repeat := self._repeat(runs)):
                return repeat
        if reason is not None or proposal is None:
            return Nothing(reason=reason or "space_exhausted")
        return self._proposed(runs, proposal, runs_left=settings.budget_runs - started.profile_runs)

    def startup_s(self, runs: Sequence[RunRecord]) -> float:
        """Seconds of a run to come before its first step."""
        return startup_s(runs, settings=self.problem.settings, assumed_s=self.problem.assumed_startup_s)

    def best_step_s(self, run: RunRecord, runs: Sequence[RunRecord]) -> float | None:
        """Seconds of a step that a run's are hopeless against: the best known; of the first run on GPUs, its own prediction,
        since one that stalls has nothing more to say. A CPU's predictions may be off by as much themselves.
        """
        if (known := leader(runs)) is not None:
            return known[1]
        return run.predicted["calibrated_step_s"] if self.problem.cluster.gpu.kind == "gpu" else None

    def _proposed(self, runs: Sequence[RunRecord], proposal: Proposal, *, runs_left: int) -> NextRun:
        trial, row = self.projection.ask()
        parallel = self.problem.candidates.config(row)
        calibration = self._calibration()
        predicted = self.problem.predicted(row=row, calibration=calibration, proposal=proposal)
        reused = self.reusable.get(configuration_digest(parallel=parallel))
        if reused is not None:
            predicted |= {REUSED: reused}
        reduction = None if reused is not None else self._reduction(runs, parallel, predicted, calibration, runs_left=runs_left)
        if reduction is not None:
            predicted |= _of_reduction(reduction, predicted, calibration)
        elif reused is None:
            predicted |= self._rivals(row, calibration, count=min(self.problem.configurations_per_job, runs_left) - 1)
        fidelity = WHOLE if reduction is None else reduction.fidelity
        return NextRun(parallel=parallel, fidelity=fidelity, predicted=predicted, trial=trial, calibration=calibration)

    def _rivals(self, row: int, calibration: Calibration, *, count: int) -> JsonObject:
        """What the job of a row's run runs afterwards, as the run's prediction keeps it."""
        proposals = self.projection.rivals(count=count, apart=self.problem.apart(row)) if count > 0 else []
        beside = [
            {
                DIGEST: self.problem.digest(each.row),
                **self.problem.predicted(row=each.row, calibration=calibration, proposal=each),
            }
            for each in proposals
        ]
        return {RIVALS: beside} if beside else {}

    def _reduction(
        self,
        runs: Sequence[RunRecord],
        parallel: RunConfig,
        predicted: JsonObject,
        calibration: Calibration,
        *,
        runs_left: int,
    ) -> Reduction | None:
        """A reduced run in place of the whole one: where the launcher has too few devices, or where it saves half the cost
        and a run is left to prove the leader with."""
        settings = self.problem.settings
        must = num_gpus(parallel) > self.available_gpus
        if settings.fidelity == "full" or (runs_left < 2 and not must):
            return None
        reduction = self.problem.reduction(parallel)
        if reduction is None or must:
            return reduction
        cost = partial(run_gpu_seconds, startup_s=self.startup_s(runs), settings=settings)
        whole = cost(num_gpus=num_gpus(parallel), step_s=predicted["calibrated_step_s"])
        part = cost(num_gpus=reduction.num_gpus, step_s=reduction.step_s(calibration))
        return reduction if part <= assumed().search.reduced_cost_share * whole else None

    def _confirmation(self, runs: Sequence[RunRecord], spent: Spent, *, average_s: float, stopping: bool) -> NextRun | None:
        """The whole run of a leader that was only seen reduced: when nothing else is worth running, or while it is still
        affordable and would not be after one more run."""
        best, step_s = leader(runs) or (None, 0.0)
        if best is None or best.fidelity.is_whole or num_gpus(best.parallel) > self.available_gpus:
            return None
        if any(run.parallel == best.parallel and run.fidelity.is_whole and run.measurement is not None for run in runs):
            return None  # it was cut off before it measured a step
        settings = self.problem.settings
        cost = run_gpu_seconds(
            num_gpus=num_gpus(best.parallel),
            step_s=step_s,
            startup_s=self.startup_s(runs),
            settings=settings,
        )
        one_more = Spent(profile_runs=spent.profile_runs + 1, gpu_seconds=spent.gpu_seconds + average_s)
        if not self._affordable(spent, cost) or (not stopping and self._affordable(one_more, cost)):
            return None
        return self._again(best, fidelity=WHOLE, reason=CONFIRMATION, expected_gain=0.0)

    def _affordable(self, spent: Spent, gpu_seconds: float) -> bool:
        """Whether the budgets leave room for one more run."""
        settings = self.problem.settings
        budget = settings.budget_gpu_seconds or float("inf")
        return spent.profile_runs < settings.budget_runs and spent.gpu_seconds + gpu_seconds <= budget

    def _repeat(self, runs: Sequence[RunRecord]) -> NextRun | None:
        """The leader again, for twice the steps, where noise leaves open whether it leads."""
        best, gain = repeat_gain(runs) or (None, 0.0)
        least = max(self.problem.settings.min_gain_fraction, assumed().search.least_repeat_gain)
        if best is None or gain < least:
            return None
        longer = Fidelity(steps=2 * self.problem.settings.steps)
        return self._again(best, fidelity=longer, reason=REPEAT, expected_gain=gain)

    def _again(self, run: RunRecord, *, fidelity: Fidelity, reason: str, expected_gain: float) -> NextRun | None:
        """Another run of a configuration; None where it is no candidate any more."""
        row = self.problem.row(run.parallel)
        if row is None:
            return None
        seen = Proposal(row=row, expected_gain=expected_gain, reason=reason, hold_probability=1.0)  # it did before
        predicted = self.problem.predicted(row=row, calibration=self._calibration(), proposal=seen)
        return NextRun(parallel=run.parallel, fidelity=fidelity, predicted=predicted)

    def _calibration(self) -> Calibration:
        return self.projection.sampler.calibration(study=self.projection.study)


def to_try_again(runs: Sequence[RunRecord]) -> RunRecord | None:
    """The first configuration whose last attempt was abandoned for no fault of its own."""
    last, attempts = {run.digest: run for run in runs}, assumed().search.attempts
    return next((run for run in last.values() if run.state is RunState.ABANDONED and run.attempt + 1 < attempts), None)


def _of_reduction(reduction: Reduction, predicted: JsonObject, calibration: Calibration) -> JsonObject:
    """What is believed of the reduced run, and what its seconds are to be multiplied by."""
    step_s = reduction.step_s(calibration)
    return {
        "reduced_step_s": float(sum(seconds[0] for seconds in reduction.parts_s.values())),
        "reduced_calibrated_step_s": step_s,
        EXTRAPOLATION_RATIO: reduction.crowding * predicted["calibrated_step_s"] / step_s,
    }


def repeat_gain(runs: Sequence[RunRecord]) -> tuple[RunRecord, float] | None:
    """(leader, what running it again is expected to win as a share of its step time); None without two measured rivals.

    If the leader is slower than it looked by more than the runner-up lies behind, the runner-up is the better choice:
    E[max(T1 - T2, 0)] / T1 for normal errors of both medians, as their steps scattered. A leader that ran twice stays.
    """
    latest = {run.parallel: run for run in runs if _is_timed(run)}
    ranked = sorted(latest.values(), key=_step_s)
    if len(ranked) < 2 or sum(_is_timed(run) and run.parallel == ranked[0].parallel for run in runs) > 1:
        return None
    first, second = ranked[:2]
    noise_s = math.hypot(*(standard_error_s(run.measurement) for run in (first, second) if run.measurement is not None))
    behind_s = _step_s(second) - _step_s(first)
    if noise_s == 0.0:
        return first, 0.0
    z = behind_s / noise_s
    normal = NormalDist()
    return first, (noise_s * normal.pdf(z) - behind_s * (1.0 - normal.cdf(z))) / _step_s(first)


def standard_error_s(measurement: Measurement) -> float:
    """Return the standard error of a run's median step time: by how its steps scattered, for one step by how they do elsewhere,
    and 0 without any."""
    times = measurement.repetitions_s
    if len(times) < 2:
        return assumed().search.single_step_sd * sum(times)
    return _MEDIAN_EFFICIENCY * statistics.stdev(times) / math.sqrt(len(times))


def _is_timed(run: RunRecord) -> bool:
    return run.measurement is not None and run.measurement.status == "ok" and run.fidelity.is_whole


def _step_s(run: RunRecord) -> float:
    assert run.measurement is not None and run.measurement.objective_s is not None
    return run.measurement.objective_s
