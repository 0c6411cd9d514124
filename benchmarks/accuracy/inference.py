"""Serving predictions beside measured runs: `python -m benchmarks.accuracy.inference [--data DIR]
[--json]`.

Constants of an engine version come from one half of the groups (ServingRun.fitted says which);
everything quoted as unseen is of the other half, or of models and GPUs left out of a fresh fit.
TTFT is that of runs that the KV cache does not limit.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import print_report
from benchmarks.accuracy.fit_engines import LEFT_OUT, by_version, left_out, settings
from benchmarks.accuracy.serving_runs import (
    Predicted,
    ServingRun,
    batches,
    by_constants,
    cached_series,
    dense_runs,
    index_of,
    predict,
    setting_of,
)
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import (
    doubts,
    engine_efficiency,
    engine_profiles,
    gpu_efficiency,
    version_key,
)
from hp_tool.catalog.familiarity import measured_runs
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.engines import EngineEfficiency, ExpertEfficiency, PoolEfficiency
from hp_tool.questions.serving.intervals import log_sd, nearest_served

CHOSEN_WITHIN = 1e-9
Scatter = ExpertEfficiency | PoolEfficiency


def shipped(runs: Sequence[ServingRun]) -> list[Predicted]:
    """Every run, predicted by the constants the catalogue ships for its version or the nearest
    one.
    """
    predicted = []
    for profile, members in by_constants(runs):
        predicted += predict(batches(members, profile), profile)
    return predicted


def unseen(runs: Sequence[ServingRun]) -> list[Predicted]:
    """The runs of versions with constants of their own that these did not see; series with cached
    prompts are left out.
    """
    cached = cached_series(runs)
    profiles = {(profile.engine, profile.version) for profile in engine_profiles()}
    chosen = [
        r
        for r in runs
        if (r.engine, r.version) in profiles and r.series not in cached and not r.fitted
    ]
    return shipped(chosen)


def stated(
    row: Comparison, pair: Predicted, what: str, *, scatter: Scatter | None = None
) -> Comparison:
    """Return the row in the interval that an answer states if nothing but the runs of the pair's
    index was measured. scatter: Deviations of models left out, of mixtures; None: the engine's.
    """
    run, device = pair.run, gpu(pair.run.gpu)
    profile = constants_of(run)
    extras = doubts()
    near = nearest_served(
        setting_of(run),
        measured_runs("serving") if pair.index is None else pair.index,
        extras,
        what,
        left_out=scatter is not None,
        kernels_alone=profile.kernels_alone,
    )
    own = getattr(scatter or profile, f"{what}_log_sd")
    timed = gpu_efficiency(device).measured
    base = math.hypot(own, 0.0 if timed else extras.serving[what]["die"])
    return dataclasses.replace(
        row.within(NORMAL_QUANTILE * log_sd(base, near, kernels=0.0)),
        differs=near.differs,
        kind="dense" if scatter is None else "mixture",
        base_log_sd=base,
    )


def constants_of(run: ServingRun) -> EngineEfficiency:
    return engine_efficiency(
        engine=run.engine, version=run.version or None, silicon=gpu(run.gpu).silicon
    )


def comparisons(
    pairs: Sequence[Predicted], what: str, *, scatter: Scatter | None = None
) -> list[Comparison]:
    """One figure of each run: ttft, tpot or throughput; ttft of those below the cache's limit."""
    rows = []
    for pair in pairs:
        run = pair.run
        if (what == "ttft" and pair.really_limited) or (
            what != "throughput" and run.queued_throughput is not None
        ):
            continue
        suffix = "" if what == "throughput" else "_s"
        sizes = (
            f"TP {run.config.tensor_parallel_size}, {run.input_length}/{run.output_length}, "
            f"{run.concurrency} at once"
        )
        row = Comparison(
            source=f"{run.engine} {run.version}",
            model=run.model,
            what=f"{run.engine} {run.precision} {sizes}",
            gpu=run.gpu,
            part=run.gpu,
            published=getattr(run, f"{what}{suffix}"),
            predicted=getattr(pair, f"{what}{suffix}"),
            refused=None if pair.fits else "memory",
        )
        rows.append(stated(row, pair, what, scatter=scatter))
    return rows


def refitted(runs: Sequence[ServingRun]) -> dict[str, list[Predicted]]:
    """For each engine version with several models (or GPUs): every one of them, predicted by
    constants that saw the others.
    """
    results = {}
    for (name, version), members in by_version(runs).items():
        for key in LEFT_OUT:
            for kind, pairs in left_out(members, name=name, version=version, key=key).items():
                results[f"{name} {version}: {kind}"] = pairs
    return results


def other_release(runs: Sequence[ServingRun]) -> dict[str, list[Predicted]]:
    """Every version with constants of its own, predicted by those of the engine's nearest other
    version.
    """
    results = {}
    fitted = (profile for profile in engine_profiles() if not profile.kernels_alone)
    profiles = sorted(fitted, key=lambda profile: version_key(profile.version))
    of_version = by_version(runs)
    for (name, version), members in of_version.items():
        before, after = (
            [
                p
                for p in profiles
                if p.engine == name and test(version_key(p.version), version_key(version))
            ]
            for test in (operator.lt, operator.gt)
        )
        if before or after:
            profile = before[-1] if before else after[0]
            # What is no constant of the release stays as it was run: memory for the cache, limits
            # of a batch, the client.
            own = constants_of(members[0])
            habits = {"prefill_group": own.prefill_group, "wave_share": own.wave_share}
            as_run = dataclasses.replace(profile, **settings(name, version), **habits)
            saw = of_version.get((name, profile.version), [])
            results[f"{name} {version} by {profile.version}"] = predict(
                batches(members, as_run), as_run, index=index_of(saw)
            )
    return results


def regret(pairs: Sequence[Predicted]) -> dict[str, Any]:
    """Return what the predicted best parallelism loses of the best measured tokens/s/GPU, by groups
    with several sizes.
    """
    groups: dict[tuple[object, ...], list[Predicted]] = defaultdict(list)
    for pair in pairs:
        groups[pair.run.group].append(pair)
    lost = []
    for members in groups.values():
        if len(members) > 1:
            chosen = max(members, key=lambda p: p.throughput)
            lost.append(1.0 - chosen.run.throughput / max(p.run.throughput for p in members))
    best = sum(value <= CHOSEN_WITHIN for value in lost)
    return {
        "groups": len(lost),
        "best_chosen": best,
        "worst": max(lost, default=0.0),
        "mean": float(np.mean(lost or [0.0])),
    }


def limit_predicted(pairs: Sequence[Predicted]) -> float:
    """Return the share of runs of which is predicted whether the KV cache limits them."""
    closed = [pair for pair in pairs if pair.run.queued_throughput is None]
    return float(np.mean([pair.kv_limited == pair.really_limited for pair in closed]))


def evaluate(folder: Path) -> dict[str, Any]:
    """Return {groups, best_layout: {runs: regret}, limit_predicted}; minutes, for the fits."""
    from benchmarks.accuracy import evidence, serving_groups

    runs = dense_runs(folder)
    kinds: dict[str, list[Predicted]] = {"groups no constant was fitted on": unseen(runs)}
    for kind, pair, _ in serving_groups.unseen_kinds(folder):
        kinds.setdefault(kind, []).append(pair)
    return {
        "groups": [
            *evidence.section("serving", folder),
            *serving_groups.shipped(folder),
            *serving_groups.refitted(folder),
        ],
        "best_layout": {name: regret(pairs) for name, pairs in kinds.items()},
        "limit_predicted": limit_predicted(unseen(runs)),
    }


def as_dict(report: dict[str, Any]) -> dict[str, Any]:
    return report | {"groups": [group.summary() for group in report["groups"]]}


if __name__ == "__main__":
    print_report(description=__doc__, evaluate=evaluate, as_dict=as_dict)
