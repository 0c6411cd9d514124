"""Summarise traces: runs, regrets, prediction errors, and tests whether methods differ by more than
chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import wilcoxon

from benchmarks.search.grid import Cell
from benchmarks.search.replaying import CHECKPOINTS, CONFIDENCE, Trace, evidence_of, model_alone
from hp_tool.loop.calibration import prior_for
from hp_tool.loop.calibration.memory import fit_memory
from hp_tool.loop.search.table import CandidateTable

OURS = ("hp_tool", "hp_tool_carried")
CLOSE_SECOND = 0.1
"""Maximum gap of a cell's second-best configuration. In other cells only one configuration is good
enough, so finding it is partly luck.
"""


def summarise(
    *,
    cells: Sequence[Cell],
    tables: Sequence[CandidateTable],
    traces: Mapping[tuple[tuple[str, int, int], str], list[Trace]],
    methods: Sequence[str],
) -> dict[str, Any]:
    """Return {cells, overall, tests}: scores by cell, means over all cells with equal weight, and
    paired tests.
    """
    by_cell = [{method: traces[cell.key, method] for method in methods} for cell in cells]
    described = [
        _cell(cell, table, by_method)
        for cell, table, by_method in zip(cells, tables, by_cell, strict=True)
    ]
    close = [cell["second_best_gap"] <= CLOSE_SECOND for cell in described]
    overall = {method: _overall(described, close, method) for method in methods}
    tests = {
        f"{ours} against {other}": _paired(described, ours, other)
        for ours in OURS
        for other in methods
        if ours in methods and other not in OURS
    }
    return {"cells": described, "overall": overall, "paired_tests": tests, "confidence": CONFIDENCE}


def _cell(cell: Cell, table: CandidateTable, traces: Mapping[str, list[Trace]]) -> dict[str, Any]:
    model, heads, nodes = cell.key
    runs = {
        name: np.array([trace.found_at for trace in members]) for name, members in traces.items()
    }
    return {
        "model": model,
        "num_key_value_heads": heads,
        "nodes": nodes,
        "configs": len(cell.step_s),
        "measured": int(np.isfinite(cell.step_s).sum()),
        "second_best_gap": cell.second_best_gap,
        "runs": {
            name: {"mean": float(n.mean()), "median": float(np.median(n)), "worst": int(n.max())}
            for name, n in runs.items()
        },
        "regret_after": {name: _regret_after(members) for name, members in traces.items()},
        "regret_after_job": {
            name: float(np.mean([trace.after_job for trace in members]))
            for name, members in traces.items()
        },
        "gpu_hours": {
            name: float(np.mean([trace.gpu_seconds for trace in members])) / 3600
            for name, members in traces.items()
        },
        "beliefs": {name: _beliefs(members) for name, members in traces.items() if name in OURS},
        "memory_error_knowing_the_others": memory_floor(cell, table),
        "top1": model_alone(cell, table, top=1),
        "top3": model_alone(cell, table, top=3),
    }


def memory_floor(cell: Cell, table: CandidateTable) -> float:
    """Return the median relative error of each peak if all other rows of the cell are known: a
    lower bound for ten known rows.
    """
    process = fit_memory(evidence=evidence_of(cell, table), prior=prior_for(kind="gpu")).process
    return (
        float("nan")
        if process is None
        else float(np.median(np.abs(np.expm1(process.values - process.left_out()[0]))))
    )


def _regret_after(traces: list[Trace]) -> dict[str, float]:
    return {
        str(k): float(np.mean([trace.regret[k] for trace in traces]))
        for k in CHECKPOINTS
        if k in traces[0].regret
    }


def _beliefs(traces: list[Trace]) -> dict[str, float]:
    known = [trace.beliefs for trace in traces if trace.beliefs is not None]
    names = (
        "rank_correlation",
        "throughput_median_error",
        "memory_median_error",
        "coverage",
        "memory_coverage",
    )
    return (
        {name: float(np.nanmean([getattr(beliefs, name) for beliefs in known])) for name in names}
        if known
        else {}
    )


def _overall(cells: Sequence[dict[str, Any]], close: Sequence[bool], method: str) -> dict[str, Any]:
    runs = [cell["runs"][method] for cell in cells]
    regrets = [cell["regret_after"][method] for cell in cells]
    worst_close = [run["worst"] for run, is_close in zip(runs, close, strict=True) if is_close]
    overall: dict[str, Any] = {
        "mean_runs": float(np.mean([run["mean"] for run in runs])),
        "median_runs": float(np.median([run["median"] for run in runs])),
        "worst_runs": max(run["worst"] for run in runs),
        "worst_runs_close_second": max(worst_close, default=None),
        "regret_after": {
            str(k): float(np.mean([r[str(k)] for r in regrets if str(k) in r])) for k in CHECKPOINTS
        },
        "regret_after_job": float(np.mean([cell["regret_after_job"][method] for cell in cells])),
        "gpu_hours": float(np.mean([cell["gpu_hours"][method] for cell in cells])),
    }
    if method in OURS:
        known = [cell["beliefs"][method] for cell in cells if cell["beliefs"][method]]
        overall["beliefs"] = {
            name: float(np.median([beliefs[name] for beliefs in known])) for name in known[0]
        }
        for name in ("coverage", "memory_coverage"):
            overall["beliefs"][name] = float(np.mean([beliefs[name] for beliefs in known]))
    return overall


def _paired(cells: Sequence[dict[str, Any]], ours: str, other: str) -> dict[str, float]:
    """Apply Wilcoxon's signed-rank test to the mean runs of each cell, because seeds of one cell
    are not independent.
    """
    pairs = np.array([(cell["runs"][ours]["mean"], cell["runs"][other]["mean"]) for cell in cells])
    difference = pairs[:, 0] - pairs[:, 1]
    p_value = float(wilcoxon(difference, alternative="less").pvalue) if np.any(difference) else 1.0
    return {
        "mean_difference_runs": float(difference.mean()),
        "cells": len(cells),
        "p_value": p_value,
    }


def as_text(report: dict[str, Any]) -> str:
    """Format the report as tables."""
    grid, methods = report["grid"], list(report["overall"])
    lines = [
        f"{grid['rows']} rows; {grid['dropped']} dropped, whose sizes do not multiply to the "
        f"batch; {grid['too_small']} in "
        f"cells too small; {len(report['cells'])} cells, {grid['seeds']} seeds, noise "
        f"{grid['noise_log_sd']:.0%}",
        grid["profile"],
        "",
        f"{'runs: mean (worst)':28}"
        + "".join(f"{name:>17}" for name in methods)
        + "     top1  top3",
    ]
    for cell in report["cells"]:
        name = (
            f"{cell['model']} kv{cell['num_key_value_heads']} {cell['nodes']} nodes "
            f"({cell['measured']}/{cell['configs']})"
        )
        runs = "".join(
            f"{cell['runs'][m]['mean']:10.1f} ({cell['runs'][m]['worst']:3d}) " for m in methods
        )
        lines.append(f"{name:28}{runs}    {cell['top1']:4.0%}  {cell['top3']:4.0%}")
    titles = (
        ("runs mean", 10),
        ("median", 8),
        ("worst", 7),
        ("worst*", 8),
        ("regret after 1", 16),
        (3, 6),
        (5, 6),
        (10, 6),
    )
    further = (("a job", 7), ("GPU-hours", 11))
    lines += ["", " " * 18 + "".join(f"{title:>{width}}" for title, width in (*titles, *further))]
    for name in methods:
        overall = report["overall"][name]
        regrets = "".join(f"{overall['regret_after'][str(k)]:6.0%}" for k in CHECKPOINTS)
        close = overall["worst_runs_close_second"]
        lines.append(
            f"{name:18}{overall['mean_runs']:10.1f}{overall['median_runs']:8.1f}{overall['worst_runs']:7d}"
            f"{close if close is not None else '-':>8}{regrets:>34}{overall['regret_after_job']:7.0%}"  # noqa: E501
            f"{overall['gpu_hours']:11.1f}"
        )
    lines.append(f"* in cells whose second best is within {CLOSE_SECOND:.0%} of the best")
    for name in methods:
        if beliefs := report["overall"][name].get("beliefs"):
            lines.append(
                f"{name}, unseen rows after 10 measurements: rank correlation "
                f"{beliefs['rank_correlation']:.2f}, "
                f"throughput error {beliefs['throughput_median_error']:.0%}, memory error "
                f"{beliefs['memory_median_error']:.1%}; {report['confidence']:.0%} intervals hold "
                f"{beliefs['coverage']:.0%} of step times and {beliefs['memory_coverage']:.0%} of "
                "peaks"
            )
    floor = np.median([cell["memory_error_knowing_the_others"] for cell in report["cells"]])
    lines.append(f"memory error of each row where all others of its cell are known: {floor:.1%}")
    lines += [
        f"{pair}: {test['mean_difference_runs']:+.1f} runs, p = {test['p_value']:.2g} (Wilcoxon, "
        f"{test['cells']} cells)"
        for pair, test in report["paired_tests"].items()
    ]
    return "\n".join(lines)
