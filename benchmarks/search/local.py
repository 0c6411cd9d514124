"""Compare a real search on this machine with a run of every candidate: `python -m
benchmarks.search.local`.

Searches the quickstart's space (63 candidates on two processes) as `hp-tool tune` does, then runs
the candidates one by one, and tells how much slower the configuration found is than the best of
them all. About 14 minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Launcher
from hp_tool.domain.query import Query
from hp_tool.loop.tuning import TuneResult, tune
from hp_tool.loop.tuning.run import OnEvent
from hp_tool.questions import schema
from hp_tool.store import open_store

QUERY = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


def measured(
    query: Query,
    *,
    launcher: Launcher | None = None,
    on_event: OnEvent = lambda kind, payload: None,
) -> tuple[TuneResult, dict[ParallelConfig, float], float]:
    """Run a search without earlier measurements. Return its answer, the step time of each
    configuration in its first complete run, and the seconds the search took.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{Path(folder) / 'search.sqlite3'}")
        try:
            result = tune(query=query, store=store, launcher=launcher, on_event=on_event)
            runs = store.runs(search_id=result.search.id)
        finally:
            store.close()
    step_s = {
        run.parallel: run.measurement.step_s
        for run in reversed(runs)  # the leader may have run again, for twice the steps
        if run.fidelity.is_whole
        and run.measurement is not None
        and run.measurement.step_s is not None
    }
    return result, step_s, time.perf_counter() - started


def compare(
    query: Query,
    *,
    candidates: int,
    launcher: Launcher | None = None,
    on_event: OnEvent = lambda kind, payload: None,
) -> dict[str, Any]:
    """Run the query's search, then `candidates` configurations of its space, each in a complete run
    of the same length.

    regret: 1 - best step time / step time of the configuration recommended, both from the second
    pass, so that neither was chosen by the run it is judged by; the search's own time where the
    second pass left the configuration out.
    """
    result, own, search_s = measured(query, launcher=launcher, on_event=on_event)
    once = min(candidates, result.space.feasible)
    settings = replace(
        query.search, budget_runs=once + 1, min_gain_fraction=0.0, fidelity="full", reuse=False
    )
    settings = replace(settings, budget_gpu_seconds=None, configurations_per_job=1, baseline=None)
    everything = replace(query, search=settings)
    grid, truth, grid_s = measured(everything, launcher=launcher, on_event=on_event)
    best = result.recommendations[0].parallel
    known: Mapping[ParallelConfig, float] = own | truth
    fastest = min(truth.values())
    return {
        "candidates": result.space.feasible,
        "search": {
            "runs": result.search.profile_runs,
            "seconds": search_s,
            "gpu_seconds": result.search.gpu_seconds,
            "stopped_because": result.search.stopped_because,
            "step_s": known[best],
        },
        "grid": {
            "runs": min(grid.search.profile_runs, once),  # one more is the leader's second
            "worked": len(truth),
            "seconds": grid_s,
            "gpu_seconds": grid.search.gpu_seconds,
            "best_step_s": fastest,
        },
        "regret": max(0.0, 1.0 - fastest / known[best]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--query", type=Path, default=QUERY, metavar="FILE", help="another search to judge"
    )
    parser.add_argument(
        "--candidates",
        type=int,
        default=1000,
        help="at most so many are run for comparison; default: all",
    )
    parser.add_argument("--budget-runs", type=int, help="of the search, in place of the query's")
    arguments = parser.parse_args()
    query = schema.parse_query(arguments.query.read_text(encoding="utf-8"))
    if arguments.budget_runs is not None:
        query = replace(query, search=replace(query.search, budget_runs=arguments.budget_runs))

    def progress(kind: str, payload: Mapping[str, Any]) -> None:
        if kind == "run_finished":
            run = {name: payload.get(name) for name in ("number", "status", "step_s")}
            print(json.dumps({"run": run}), file=sys.stderr, flush=True)

    print(json.dumps(compare(query, candidates=arguments.candidates, on_event=progress), indent=1))


if __name__ == "__main__":
    main()
