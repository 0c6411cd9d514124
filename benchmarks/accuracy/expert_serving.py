"""Compare predictions with serving runs of MoE models: `python -m
benchmarks.accuracy.expert_serving [--data DIR] [--json]`.

For each comparison, the constants of experts are refitted without the run's load, its layout
(tensor parallel size) or its model. The engines' constants come from dense models. No constant of
experts was fitted to runs with separate pools or queued requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.accuracy.data import print_report
from benchmarks.accuracy.fit_experts import left_out, moe_runs, predict_runs, prepare_batches
from benchmarks.accuracy.groups import Rows, as_groups
from benchmarks.accuracy.inference import (
    as_dict,
    compare_pools,
    judge_moe_runs,
    ratios,
    regret,
    rows_by_title,
)
from benchmarks.accuracy.serving_runs import queued_runs
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.efficiency import expert_efficiency

KEYS = {
    "load": lambda run: run.concurrency,
    "layout": lambda run: (run.model, run.config.tensor_parallel_size),
    "model": lambda run: run.model,
}


def evaluate(folder: Path) -> dict[str, Any]:
    """Return {groups, best_layout: {runs: regret}} by what the fit held out, and for separate
    pools.
    """
    runs = moe_runs(folder)
    sets = {
        f"Served MoE models, unseen {name}": [
            pair for _, members in left_out(runs, key).values() for pair in members
        ]
        for name, key in KEYS.items()
    }
    queued = [run for run in queued_runs(folder) if catalogue_model(run.model).num_experts]
    constants = {run.engine: expert_efficiency(engine=run.engine) for run in queued}
    sets["Served MoE models, all requests queued at once"] = predict_runs(
        prepare_batches(queued), constants
    )
    rows: Rows = {}
    for title, pairs in sets.items():
        rows |= rows_by_title(title, ratios(judge_moe_runs(pairs)))
    return {
        "groups": as_groups(rows | compare_pools(folder)),
        "best_layout": {title: regret(pairs) for title, pairs in sets.items()},
    }


if __name__ == "__main__":
    print_report(description=__doc__, evaluate=evaluate, as_dict=as_dict)
