"""Fit what an inference engine adds to isolated kernels: `python -m benchmarks.accuracy.fit_engines --data DIR`.

Writes hp_tool/catalog/data/efficiency/engines/*.yaml, one file per engine and version with enough runs of dense models, from
one half of the groups of inference_measured.csv, inference_measured_2.csv and inference_trtllm_throughput.csv (see
ServingRun.fitted), with priors that keep every constant physical. Runs whose prompts were demonstrably cached are left out.
The other half gives the intervals, and models and dies left out of fits of their own how much wider they are for others.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.accuracy.data import add_data_argument, data_folder, write_constants
from benchmarks.accuracy.serving_rows import dense_runs
from benchmarks.accuracy.serving_runs import Batch, Predicted, ServingRun, batches, cached_series, predict
from hp_tool.catalog import gpu
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.efficiency import FOLDER
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.serving import EngineEfficiency

Floats = NDArray[np.float64]

PRIORS = {
    # name: (mean, standard deviation, lowest, highest)
    "matmul_slowdown": (1.05, 0.1, 0.7, 2.0),
    "attention_slowdown": (1.1, 0.2, 0.5, 4.0),
    "narrow_cache_slowdown": (1.2, 0.05, 0.7, 3.0),
    "communication_slowdown": (1.2, 0.5, 0.5, 8.0),
    "cast_share": (1.0, 0.3, 0.0, 1.5),
    "layer_overhead_s": (1.5e-5, 1e-5, 0.0, 1e-4),
    "iteration_overhead_s": (5e-4, 2e-4, 0.0, 2e-2),
    "sequence_overhead_s": (5e-6, 2e-5, 0.0, 1e-3),
    "eager_layer_s": (5e-5, 5e-5, 0.0, 5e-4),
    "prompt_layer_overhead_s": (2e-5, 5e-5, 0.0, 8e-4),
    "request_overhead_s": (5e-3, 1e-2, 0.0, 5e-2),
    "stream_overhead_s": (5e-5, 1e-4, 0.0, 1e-3),
    "first_token_s": (1e-2, 2e-2, 0.0, 1e-1),
    "backlog_share": (0.2, 0.3, 0.0, 1.0),
    "prefill_group": (3.0, 1.5, 1.0, 8.0),
    "wave_share": (0.2, 0.3, 0.0, 1.2),
}
STARTS = (5e-3, 2e-2)
"""Front-end work a request to start from: where the front end bounds no run, its constants have no gradient."""
NOISE = {"ttft": 0.5, "tpot": 0.06, "throughput": 0.06}
"""Relative scatter taken for one measured figure; it sets the figures against each other and the priors."""
ROBUST = {"ttft": 0.25, "tpot": 0.06, "throughput": 0.06}
"""Log ratio from which a residual counts linearly, so that a capacity cliff bends no constant."""
FEWEST_RUNS = 20
ASSUMED_TTFT_LOG_SD = 0.5
"""Where only throughput was measured."""
UNFAMILIAR_FACTOR = 2.0
"""Where one model on one die was measured: assumed."""

SETTINGS: dict[str, dict[str, Any]] = {
    "vllm": {"schedule": "mixed", "max_num_seqs": 1024, "max_num_batched_tokens": 8192, "memory_fraction": 0.9,
             "kv_reserved_output_fraction": 0.75, "fp8_cache_with": ()},
    "sglang": {"schedule": "prefill_first", "max_num_seqs": 1024, "max_num_batched_tokens": 8192, "memory_fraction": 0.85,
               "kv_reserved_output_fraction": 0.75, "fp8_cache_with": ()},
    "trtllm": {"schedule": "mixed", "max_num_seqs": 2048, "max_num_batched_tokens": 8192, "memory_fraction": 0.9,
               "kv_reserved_output_fraction": 1.0, "fp8_cache_with": ("fp8", "nvfp4")},
}  # fmt: skip
"""The engines' own defaults on 80 GB devices, from their documentation. vLLM and SGLang hand out cache blocks as tokens appear
and admit a request when its prompt fits; TensorRT-LLM promises a request its whole output (GUARANTEED_NO_EVICT).
"""
BY_VERSION: dict[tuple[str, str], dict[str, Any]] = {
    # As most runs of trtllm-bench were: 95 % of what is free; a C++ runtime without PyTorch's reserve.
    ("trtllm", "0.17"): {"memory_fraction": 0.95, "memory_fraction_of": "free", "reserve_bytes": 1e9},
    # The default of KvCacheConfig.free_gpu_memory_fraction; the runs of 1.0.0rc3 had less.
    ("trtllm", "1.1"): {"memory_fraction_of": "free"},
}
NOTES = {
    ("trtllm", "1.1"): "; the rows tell no version, only October 2025",
    ("trtllm", "0.17"): "; of offline throughput alone: constants of the front end and of arrivals are assumed",
}
RESERVE_BYTES = 2e9
"""CUDA context, NCCL, CUDA graphs."""


def settings(name: str, version: str) -> dict[str, Any]:
    """What is not fitted."""
    return {"reserve_bytes": RESERVE_BYTES} | SETTINGS[name] | BY_VERSION.get((name, version), {})


def engine(x: Floats, *, name: str, version: str) -> EngineEfficiency:
    """The profile with the fitted constants in the order of PRIORS."""
    values = dict(zip(PRIORS, (float(f"{v:.4g}") for v in x), strict=True))
    return EngineEfficiency(
        engine=name, version=version, ttft_log_sd=0.0, tpot_log_sd=0.0, throughput_log_sd=0.0,
        fitted_on="", **settings(name, version), **values,
    )  # fmt: skip


def fit(seen: Sequence[ServingRun], *, name: str, version: str) -> EngineEfficiency:
    """Maximum a posteriori constants from the runs seen."""
    mean, sd, low, high = (np.array(column) for column in zip(*PRIORS.values(), strict=True))
    prepared = batches(seen, engine(mean, name=name, version=version))
    measured = {what: np.array([_figure(run, what) for batch in prepared for run in batch.runs]) for what in NOISE}

    def residuals(x: Floats) -> Floats:
        predicted = _figures(prepared, engine(x, name=name, version=version))
        logs = {what: np.nan_to_num(np.log(predicted[what] / measured[what])) for what in NOISE}
        terms = [_linear_beyond(logs[what], ROBUST[what]) * ROBUST[what] / NOISE[what] for what in NOISE]
        return np.concatenate([*terms, (x - mean) / sd])

    index = list(PRIORS).index("request_overhead_s")
    offline = all(run.queued_throughput is not None for run in seen)
    starts = [
        mean if offline else np.where(np.arange(len(mean)) == index, start, mean) for start in STARTS[: 1 if offline else None]
    ]
    found = [least_squares(residuals, x, bounds=(low, high), x_scale=sd, diff_step=1e-3, ftol=1e-5) for x in starts]
    return engine(min(found, key=lambda solution: solution.cost).x, name=name, version=version)


def _figure(run: ServingRun, what: str) -> float:
    return {"ttft": run.ttft_s, "tpot": run.tpot_s, "throughput": run.throughput}[what]


def _figures(prepared: Sequence[Batch], profile: EngineEfficiency) -> dict[str, Floats]:
    costs = [batch.costs(profile) for batch in prepared]
    return {
        "ttft": np.concatenate([c.ttft_s for c in costs]),
        "tpot": np.concatenate([c.tpot_s for c in costs]),
        "throughput": np.concatenate([c.output_tokens_per_second_per_gpu for c in costs]),
    }


def _linear_beyond(z: Floats, scale: float) -> Floats:
    """Residuals whose square is the pseudo-Huber loss, in units of `scale`."""
    return np.sign(z) * np.sqrt(2.0 * (np.sqrt(1.0 + (z / scale) ** 2) - 1.0))


def by_version(found: Sequence[ServingRun]) -> dict[tuple[str, str], list[ServingRun]]:
    """The runs of each engine and version with enough of them, without series whose prompts were cached."""
    cached = cached_series(found)
    grouped: dict[tuple[str, str], list[ServingRun]] = defaultdict(list)
    for run in found:
        if run.series not in cached:
            grouped[(run.engine, run.version)].append(run)
    return {key: members for key, members in grouped.items() if len(members) >= FEWEST_RUNS}


def scatter(pairs: Sequence[Predicted]) -> dict[str, float]:
    """{figure: standard deviation of log ratios} whose 90 % interval holds 90 % of the pairs, and one more to come."""
    found = {}
    for what in NOISE:
        suffix = "" if what == "throughput" else "_s"
        logs = np.array([np.log(getattr(p.run, f"{what}{suffix}") / getattr(p, f"{what}{suffix}")) for p in pairs])
        off = np.sort(np.abs(logs[np.isfinite(logs)]))
        if len(off):
            found[what] = float(off[min(math.ceil(0.9 * (len(off) + 1)), len(off)) - 1]) / NORMAL_QUANTILE
    return found


def pair_scatter(pairs: Sequence[Predicted]) -> float | None:
    """Return the scatter of the ratio of two layouts' throughputs under one load; None where too few loads had several."""
    groups: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for p in pairs:
        groups[p.run.group].append(math.log(p.run.throughput / p.throughput))
    ratios = sorted(abs(one - other) for logs in groups.values() for one, other in itertools.combinations(logs, 2))
    if len(ratios) < FEWEST_RUNS:
        return None
    return ratios[min(math.ceil(0.9 * (len(ratios) + 1)), len(ratios)) - 1] / NORMAL_QUANTILE


def left_out(
    members: Sequence[ServingRun], *, name: str, version: str, key: Callable[[ServingRun], str]
) -> dict[str, list[Predicted]]:
    """The runs of each kind, predicted by constants that saw the others; none where there are too few of those."""
    found = {}
    for kind in dict.fromkeys(key(run) for run in members):
        seen = [run for run in members if run.fitted and key(run) != kind]
        unseen = [run for run in members if key(run) == kind]
        if len(seen) >= FEWEST_RUNS:
            profile = fit(seen, name=name, version=version)
            found[kind] = predict(batches(unseen, profile), profile)
    return found


def by_model(run: ServingRun) -> str:
    return run.model


def by_gpu(run: ServingRun) -> str:
    return run.gpu


def with_scatter(profile: EngineEfficiency, members: Sequence[ServingRun]) -> EngineEfficiency:
    """The profile with its scatter on groups it did not see, and how much more there is on models and GPUs left out."""
    unseen = [run for run in members if not run.fitted]
    predicted = predict(batches(unseen, profile), profile)
    own, pair = scatter(predicted), pair_scatter(predicted)
    name, version = profile.engine, profile.version
    refits = [left_out(members, name=name, version=version, key=key) for key in (by_model, by_gpu)]
    foreign = [pair for found in refits for pairs in found.values() for pair in pairs]
    wider = [value / own[what] for what, value in scatter(foreign).items() if what != "ttft"] if foreign else []
    assumed = {"ttft": ASSUMED_TTFT_LOG_SD, "tpot": own["throughput"]} | own
    return dataclasses.replace(
        profile,
        **{f"{what}_log_sd": float(f"{assumed[what]:.3g}") for what in NOISE},
        pair_log_sd=None if pair is None else float(f"{pair:.3g}"),
        unfamiliar_factor=float(f"{max([1.0, *wider]):.3g}") if wider else UNFAMILIAR_FACTOR,
        fitted_models=tuple(dict.fromkeys(catalogue_model(run.model).name for run in members)),
        fitted_silicon=tuple(dict.fromkeys(die for run in members if (die := gpu(run.gpu).silicon))),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_argument(parser)
    data = data_folder(parser.parse_args())
    if data is None:
        return
    folder = FOLDER / "engines"
    folder.mkdir(parents=True, exist_ok=True)
    for (name, version), members in by_version(dense_runs(data)).items():
        seen = [run for run in members if run.fitted]
        models = ", ".join(dict.fromkeys(f"{run.model} {run.precision} on {run.gpu}" for run in members))
        profile = dataclasses.replace(
            with_scatter(fit(seen, name=name, version=version), members),
            fitted_on=f"{len(seen)} runs ({models}) by python -m benchmarks.accuracy.fit_engines; deviations from "
            f"{len(members) - len(seen)} runs of other groups" + NOTES.get((name, version), ""),
        )
        path = folder / f"{name}-{version}.yaml"
        write_constants(path, dataclasses.asdict(profile), command="benchmarks.accuracy.fit_engines")
        print(f"{name} {version}: {len(seen)} of {len(members)} runs seen; 90 % of the others within a TPOT deviation of "
              f"{profile.tpot_log_sd:.1%}, others' {profile.unfamiliar_factor:.2f} times that", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
