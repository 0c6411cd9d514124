"""Change the constants of the search's prior one at a time, and compare the regret on a measured
grid: `python -m benchmarks.search.design [--grid FILE.csv]`.

The prior's hyperparameters, changed one at a time. For each model the setting with the least regret
(mean after 1, 3, 5 and 10 runs) on the cells of the other models is chosen, and what it does on the
model's own cells is told beside the shipped setting: a figure for constants that nothing of the
model was shown to.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.search.grid import Cell, add_grid_arguments, read_grid
from benchmarks.search.methods import Ours, silence_optuna
from benchmarks.search.profiles import profiles_without
from benchmarks.search.replaying import CHECKPOINTS, legal_rows, replay, table_of
from benchmarks.search.shapes import read_shapes
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.loop.calibration import Prior, prior_for

SHIPPED = "shipped"
ALTERNATIVES: dict[str, tuple[float, ...]] = {
    "common_log_sd": (0.05, 0.2),
    "model_log_sd": (0.025, 0.1),
    "slow_share": (0.01, 0.1),
    "residual_log_sd": (0.05, 0.2),
    "group_log_sd": (0.1, 0.4),
}
"""Alternative values of the prior's fields: about half and twice the shipped ones."""


def prior_settings() -> dict[str, Prior]:
    """Return the shipped prior and its alternatives by name."""
    changed = {
        f"{name} {value:g}": dataclasses.replace(prior_for(kind="gpu"), **{name: value})
        for name, values in ALTERNATIVES.items()
        for value in values
    }
    return {SHIPPED: prior_for(kind="gpu"), **changed}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One prior on one cell."""

    cell: Cell
    profile: EfficiencyProfile
    prior: Prior
    seeds: int
    noise_log_sd: float


def mean_regrets(task: Task) -> list[float]:
    """Return the mean regret over the seeds at each checkpoint. A cell with fewer rows repeats its
    last regret.
    """
    silence_optuna()
    table, rows = table_of(task.cell, task.profile), legal_rows(task.cell)
    after = []
    for seed in range(task.seeds):
        method = Ours(table=table, rows=rows, evidence=None, seed=seed, prior=task.prior)
        regret = replay(
            task.cell,
            table,
            method,
            seed=seed,
            noise_log_sd=task.noise_log_sd,
            runs=CHECKPOINTS[-1],
        ).regret
        after.append([regret.get(k, min(regret.values())) for k in CHECKPOINTS])
    return np.mean(after, axis=0).tolist()


def choose(by_setting: dict[str, dict[str, list[list[float]]]]) -> list[dict[str, Any]]:
    """Return, for each model, the setting with the least regret on the other models' cells, and the
    regrets on its own cells with that setting and with the shipped one. `by_setting` has the
    regrets of each cell, by setting and model.

    `by_setting`: regrets of each cell, by setting and model.
    """
    chosen = []
    for model in by_setting[SHIPPED]:
        score = {
            name: np.mean(
                [regret for other, cells in models.items() if other != model for regret in cells]
            )
            for name, models in by_setting.items()
        }
        best = min(score, key=lambda name: score[name])
        own = {name: np.mean(by_setting[name][model], axis=0).tolist() for name in (SHIPPED, best)}
        chosen.append(
            {
                "left_out": model,
                "chosen": best,
                "regret_of_others": {SHIPPED: float(score[SHIPPED]), "chosen": float(score[best])},
                "regret_after": {
                    name: dict(zip(map(str, CHECKPOINTS), own[key], strict=True))
                    for name, key in ((SHIPPED, SHIPPED), ("chosen", best))
                },
            }
        )
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_grid_arguments(parser)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--noise", type=float, default=0.04, metavar="LOG_SD", help="run-to-run scatter"
    )
    arguments = parser.parse_args()
    where: dict[str, Any] = {"gpu": arguments.gpu, "framework": arguments.framework}
    profiles = profiles_without(grid=arguments.grid, **where)
    shapes = read_shapes(arguments.shapes) if arguments.shapes else {}
    cells, _ = read_grid(
        arguments.grid, shapes=shapes, sequence_length=arguments.sequence_length, **where
    )
    wanted = list(product(prior_settings().items(), cells))
    tasks = [
        Task(
            cell=cell,
            profile=profiles.of(cell.model.name),
            prior=prior,
            seeds=arguments.seeds,
            noise_log_sd=arguments.noise,
        )
        for (_, prior), cell in wanted
    ]
    with ProcessPoolExecutor(
        arguments.processes, initializer=threadpool_limits, initargs=(1,)
    ) as pool:
        lost = list(pool.map(mean_regrets, tasks))
    by_setting: dict[str, dict[str, list[list[float]]]] = {name: {} for name in prior_settings()}
    for ((name, _), cell), regret in zip(wanted, lost, strict=True):
        by_setting[name].setdefault(cell.model.name, []).append(regret)
    means = {
        name: {model: float(np.mean(each)) for model, each in models.items()}
        for name, models in by_setting.items()
    }
    print(
        json.dumps(
            {"seeds": arguments.seeds, "mean_regret": means, "models": choose(by_setting)}, indent=1
        )
    )


if __name__ == "__main__":
    main()
