"""An Optuna sampler that proposes rows of a candidate table, with the cost model as prior."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration import Calibration, Evidence, Prior, fit_calibration
from hp_tool.loop.calibration.evidence import select_most_similar
from hp_tool.loop.search.acquisition import Observations, Proposal, propose
from hp_tool.loop.search.table import CandidateTable

MEMORY_CONSTRAINT = "memory"
"""Name of the constraint, which is above 0 for trials that ran out of memory."""
PEAK_MEMORY = "peak_memory_bytes"
"""User attribute for the peak allocated bytes of a run."""
STATUS = "status"
"""User attribute for the status of a trial's run: that of its measurement, or ABANDONED."""
ABANDONED = "abandoned"
MEASUREMENT_ID = "measurement_id"


class CostModelSampler(BaseSampler):
    """Minimise step time in seconds over the rows of a table, with the cost model as prior.

    The objective calls `trial.suggest_categorical(name, sampler.table.choices[name])` for each axis
    and returns the measured seconds. If a run runs out of memory, it returns any number and calls
    `trial.set_constraint("memory", 1.0)`. Proposals are joint: all axis values of a trial together
    identify a row of the table. Other parameters are drawn uniformly. The sampler is deterministic
    given the seed and the study's trials.
    """

    def __init__(
        self,
        *,
        table: CandidateTable,
        prior: Prior,
        evidence: Evidence | None = None,
        coverage_runs: int = 0,
        seed: int = 0,
        stored: Collection[int] = (),
    ) -> None:
        """Create the sampler.

        Args:
            evidence: Measurements from outside the study.
            coverage_runs: See `acquisition.propose`.
            stored: See `acquisition.propose`.
        """
        self.table = table
        self._prior = prior
        limit = assumed().search.carried_runs
        self._evidence = select_most_similar(
            evidence=evidence or Evidence.empty(), features=table.features, limit=limit
        )
        self._coverage_runs = coverage_runs
        self._seed = seed
        self._stored = stored
        self.reserved: frozenset[int] = frozenset()
        """Rows that running jobs will execute in addition to those of their trials."""
        self._last_fit: tuple[Any, Calibration] | None = None
        """Observations and result of the last fit, which one step of the search uses several times.
        """
        self._last_proposal: tuple[Observations, Proposal | None] | None = None

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Return a categorical distribution for each axis, for `study.ask(fixed_distributions)`."""
        return {
            name: CategoricalDistribution(choices) for name, choices in self.table.choices.items()
        }

    def calibration(self, *, study: Study) -> Calibration:
        """Return the calibration fitted to the study's finished trials and the outside evidence."""
        return self._calibrate(self.observations(study=study))

    def proposal(self, *, study: Study, exclude: int | None = None) -> Proposal | None:
        """Return the next row and its expected gain; None if no row is left.

        Trial number `exclude` is ignored.
        """
        observations = self.observations(study=study, exclude=exclude)
        return self._propose(observations, self._calibrate(observations))

    def rivals(
        self, *, study: Study, count: int, apart: frozenset[int] = frozenset()
    ) -> list[Proposal]:
        """Return up to `count` rows to run in the same jobs as the pending trials.

        Rows in `apart` are excluded. Each row is chosen as if the earlier ones had returned their
        predictions.
        """
        observations, proposals = (
            replace(self.observations(study=study), apart=apart),
            list[Proposal](),
        )
        calibration = self._calibrate(observations)
        while (
            len(proposals) < count
            and (proposal := self._propose(observations, calibration)) is not None
        ):
            proposals.append(proposal)
            observations = replace(observations, pending=observations.pending | {proposal.row})
        return proposals

    def _propose(self, observations: Observations, calibration: Calibration) -> Proposal | None:
        if self._last_proposal is not None and self._last_proposal[0] == observations:
            return self._last_proposal[1]
        proposal = propose(
            table=self.table,
            calibration=calibration,
            observations=observations,
            coverage_runs=self._coverage_runs,
            rng=np.random.default_rng([self._seed, len(observations.tried)]),
            stored=self._stored,
        )
        self._last_proposal = (observations, proposal)
        return proposal

    def observations(self, *, study: Study, exclude: int | None = None) -> Observations:
        """Return the results of the study's trials by row.

        If a row has several trials, the last counts.
        """
        step_s: dict[int, float] = {}
        memory: dict[int, float] = {}
        ids: dict[int, str] = {}
        out_of_memory: set[int] = set()
        broken: set[int] = set()
        pending = set(self.reserved)
        for trial in study.get_trials(deepcopy=False):
            row = self.table.row_of(trial.params)
            if row is None or trial.number == exclude or trial.user_attrs.get(STATUS) == ABANDONED:
                continue
            ids[row] = str(trial.user_attrs.get(MEASUREMENT_ID, f"trial-{trial.number}"))
            if trial.state in (TrialState.RUNNING, TrialState.WAITING):
                pending.add(row)
                continue
            for earlier in (step_s, memory):  # A reduced run, or one that is repeated.
                earlier.pop(row, None)
            if trial.state != TrialState.COMPLETE:
                broken.add(row)
            elif trial.constraints.get(MEMORY_CONSTRAINT, 0.0) > 0:
                out_of_memory.add(row)
            elif trial.value is not None:
                step_s[row] = trial.value
                memory[row] = float(trial.user_attrs.get(PEAK_MEMORY) or np.nan)
        return Observations(
            step_s=step_s,
            memory_bytes=memory,
            measurement_ids=ids,
            out_of_memory=frozenset(out_of_memory),
            broken=frozenset(broken),
            pending=frozenset(pending),
        )

    def _calibrate(self, observations: Observations) -> Calibration:
        rows = [*observations.step_s, *sorted(observations.out_of_memory)]
        ids = tuple(observations.measurement_ids[row] for row in rows)
        key = (ids, observations.step_s, observations.memory_bytes, observations.out_of_memory)
        if self._last_fit is not None and self._last_fit[0] == key:
            return self._last_fit[1]
        own = self.table.evidence(
            rows=np.array(rows, dtype=np.intp),
            measurement_ids=ids,
            step_s=np.array([observations.step_s.get(row, np.nan) for row in rows]),
            memory_bytes=np.array([observations.memory_bytes.get(row, np.nan) for row in rows]),
            out_of_memory=np.array(
                [row in observations.out_of_memory for row in rows], dtype=np.bool_
            ),
        )
        fit = fit_calibration(
            evidence=Evidence.concatenate([self._evidence, own]), prior=self._prior
        )
        self._last_fit = (key, fit)
        return fit

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return all axes from the first trial on, because the search space is known in advance."""
        if study.direction != StudyDirection.MINIMIZE:
            raise ValueError(
                "CostModelSampler minimises seconds: create the study with direction='minimize'"
            )
        return self.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the axis values of the proposed row.

        If all rows were tried, repeat the best one.
        """
        proposal = self.proposal(study=study, exclude=trial.number)
        if proposal is not None:
            return dict(self.table.params(proposal.row))
        measured = self.observations(study=study, exclude=trial.number).step_s
        return dict(self.table.params(min(measured, key=measured.__getitem__))) if measured else {}

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Draw parameters that are not axes of the table from a uniform distribution."""
        from optuna.samplers import RandomSampler

        seed = int(np.random.SeedSequence([self._seed, trial.number]).generate_state(1)[0])
        return RandomSampler(seed=seed).sample_independent(
            study, trial, param_name, param_distribution
        )
