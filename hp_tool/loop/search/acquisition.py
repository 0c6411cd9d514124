"""Choose the next run by its expected gain. Numeric functions on table rows."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration import Calibration
from hp_tool.loop.calibration.evidence import BoolArray, FloatArray
from hp_tool.loop.search.improvement import expected_improvement
from hp_tool.loop.search.lookahead import ROWS, further_gains
from hp_tool.loop.search.table import AxisValue, CandidateTable

COVERED_AXES = ("tensor_parallel_size", "pipeline_parallel_size", "sequence_parallel", "recompute")
"""Axes whose effect on time a calibration can only learn from runs that vary them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """Results of this search's runs by table row."""

    step_s: Mapping[int, float] = field(default_factory=dict)
    """Measured step time in seconds of each row that ran."""
    memory_bytes: Mapping[int, float] = field(default_factory=dict)
    """Measured peak bytes of each of these rows, if known."""
    measurement_ids: Mapping[int, str] = field(default_factory=dict)
    out_of_memory: frozenset[int] = frozenset()
    broken: frozenset[int] = frozenset()
    """Rows that crashed or timed out. They have no step time but show which axis values fail."""
    pending: frozenset[int] = frozenset()
    """Rows that have been proposed or are running."""
    apart: frozenset[int] = frozenset()
    """Rows excluded from this proposal only."""

    @property
    def tried(self) -> frozenset[int]:
        """Rows that must not be proposed again."""
        return frozenset(self.step_s) | self.out_of_memory | self.broken | self.pending


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The next run to start."""

    row: int
    expected_gain: float
    """Expected saving as a fraction of the best step time so far. Infinite without measurements."""
    reason: str
    """analytic_best, coverage or expected_improvement."""
    hold_probability: float
    """Probability that the run fits in memory, works and does not stall."""
    further_gains: tuple[float, ...] = ()
    """Expected savings from sequences of 1, 2, ... further runs; see `lookahead`. Empty before the
    first measurement.
    """

    @property
    def expected_further_gain(self) -> float:
        """Return the expected saving from the longest sequence."""
        return self.further_gains[-1] if self.further_gains else self.expected_gain

    def is_worth(self, least_gain: float) -> bool:
        """Return True if the next run is expected to save at least `least_gain`.

        It may also start a sequence of runs that is expected to save this fraction per run.
        """
        gains = self.further_gains or (self.expected_gain,)
        return any(gain >= runs * least_gain for runs, gain in enumerate(gains, start=1))


def propose(
    *,
    table: CandidateTable,
    calibration: Calibration,
    observations: Observations,
    coverage_runs: int,
    rng: np.random.Generator,
    stored: Collection[int] = (),
) -> Proposal | None:
    """Return the row to run next; None if every row that may fit was tried.

    Without measurements, this is the row with the greatest expected speed, weighted by the
    probability that it fits and does not stall. Until `coverage_runs` rows were tried, it is the
    row with the most unseen axis values among those that are not much slower. After that, it is the
    row whose run is expected to lower the best expected step time most (`lookahead`), weighted by
    the probability that it fits, works and neither stalls nor retries. Pending rows count as if
    they had returned their prediction. Rows in `stored` already have a measurement and are
    preferred among nearly equal ones.
    """
    free = np.ones(len(table), dtype=np.bool_)
    free[list(observations.tried | observations.apart)] = False
    step = table.predict_without_retries(calibration)
    chance = table.predict_memory(calibration).fit_probability(table.usable_bytes)
    chance = chance * _works_probability(table, observations)
    quick = 1.0 - step.slow_probability
    # Equal predictions are common (an axis may have no effect). Break ties by the seed, not by the
    # order of enumeration.
    median_s = step.regular_s * (1.0 + 1e-9 * rng.random(len(table)))
    likely = free & (chance >= min(0.5, float(chance[free].max(initial=0.0))))
    if not likely.any():
        return None
    here = np.isin(np.arange(len(table)), list(stored))
    known = [*observations.step_s.values(), *median_s[list(observations.pending)].tolist()]
    retries, slowdown, limits = table.retry_chance, table.retry_slowdown, assumed().search
    holds = chance * quick * (1.0 - retries)

    further: tuple[float, ...] = ()

    def chosen(row: int, *, gain: float, reason: str) -> Proposal:
        return Proposal(
            row=row,
            expected_gain=gain,
            reason=reason,
            hold_probability=float(holds[row]),
            further_gains=further,
        )

    if not known:
        stalled_s = limits.stall_factor * median_s if step.slow is None else step.slow.step_s
        speed = chance * (
            quick * (1.0 - retries + retries / slowdown) / median_s + (1.0 - quick) / stalled_s
        )
        row = _argmin(-speed * np.where(here, limits.stored_slowdown, 1.0), likely)
        return chosen(row, gain=np.inf, reason="analytic_best")
    best_s = min(known)
    gain = expected_improvement(median_s=median_s, log_sd=step.log_sd, best_s=best_s) * holds * free
    if observations.step_s:
        ran = sorted(observations.step_s, key=observations.step_s.__getitem__)[:ROWS]
        order = np.argsort(np.where(free, -gain, np.inf), kind="stable")
        rows = np.array([*ran, *order[: min(ROWS, free.sum())]])
        measured_s = np.array([observations.step_s.get(row, np.nan) for row in rows])
        further, next_gains = further_gains(
            table.joint_steps(calibration, rows=rows),
            measured_s=measured_s,
            holds=holds[rows] * free[rows],
            rng=rng,
        )
        gain = np.zeros(len(table))
        gain[rows] = best_s * next_gains
    if len(observations.tried) < coverage_runs:
        bearable = likely & (median_s <= limits.coverage_slowdown * median_s[likely].min())
        news = _unseen_values(table, observations) * bearable
        if news.max() > 0:
            row = _argmin(
                median_s / np.where(here, limits.stored_slowdown, 1.0), news == news.max()
            )
            return chosen(row, gain=float(gain[row] / best_s), reason="coverage")
    if gain.max() > 0:
        row = int(np.argmax(gain * np.where(here, limits.stored_gain, 1.0)))
        return chosen(row, gain=float(gain[row] / best_s), reason="expected_improvement")
    return chosen(_argmin(median_s, likely), gain=0.0, reason="expected_improvement")


def _argmin(values: FloatArray, where: BoolArray) -> int:
    return int(np.argmin(np.where(where, values, np.inf)))


def _works_probability(table: CandidateTable, observations: Observations) -> FloatArray:
    """Return the probability that each row works, given the crashes so far; shape (n,).

    It is (worked + 1) / (worked + blame + 1) of the row's least reliable axis value. Because it is
    unknown which axis value caused a crash, all values of the row share the blame equally. Without
    crashes, the probability is 1. If an axis value (a schedule or a degree) has only ever crashed,
    other values are tried first.
    """
    probability = np.ones(len(table))
    worked = list(observations.step_s) + list(observations.out_of_memory)
    for values in table.axes.values() if observations.broken else ():
        trust: dict[AxisValue, float] = {}
        for value in {values[row] for row in observations.broken}:
            good = sum(values[row] == value for row in worked)
            blame = sum(values[row] == value for row in observations.broken) / len(table.axes)
            trust[value] = (good + 1) / (good + blame + 1)
        probability = np.minimum(probability, [trust.get(value, 1.0) for value in values])
    return probability


def _unseen_values(table: CandidateTable, observations: Observations) -> NDArray[np.int64]:
    """Return on how many covered axes each row has a value that no tried row has, shape (n,)."""
    count = np.zeros(len(table), dtype=np.int64)
    for name in COVERED_AXES:
        if name in table.axes:
            values = table.axes[name]
            seen = {values[row] for row in observations.tried}
            count += np.array([value not in seen for value in values])
    return count
