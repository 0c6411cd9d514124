"""Choose the next run: a retry, the baseline, a confirmation of the leader, or a new proposal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from optuna.trial import Trial

from hp_tool.domain.digests import configuration_digest
from hp_tool.domain.hardware import Kind
from hp_tool.domain.measurement import Fidelity
from hp_tool.domain.records import REUSED, JsonObject, RunRecord
from hp_tool.domain.serving import RunConfig
from hp_tool.domain.states import RunState
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration import Calibration
from hp_tool.loop.search.account import (
    Spent,
    open_runs,
    run_gpu_seconds,
    spent_by,
    startup_s,
    why_stop,
)
from hp_tool.loop.search.acquisition import Proposal
from hp_tool.loop.search.fidelity import (
    EXTRAPOLATION_RATIO,
    WHOLE,
    Reduction,
    find_leader,
    num_gpus,
)
from hp_tool.loop.search.noise import measured_steps
from hp_tool.loop.search.problem import Question
from hp_tool.loop.search.rivals import (
    BESIDE,
    DIGEST,
    RIVALS,
    count_configurations,
    num_jobs,
    rivals_of,
)
from hp_tool.loop.search.study import StudyProjection

CONFIRMATION = "confirmation"
"""Reason of a run that confirms the best configuration, which so far only ran reduced."""

REPEAT = "repeat"
"""Reason of a run that repeats the leader, because it is unclear within noise which configuration
is best.
"""
BASELINE = "baseline"
"""Reason of a run of the baseline, with which the result is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRun:
    parallel: RunConfig
    fidelity: Fidelity
    predicted: JsonObject
    trial: Trial | None = None
    """Optuna trial, if the sampler proposed the run."""
    calibration: Calibration | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """No further run, and why."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Decide on the next run given all runs so far. The same runs give the same decision."""

    problem: Question
    projection: StudyProjection
    available_gpus: int
    """Maximum number of devices that the launcher can allocate to a job."""
    reusable: Mapping[str, str]
    """Ids of stored measurements that replace runs, by configuration digest."""

    def decide(self, runs: Sequence[RunRecord], proposal: Proposal | None) -> NextRun | Nothing:
        """Return the next run, or why none should be started.

        In the budgets, open runs count as if they had ended.
        """
        again = find_retry(runs)
        if again is not None:
            return NextRun(
                parallel=again.parallel, fidelity=again.fidelity, predicted=again.predicted
            )
        settings, spent = self.problem.settings, spent_by(runs)
        underway, waiting = len(open_runs(runs)), count_configurations(open_runs(runs))
        average_s, beside_s = gpu_seconds_by_job(runs)
        waiting_s = underway * average_s + (waiting - underway) * beside_s
        started = Spent(
            profile_runs=spent.profile_runs + waiting, gpu_seconds=spent.gpu_seconds + waiting_s
        )
        reason = why_stop(
            settings=settings, spent=started, next_run_gpu_seconds=average_s, proposal=proposal
        )
        if baseline := self._baseline(runs, started, average_s):
            return baseline
        stopping = reason is not None
        if not waiting and (
            proof := self._confirmation(runs, started, average_s=average_s, stopping=stopping)
        ):
            return proof
        if reason is not None or proposal is None:
            return Nothing(reason=reason or "space_exhausted")
        runs_left = settings.budget_runs - started.profile_runs
        kept_back = (
            1 if settings.budget_runs > assumed().search.least_runs else 0
        )  # For the leader again.
        beside = min(self.problem.configurations_per_job, runs_left - kept_back) - 1
        if settings.budget_gpu_seconds is not None and beside > 0:
            first_s, next_s = self._expected_job(runs, proposal)
            left_s = settings.budget_gpu_seconds - started.gpu_seconds - (average_s or first_s)
            beside = max(min(beside, int(left_s / (beside_s or next_s))), 0)
        return self._proposed(runs, proposal, runs_left=runs_left, beside=beside)

    def _expected_job(self, runs: Sequence[RunRecord], proposal: Proposal) -> tuple[float, float]:
        """Return the expected GPU-seconds of a job with the proposed configuration.

        Also return those of one more such configuration in the same job.
        """
        predicted = self.problem.predicted(
            row=proposal.row, calibration=self._calibration(), proposal=proposal
        )
        startup_s, step_s = self.startup_s(runs), predicted["calibrated_step_s"]
        first_s, next_s = (
            run_gpu_seconds(
                num_gpus=num_gpus(self.problem.candidates.config(proposal.row)),
                step_s=step_s,
                startup_s=each,
                settings=self.problem.settings,
            )
            for each in (startup_s, assumed().search.next_startup_share * startup_s)
        )
        return first_s, next_s

    def startup_s(self, runs: Sequence[RunRecord]) -> float:
        """Return the expected time of a run before its first step, in seconds."""
        seen_s = startup_s(runs, settings=self.problem.settings)
        return self.problem.assumed_startup_s if seen_s is None else seen_s

    def best_step_s(self, run: RunRecord, runs: Sequence[RunRecord]) -> float | None:
        """Return the step time used to decide whether a run may end early, in seconds.

        It is the best known step time. For the first run on GPUs, it is that run's prediction,
        because a stalled run gives no further information. For CPUs, predictions are too inaccurate
        for this.
        """
        if (known := find_leader(runs)) is not None:
            return known[1]
        return (
            run.predicted["calibrated_step_s"] if self.problem.cluster.gpu.kind == "gpu" else None
        )

    def _proposed(
        self, runs: Sequence[RunRecord], proposal: Proposal, *, runs_left: int, beside: int
    ) -> NextRun:
        """Return the proposed run. Its job has at most `beside` further configurations."""
        trial, row = self.projection.ask()
        parallel = self.problem.candidates.config(row)
        calibration = self._calibration()
        predicted = self.problem.predicted(row=row, calibration=calibration, proposal=proposal)
        reused = self.reusable.get(configuration_digest(parallel=parallel))
        if reused is not None:
            predicted |= {REUSED: reused}
        reduction = (
            None
            if reused is not None
            else self._reduction(runs, parallel, predicted, calibration, runs_left=runs_left)
        )
        if reduction is not None:
            predicted |= _predict_reduced_run(reduction, predicted, calibration)
        elif reused is None:
            predicted |= self._rivals(runs, row, calibration, count=beside)
        fidelity = WHOLE if reduction is None else reduction.fidelity
        return NextRun(
            parallel=parallel,
            fidelity=fidelity,
            predicted=predicted,
            trial=trial,
            calibration=calibration,
        )

    def _rivals(
        self, runs: Sequence[RunRecord], row: int, calibration: Calibration, *, count: int
    ) -> JsonObject:
        """Return the other configurations in a run's job, as stored in its prediction.

        The baseline comes first.
        """
        apart = self.problem.apart(row)
        baseline = self._baseline_row(runs) if count > 0 else None
        first = (
            []
            if baseline in (None, row) or baseline in apart
            else [_unconditional_proposal(baseline, reason=BASELINE)]
        )
        others = self.projection.rivals(count=count, apart=apart) if count > 0 else []
        proposals = [*first, *(each for each in others if each.row != baseline)][:count]
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
        """Return a reduced run that replaces the complete one; None if there should be none.

        Runs are reduced if the launcher has too few devices. They are also reduced if this halves
        the cost and another run remains to confirm the leader.
        """
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

    def _baseline(
        self, runs: Sequence[RunRecord], spent: Spent, average_s: float
    ) -> NextRun | None:
        """Return a run of the baseline unless it has run; None before the search's first run."""
        row = self._baseline_row(runs)
        if row is None or not runs or not self._affordable(spent, average_s):
            return None
        reused = self.reusable.get(self.problem.digest(row))
        return self._again(
            self.problem.candidates.config(row), fidelity=WHOLE, reason=BASELINE, reused=reused
        )

    def _baseline_row(self, runs: Sequence[RunRecord]) -> int | None:
        """Return the row of the baseline; None if it cannot run, has run, or is part of a job."""
        baseline = self.problem.baseline
        row = None if baseline is None else self.problem.row(baseline)
        if baseline is None or row is None or num_gpus(baseline) > self.available_gpus:
            return None
        digest = self.problem.digest(row)
        own = any(run.digest == digest for run in runs)
        beside = any(digest == rival[DIGEST] for run in open_runs(runs) for rival in rivals_of(run))
        return None if own or beside else row

    def _confirmation(
        self, runs: Sequence[RunRecord], spent: Spent, *, average_s: float, stopping: bool
    ) -> NextRun | None:
        """Return another run of the leader if it only ran reduced, or if noise hides the order.

        It is due if no other run is worthwhile, or if it would no longer be affordable after one
        more run. Noise does not justify one of the first runs.
        """
        best, step_s = find_leader(runs) or (None, 0.0)
        if best is None or num_gpus(best.parallel) > self.available_gpus:
            return None
        settings, whole = self.problem.settings, best.fidelity.is_whole
        steps = 2 * settings.steps if whole else settings.steps
        if whole and not needs_repeat(runs, kind=self.problem.cluster.gpu.kind):
            return None
        if not whole and any(
            run.parallel == best.parallel and run.fidelity.is_whole and run.measurement is not None
            for run in runs
        ):
            return None  # It was cut off before it measured a step.
        cost = run_gpu_seconds(
            num_gpus=num_gpus(best.parallel),
            step_s=step_s,
            startup_s=self.startup_s(runs),
            settings=replace(settings, steps=steps),
        )
        one_more = Spent(
            profile_runs=spent.profile_runs + 1, gpu_seconds=spent.gpu_seconds + average_s
        )
        last_chance = not self._affordable(one_more, cost) and not (
            whole and spent.profile_runs < assumed().search.least_runs
        )
        if not self._affordable(spent, cost) or not (stopping or last_chance):
            return None
        fidelity, reason = (Fidelity(steps=steps), REPEAT) if whole else (WHOLE, CONFIRMATION)
        return self._again(best.parallel, fidelity=fidelity, reason=reason)

    def _affordable(self, spent: Spent, gpu_seconds: float) -> bool:
        settings = self.problem.settings
        budget = settings.budget_gpu_seconds or float("inf")
        return (
            spent.profile_runs < settings.budget_runs and spent.gpu_seconds + gpu_seconds <= budget
        )

    def _again(
        self, parallel: RunConfig, *, fidelity: Fidelity, reason: str, reused: str | None = None
    ) -> NextRun | None:
        """Return a run of a configuration that was not proposed; None if it is not a candidate.

        `reused` is a stored measurement that replaces the run.
        """
        row = self.problem.row(parallel)
        if row is None:
            return None
        proposal = _unconditional_proposal(row, reason=reason)
        predicted = self.problem.predicted(
            row=row, calibration=self._calibration(), proposal=proposal
        )
        return NextRun(
            parallel=parallel,
            fidelity=fidelity,
            predicted=predicted | ({REUSED: reused} if reused else {}),
        )

    def _calibration(self) -> Calibration:
        return self.projection.sampler.calibration(study=self.projection.study)


def _unconditional_proposal(row: int, *, reason: str) -> Proposal:
    """Return a proposal without an expected gain.

    Its row has already run in this search, or in the user's training.
    """
    return Proposal(row=row, expected_gain=0.0, reason=reason, hold_probability=1.0)


def gpu_seconds_by_job(runs: Sequence[RunRecord]) -> tuple[float, float]:
    """Return the mean GPU-seconds of a job's first configuration and of each further one.

    Both are 0 before any job.
    """
    beside = [run.gpu_seconds or 0.0 for run in runs if BESIDE in run.predicted]
    jobs = num_jobs(runs)
    alone = (spent_by(runs).gpu_seconds - sum(beside)) / jobs if jobs else 0.0
    return alone, sum(beside) / len(beside) if beside else 0.0


def find_retry(runs: Sequence[RunRecord]) -> RunRecord | None:
    """Return the first run whose last attempt was abandoned for an external reason."""
    last, attempts = {run.digest: run for run in runs}, assumed().search.attempts
    return next(
        (
            run
            for run in last.values()
            if run.state is RunState.ABANDONED and run.attempt + 1 < attempts
        ),
        None,
    )


def _predict_reduced_run(
    reduction: Reduction, predicted: JsonObject, calibration: Calibration
) -> JsonObject:
    """Return the prediction of a reduced run, and the factor on its seconds."""
    step_s = reduction.step_s(calibration)
    return {
        "reduced_step_s": float(sum(seconds[0] for seconds in reduction.parts_s.values())),
        "reduced_calibrated_step_s": step_s,
        EXTRAPOLATION_RATIO: reduction.crowding * predicted["calibrated_step_s"] / step_s,
    }


def needs_repeat(runs: Sequence[RunRecord], *, kind: Kind) -> bool:
    """Return True if the leader should run again.

    This is so if it ran once and the runner-up may be faster by more than a repeat is worth. The
    criterion is the 90% interval of the ratio of their measured step times, with one run each.
    """
    steps = measured_steps(runs, kind=kind)
    ranked = sorted(steps.known, key=lambda parallel: steps.known[parallel][0])
    if (
        len(ranked) < 2
        or sum(
            run.parallel == ranked[0] and run.status == "ok" and run.fidelity.is_whole
            for run in runs
        )
        > 1
    ):
        return False
    _, low, _ = steps.ratio(ranked[1], ranked[0])
    return low < 1.0 - assumed().search.least_repeat_gain
