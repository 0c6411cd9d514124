"""Serving predictions beside measured runs: `python -m benchmarks.accuracy.inference [--data DIR]
[--json]`.

Errors are relative, bias is the mean of log(predicted / measured). Constants of an engine version
come from one half of the groups (ServingRun.fitted says which); everything quoted as unseen is of
the other half, or of models and GPUs left out of a fresh fit. TTFT is quoted by its median error
and mean |log ratio|, apart for runs that the KV cache limits.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import serving_by_engine
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import print_report
from benchmarks.accuracy.fit_engines import LEFT_OUT, by_version, left_out, settings
from benchmarks.accuracy.serving_rows import dense_runs
from benchmarks.accuracy.serving_runs import (
    Predicted,
    ServingRun,
    batches,
    by_constants,
    cached_series,
    predict,
)
from hp_tool.catalog import gpu
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.efficiency import (
    engine_efficiency,
    engine_profiles,
    gpu_efficiency,
    version_key,
)
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.engines import EngineEfficiency
from hp_tool.questions.serving.intervals import log_sd

CHOSEN_WITHIN = 1e-9


def figures(
    pairs: Sequence[Predicted], *, foreign: bool = False, borrowed: bool = False
) -> dict[str, float]:
    """Errors, biases and coverage of one set of runs; TTFT of runs below the KV limit alone.
    Intervals are those of an answer about a model or die that is `foreign` to the constants, of a
    release with `borrowed` ones, or else as things are.
    """
    closed = [p for p in pairs if p.run.queued_throughput is None]
    free = [p for p in closed if not p.really_limited]
    tpot = np.array([np.log(p.tpot_s / p.run.tpot_s) for p in closed])
    throughput = np.array([np.log(p.throughput / p.run.throughput) for p in pairs])
    ttft = np.array([np.log(p.ttft_s / p.run.ttft_s) for p in free])
    values = {
        "runs": len(pairs),
        "tpot_error": np.abs(np.expm1(tpot)).mean() if closed else np.nan,
        "tpot_bias": tpot.mean() if closed else np.nan,
        "throughput_error": np.abs(np.expm1(throughput)).mean(),
        "throughput_bias": throughput.mean(),
        "ttft_median_error": np.median(np.abs(np.expm1(ttft))) if len(free) else np.nan,
        "ttft_abs_log": np.abs(ttft).mean() if len(free) else np.nan,
        "ttft_bias": ttft.mean() if len(free) else np.nan,
        "kv_limited": len(closed) - len(free),
        "kv_limit_right": np.mean([p.kv_limited == p.really_limited for p in closed])
        if closed
        else np.nan,
        **{
            f"{what}_inside": inside(pairs, what, foreign, borrowed)
            for what in ("ttft", "tpot", "throughput")
        },
        "refused": sum(not p.fits for p in pairs),
    }
    return {name: float(value) for name, value in values.items()}


def inside(pairs: Sequence[Predicted], what: str, foreign: bool, borrowed: bool) -> float:
    """Share of the measured figures in the 90 % interval that an answer states; NaN where none was
    measured.
    """
    within = [
        row.low <= row.published <= row.high
        for row in comparisons(pairs, what, foreign=foreign, borrowed=borrowed)
    ]
    return float(np.mean(within)) if within else np.nan


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


def half_width(
    profile: EngineEfficiency, run: ServingRun, what: str, *, foreign: bool, borrowed: bool
) -> float:
    """Log of how far an answer's 90 % interval reaches up and down from one of its figures."""
    device, model = gpu(run.gpu), catalogue_model(run.model)
    familiar = not foreign and profile.covers(
        model=model.name, silicon=device.silicon, precision=run.precision
    )
    borrowed = borrowed or not (profile.measured and gpu_efficiency(device).measured)
    own = getattr(profile, f"{what}_log_sd")
    return NORMAL_QUANTILE * log_sd(profile, what, own=own, familiar=familiar, borrowed=borrowed)


def widths(run: ServingRun, *, borrowed: bool) -> dict[str, float]:
    """Half widths of all figures, of an answer about a GPU or precision that the constants did not
    see.
    """
    profile = constants_of(run)
    return {
        what: half_width(profile, run, what, foreign=True, borrowed=borrowed)
        for what in ("ttft", "tpot", "throughput")
    }


def constants_of(run: ServingRun) -> EngineEfficiency:
    return engine_efficiency(
        engine=run.engine, version=run.version or None, silicon=gpu(run.gpu).silicon
    )


def comparisons(
    pairs: Sequence[Predicted], what: str, *, foreign: bool = False, borrowed: bool = False
) -> list[Comparison]:
    """One figure of each run: ttft, tpot or throughput; ttft of those below the cache's limit."""
    rows = []
    for pair in pairs:
        run = pair.run
        if (what == "ttft" and pair.really_limited) or (
            what != "throughput" and run.queued_throughput is not None
        ):
            continue
        profile = constants_of(run)
        spread = float(np.exp(half_width(profile, run, what, foreign=foreign, borrowed=borrowed)))
        suffix = "" if what == "throughput" else "_s"
        predicted = getattr(pair, f"{what}{suffix}")
        sizes = (
            f"TP {run.config.tensor_parallel_size}, {run.input_length}/{run.output_length}, "
            f"{run.concurrency} at once"
        )
        rows.append(
            Comparison(
                source=f"{run.engine} {run.version}",
                model=run.model,
                what=f"{run.engine} {run.precision} {sizes}",
                gpu=run.gpu,
                part=run.gpu,
                published=getattr(run, f"{what}{suffix}"),
                predicted=predicted,
                low=predicted / spread,
                high=predicted * spread,
                refused=None if pair.fits else "memory",
            )
        )
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
    for (name, version), members in by_version(runs).items():
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
            results[f"{name} {version} by {profile.version}"] = predict(
                batches(members, as_run), as_run
            )
    return results


def by_engine(folder: Path, runs: Sequence[ServingRun]) -> dict[str, dict[str, float]]:
    """{engine and kind of model, or pools: figures of runs whose GPU, precision or model constants
    did not see}.
    """
    releases = other_release(runs)

    def others(name: str, version: str) -> list[Predicted]:
        return next(
            (
                pairs
                for title, pairs in releases.items()
                if title.startswith(f"{name} {version} by ")
            ),
            [],
        )

    groups = serving_by_engine.dense(
        runs, widths=widths, others=others
    ) | serving_by_engine.mixtures(folder)
    rows = {
        name: serving_by_engine.figures(group, regret) for name, group in sorted(groups.items())
    }
    return rows | serving_by_engine.pools(folder)


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


def evaluate(folder: Path, *, refits: bool = True) -> dict[str, Any]:
    """{unseen, seen, left_out, by_engine, other_release, cached, other_versions, regret}: figures
    by what they are of.

    Without `refits` left_out and by_engine are empty: they take a fit for each model and GPU,
    minutes in all.
    """
    everything = dense_runs(folder)
    cached = cached_series(everything)
    pairs = shipped(everything)
    profiles = {(profile.engine, profile.version) for profile in engine_profiles()}
    own = [
        p for p in pairs if (p.run.engine, p.run.version) in profiles and p.run.series not in cached
    ]
    other = [
        p
        for p in pairs
        if (p.run.engine, p.run.version) not in profiles and p.run.series not in cached
    ]
    left = [p for p in own if not p.run.fitted]
    computed = [p for p in pairs if p.run.series not in cached]
    return {
        "unseen": _by_series(left),
        "seen": _by_series([p for p in own if p.run.fitted]),
        "left_out": {
            name: figures(members, foreign=True) for name, members in refitted(everything).items()
        }
        if refits
        else {},
        "other_release": {
            name: figures(members, foreign=True, borrowed=True)
            for name, members in other_release(everything).items()
        },
        "other_versions": _by_series(other),
        "cached": _by_series([p for p in pairs if p.run.series in cached]),
        "by_engine": by_engine(folder, everything) if refits else {},
        "regret": {"unseen": regret(left), "all": regret(computed)},
        "refused": sum(not p.fits for p in pairs),
        "runs": len(pairs),
    }


def _by_series(pairs: Sequence[Predicted]) -> dict[str, dict[str, float]]:
    grouped: dict[str, list[Predicted]] = {"all": list(pairs)} if pairs else {}
    for pair in pairs:
        run = pair.run
        grouped.setdefault(
            f"{run.engine} {run.version}, {run.model} {run.precision}, {run.gpu}", []
        ).append(pair)
    return {name: figures(members) for name, members in grouped.items()}


TITLES = {
    "unseen": "Groups no constant was fitted on",
    "left_out": "Models and GPUs left out of a fresh fit",
    "other_release": "Releases by the constants of the nearest other release",
    "other_versions": "Versions without constants of their own (nearest version's)",
    "seen": "Groups the constants were fitted on",
    "cached": "Prompts mostly found in a prefix cache, predicted as if computed (see "
    "serving_runs.cached_series)",
}


def as_text(report: dict[str, Any]) -> str:
    head = (
        f"  {'':72} runs   TPOT  bias inside  tok/s  bias inside | TTFT median |ln|  bias "
        "inside | KV limit: runs right"
    )
    blocks = []
    for key, title in TITLES.items():
        if report[key]:
            blocks.append(
                "\n".join([title, head, *(_line(name, row) for name, row in report[key].items())])
            )
    if report["by_engine"]:
        title = (
            "By engine: a GPU or a precision left out, of mixtures the model, of pools engine "
            "and lengths"
        )
        columns = f"  {'':20}  runs    TPOT inside   tok/s  TTFT med inside"
        rows = (serving_by_engine.line(name, row) for name, row in report["by_engine"].items())
        blocks.append("\n".join([title, columns, *rows]))
    for name, row in report["regret"].items():
        blocks.append(
            f"Best TP by tokens/s/GPU, {name} groups: {row['best_chosen']} of {row['groups']} "
            "chosen, "
            f"regret mean {row['mean']:.2%}, worst {row['worst']:.1%}"
        )
    blocks.append(f"Measured configurations refused: {report['refused']} of {report['runs']}")
    return "\n\n".join(blocks)


def _line(name: str, f: dict[str, float]) -> str:
    return (
        f"  {name:72} {f['runs']:4.0f} {f['tpot_error']:6.1%} {f['tpot_bias']:+.2f} "
        f"{f['tpot_inside']:6.0%} "
        f"{f['throughput_error']:6.1%} {f['throughput_bias']:+.2f} {f['throughput_inside']:6.0%} | "
        f"{f['ttft_median_error']:8.1%} {f['ttft_abs_log']:7.2f} {f['ttft_bias']:+.2f} "
        f"{f['ttft_inside']:6.0%} | "
        f"{f['kv_limited']:9.0f} {f['kv_limit_right']:8.1%}"
    )


if __name__ == "__main__":
    print_report(description=__doc__, evaluate=evaluate, as_text=as_text)
