"""A search over a table of medians: its inputs, and the ranking and answer after its runs.

Training and serving searches differ in the meaning of a row's seconds, in which rows are
acceptable, and in how a row is described. Subclasses of `Medians` define these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic

import numpy as np

from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.answer import Answer, ServingAnswer, get_verdict
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.ports import Launcher, Store
from hp_tool.domain.query import Query
from hp_tool.domain.records import RunRecord
from hp_tool.domain.result import SpaceSummary
from hp_tool.loop.calibration import Calibration, Evidence, Prior
from hp_tool.loop.calibration.evidence import FloatArray
from hp_tool.loop.calibration.posterior import OwnRuns, ratio_interval
from hp_tool.loop.learning.series import Series
from hp_tool.loop.search.fidelity import combine_repeats, representative_runs
from hp_tool.loop.search.noise import measured_steps
from hp_tool.loop.search.problem import Question
from hp_tool.loop.tuning.answer import Config, KnownBaseline, Predicted, effect_of_axes, gains_of
from hp_tool.loop.tuning.result import TOP, Account, TuneResult
from hp_tool.questions.schema import query_mapping
from hp_tool.questions.training.ranking.misses import NUM_NEAREST


@dataclass(frozen=True, kw_only=True)
class Searched(ABC):
    """A resolved search: its inputs, launcher and evidence, and the ranking after its runs."""

    query: Query
    search: Question
    prior: Prior
    series: Series
    """Calibration series that the search uses and updates."""

    @property
    @abstractmethod
    def legal(self) -> int:
        """Return the number of legal candidates."""

    def launched(self, launcher: Launcher) -> Launcher:
        """Wrap the launcher for the runs of this search."""
        return launcher

    @abstractmethod
    def load_evidence(
        self, store: Store, *, series: Series, without_search: str | None = None
    ) -> Evidence:
        """Return evidence from a series' stored runs, without those of one search."""

    @abstractmethod
    def keep(self, store: Store) -> None:
        """Store the calibration fitted to the runs of the series."""

    @abstractmethod
    def medians(
        self, store: Store, *, calibration: Calibration, runs: Sequence[RunRecord], owner: str
    ) -> Medians[Any, Any]:
        """Return the state of all rows after the given runs.

        Can be called at any time during a search. Held runs of `owner`, the search's owner, count
        for its result.
        """


@dataclass(frozen=True, kw_only=True)
class Medians(ABC, Generic[Config, Predicted]):
    """The candidates of a search by row: posterior seconds given calibration and own runs."""

    problem: Searched
    runs: Sequence[RunRecord]
    seconds: FloatArray
    """(n,) posterior median of a step or request time in seconds."""
    log_sd: FloatArray
    """(n,) standard deviation of ln(seconds)."""
    outcomes: Mapping[int, Measurement]
    """Measurement of each row that ran: that of its representative run."""

    @property
    @abstractmethod
    def acceptable(self) -> Sequence[int]:
        """Return the rows that may be recommended."""

    @property
    @abstractmethod
    def ran(self) -> Collection[int]:
        """Return the rows whose seconds were measured in a complete run."""

    @property
    @abstractmethod
    def near(self) -> list[int]:
        """Return the rows listed as nearest misses if none is acceptable, smallest miss first."""

    @property
    @abstractmethod
    def space(self) -> tuple[int, int, dict[str, int]]:
        """Return the number of legal and feasible candidates, and rejected ones by reason."""

    @property
    @abstractmethod
    def grid_gpu_seconds(self) -> float | None:
        """Return devices x seconds for running every candidate, in GPU-seconds; None if unknown."""

    @property
    @abstractmethod
    def baseline(self) -> KnownBaseline[Config, Predicted] | None:
        """Return the configuration to which the answer is compared. It need not be a candidate."""

    @abstractmethod
    def describe(self, rows: Sequence[int]) -> tuple[Any, ...]:
        """Return the recommendations for some rows, in the order of the rows."""

    @abstractmethod
    def described(self, best: Any, **common: Any) -> Answer | ServingAnswer:
        """Return the answer: the first row's metrics, and the `common` fields of all answers."""

    def preferred(self, rows: list[int]) -> list[int]:
        """Return the ranked rows, starting with the one to recommend."""
        return rows

    @property
    def front(self) -> Sequence[int]:
        """Return the rows on the Pareto front of two objectives, if this kind of search has one."""
        return ()

    def known(self, row: int) -> tuple[float, float]:
        """Return the (seconds, log_sd) of a row that are compared with the baseline."""
        return float(self.seconds[row]), float(self.log_sd[row])

    def works(self, measurement: Measurement) -> bool:
        """Return True if the run measured its row's time."""
        return measurement.status == "ok"

    def compared_s(self, measurement: Measurement) -> float | None:
        """Return the measured time from which gains are computed, in seconds."""
        return measurement.objective_s

    @cached_property
    def measured(self) -> dict[int, Measurement]:
        """Return the measurements of successful runs."""
        return {row: outcome for row, outcome in self.outcomes.items() if self.works(outcome)}

    @cached_property
    def order(self) -> list[int]:
        """Return the acceptable rows, best first."""
        ranked = rank(
            median_s=self.seconds,
            log_sd=self.log_sd,
            eligible=self.acceptable,
            measured_s={
                row: float(self.seconds[row]) for row in self.acceptable if row in self.ran
            },
        )
        return self.preferred(ranked)

    def result(self, account: Account) -> TuneResult:
        """Describe the first rows and all that ran; if none is acceptable, the nearest misses."""
        query, (legal, feasible, rejections) = self.problem.query, self.space
        shown = [row for place, row in enumerate(self.order) if place < TOP or row in self.measured]
        recommendations = self.describe(shown)
        return TuneResult(
            id=query.id,
            query=query_mapping(query),
            status="error" if account.error else "ok",
            error=account.error.as_dict() if account.error else None,
            recommendations=recommendations,
            answer=self.answer(recommendations[0]) if shown else None,
            axes=effect_of_axes(self.problem.search.table.axes, self.order, self.seconds),
            space=SpaceSummary(legal=legal, feasible=feasible, seconds=account.seconds),
            rejections=rejections,
            nearest_misses=() if shown else self.describe(self.near[:NUM_NEAREST]),
            pareto=self.describe(self.front),
            search=account.summary(settings=query.search, grid_gpu_seconds=self.grid_gpu_seconds),
        )

    def answer(self, best: Any) -> Answer | ServingAnswer:
        """Return the answer for the first row's recommendation."""
        kind, (first, *_) = self.problem.search.cluster.gpu.kind, self.order
        steps = measured_steps(self.runs, kind=kind, seconds=self.compared_s)
        baseline = self.baseline
        gains = (
            ()
            if baseline is None
            else gains_of(best.parallel, self.known(first), baseline=baseline, measured=steps)
        )
        answer = self.described(
            best,
            parallel=best.parallel,
            known_from_runs=sum(run.status == "ok" for run in self.runs),
            measured=combine_repeats(self.runs).get(best.parallel) if best.measurement else None,
            as_good=len(tied(self.order, seconds=self.seconds, log_sd=self.log_sd)),
            gain=gains[0] if gains else None,
            gains=gains,
            clearly_better=gains[0].clear if gains else None,
        )
        return replace(answer, verdict=get_verdict(answer))


def tied(rows: Sequence[int], *, seconds: FloatArray, log_sd: FloatArray) -> list[int]:
    """Return the rows after the first that are tied with it.

    The 90% interval of their ratio contains 1.
    """
    first, *others = rows
    _, low, high = ratio_interval(
        (seconds[others], log_sd[others]), (seconds[first], log_sd[first]), quantile=NORMAL_QUANTILE
    )
    return [row for row, alike in zip(others, (low <= 1.0) & (high >= 1.0), strict=True) if alike]


def rank(
    *,
    median_s: Sequence[float] | np.ndarray,
    log_sd: Sequence[float] | np.ndarray,
    eligible: Sequence[int],
    measured_s: Mapping[int, float],
) -> list[int]:
    """Rank rows by their seconds: `measured_s` for complete runs, else `median_s`.

    A measured row comes first, unless a prediction is better by more than one standard deviation of
    their ratio. Within the noise, a configuration that ran is preferable.
    """
    times = {row: measured_s.get(row, float(median_s[row])) for row in {*eligible, *measured_s}}
    order = sorted(times, key=lambda row: (times[row], row))
    best_measured = next((row for row in order if row in measured_s), None)
    if best_measured is not None and order[0] != best_measured:
        ahead = order[: order.index(best_measured)]
        if all(
            np.log(times[best_measured] / times[row])
            <= np.hypot(log_sd[row], log_sd[best_measured])
            for row in ahead
        ):
            order.remove(best_measured)
            order.insert(0, best_measured)
    return order


def outcome_of_rows(search: Question, runs: Sequence[RunRecord]) -> dict[int, Measurement]:
    """Return the measurement of each row of the search, from its representative run."""
    counted = (
        (search.row(parallel), run.measurement)
        for parallel, run in representative_runs(runs).items()
    )
    return {
        row: measurement
        for row, measurement in counted
        if row is not None and measurement is not None
    }


def own_runs(
    search: Question,
    runs: Sequence[RunRecord],
    *,
    shown: Callable[[Measurement], tuple[float, float] | None],
) -> OwnRuns:
    """Return the measurements of successful runs by row.

    They are all complete runs of a configuration, else its representative reduced run.
    Configurations whose last complete run failed are omitted. `shown` returns a run's value and the
    standard deviation of its logarithm; None if the run has no value.
    """
    counting = {
        parallel: run for parallel, run in representative_runs(runs).items() if run.status == "ok"
    }
    known: list[tuple[int, float, float]] = []
    for run in runs:
        counts, row = counting.get(run.parallel), search.row(run.parallel)
        if counts is None or row is None or run.measurement is None or run.status != "ok":
            continue
        if (counts is run or run.fidelity.is_whole) and (
            figure := shown(run.measurement)
        ) is not None:
            known.append((row, *figure))
    rows, values, log_sds = zip(*known, strict=True) if known else ((), (), ())
    return OwnRuns(
        row=np.array(rows, dtype=np.intp),
        value=np.array(values, dtype=np.float64),
        log_sd=np.array(log_sds, dtype=np.float64),
    )
