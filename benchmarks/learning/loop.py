"""`python -m benchmarks.learning.loop [--seeds 12] [--runs 12] [--save FILE]`: searches over the
quickstart's candidates, whose true step times are drawn: the prediction times a bias, and a scatter
of each layout's own. A run shows the truth with noise.

Says how wide intervals are after so many runs, how many of the true step times lie inside, and when
searches stop by themselves and how much slower than the best what they chose is. Nothing here was
used to fit or choose a constant.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np
import optuna
from threadpoolctl import threadpool_limits

from hp_tool.domain.measurement import Hardware
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration.evidence import FloatArray
from hp_tool.loop.search.account import Spent, coverage_runs, why_stop
from hp_tool.loop.search.sampler import CostModelSampler
from hp_tool.loop.tuning.problem import TuningProblem, build_problem
from hp_tool.questions.schema import parse_query, query_mapping

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
BIASES, SCATTERS, NOISES = (1.0, 1.2, 3.0), (0.03, 0.10), (0.02, 0.08)
"""Truth over prediction; standard deviations of the logarithm, of layouts and of the runs of
one.
"""
CHECKPOINTS = (0, 1, 2, 3, 4, 6, 9, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A machine to search on."""

    bias: float
    scatter: float
    noise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One search."""

    widths: dict[int, float]
    """By number of runs: median high/low of what has not run, ..."""
    inside: dict[int, float]
    """... and the share of its true step times inside."""
    stopped_after: int | None
    """Runs after which it stopped by itself; None: it did not."""
    regret: float
    """1 - best true step time / that of the row that ran fastest, when it stopped or at the end."""
    regret_of_all: float
    """Had every row run once: runs scatter."""


def quickstart() -> TuningProblem:
    """The search that the README's first command starts."""
    query = parse_query(QUICKSTART.read_text())
    problem = build_problem(
        query=query, query_json=query_mapping(query), hardware=Hardware(gpu="cpu", num_gpus=2)
    )
    assert isinstance(problem, TuningProblem)
    return problem


def searched(problem: TuningProblem, case: Case, *, seed: int, runs: int) -> Trace:
    """Search one machine, on beyond the stop, so that widths after as many runs can be compared."""
    table, settings = problem.search.table, replace(problem.search.settings, budget_runs=runs + 1)
    predicted = np.sum(list(table.parts_s.values()), axis=0)
    rng = np.random.default_rng([seed, *map(ord, str(case))])
    true_s = case.bias * predicted * rng.lognormal(0.0, case.scatter, len(table))
    answers = true_s * rng.lognormal(0.0, case.noise, len(table))
    sampler = CostModelSampler(
        table=table,
        prior=problem.prior,
        coverage_runs=coverage_runs(settings, prior=problem.prior),
        seed=seed,
    )
    study = optuna.create_study(sampler=sampler)
    done: list[int] = []
    widths: dict[int, float] = {}
    inside: dict[int, float] = {}
    stopped_after, regret = None, 1.0
    for count in range(runs + 1):
        if count in CHECKPOINTS:
            widths[count], inside[count] = _believed(sampler, study, true_s, done)
        if stopped_after is None:
            regret = _regret(true_s, answers, done) if done else 1.0
            spent = Spent(profile_runs=count, gpu_seconds=0.0)
            proposal = sampler.proposal(study=study)
            if (
                why_stop(
                    settings=settings, spent=spent, next_run_gpu_seconds=0.0, proposal=proposal
                )
                == "no_expected_gain"
            ):
                stopped_after = count
        if count < runs:
            trial = study.ask(sampler.distributions)
            row = table.row_of(trial.params)
            assert row is not None
            study.tell(trial, float(answers[row]))
            done.append(row)
    return Trace(
        widths=widths,
        inside=inside,
        stopped_after=stopped_after,
        regret=regret,
        regret_of_all=_regret(true_s, answers, range(len(true_s))),
    )


def _believed(
    sampler: CostModelSampler, study: optuna.Study, true_s: FloatArray, done: Sequence[int]
) -> tuple[float, float]:
    low, high = sampler.table.predict_step(sampler.calibration(study=study)).interval()
    unseen = ~np.isin(np.arange(len(true_s)), list(done))
    holds = (low <= true_s) & (true_s <= high)
    return float(np.median((high / low)[unseen])), float(holds[unseen].mean())


def _regret(true_s: FloatArray, answers: FloatArray, done: Sequence[int]) -> float:
    return float(1.0 - true_s.min() / true_s[min(done, key=lambda row: answers[row])])


def cases() -> list[Case]:
    """Every bias, scatter and noise."""
    return [
        Case(bias=b, scatter=s, noise=n) for b, s, n in itertools.product(BIASES, SCATTERS, NOISES)
    ]


def as_text(traces: dict[Case, list[Trace]]) -> str:
    """A row for each machine: means over its searches."""
    counts = list(next(iter(traces.values()))[0].widths)
    lines = [
        "median high/low and share of true step times inside, by runs; searches that stopped, "
        "after how many runs, regret",
        f"{'bias scatter noise':20}"
        + "".join(f"{count:>13}" for count in counts)
        + f"{'stopped':>10}{'after':>7}{'regret':>8}{'of all':>8}",
    ]
    for case, each in traces.items():
        cells = [
            (median(t.widths[k] for t in each), fmean(t.inside[k] for t in each)) for k in counts
        ]
        stops = [t.stopped_after for t in each if t.stopped_after is not None]
        after = f"{median(stops):.0f}" if stops else "-"
        lines.append(
            f"{case.bias:4} {case.scatter:7.2f} {case.noise:5.2f}  "
            + "".join(f"{width:8.2f} {share:4.0%}" for width, share in cells)
            + f"{f'{len(stops)}/{len(each)}':>10}{after:>7}{median(t.regret for t in each):8.1%}"
            + f"{median(t.regret_of_all for t in each):8.1%}"
        )
    lines.append(f"(no search stops before {assumed().search.least_runs} runs)")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning.loop", description=__doc__)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the traces as JSON")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    problem = quickstart()
    with threadpool_limits(limits=1):
        traces = {
            case: [
                searched(problem, case, seed=seed, runs=arguments.runs)
                for seed in range(arguments.seeds)
            ]
            for case in cases()
        }
    print(as_text(traces))
    if arguments.save:
        rows = [
            {**asdict(case), "traces": [asdict(trace) for trace in each]}
            for case, each in traces.items()
        ]
        arguments.save.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
