"""`python -m benchmarks.learning.loop [--seeds 12] [--noises .02 .20] [--save FILE]`: searches on
machines that the cost model does not describe.

Eight truths, each with quiet and with noisy runs, give the true step time of every layout of the
quickstart's search. A run measures its layout's true time with noise. The table reports how many
layouts that have not run have their true time inside the 90% interval, how many would be measured
inside (the interval is of a measured step), how wide the interval is, when the search stops, and
what the best of four further runs would win. `loop/assumptions.yaml` names the constants that were
chosen with these truths in view.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from unittest import mock

import numpy as np
import optuna
from threadpoolctl import threadpool_limits

from hp_tool.domain.measurement import Hardware
from hp_tool.domain.parts import PARTS
from hp_tool.domain.query import SearchSettings
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.evidence import FloatArray
from hp_tool.loop.search.account import Spent, coverage_runs, why_stop
from hp_tool.loop.search.sampler import CostModelSampler
from hp_tool.loop.search.table import CandidateTable
from hp_tool.loop.tuning.problem import build_problem
from hp_tool.loop.tuning.training_result import TuningProblem
from hp_tool.questions.schema import parse_query, query_mapping

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
BIAS, SCATTER_LOG_SD = 1.2, 0.03
"""Ratio of true to predicted step time on every machine, and scatter of single layouts."""
STEP_OVERHEAD_S = 0.02
"""Seconds per step that the prediction lacks, multiplied by a truth's factor `overhead`."""
TAIL_DEGREES = 2.0
"""Degrees of freedom of Student's t distribution for truths with heavy tails."""
NOISES = (0.02, 0.20)
CHECKPOINTS = (6, 12)
"""Numbers of runs after which intervals are compared with the truth."""
MOST_RUNS, FURTHER_RUNS = 12, 4
COVERED, WIDEST, MOST_GAIN = (0.83, 0.97), 2.2, {0.02: 0.02, 0.20: 0.06}
"""Targets: share inside the interval, median high/low after six runs, and gain left at the stop by
noise.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """How a machine differs from its prediction, in addition to BIAS."""

    name: str
    factors: dict[str, float] = field(default_factory=dict)
    """Ratio of true to predicted seconds by part, or by group for parts without an entry."""
    scatter_log_sd: float = SCATTER_LOG_SD
    """Standard deviation of ln(true step time) between layouts."""
    stall_share: float = 0.0
    """Fraction of layouts that run STALL_FACTOR times as long."""
    heavy_tails: bool = False
    """Whether scatter and noise follow Student's t distribution with TAIL_DEGREES."""
    drift_log: float = 0.0
    """ln of the slowdown of the whole machine from one run to the next."""


TRUTHS = (
    Truth(name="as assumed"),
    Truth(name="communication x3", factors={"communication": 3.0}),
    Truth(name="recompute x3, bubble x2", factors={"recompute": 3.0, "pipeline_bubble": 2.0}),
    Truth(name="compute x2, overhead x4", factors={"compute": 2.0, "overhead": 4.0}),
    Truth(name="scatter .2", scatter_log_sd=0.2),
    Truth(name="15% stall x3", stall_share=0.15),
    Truth(name="heavy tails", heavy_tails=True),
    Truth(name="drift 2% a run", drift_log=0.02),
)
STALL_FACTOR = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Result of one search."""

    inside: dict[int, float]
    """Share of the layouts that have not run whose true time lies inside the 90% interval, by
    number of runs.
    """
    measured_inside: dict[int, float]
    """Share of these layouts that would be measured inside the interval, by number of runs."""
    widths: dict[int, float]
    """Median high/low of these intervals, by number of runs."""
    stopped_after: int
    """Number of runs at the stop; MOST_RUNS if the search did not stop earlier."""
    gain_left: float
    """1 - best true time of the next four runs / true time of the fastest measured layout, at least
    0.
    """
    regret: float
    """1 - best true time of all layouts / true time of the fastest measured layout, at the stop."""


@cache
def quickstart() -> TuningProblem:
    """Return the search of the README's first command, with its table of predictions.

    A stored profile of this host's processor is not used, so that all hosts compute the same.
    """
    query = parse_query(QUICKSTART.read_text())
    with (
        tempfile.TemporaryDirectory() as empty,
        mock.patch.dict(os.environ, XDG_CONFIG_HOME=empty),
    ):
        problem = build_problem(
            query=query, query_json=query_mapping(query), hardware=Hardware(gpu="cpu", num_gpus=2)
        )
    assert isinstance(problem, TuningProblem)
    return problem


def true_step_s(table: CandidateTable, truth: Truth, *, rng: np.random.Generator) -> FloatArray:
    """Draw the true seconds of each of n layouts, (n,), before any drift."""

    def factor(part: str) -> float:
        return truth.factors.get(part, truth.factors.get(PARTS[part].factor, 1.0))

    rows = len(table)
    parts_s = [factor(part) * seconds for part, seconds in table.parts_s.items()]
    seconds = np.sum(parts_s, axis=0) + truth.factors.get("overhead", 0.0) * STEP_OVERHEAD_S
    stalls = np.where(rng.random(rows) < truth.stall_share, STALL_FACTOR, 1.0)
    scatter = truth.scatter_log_sd * _draws(truth, rng, rows)
    return np.asarray(BIAS * seconds * stalls * np.exp(scatter))


def _draws(truth: Truth, rng: np.random.Generator, rows: int) -> FloatArray:
    return rng.standard_t(TAIL_DEGREES, rows) if truth.heavy_tails else rng.standard_normal(rows)


def run_search(truth: Truth, *, noise: float, seed: int) -> Trace:
    """Search one machine. The search continues after its stop, so that all searches are compared
    after equally many runs.
    """
    problem = quickstart()
    table = problem.search.table
    settings = replace(
        problem.search.settings, budget_runs=MOST_RUNS + FURTHER_RUNS, budget_gpu_seconds=None
    )
    rng = np.random.default_rng([seed, round(1000 * noise), *map(ord, truth.name)])
    true_s = true_step_s(table, truth, rng=rng)
    answers = true_s * np.exp(noise * _draws(truth, rng, len(table)))
    sampler = CostModelSampler(
        table=table,
        prior=problem.prior,
        coverage_runs=coverage_runs(settings, prior=problem.prior),
        seed=seed,
    )
    study = optuna.create_study(sampler=sampler)
    measured: dict[int, float] = {}
    inside: dict[int, float] = {}
    measured_inside: dict[int, float] = {}
    widths: dict[int, float] = {}
    stopped_after: int | None = None
    for count in itertools.count():
        drift = np.exp(truth.drift_log * count)
        if count in CHECKPOINTS:
            low, high = sampler.table.predict_step(sampler.calibration(study=study)).interval()
            unseen = ~np.isin(np.arange(len(table)), list(measured))
            for shares, seconds in ((inside, true_s), (measured_inside, answers)):
                holds = (low <= drift * seconds) & (drift * seconds <= high)
                shares[count] = float(holds[unseen].mean())
            widths[count] = float(np.median((high / low)[unseen]))
        if stopped_after is None and (count == MOST_RUNS or _stops(sampler, study, settings)):
            stopped_after = count
        if stopped_after is not None and count >= max(MOST_RUNS, stopped_after + FURTHER_RUNS):
            break
        trial = study.ask(sampler.distributions)
        row = table.row_of(trial.params)
        assert row is not None
        measured[row] = float(drift * answers[row])
        study.tell(trial, measured[row])
    assert stopped_after is not None
    rows = list(measured)
    chosen = min(rows[:stopped_after], key=measured.__getitem__)
    further = rows[stopped_after : stopped_after + FURTHER_RUNS]
    return Trace(
        inside=inside,
        measured_inside=measured_inside,
        widths=widths,
        stopped_after=stopped_after,
        gain_left=max(0.0, 1.0 - float(true_s[further].min() / true_s[chosen])),
        regret=1.0 - float(true_s.min() / true_s[chosen]),
    )


def _stops(sampler: CostModelSampler, study: optuna.Study, settings: SearchSettings) -> bool:
    runs = len(study.get_trials(deepcopy=False))
    reason = why_stop(
        settings=settings,
        spent=Spent(profile_runs=runs, gpu_seconds=0.0),
        next_run_gpu_seconds=0.0,
        proposal=sampler.proposal(study=study),
    )
    return reason == "no_expected_gain"


Key = tuple[str, float]


def as_text(traces: dict[Key, list[Trace]]) -> str:
    """Return a table with one row per truth and noise, and how many rows meet each aim."""
    head = (
        "true in 6",
        "in 12",
        "run in 6",
        "in 12",
        "high/low",
        "stopped",
        "4 more win",
        "regret",
    )
    lines = [
        "share of true step times and of further runs inside the 90% interval after 6 and 12 runs "
        "(means), high/low after 6,",
        "runs at the stop (medians), what the best of four further runs would win, and regret "
        "(means)",
        f"{'truth':26}{'noise':>6}" + "".join(f"{each:>12}" for each in head),
    ]
    covered_true = covered_runs = narrow = finished = 0
    for (name, noise), each in traces.items():
        true_shares, run_shares = (
            [fmean(getattr(t, name)[count] for t in each) for count in CHECKPOINTS]
            for name in ("inside", "measured_inside")
        )
        width = median(t.widths[CHECKPOINTS[0]] for t in each)
        gain, regret = fmean(t.gain_left for t in each), fmean(t.regret for t in each)
        covered_true += _is_covered(true_shares)
        covered_runs += _is_covered(run_shares)
        narrow += _is_covered(true_shares) and width <= WIDEST
        finished += gain <= MOST_GAIN.get(noise, max(MOST_GAIN.values()))
        lines.append(
            f"{name:26}{noise:6.2f}"
            + "".join(f"{share:12.0%}" for share in (*true_shares, *run_shares))
            + f"{width:12.2f}"
            f"{median(t.stopped_after for t in each):12.0f}{gain:12.1%}{regret:12.1%}"
        )
    lines += [
        f"{COVERED[0]:.0%} to {COVERED[1]:.0%} inside after 6 and 12: true times in {covered_true} "
        f"of {len(traces)} ({narrow} with high/low up to {WIDEST}), further runs in {covered_runs}",
        f"four further runs would win at most {MOST_GAIN[0.02]:.0%} (noise .02) or "
        f"{MOST_GAIN[0.20]:.0%} (.20): {finished} of {len(traces)}",
        f"(no search stops before {assumed().search.least_runs} runs)",
    ]
    return "\n".join(lines)


def _is_covered(shares: Sequence[float]) -> bool:
    return all(COVERED[0] <= share <= COVERED[1] for share in shares)


def _task(task: tuple[Truth, float, int]) -> Trace:
    truth, noise, seed = task
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with threadpool_limits(limits=1):
        return run_search(truth, noise=noise, seed=seed)


def main() -> None:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning.loop", description=__doc__)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--noises", type=float, nargs="+", default=NOISES)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the traces as JSON")
    arguments = parser.parse_args()
    tasks = list(itertools.product(TRUTHS, arguments.noises, range(arguments.seeds)))
    traces: dict[Key, list[Trace]] = {}
    with ProcessPoolExecutor(arguments.processes) as pool:
        for (truth, noise, _), trace in zip(tasks, pool.map(_task, tasks), strict=True):
            traces.setdefault((truth.name, noise), []).append(trace)
    print(as_text(traces))
    if arguments.save:
        rows = [
            {"truth": name, "noise": noise, "traces": [asdict(trace) for trace in each]}
            for (name, noise), each in traces.items()
        ]
        arguments.save.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
