"""Count the runs until a search finds a configuration within 2% of the best: `python -m
benchmarks.search.replay [--grid FILE.csv]`.

Replays a measured grid. Each cell (a model on a number of nodes) is searched by each method with
the same seeds; a run is answered from the file, a failed one by a failure. Nothing that a replayed
cell measured reaches a method before it ran it. Rows that the framework refuses by its own rules
are known to this search, as in the product, and not to the baselines.
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.search.grid import Cell, add_grid_arguments, read_grid
from benchmarks.search.methods import METHODS, create_method
from benchmarks.search.profiles import profiles_without
from benchmarks.search.replaying import Trace, evidence_of, legal_rows, replay, table_of
from benchmarks.search.report import as_text, summarise
from benchmarks.search.shapes import read_shapes
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.loop.calibration import Evidence

NOISE_LOG_SD = 0.04
"""Assumed standard deviation of ln(time) between runs, if the grid has too few repeats: repeated
runs on clusters differ by up to 13%.
"""
MIN_REPEATS = 10


@dataclass(frozen=True, kw_only=True)
class Task:
    """All searches of one cell by one method, one per seed."""

    cell: Cell
    profile: EfficiencyProfile
    carried: tuple[Cell, ...]
    method: str
    seeds: int
    noise_log_sd: float
    together: int


def run_task(task: Task) -> list[Trace]:
    """Return a trace for each seed."""
    table = table_of(task.cell, task.profile)
    carried = Evidence.empty()
    if task.method == "hp_tool_carried":
        carried = Evidence.concatenate(
            [evidence_of(other, table_of(other, task.profile)) for other in task.carried]
        )
    return [
        replay(
            task.cell,
            table,
            create_method(
                task.method,
                table=table,
                legal=legal_rows(task.cell),
                carried=carried,
                seed=seed,
                together=task.together,
            ),
            seed=seed,
            noise_log_sd=task.noise_log_sd,
        )
        for seed in range(task.seeds)
    ]


def noise_of(cells: list[Cell]) -> float:
    """Return the standard deviation of ln(time) between repeats: 1.4826 x the median deviation from
    a configuration's median, which is robust against faults. Return NOISE_LOG_SD if fewer than
    MIN_REPEATS configurations were repeated.
    """
    deviations = [
        np.abs(np.log(times) - np.median(np.log(times))) for cell in cells for times in cell.repeats
    ]
    if len(deviations) < MIN_REPEATS:
        return NOISE_LOG_SD
    return float(1.4826 * np.median(np.concatenate(deviations)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_grid_arguments(parser)
    parser.add_argument(
        "--cells", nargs="*", metavar="MODEL[-KV-NODES]", help="only cells whose name begins so"
    )
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--together", type=int, default=1, help="configurations of one of our jobs")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--noise", type=float, metavar="LOG_SD", help="run-to-run scatter; default: as repeats show"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    shapes = read_shapes(arguments.shapes) if arguments.shapes else {}
    profiles = profiles_without(
        grid=arguments.grid, gpu=arguments.gpu, framework=arguments.framework
    )
    cells, counts = read_grid(
        arguments.grid,
        shapes=shapes,
        gpu=arguments.gpu,
        sequence_length=arguments.sequence_length,
        framework=arguments.framework,
    )
    noise = noise_of(cells) if arguments.noise is None else arguments.noise
    wanted = [
        cell
        for cell in cells
        if not arguments.cells or any(_name(cell).startswith(c) for c in arguments.cells)
    ]
    tasks = [
        Task(
            cell=cell,
            profile=profiles.of(cell.model.name),
            carried=tuple(other for other in cells if other.model.name != cell.model.name),
            method=method,
            seeds=arguments.seeds,
            noise_log_sd=noise,
            together=arguments.together,
        )
        for cell, method in product(wanted, arguments.methods)
    ]
    # Matrices here are small: threads inside a process would only fight over the cores.
    with ProcessPoolExecutor(
        arguments.processes, initializer=threadpool_limits, initargs=(1,)
    ) as pool:
        traces = list(pool.map(run_task, tasks))
    report = summarise(
        cells=wanted,
        tables=[table_of(cell, profiles.of(cell.model.name)) for cell in wanted],
        traces={
            (task.cell.key, task.method): trace for task, trace in zip(tasks, traces, strict=True)
        },
        methods=arguments.methods,
    )
    report |= {
        "grid": {
            **counts,
            "noise_log_sd": noise,
            "seeds": arguments.seeds,
            "profile": profiles.describe(),
        }
    }
    print(json.dumps(report, indent=1) if arguments.json else as_text(report))


def _name(cell: Cell) -> str:
    return "-".join(map(str, cell.key))


if __name__ == "__main__":
    main()
