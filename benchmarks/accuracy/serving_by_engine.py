"""Serving predictions by engine, each run by constants that saw neither its GPU or its precision
nor, of mixtures, its model.

Of a release that was measured on one GPU in one precision alone, constants are those of the
engine's nearest other release.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import fit_experts, fit_pools
from benchmarks.accuracy.fit_engines import by_gpu, by_precision, by_version, left_out
from benchmarks.accuracy.serving_runs import Predicted, ServingRun, log_ratios
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.efficiency import expert_efficiency, pool_efficiency
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.engines import PoolEfficiency


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unseen:
    """Runs of one engine and kind of model by constants that did not see them, and the intervals
    stated for each.
    """

    pairs: list[Predicted]
    widths: list[dict[str, float]]


def dense(
    runs: Sequence[ServingRun],
    *,
    widths: Callable[..., dict[str, float]],
    others: Callable[..., list[Predicted]],
) -> dict[str, Unseen]:
    """{engine: its dense runs}. `widths(run, borrowed=)` states intervals; `others(name, version)`
    are a release's runs by the constants of another.
    """
    unseen: dict[str, Unseen] = defaultdict(lambda: Unseen(pairs=[], widths=[]))
    for (name, version), members in by_version(runs).items():
        parts = [
            pairs
            for key in (by_gpu, by_precision)
            for pairs in left_out(members, name=name, version=version, key=key).values()
        ]
        borrowed = not parts
        for pairs in parts or [others(name, version)]:
            unseen[f"{name}, dense"].pairs.extend(pairs)
            unseen[f"{name}, dense"].widths.extend(
                widths(pair.run, borrowed=borrowed) for pair in pairs
            )
    return dict(unseen)


def mixtures(folder: Path) -> dict[str, Unseen]:
    """{engine: its mixtures}, by experts' constants without the model, with the intervals that
    answers state.
    """
    unseen: dict[str, Unseen] = defaultdict(lambda: Unseen(pairs=[], widths=[]))
    runs = fit_experts.mixtures(folder)
    for _, pairs in fit_experts.left_out(
        runs, lambda run: catalogue_model(run.model).name
    ).values():
        for pair in pairs:
            scatter = expert_efficiency(engine=pair.run.engine)
            group = unseen[f"{pair.run.engine}, mixtures"]
            group.pairs.append(pair)
            group.widths.append(
                {
                    what: NORMAL_QUANTILE * getattr(scatter, f"{what}_log_sd")
                    for what in ("ttft", "tpot")
                }
            )
    return dict(unseen)


def figures(
    group: Unseen, regret: Callable[[Sequence[Predicted]], dict[str, Any]]
) -> dict[str, float]:
    """Errors of TPOT (mean) and of TTFT (median), shares inside, and the choice of a layout."""
    closed = [place for place, pair in enumerate(group.pairs) if pair.run.queued_throughput is None]
    logs = {what: log_ratios(group.pairs, what) for what in ("tpot", "ttft", "throughput")}
    best = regret(group.pairs)

    def inside(what: str) -> float:
        return (
            float(np.mean([abs(logs[what][i]) <= group.widths[i][what] for i in closed]))
            if closed
            else np.nan
        )

    return {
        "runs": len(group.pairs),
        "tpot_error": float(np.abs(np.expm1(logs["tpot"][closed])).mean()) if closed else np.nan,
        "throughput_error": float(np.abs(np.expm1(logs["throughput"])).mean()),
        "ttft_median_error": float(np.median(np.abs(np.expm1(logs["ttft"][closed]))))
        if closed
        else np.nan,
        "tpot_inside": inside("tpot"),
        "ttft_inside": inside("ttft"),
        "cells": best["groups"],
        "best_chosen": best["best_chosen"],
        "worst_regret": best["worst"],
    }


def pools(folder: Path, scatter: PoolEfficiency | None = None) -> dict[str, dict[str, float]]:
    """{engine: figures of its pools}, by hops between pools that saw neither the engine nor the
    lengths.
    """
    stated = scatter or pool_efficiency()
    by_engine: dict[str, list[fit_pools.PredictedPool]] = defaultdict(list)
    for pairs in fit_pools.left_out(fit_pools.told(folder)).values():
        for pair in pairs:
            by_engine[f"{pair.run.engine}, pools"].append(pair)
    rows = {}
    for name, members in by_engine.items():
        logs = {
            what: np.array([pair.log_ratio(what) for pair in members])
            for what in ("tpot", "ttft", "throughput")
        }
        within = {what: NORMAL_QUANTILE * getattr(stated, f"{what}_log_sd") for what in logs}
        rows[name] = {
            "runs": len(members),
            "tpot_error": float(np.abs(np.expm1(logs["tpot"])).mean()),
            "throughput_error": float(np.abs(np.expm1(logs["throughput"])).mean()),
            "ttft_median_error": float(np.median(np.abs(np.expm1(logs["ttft"])))),
            "tpot_inside": float(np.mean(np.abs(logs["tpot"]) <= within["tpot"])),
            "ttft_inside": float(np.mean(np.abs(logs["ttft"]) <= within["ttft"])),
        }
    return rows


def line(name: str, f: dict[str, float]) -> str:
    layout = ""
    if f.get("cells"):
        layout = (
            f" | best layout {f['best_chosen']:.0f} of {f['cells']:.0f}, worst regret "
            f"{f['worst_regret']:.1%}"
        )
    return (
        f"  {name:20} {f['runs']:5.0f} {f['tpot_error']:7.1%} {f['tpot_inside']:6.0%} "
        f"{f['throughput_error']:7.1%} "
        f"{f['ttft_median_error']:9.1%} {f['ttft_inside']:6.0%}{layout}"
    )
