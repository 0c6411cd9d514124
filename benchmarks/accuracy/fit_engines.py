"""Fit the time that an inference engine adds to isolated kernels: `python -m evidence.fit --only
engines`.

Writes hp_tool/catalog/data/efficiency/engines/*.yaml: one file for each engine version with enough
runs of dense models. Constants are fitted to one half of the groups of runs in
inference_measured.csv, inference_measured_2.csv and inference_trtllm_throughput.csv
(`ServingRun.fitted`), with priors that limit every constant to physical values. Runs whose prompts
were certainly cached are excluded. The other half determines the intervals. `fit_intervals` fits
how much wider intervals are for other software, models and GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import fitting
from benchmarks.accuracy.fitting import (
    Fit,
    Floats,
    Prior,
    Values,
    conformal_sd,
    fit_settings,
    linear_beyond,
    priors,
    rounded,
)
from benchmarks.accuracy.serving_runs import (
    Predicted,
    ServingRun,
    batches,
    cached_series,
    dense_runs,
    index_of,
    log_ratios,
    predict,
)
from evidence.fitted_file import FittedFile
from hp_tool.catalog import gpu
from hp_tool.domain.engines import BY_RELEASE, EngineEfficiency

COMMAND = "python -m evidence.fit --only engines"

GIVEN = fit_settings("engines")
NOISE, ROBUST = GIVEN["noise"], GIVEN["robust"]
FEWEST_RUNS = 20
HARDLY_TOLD = 0.5
"""Ratio of a constant's fitted deviation to its prior deviation above which its runs hardly
determine it.
"""
ASSUMED_TTFT_LOG_SD = 0.5
"""Assumed deviation of TTFT if only throughput was measured."""

GIB = 1 << 30
RESERVE_BYTES = 2e9
"""Bytes reserved for the CUDA context, NCCL and CUDA graphs."""


def priors_of(name: str) -> dict[str, Prior]:
    """Return the free constants of an engine."""
    return priors("engines") | priors("engines", f"priors_{name}")


def settings(name: str, version: str) -> dict[str, Any]:
    """Return the settings that are not fitted."""
    known = GIVEN["settings"]
    stated = {"reserve_bytes": RESERVE_BYTES}
    for each in (known[name], known.get(f"{name} {version}", {})):
        for key, value in each.items():
            unit = key.removesuffix("_gib")
            stated |= {f"{unit}_bytes": value * GIB} if unit != key else {key: value}
    return as_fields(stated)


def as_fields(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as profile fields, which have tuples instead of lists."""
    return {key: tuple(each) if isinstance(each, list) else each for key, each in stated.items()}


def engine(values: Values, *, name: str, version: str) -> EngineEfficiency:
    """Return the engine's profile with these values of the free constants."""
    return EngineEfficiency(
        engine=name,
        version=version,
        ttft_log_sd=0.0,
        tpot_log_sd=0.0,
        throughput_log_sd=0.0,
        fitted_on="",
        **settings(name, version),
        **values,
    )


def fit(seen: Sequence[ServingRun], *, name: str, version: str) -> EngineEfficiency:
    """Return the maximum a posteriori constants for the given runs."""
    make = functools.partial(engine, name=name, version=version)
    free = priors_of(name)
    means = {constant: prior.mean for constant, prior in free.items()}

    offline = all(run.queued_throughput is not None for run in seen)
    fit = Fit[ServingRun, EngineEfficiency](
        priors=free,
        constants=make,
        errors=functools.partial(errors, start=make(rounded(means))),
        in_deviations=False,
        near=0.0,
        options={
            "x_scale": [prior.sd for prior in free.values()],
            "diff_step": 1e-3,
            "ftol": 1e-5,
        },
    )
    profile = fit(seen, starts=({},) if offline else GIVEN["starts"])
    return dataclasses.replace(
        profile, assumed=poorly_determined(profile, errors(seen, start=profile), free)
    )


def errors(
    runs: Sequence[ServingRun], *, start: EngineEfficiency
) -> Callable[[EngineEfficiency], Floats]:
    """Return the log ratios of these runs for given constants, each divided by its assumed
    noise.
    """
    prepared = batches(runs, start)

    def of(trial: EngineEfficiency) -> Floats:
        pairs = predict(prepared, trial)
        logs = {what: np.nan_to_num(log_ratios(pairs, what)) for what in NOISE}
        return np.concatenate(
            [linear_beyond(logs[what], ROBUST[what]) / NOISE[what] for what in NOISE]
        )

    return of


def poorly_determined(
    profile: EngineEfficiency,
    residuals: Callable[[EngineEfficiency], Floats],
    free: Mapping[str, Prior],
) -> tuple[str, ...]:
    """Return the constants whose fitted deviation is more than half their prior deviation, so that
    the runs hardly determine them. The fitted deviation is 1 / sqrt of the diagonal of the inverse
    of J^T J + prior. J comes from differences of a tenth of each prior deviation.
    """
    sds = np.array([prior.sd for prior in free.values()])
    here = residuals(profile)
    columns = [
        (
            residuals(
                dataclasses.replace(profile, **{name: getattr(profile, name) + 0.1 * prior.sd})
            )
            - here
        )
        / 0.1
        for name, prior in free.items()
    ]
    in_deviations = np.stack(columns, axis=1)
    after = np.sqrt(np.diag(np.linalg.inv(in_deviations.T @ in_deviations + np.eye(len(sds)))))
    return tuple(name for name, share in zip(free, after, strict=True) if share > HARDLY_TOLD)


def by_version(runs: Sequence[ServingRun]) -> dict[tuple[str, str], list[ServingRun]]:
    """Return the runs of each engine version that has enough runs, without series whose prompts
    were cached.
    """
    cached = cached_series(runs)
    grouped: dict[tuple[str, str], list[ServingRun]] = defaultdict(list)
    for run in runs:
        if run.series not in cached:
            grouped[(run.engine, run.version)].append(run)
    return {key: members for key, members in grouped.items() if len(members) >= FEWEST_RUNS}


def scatter(pairs: Sequence[Predicted]) -> dict[str, float]:
    """Return {figure: standard deviation of log ratios} for the measured figures."""
    logs = {what: log_ratios(pairs, what) for what in NOISE}
    finite = {what: values[np.isfinite(values)] for what, values in logs.items()}
    return {what: conformal_sd(values) for what, values in finite.items() if len(values)}


def pair_scatter(pairs: Sequence[Predicted]) -> float | None:
    """Return the scatter of the ratio of two layouts' throughputs under the same load; None if too
    few loads were run with several layouts.
    """
    groups: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for pair, log_ratio in zip(pairs, log_ratios(pairs, "throughput"), strict=True):
        groups[pair.run.group].append(log_ratio)
    ratios = [
        one - other for logs in groups.values() for one, other in itertools.combinations(logs, 2)
    ]
    return conformal_sd(np.array(ratios)) if len(ratios) >= FEWEST_RUNS else None


def left_out(
    members: Sequence[ServingRun], *, name: str, version: str, key: Callable[[ServingRun], str]
) -> dict[str, list[Predicted]]:
    """Return the runs of each kind, predicted by constants fitted to the remaining runs; none if
    too few remain.
    """
    predicted = {}
    for kind, runs, others in fitting.split_by_key(members, key):
        seen = [run for run in others if run.fitted]
        if len(seen) >= FEWEST_RUNS:
            profile = fit(seen, name=name, version=version)
            predicted[str(kind)] = predict(batches(runs, profile), profile, index=index_of(seen))
    return predicted


def by_model(run: ServingRun) -> str:
    return run.model


def by_gpu(run: ServingRun) -> str:
    return run.gpu


def by_precision(run: ServingRun) -> str:
    return run.precision


LEFT_OUT = (by_model, by_gpu, by_precision)


def with_scatter(profile: EngineEfficiency, members: Sequence[ServingRun]) -> EngineEfficiency:
    """Return the profile with its scatter on held-out groups."""
    others = [run for run in members if not run.fitted]
    predicted = predict(batches(others, profile), profile)
    own, pair = scatter(predicted), pair_scatter(predicted)
    assumed = {"ttft": ASSUMED_TTFT_LOG_SD, "tpot": own["throughput"]} | own
    return dataclasses.replace(
        profile,
        **{f"{what}_log_sd": float(f"{assumed[what]:.3g}") for what in NOISE},
        pair_log_sd=None if pair is None else float(f"{pair:.3g}"),
        fitted_silicon=tuple(
            dict.fromkeys(die for run in members if (die := gpu(run.gpu).silicon))
        ),
    )


def stored_fields(profile: EngineEfficiency) -> dict[str, Any]:
    """Return the fields of an engine's file: all except the settings that follow from its
    release.
    """
    fields = dataclasses.asdict(profile)
    return {name: value for name, value in fields.items() if name not in BY_RELEASE}


def fitted(folder: Path) -> Iterator[FittedFile]:
    for (name, version), members in by_version(dense_runs(folder)).items():
        note = GIVEN["notes"].get(f"{name} {version}", "")
        seen = [run for run in members if run.fitted]
        models = ", ".join(
            dict.fromkeys(f"{run.model} {run.precision} on {run.gpu}" for run in members)
        )
        profile = dataclasses.replace(
            with_scatter(fit(seen, name=name, version=version), members),
            fitted_on=f"{len(seen)} runs ({models}) by {COMMAND}; deviations from "
            f"{len(members) - len(seen)} runs of other groups{note}",
        )
        yield FittedFile(file=f"engines/{name}-{version}.yaml", fields=stored_fields(profile))
