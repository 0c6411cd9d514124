"""Methods that choose the next run: the product's sampler, Optuna's samplers, random choice, and
ordered enumeration.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.study import Study
from optuna.trial import Trial, TrialState

from hp_tool.domain.query import SearchSettings
from hp_tool.loop.calibration import Evidence, Prior, prior_for
from hp_tool.loop.search.account import coverage_runs
from hp_tool.loop.search.sampler import MEMORY_CONSTRAINT, PEAK_MEMORY, CostModelSampler
from hp_tool.loop.search.table import CandidateTable

METHODS = ("hp_tool", "hp_tool_carried", "optuna_tpe", "optuna_gp", "random", "enumeration")
MAX_MISSES = 20
"""Maximum consecutive proposals of a baseline that are not a new row of the cell. After that, a row
is drawn at random.
"""
ENUMERATED = ("tensor_parallel_size", "pipeline_parallel_size", "micro_batch_size", "zero_stage")
"""Order of the nested loops of NVIDIA's auto-configurator, outermost first, each from small to
large.
"""


class Method(Protocol):
    """Proposes rows one by one and receives the result of each."""

    begins_job: bool
    """Whether the last proposed row starts a new job, instead of running in the previous row's job.
    """

    def ask(self) -> int:
        """Return a row that was not returned before."""

    def tell(self, row: int, *, step_s: float, memory_bytes: float, out_of_memory: bool) -> None:
        """Receive a row's step time (NaN if it failed), peak bytes (NaN if unknown), and whether it
        ran out of memory.
        """


class Ours:
    """The product's sampler in an Optuna study, on the rows that the framework accepts."""

    def __init__(
        self,
        *,
        table: CandidateTable,
        rows: NDArray[np.intp],
        evidence: Evidence | None,
        seed: int,
        prior: Prior | None = None,
        together: int = 1,
    ) -> None:
        """Create the method. `rows` are the legal rows of the table; `together` is the number of
        configurations in a job.
        """
        prior = prior or prior_for(kind="gpu")
        self.rows = rows
        self.sampler = CostModelSampler(
            table=table.take(rows),
            prior=prior,
            evidence=evidence,
            coverage_runs=coverage_runs(SearchSettings(budget_runs=len(rows)), prior=prior),
            seed=seed,
        )
        self.study = optuna.create_study(sampler=self.sampler)
        self._together = together
        self._rivals: list[int] = []
        self._trial: Trial | None = None
        self.begins_job = True

    def ask(self) -> int:
        self.begins_job = not self._rivals
        if self._rivals:
            self.study.enqueue_trial(self.sampler.table.params(self._rivals.pop(0)))
        self._trial = self.study.ask(self.sampler.distributions)
        row = self.sampler.table.row_of(self._trial.params)
        assert row is not None
        if self.begins_job:
            beside = (
                self.sampler.rivals(study=self.study, count=self._together - 1)
                if self._together > 1
                else []
            )
            self._rivals = [proposal.row for proposal in beside]
        return int(self.rows[row])

    def tell(self, row: int, *, step_s: float, memory_bytes: float, out_of_memory: bool) -> None:
        assert self._trial is not None
        if np.isfinite(step_s):
            if np.isfinite(memory_bytes):
                self._trial.set_user_attr(PEAK_MEMORY, memory_bytes)
            self.study.tell(self._trial, step_s)
        elif out_of_memory:
            self._trial.set_constraint(MEMORY_CONSTRAINT, 1.0)
            self.study.tell(self._trial, 0.0)
        else:
            self.study.tell(self._trial, state=TrialState.FAIL)


class Baseline:
    """One of Optuna's samplers, with the axes as categories. It minimises ln(seconds); a failed run
    counts as the slowest so far. Proposals that are not a new row cost nothing: the sampler is told
    that they failed and asked again. After MAX_MISSES of them, a row is drawn at random.
    """

    begins_job = True

    def __init__(self, *, table: CandidateTable, sampler: BaseSampler, seed: int) -> None:
        self._table = table
        self._rng = np.random.default_rng(seed)
        self.study: Study = optuna.create_study(sampler=sampler)
        self._distributions = {
            n: optuna.distributions.CategoricalDistribution(c) for n, c in table.choices.items()
        }
        self._trials: dict[int, Trial] = {}
        self._values: dict[int, float] = {}

    def ask(self) -> int:
        for _ in range(MAX_MISSES):
            trial = self.study.ask(self._distributions)
            row = self._table.row_of(trial.params)
            if row is not None and row not in self._values:
                self._trials[row] = trial
                return row
            self.study.tell(trial, state=TrialState.FAIL)
        row = int(self._rng.choice([r for r in range(len(self._table)) if r not in self._values]))
        self.study.enqueue_trial(self._table.params(row))
        self._trials[row] = self.study.ask(self._distributions)
        return row

    def tell(self, row: int, *, step_s: float, memory_bytes: float, out_of_memory: bool) -> None:
        slowest = max(self._values.values(), default=0.0)
        self._values[row] = float(np.log(step_s)) if np.isfinite(step_s) else slowest
        self.study.tell(self._trials[row], self._values[row])


class Ordered:
    """Rows in a fixed order."""

    begins_job = True

    def __init__(self, order: Iterator[int]) -> None:
        self._order = order

    def ask(self) -> int:
        return next(self._order)

    def tell(self, row: int, *, step_s: float, memory_bytes: float, out_of_memory: bool) -> None:
        """Ignore the result."""


def silence_optuna() -> None:
    """Turn off Optuna's log messages for single trials."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def create_method(
    name: str,
    *,
    table: CandidateTable,
    legal: NDArray[np.intp],
    carried: Evidence,
    seed: int,
    together: int = 1,
) -> Method:
    """Create a method by name for one cell's table. `carried` are measurements of other models on
    the same cluster. `legal` are the rows that the framework accepts, which only this search knows.
    `together` is the number of configurations in a job of this search.
    """
    silence_optuna()
    if name in ("hp_tool", "hp_tool_carried"):
        evidence = carried if name == "hp_tool_carried" else None
        return Ours(table=table, rows=legal, evidence=evidence, seed=seed, together=together)
    if name == "optuna_tpe":
        return Baseline(table=table, sampler=TPESampler(seed=seed, multivariate=True), seed=seed)
    if name == "optuna_gp":
        return Baseline(table=table, sampler=GPSampler(seed=seed), seed=seed)
    if name == "random":
        return Ordered(iter(np.random.default_rng(seed).permutation(len(table)).tolist()))
    axes = [table.axes[axis] for axis in ENUMERATED if axis in table.axes]
    return Ordered(iter(sorted(range(len(table)), key=lambda row: [axis[row] for axis in axes])))
