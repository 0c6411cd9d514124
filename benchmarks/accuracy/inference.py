"""Compare serving predictions with measured runs: `python -m benchmarks.accuracy.inference [--data
DIR] [--json]`.

The constants of an engine version are fitted to one half of the groups of runs
(`ServingRun.fitted`). Errors on unseen runs are those of the other half, or of models and GPUs that
a refit leaves out. TTFT is compared for runs that the KV cache does not limit. Intervals are those
of estimates.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import fit_defaults, fit_experts
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import print_report
from benchmarks.accuracy.fit_engines import (
    LEFT_OUT,
    by_gpu,
    by_precision,
    by_version,
    left_out,
    settings,
)
from benchmarks.accuracy.groups import Group, Rows, as_groups
from benchmarks.accuracy.serving_runs import (
    Predicted,
    ServingRun,
    batches,
    by_constants,
    cached_series,
    dense_runs,
    index_of,
    log_ratios,
    predict,
    setting_of,
)
from hp_tool.catalog import gpu
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.efficiency import (
    defaults_efficiency,
    engine_efficiency,
    engine_profiles,
    expert_efficiency,
    gpu_efficiency,
    pool_efficiency,
    prediction_doubts,
    version_key,
)
from hp_tool.catalog.familiarity import measured_runs
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.engines import EngineEfficiency, ExpertEfficiency, PoolEfficiency
from hp_tool.questions.serving.intervals import figure_log_sd, nearest_serving_runs

CHOSEN_WITHIN = 1e-9
Scatter = ExpertEfficiency | PoolEfficiency


def shipped_pairs(runs: Sequence[ServingRun]) -> list[Predicted]:
    """Return every run, predicted by the catalogue's constants for its engine version or the
    nearest one.
    """
    predicted = []
    for profile, members in by_constants(runs):
        predicted += predict(batches(members, profile), profile)
    return predicted


def compare_unseen(runs: Sequence[ServingRun]) -> list[Predicted]:
    """Return runs that the constants of their version were not fitted to. Versions without
    constants and series with cached prompts are omitted.
    """
    cached = cached_series(runs)
    profiles = {(profile.engine, profile.version) for profile in engine_profiles()}
    chosen = [
        r
        for r in runs
        if (r.engine, r.version) in profiles and r.series not in cached and not r.fitted
    ]
    return shipped_pairs(chosen)


def with_interval(
    row: Comparison, pair: Predicted, what: str, *, scatter: Scatter | None = None
) -> Comparison:
    """Return the row with the interval that an estimate would have if only the runs of the pair's
    index had been measured.

    scatter: deviations of left-out MoE models; None: those of the engine.
    """
    run, device = pair.run, gpu(pair.run.gpu)
    profile = constants_of(run)
    extras = prediction_doubts()
    near = nearest_serving_runs(
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
        row.within(NORMAL_QUANTILE * figure_log_sd(base, near, kernels=0.0)),
        differs=near.differs,
        kind="dense" if scatter is None else "mixture",
        base_log_sd=base,
    )


def constants_of(run: ServingRun) -> EngineEfficiency:
    return engine_efficiency(
        engine=run.engine, version=run.version or None, silicon=gpu(run.gpu).silicon
    )


def comparisons(pairs: Sequence[Predicted], what: str) -> list[Comparison]:
    """Return one figure of each run: ttft, tpot or throughput. ttft is compared only for runs below
    the limit of the KV cache.
    """
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
        rows.append(with_interval(row, pair, what))
    return rows


def refitted_pairs(runs: Sequence[ServingRun]) -> dict[str, list[Predicted]]:
    """Return, for each engine version with several models (or GPUs), the runs of each, predicted by
    constants fitted to the others.
    """
    results = {}
    for (name, version), members in by_version(runs).items():
        for key in LEFT_OUT:
            for kind, pairs in left_out(members, name=name, version=version, key=key).items():
                results[f"{name} {version}: {kind}"] = pairs
    return results


def other_release(runs: Sequence[ServingRun]) -> dict[str, list[Predicted]]:
    """Return the runs of every version that has constants, predicted by those of the engine's
    nearest other version.
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
    """Return how much lower the tokens/s per GPU of the layout with the best prediction is than
    that of the best measured layout, for groups with several layouts.
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
    """Return the fraction of runs for which the model predicts correctly whether the KV cache
    limits them.
    """
    closed = [pair for pair in pairs if pair.run.queued_throughput is None]
    return float(np.mean([pair.kv_limited == pair.really_limited for pair in closed]))


FIGURES = {
    "tpot": "time per output token",
    "ttft": "time to first token",
    "throughput": "tokens/s per GPU",
}
"""Titles of the figures."""
Judged = tuple[str, Predicted | fit_defaults.PredictedPool, Scatter | None]
"""(part of a group, run with its prediction, deviations of left-out models or None for the
engine's).
"""


def compare_shipped(folder: Path) -> list[Group]:
    """Return the comparisons of the runs with the shipped constants of their release and of another
    release. Takes seconds.

    Runs that no constant of their release was fitted to are in the groups of `evidence` whose
    titles start with Serving.
    """
    runs = dense_runs(folder)
    cached = cached_series(runs)
    profiles = {(profile.engine, profile.version) for profile in engine_profiles()}
    pairs = [pair for pair in shipped_pairs(runs) if pair.run.series not in cached]
    own = [pair for pair in pairs if (pair.run.engine, pair.run.version) in profiles]
    judged_mixtures = judge_moe_runs(shipped_pairs(fit_experts.moe_runs(folder)))
    return as_groups(
        rows_by_title(
            "Engines, fitted groups",
            figures_by_part(_series(pair for pair in own if pair.run.fitted)),
        )
        | rows_by_title(
            "Engines, versions without constants",
            figures_by_part(_series(pair for pair in pairs if pair not in own)),
        )
        | rows_by_title("Engines, MoE models with the shipped constants", ratios(judged_mixtures))
        | rows_by_title(
            "Engines with default settings, unseen model", ratios(compare_defaults(folder))
        )
        | rows_by_title(
            "Engines, constants of another release", figures_by_part(_parts(other_release(runs)))
        )
    )


def compare_refitted(folder: Path) -> list[Group]:
    """Return the comparisons of the runs with constants fitted without their GPU, precision or
    model. Takes minutes because of the many fits.
    """
    fits = _parts(refitted_pairs(dense_runs(folder)))
    rows = (
        rows_by_title("Engines, unseen model or GPU", figures_by_part(fits))
        | rows_by_title("Engines by kind of model", ratios(unseen_kinds(folder)))
        | compare_pools(folder)
    )
    return as_groups(rows, is_long=True)


def _series(pairs: Iterable[Predicted]) -> list[tuple[str, Predicted]]:
    return [(series(pair.run), pair) for pair in pairs]


def _parts(pairs: Mapping[str, Sequence[Predicted]]) -> list[tuple[str, Predicted]]:
    return [(part, pair) for part, members in pairs.items() for pair in members]


def judge_moe_runs(pairs: Iterable[Predicted]) -> list[Judged]:
    """Return runs of MoE models with the shipped deviations of their engine."""
    return [(series(pair.run), pair, expert_efficiency(engine=pair.run.engine)) for pair in pairs]


def compare_defaults(folder: Path) -> list[Judged]:
    """Return runs of engines with default settings, predicted with the slowdown fitted to other
    models.
    """
    pairs = fit_defaults.left_out(fit_defaults.runs_with_defaults(folder))
    return [
        (
            f"{pair.run.engine}, {pair.run.gpu}",
            pair,
            defaults_efficiency(engine=pair.run.engine, silicon=gpu(pair.run.gpu).silicon),
        )
        for pair in pairs
    ]


def compare_pools(folder: Path) -> Rows:
    """Return runs with separate pools, predicted with hops fitted without the engine or without the
    lengths.
    """
    unseen = fit_defaults.pools_left_out(folder)
    judged: list[Judged] = [(pair.run.engine, pair, pool_efficiency()) for pair in unseen]
    return rows_by_title(
        "Separate prefill and decode pools, unseen engine and lengths", ratios(judged)
    )


@functools.cache
def unseen_kinds(folder: Path) -> list[Judged]:
    """Return the runs by engine and kind of model, each predicted by constants fitted without its
    GPU or its precision; MoE models also without the model.

    If a release was measured on a single GPU in a single precision, the constants of the engine's
    nearest other release are used.
    """
    kinds: dict[str, list[Judged]] = defaultdict(list)
    runs = dense_runs(folder)
    releases = other_release(runs)
    for (name, version), members in by_version(runs).items():
        parts = [
            pairs
            for key in (by_gpu, by_precision)
            for pairs in left_out(members, name=name, version=version, key=key).values()
        ]
        own = f"{name} {version} by "
        others = next((pairs for title, pairs in releases.items() if title.startswith(own)), [])
        kinds[f"{name}, dense"] += [
            (f"{name}, dense", pair, None) for pairs in parts or [others] for pair in pairs
        ]
    unseen = fit_experts.left_out(
        fit_experts.moe_runs(folder), lambda run: catalogue_model(run.model).name
    )
    for _, pairs in unseen.values():
        for pair in pairs:
            kind = f"{pair.run.engine}, MoE models"
            kinds[kind].append((kind, pair, expert_efficiency(engine=pair.run.engine)))
    return [judged for _, members in sorted(kinds.items()) for judged in members]


def ratios(judged: Iterable[Judged]) -> Rows:
    """Return {figure: predicted / measured, as comparisons with 1} of the runs in which the figure
    was measured.
    """
    rows: Rows = {what: [] for what in FIGURES}
    for part, pair, scatter in judged:
        for what, found in rows.items():
            log = float(log_ratios([pair], what)[0])
            if math.isfinite(log):
                row = Comparison(
                    source="",
                    model=pair.run.model,
                    what="",
                    published=1.0,
                    predicted=math.exp(log),
                    part=part,
                )
                if isinstance(pair, Predicted):
                    found.append(with_interval(row, pair, what, scatter=scatter))
                else:
                    width = NORMAL_QUANTILE * getattr(scatter, f"{what}_log_sd")
                    found.append(row.within(width))
    return rows


def figures_by_part(pairs: Iterable[tuple[str, Predicted]]) -> Rows:
    """Return {figure: comparisons} for tuples of (part of a group, run with its prediction)."""
    rows: Rows = {what: [] for what in FIGURES}
    for part, pair in pairs:
        for what, found in rows.items():
            compared = comparisons([pair], what)
            found += [dataclasses.replace(row, part=part) for row in compared]
    return rows


def series(run: ServingRun) -> str:
    """Return a description of the series of a run: the runs that one person measured together."""
    return f"{run.engine} {run.version}, {run.model} {run.precision}, {run.gpu}"


def rows_by_title(title: str, rows: Rows) -> Rows:
    """Return the rows of each figure by the title of their group."""
    return {f"{title}: {words}": rows[what] for what, words in FIGURES.items()}


def evaluate(folder: Path) -> dict[str, Any]:
    """Return {groups, best_layout: {runs: regret}, limit_predicted}. The fits take minutes."""
    from benchmarks.accuracy import evidence

    runs = dense_runs(folder)
    kinds: dict[str, list[Predicted]] = {"groups no constant was fitted on": compare_unseen(runs)}
    for kind, pair, _ in unseen_kinds(folder):
        kinds.setdefault(kind, []).append(pair)
    return {
        "groups": [
            *evidence.section("serving", folder),
            *compare_shipped(folder),
            *compare_refitted(folder),
        ],
        "best_layout": {name: regret(pairs) for name, pairs in kinds.items()},
        "limit_predicted": limit_predicted(compare_unseen(runs)),
    }


def as_dict(report: dict[str, Any]) -> dict[str, Any]:
    return report | {"groups": [group.summary() for group in report["groups"]]}


if __name__ == "__main__":
    print_report(description=__doc__, evaluate=evaluate, as_dict=as_dict)
