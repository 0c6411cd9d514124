"""Fit what an inference engine adds to isolated kernels: `python -m evidence.fit --only engines`.

Writes hp_tool/catalog/data/efficiency/engines/*.yaml, one file per engine and version with enough
runs of dense models, from one half of the groups of inference_measured.csv,
inference_measured_2.csv and inference_trtllm_throughput.csv (see ServingRun.fitted), with priors
that keep every constant physical. Runs whose prompts were demonstrably cached are left out. The
other half gives the intervals; `fit_serving_intervals` fits how much wider they are for others.
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
    linear_beyond,
    rounded,
)
from benchmarks.accuracy.serving_rows import dense_runs
from benchmarks.accuracy.serving_runs import (
    Predicted,
    ServingRun,
    batches,
    cached_series,
    index_of,
    log_ratios,
    predict,
)
from evidence.fitted_file import FittedFile
from hp_tool.catalog import gpu
from hp_tool.domain.engines import EngineEfficiency

COMMAND = "python -m evidence.fit --only engines"

PRIORS = {
    "matmul_slowdown": Prior(1.05, 0.1, 0.7, 2.0),
    "attention_slowdown": Prior(1.1, 0.2, 0.5, 4.0),
    "narrow_cache_slowdown": Prior(1.2, 0.05, 0.7, 3.0),
    "communication_slowdown": Prior(1.1, 0.1, 0.5, 8.0),
    "cast_share": Prior(0.75, 0.3, 0.0, 1.5),
    "layer_overhead_s": Prior(1.5e-5, 4e-6, 0.0, 1e-4),
    "iteration_overhead_s": Prior(5e-4, 2e-4, 0.0, 2e-2),
    "sequence_overhead_s": Prior(5e-6, 2e-5, 0.0, 1e-3),
    "eager_layer_s": Prior(5e-5, 5e-5, 0.0, 5e-4),
    "prompt_layer_overhead_s": Prior(2e-5, 5e-5, 0.0, 8e-4),
    "request_overhead_s": Prior(5e-3, 1e-2, 0.0, 5e-2),
    "stream_overhead_s": Prior(5e-5, 1e-4, 0.0, 1e-3),
    "first_token_s": Prior(1e-2, 2e-2, 0.0, 1e-1),
    "backlog_share": Prior(0.2, 0.3, 0.0, 1.0),
    "prefill_group": Prior(3.0, 1.5, 1.0, 8.0),
    "wave_share": Prior(0.2, 0.3, 0.0, 1.2),
}
BY_ENGINE = {"vllm": {"cast_share": Prior(0.25, 0.25, 0.0, 1.5)}}
"""Priors of one engine. vLLM's compiled passes (fuse_norm_quant, fuse_act_quant) put the casts
after norms and activations into these: of a layer's four matmuls only the one after attention has a
cast of its own.
"""
STARTS = ({"request_overhead_s": 5e-3}, {"request_overhead_s": 2e-2})
"""Front-end work a request to start from: where the front end bounds no run, its constants have no
gradient.
"""
NOISE = {"ttft": 0.5, "tpot": 0.06, "throughput": 0.06}
"""Relative scatter taken for one measured figure; it sets the figures against each other and the
priors.
"""
ROBUST = {"ttft": 0.25, "tpot": 0.06, "throughput": 0.06}
"""Log ratio from which a residual counts linearly, so that a capacity cliff bends no constant."""
FEWEST_RUNS = 20
HARDLY_TOLD = 0.5
"""Share of a prior's deviation that is left of a constant that its runs hardly tell."""
ASSUMED_TTFT_LOG_SD = 0.5
"""Where only throughput was measured."""

GIB = 1 << 30
PROFILED = {
    "reserve_bytes": 0.13 * GIB,
    "communicator_bytes": 0.42 * GIB,
    "multicast_bytes": 1.3 * GIB,
    "sampler_bytes_per_logit": 38.3,
    "working_set": "profiled",
}
"""vLLM measures one pass and the sampler (`determine_available_memory`). What it printed on an H100
(0.11.0, 1,024 sequences; Llama 3.1 8B, Llama 3.3 70B, Qwen3 0.6B and 32B, GPT-OSS 20B and 120B) is
38.3 bytes a logit within 1 %, beside 0.13 GiB that PyTorch does not count on one device and 0.55 on
each of two. On four H100 vLLM and SGLang both printed caches of Qwen3-235B that leave 1.3 GiB more
(vllm-project/vllm#21348); SGLang's is a row that `kv_cache` judges.
"""
OUTSIDE = {
    "reserve_bytes": 0.5 * GIB,
    "communicator_bytes": 0.42 * GIB,
    "multicast_bytes": 1.3 * GIB,
    "working_set": "outside",
}
"""SGLang's `profile_max_num_token` takes weights and cache out of the share of what is free before
the weights: the context, and buffers of collectives, are gone by then.
"""
SETTINGS: dict[str, dict[str, Any]] = {
    "vllm": {
        "schedule": "mixed",
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 8192,
        "memory_fraction": 0.9,
        "kv_reserved_output_fraction": 0.75,
        "fp8_cache_with": (),
        **PROFILED,
    },
    "sglang": {
        "schedule": "prefill_first",
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 8192,
        "memory_fraction": 0.85,
        "kv_reserved_output_fraction": 0.75,
        "fp8_cache_with": (),
        **OUTSIDE,
    },
    "trtllm": {
        "schedule": "mixed",
        "max_num_seqs": 2048,
        "max_num_batched_tokens": 8192,
        "memory_fraction": 0.9,
        "kv_reserved_output_fraction": 1.0,
        "fp8_cache_with": ("fp8", "nvfp4"),
    },
}
"""The engines' own defaults on 80 GB devices, from their documentation. vLLM and SGLang hand out
cache blocks as tokens appear and admit a request when its prompt fits; TensorRT-LLM promises a
request its whole output (GUARANTEED_NO_EVICT).
"""
BY_VERSION: dict[tuple[str, str], dict[str, Any]] = {
    # As most runs of trtllm-bench were: 95 % of what is free; a C++ runtime without PyTorch's
    # reserve.
    ("trtllm", "0.17"): {
        "fp8_scales": "tensor",
        "memory_fraction": 0.95,
        "memory_fraction_of": "free",
        "reserve_bytes": 1e9,
    },
    # Since 0.21 CUDA graphs are estimated before the cache is sized: 0.3 to 1.6 GiB in the logs of
    # six models; `CacheConfig.gpu_memory_utilization` is 0.92.
    ("vllm", "0.24.0"): {"memory_fraction": 0.92, "reserve_bytes": (0.13 + 0.8) * GIB},
    # The default of KvCacheConfig.free_gpu_memory_fraction; the runs of 1.0.0rc3 had less.
    ("trtllm", "1.1"): {"memory_fraction_of": "free"},
}
NOTES = {
    ("trtllm", "1.1"): "; the rows tell no version, only October 2025",
    ("vllm", "0.12.0"): "; those in fp8 tell no version, only October 2025",
    (
        "trtllm",
        "0.17",
    ): "; of offline throughput alone: constants of the front end and of arrivals are assumed",
}
RESERVE_BYTES = 2e9
"""CUDA context, NCCL, CUDA graphs."""


def settings(name: str, version: str) -> dict[str, Any]:
    """What is not fitted."""
    return {"reserve_bytes": RESERVE_BYTES} | SETTINGS[name] | BY_VERSION.get((name, version), {})


def engine(values: Values, *, name: str, version: str) -> EngineEfficiency:
    """Return the profile with the free constants."""
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
    """Maximum a posteriori constants from the runs seen."""
    make = functools.partial(engine, name=name, version=version)
    priors = PRIORS | BY_ENGINE.get(name, {})
    means = {constant: prior.mean for constant, prior in priors.items()}

    offline = all(run.queued_throughput is not None for run in seen)
    fit = Fit[ServingRun, EngineEfficiency](
        priors=priors,
        constants=make,
        errors=functools.partial(errors, start=make(rounded(means))),
        in_deviations=False,
        near=0.0,
        options={
            "x_scale": [prior.sd for prior in priors.values()],
            "diff_step": 1e-3,
            "ftol": 1e-5,
        },
    )
    profile = fit(seen, starts=({},) if offline else STARTS)
    return dataclasses.replace(
        profile, assumed=assumed(profile, errors(seen, start=profile), priors)
    )


def errors(
    runs: Sequence[ServingRun], *, start: EngineEfficiency
) -> Callable[[EngineEfficiency], Floats]:
    """What constants give for the log ratios of these runs, over the noise taken for each."""
    prepared = batches(runs, start)

    def of(trial: EngineEfficiency) -> Floats:
        pairs = predict(prepared, trial)
        logs = {what: np.nan_to_num(log_ratios(pairs, what)) for what in NOISE}
        return np.concatenate(
            [linear_beyond(logs[what], ROBUST[what]) / NOISE[what] for what in NOISE]
        )

    return of


def assumed(
    profile: EngineEfficiency,
    residuals: Callable[[EngineEfficiency], Floats],
    priors: Mapping[str, Prior],
) -> tuple[str, ...]:
    """Return the constants that are as unsure after the runs as before, to a half: 1 / sqrt of the
    diagonal of the inverse of J^T J + prior, J by differences of a tenth of each prior's deviation.
    """
    sds = np.array([prior.sd for prior in priors.values()])
    here = residuals(profile)
    columns = [
        (
            residuals(
                dataclasses.replace(profile, **{name: getattr(profile, name) + 0.1 * prior.sd})
            )
            - here
        )
        / 0.1
        for name, prior in priors.items()
    ]
    in_deviations = np.stack(columns, axis=1)
    after = np.sqrt(np.diag(np.linalg.inv(in_deviations.T @ in_deviations + np.eye(len(sds)))))
    return tuple(name for name, share in zip(priors, after, strict=True) if share > HARDLY_TOLD)


def by_version(runs: Sequence[ServingRun]) -> dict[tuple[str, str], list[ServingRun]]:
    """The runs of each engine and version with enough of them, without series whose prompts were
    cached.
    """
    cached = cached_series(runs)
    grouped: dict[tuple[str, str], list[ServingRun]] = defaultdict(list)
    for run in runs:
        if run.series not in cached:
            grouped[(run.engine, run.version)].append(run)
    return {key: members for key, members in grouped.items() if len(members) >= FEWEST_RUNS}


def scatter(pairs: Sequence[Predicted]) -> dict[str, float]:
    """{figure: standard deviation of log ratios} of the figures that were measured."""
    logs = {what: log_ratios(pairs, what) for what in NOISE}
    finite = {what: values[np.isfinite(values)] for what, values in logs.items()}
    return {what: conformal_sd(values) for what, values in finite.items() if len(values)}


def pair_scatter(pairs: Sequence[Predicted]) -> float | None:
    """Return the scatter of the ratio of two layouts' throughputs under one load; None where too
    few loads had several.
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
    """The runs of each kind, predicted by constants that saw the others; none where there are too
    few of those.
    """
    predicted = {}
    for kind, runs, others in fitting.left_out(members, key):
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
    """The profile with its scatter on groups it did not see."""
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


def fitted(folder: Path) -> Iterator[FittedFile]:
    for (name, version), members in by_version(dense_runs(folder)).items():
        seen = [run for run in members if run.fitted]
        models = ", ".join(
            dict.fromkeys(f"{run.model} {run.precision} on {run.gpu}" for run in members)
        )
        profile = dataclasses.replace(
            with_scatter(fit(seen, name=name, version=version), members),
            fitted_on=f"{len(seen)} runs ({models}) by {COMMAND}; deviations from "
            f"{len(members) - len(seen)} runs of other groups" + NOTES.get((name, version), ""),
        )
        yield FittedFile(file=f"engines/{name}-{version}.yaml", fields=dataclasses.asdict(profile))
