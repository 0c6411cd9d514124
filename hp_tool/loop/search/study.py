"""The Optuna study of a search.

It mirrors the store's runs for Optuna's tools and can be deleted at any time.
"""

import contextlib
from collections.abc import Sequence

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage
from optuna.trial import Trial, TrialState

from hp_tool.domain.records import RunRecord
from hp_tool.loop.search.acquisition import Proposal
from hp_tool.loop.search.problem import Question
from hp_tool.loop.search.sampler import (
    ABANDONED,
    MEASUREMENT_ID,
    MEMORY_CONSTRAINT,
    PEAK_MEMORY,
    STATUS,
    CostModelSampler,
)

RUN_ID = "run_id"
CLAIMS_LOOKED_BACK = 3
"""Maximum number of earlier studies that a claim deletes. Normally there is one, because each claim
deletes its predecessor's unless it died.
"""
CLAIM = "-claim-"


def study_name(search_id: str, *, claim: int) -> str:
    """Return the study name: the search id, and the claim number if the coordinator changed."""
    return search_id if claim == 1 else f"{search_id}{CLAIM}{claim}"


class StudyProjection:
    """Optuna study of one search.

    It asks for the next configuration and mirrors the results of runs.
    """

    def __init__(
        self,
        *,
        search_id: str,
        problem: Question,
        sampler: CostModelSampler,
        storage: BaseStorage,
        claim: int = 1,
    ) -> None:
        """Open or create the study of a claim on the search, and delete those of earlier claims.

        Claims do not share a study, because a coordinator that lost its lease without noticing
        could otherwise change its successor's study.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.sampler = sampler
        self._problem = problem
        name = study_name(search_id, claim=claim)
        self.study = optuna.create_study(
            storage=storage, sampler=sampler, study_name=name, load_if_exists=True
        )
        for earlier in range(max(claim - CLAIMS_LOOKED_BACK, 1), claim):
            # Then either this study remains, or its writer, which is no longer the coordinator,
            # fails.
            with contextlib.suppress(KeyError, StorageInternalError):
                optuna.delete_study(
                    study_name=study_name(search_id, claim=earlier), storage=storage
                )

    def proposal(self) -> Proposal | None:
        """Return the next row and its expected gain; None if every candidate was tried."""
        return self.sampler.proposal(study=self.study)

    def rivals(self, *, count: int, apart: frozenset[int]) -> list[Proposal]:
        """Return the rows to run in the same job as the last trial, without those in `apart`."""
        return self.sampler.rivals(study=self.study, count=count, apart=apart)

    def ask(self) -> tuple[Trial, int]:
        """Return a new trial and the table row of its parameters.

        Call `bind` once its run is stored.
        """
        trial = self.study.ask(self.sampler.distributions)
        row = self.sampler.table.row_of(trial.params)
        assert row is not None  # The sampler proposes rows of this table.
        return trial, row

    def bind(self, *, trial: Trial, run: RunRecord) -> None:
        """Record which trial a stored run belongs to."""
        trial.set_user_attr(RUN_ID, run.id)

    def sync(self, runs: Sequence[RunRecord]) -> None:
        """Update the study to one trial per run.

        End the trials of ended runs, and close trials without a run. A run whose configuration is
        no longer a candidate has no trial. It still counts as evidence and in the budget.
        """
        underway = [run for run in runs if not run.state.ended]
        self.sampler.reserved = frozenset(
            row for run in underway for row in self._problem.rival_rows(run)
        )
        trials = {
            trial.user_attrs.get(RUN_ID): trial for trial in self.study.get_trials(deepcopy=False)
        }
        for run in runs:
            params = self._problem.params(run.parallel)
            if run.id not in trials and params is not None:
                self.study.add_trial(
                    optuna.create_trial(
                        state=TrialState.RUNNING,
                        params=params,
                        distributions=self.sampler.distributions,
                        user_attrs={RUN_ID: run.id},
                    )
                )
        of_run = {run.id: run for run in runs}
        for record in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            trial = Trial(self.study, record._trial_id)
            mirrored = of_run.get(record.user_attrs.get(RUN_ID, ""))
            if mirrored is None:  # Asked for, but the coordinator ended before its run was stored.
                trial.set_user_attr(STATUS, ABANDONED)
                self.study.tell(trial, state=TrialState.FAIL)
            elif mirrored.state.ended:
                self._tell(trial, mirrored)

    def _tell(self, trial: Trial, run: RunRecord) -> None:
        """Report a run's result to its trial.

        - ok: its seconds.
        - Out of memory: complete, with a violated constraint.
        - Timeout: pruned.
        - Anything else: failed, with its cause.

        A reduced run counts with its extrapolated step time. Its memory differs from that of the
        complete run, so running out of memory carries no information.
        """
        measurement = run.measurement
        status = ABANDONED if measurement is None else measurement.status
        attributes = {
            STATUS: status,
            MEASUREMENT_ID: run.measurement_id,
            PEAK_MEMORY: measurement.peak_memory_bytes
            if measurement is not None and run.fidelity.is_whole
            else None,
            "cause": run.cause if measurement is None else measurement.cause,
            "predicted_step_s": run.predicted.get("step_s"),
            "calibrated_step_s": run.predicted.get("calibrated_step_s"),
        }
        for name, value in attributes.items():
            if value is not None:
                trial.set_user_attr(name, value)
        step_s = None if measurement is None else measurement.objective_s
        if status == "ok" and step_s is not None:
            trial.set_constraint(MEMORY_CONSTRAINT, -1.0)
            self.study.tell(trial, step_s)
        elif status == "oom" and run.fidelity.is_whole:
            # A complete trial needs a value. Use the prediction; the violated constraint marks it
            # as invalid.
            trial.set_constraint(MEMORY_CONSTRAINT, 1.0)
            self.study.tell(trial, float(run.predicted["step_s"]))
        else:
            self.study.tell(
                trial, state=TrialState.PRUNED if status == "timeout" else TrialState.FAIL
            )
