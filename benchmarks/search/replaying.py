"""Replay one search on one cell: the rows that ran, when a good one was found, and the predictions
after ten runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from benchmarks.search.grid import Cell
from benchmarks.search.methods import Method, Ours
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.cost.arrays import FloatArray
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.legality import legality
from hp_tool.cost.training import training_costs
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration import Evidence
from hp_tool.loop.search.table import CandidateTable, candidate_table

GOOD_ENOUGH = 0.02
"""Maximum slowdown against a cell's best configuration that counts as found."""
CHECKPOINTS = (1, 3, 5, 10)
"""Numbers of runs after which the regret is recorded."""
MEASUREMENTS = 10
"""Number of successful runs after which predictions of the other rows are scored."""
CONFIDENCE = 0.9
STARTUP_S = 60.0
"""Assumed seconds from a job's start to its first step, and of a run that fails at once."""
STEPS, HOPELESS_STEPS = 7, 3
"""Steps of a profile run (two to warm up, five measured), and of a run that is stopped early as
hopeless.
"""
HOPELESS = 3.0
"""Ratio to the best step time so far, or to the first run's prediction, from which a run is stopped
early (`search.hopeless_factor`).
"""
OUT_OF_MEMORY_FROM = 1.0
"""Fraction of a device's memory. If a grid gives no cause of a failed run, the run counts as out of
memory if its predicted memory exceeds this fraction, else as crashed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beliefs:
    """Scores of predictions for configurations that have not run."""

    rank_correlation: float
    throughput_median_error: float
    memory_median_error: float
    coverage: float
    """Fraction of measured step times inside their intervals of probability CONFIDENCE."""
    memory_coverage: float
    """Fraction of measured peaks inside such intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Result of one replayed search."""

    found_at: int
    """Number of runs, including failed ones, until a good-enough configuration ran; 0 if none did.
    """
    regret: dict[int, float]
    """Throughput lost by the best configuration measured so far, as a fraction of the best, by
    number of runs.
    """
    after_job: float
    """Regret after the first job, which may run several configurations."""
    gpu_seconds: float
    """GPU-seconds of all runs up to the first good-enough configuration."""
    beliefs: Beliefs | None


def case_of(cell: Cell, profile: EfficiencyProfile) -> TrainingCase:
    return TrainingCase(
        model=cell.model, cluster=cell.cluster, workload=cell.workload, profile=profile
    )


def table_of(cell: Cell, profile: EfficiencyProfile) -> CandidateTable:
    """Return the cell's configurations as the product's search sees them.

    A grid's memory is what the first pipeline stage held, so that is what is predicted of it, and
    capacities are the first stage's share of a device whose worst stage fills it: a row fits where
    it fitted before.
    """
    case = case_of(cell, profile)
    costs = training_costs(case=case, candidates=cell.candidates)
    table = candidate_table(case=case, candidates=cell.candidates, costs=costs)
    share = np.asarray(costs.first_stage_bytes) / table.memory_bytes
    return replace(
        table,
        memory_bytes=share * table.memory_bytes,
        usable_bytes=share * table.usable_bytes,
        device_bytes=share * table.device_bytes,
    )


def legal_rows(cell: Cell) -> NDArray[np.intp]:
    """Return the rows that the framework accepts; the product's search proposes no others."""
    codes = legality(
        case=case_of(
            cell, efficiency_profile(gpu=cell.cluster.gpu, framework=cell.workload.framework)
        ),
        candidates=cell.candidates,
    )
    return np.flatnonzero(codes == 0)


def is_out_of_memory(cell: Cell, table: CandidateTable) -> np.ndarray:
    """Return the failed rows that count as out of memory, shape (n,)."""
    likely = table.memory_bytes > OUT_OF_MEMORY_FROM * table.device_bytes
    return np.isnan(cell.step_s) & likely


def evidence_of(cell: Cell, table: CandidateTable) -> Evidence:
    """Return all measurements of the cell, as another search on the same cluster would have stored
    them.
    """
    out_of_memory = is_out_of_memory(cell, table)
    rows = np.flatnonzero(np.isfinite(cell.step_s) | out_of_memory)
    name = "-".join(map(str, cell.key))
    return table.evidence(
        rows=rows,
        measurement_ids=tuple(f"{name}-{row}" for row in rows),
        step_s=cell.step_s[rows],
        memory_bytes=cell.memory_bytes[rows],
        out_of_memory=out_of_memory[rows],
    )


def replay(
    cell: Cell,
    table: CandidateTable,
    method: Method,
    *,
    seed: int,
    noise_log_sd: float,
    runs: int | None = None,
) -> Trace:
    """Search until a good-enough row ran and every checkpoint passed, or for `runs` runs. A row's
    result is its measured step time times noise, drawn once per seed. Regrets use the measured step
    time without that noise.
    """
    rng = np.random.default_rng([seed, *map(ord, str(cell.key))])
    answers = cell.step_s * rng.lognormal(0.0, noise_log_sd, len(cell.step_s))
    out_of_memory = is_out_of_memory(cell, table)
    needed = min(MEASUREMENTS, int(np.isfinite(cell.step_s).sum()) - 1)
    predicted_s = sum(table.parts_s.values())
    done: list[int] = []
    found_at, spent, beliefs = 0, 0.0, None
    regret: dict[int, float] = {}
    jobs, after_job = 0, 1.0
    limit = len(cell.step_s) if runs is None else min(runs, len(cell.step_s))
    while len(done) < limit and (
        not found_at or len(regret) < len(CHECKPOINTS) or _waits(method, beliefs)
    ):
        row = method.ask()
        jobs += method.begins_job
        method.tell(
            row,
            step_s=answers[row],
            memory_bytes=cell.memory_bytes[row],
            out_of_memory=bool(out_of_memory[row]),
        )
        done.append(row)
        if not found_at:
            known_s = min(
                (s for s in answers[done[:-1]] if np.isfinite(s)), default=predicted_s[row]
            )
            steps = STEPS if answers[row] <= HOPELESS * known_s else HOPELESS_STEPS
            starting_s = (
                STARTUP_S if method.begins_job else assumed().search.next_startup_share * STARTUP_S
            )
            spent += (starting_s + steps * np.nan_to_num(cell.step_s[row])) * cell.cluster.num_gpus
            found_at = len(done) * int(cell.step_s[row] <= cell.best_s / (1.0 - GOOD_ENOUGH))
        if jobs == 1:
            after_job = _regret(cell, answers, done)
        if len(done) in CHECKPOINTS:
            regret[len(done)] = _regret(cell, answers, done)
        if (
            isinstance(method, Ours)
            and beliefs is None
            and np.isfinite(cell.step_s[done]).sum() == needed
        ):
            beliefs = _beliefs(cell, method, done)
    return Trace(
        found_at=found_at,
        regret=regret,
        after_job=after_job,
        gpu_seconds=float(spent),
        beliefs=beliefs,
    )


def model_alone(cell: Cell, table: CandidateTable, *, top: int) -> float:
    """Return the regret of the best of the `top` rows predicted fastest, among those predicted to
    fit.
    """
    predicted: FloatArray = np.where(
        table.memory_bytes <= table.usable_bytes, sum(table.parts_s.values()), np.inf
    )
    return _regret(cell, cell.step_s, np.argsort(predicted, kind="stable")[:top].tolist())


def _waits(method: Method, beliefs: Beliefs | None) -> bool:
    return isinstance(method, Ours) and beliefs is None


def _regret(cell: Cell, answers: FloatArray, done: list[int]) -> float:
    """Return 1 - best time / time of the row measured fastest; 1 if every row failed."""
    worked = [row for row in done if np.isfinite(answers[row])]
    if not worked:
        return 1.0
    return float(1.0 - cell.best_s / cell.step_s[min(worked, key=lambda row: answers[row])])


def _beliefs(cell: Cell, method: Ours, done: list[int]) -> Beliefs:
    unseen = np.isfinite(cell.step_s[method.rows]) & ~np.isin(method.rows, done)
    rows = method.rows[unseen]
    step = method.sampler.table.predict_step(method.sampler.calibration(study=method.study))
    low, high = (bound[unseen] for bound in step.interval(confidence=CONFIDENCE))
    measured, predicted = cell.step_s[rows], step.median_s[unseen]
    used = method.sampler.table.predict_memory(method.sampler.calibration(study=method.study))
    least, most = (bound[unseen] for bound in used.interval(confidence=CONFIDENCE))
    memory, known = cell.memory_bytes[rows], np.isfinite(cell.memory_bytes[rows])
    return Beliefs(
        rank_correlation=float(spearmanr(predicted, measured).statistic)
        if len(measured) > 2
        else float("nan"),
        throughput_median_error=float(np.median(np.abs(measured / predicted - 1.0))),
        memory_median_error=float(np.nanmedian(np.abs(used.median_bytes[unseen] / memory - 1.0))),
        coverage=float(np.mean((low <= measured) & (measured <= high))),
        memory_coverage=float(np.mean(((least <= memory) & (memory <= most))[known])),
    )
