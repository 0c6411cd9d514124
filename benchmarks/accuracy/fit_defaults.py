"""Fit the slowdown of engines with default settings, and of separate pools for prefill and
decoding: `python -m evidence.fit --only defaults --only pools`.

Writes defaults.yaml, defaults/ENGINE.yaml and pools.yaml in hp_tool/catalog/data/efficiency. The
first two have one factor on every forward pass, fitted to serving_as_started.csv: a common factor
for all engines, and a separate one for each engine in OWN. Their deviations are the errors of
models left out. pools.yaml has the hops between pools, fitted to the first tokens of the pools in
inference_measured_2.csv and _3 whose numbers of replicas are known. Its deviations are the errors
of lengths and engines left out.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.accuracy import fitting
from benchmarks.accuracy.data import rows
from benchmarks.accuracy.fitting import Floats, conformal_sd
from benchmarks.accuracy.serving_runs import (
    FIGURES,
    PoolRun,
    Predicted,
    ServingRun,
    batches,
    by_constants,
    log_ratios,
    pool_runs,
    predict,
    serving_run,
)
from benchmarks.accuracy.timed_kernels import solve
from evidence.fitted_file import FittedFile
from evidence.table import Row
from hp_tool.catalog import cluster, gpu, library
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.efficiency import engine_efficiency
from hp_tool.cost.serving.candidates import ServingCandidates, ServingCase
from hp_tool.cost.serving.disaggregated import PoolCosts, pool_costs
from hp_tool.domain.engines import ROCM_SILICON, DefaultsEfficiency, PoolEfficiency
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.loop.calibration.microbenchmarks import round_timing
from hp_tool.questions.serving.problem import client_arrivals, serving_case

NARROW = ("int4",)
"""Excluded runs. On H200 and MI350X, Kimi K2.5 in int4 is three to seven times slower than
predicted, because the engines had no optimised kernels for it yet.
"""
OWN = ("sglang",)
"""Engines with a separate factor: those with runs of at least three models."""
TRIALS = np.geomspace(1.0, 4.0, 15)
"""Slowdowns at which runs are predicted; errors between them are interpolated linearly."""


Errors = Mapping[int, Floats]
"""Errors of each run, by its id, at each of TRIALS."""


def runs_with_defaults(folder: Path) -> list[ServingRun]:
    """Return the runs whose model is in the catalogue and fits the layout."""
    runs = [
        _with_means(
            dataclasses.replace(serving_run(row), equal_lengths=row["engine"] == "vllm"), row
        )
        for row in rows(folder, "serving_as_started")
        if library.has_entry("models", row["model"]) and row["precision"] not in NARROW
    ]
    fitting_ones = {id(pair.run) for pair in predict_slowed(runs, 1.0) if pair.fits}
    return [run for run in runs if id(run) in fitting_ones]


def _with_means(run: ServingRun, row: Row) -> ServingRun:
    """Return a run with its mean TPOT if its table has medians.

    Requests of equal lengths run in waves. Requests with a late first token decode fast and the
    rest decode slowly, so the medians of TTFT and TPOT do not add up to a request's latency. The
    mean latency is the concurrency divided by the measured request rate (Little's law).
    """
    rate = row["output_tokens_per_second"]
    if row["statistic"] != "median" or rate is None:
        return run
    latency_s = run.concurrency * run.output_length / rate
    return dataclasses.replace(run, tpot_s=(latency_s - run.ttft_s) / (run.output_length - 1))


def predict_slowed(runs: Sequence[ServingRun], slowdown: float) -> list[Predicted]:
    """Return the predictions for the runs with every forward pass slowed down by a factor."""
    pairs = []
    for profile, members in by_constants(runs):
        for batch in batches(members, profile):
            case = dataclasses.replace(batch.case, slowdown=slowdown)
            pairs += predict([dataclasses.replace(batch, case=case)], profile)
    return pairs


def fit(runs: Sequence[ServingRun], errors: Errors) -> float:
    """Return the slowdown with the smallest TPOT error; each model has the same weight."""
    models: dict[str, list[Floats]] = defaultdict(list)
    for run in runs:
        models[_model(run)].append(errors[id(run)])
    means = np.mean([np.mean(of, axis=0) for of in models.values()], axis=0)
    return round_timing(float(TRIALS[int(np.argmin(means))]))


def errors_by_slowdown(runs: Sequence[ServingRun]) -> Errors:
    """Return |ln(predicted / measured)| of each run's TPOT at each slowdown in TRIALS."""
    found: dict[int, list[float]] = defaultdict(list)
    for slowdown in TRIALS:
        pairs = predict_slowed(runs, float(slowdown))
        for pair, log in zip(pairs, np.abs(log_ratios(pairs, "tpot")), strict=True):
            found[id(pair.run)].append(float(log))
    return {run: np.array(logs) for run, logs in found.items()}


def left_out(runs: Sequence[ServingRun], errors: Errors | None = None) -> list[Predicted]:
    """Return the runs of each model, predicted with the slowdown fitted to the remaining models:
    those of the same engine if it is in OWN.
    """
    known = errors_by_slowdown(runs) if errors is None else errors
    return [
        pair
        for engine in ("", *OWN)
        for _, members, others in fitting.split_by_key(_runs_of_engine(runs, engine), _model)
        for pair in predict_slowed(
            [run for run in members if _factor_engine(run) == engine], fit(others, known)
        )
    ]


def _factor_engine(run: ServingRun) -> str:
    """Return the engine whose factor applies to a run; empty for the common factor, which also
    applies to runs on ROCm.
    """
    rocm = gpu(run.gpu).silicon in ROCM_SILICON
    return run.engine if run.engine in OWN and not rocm else ""


def _runs_of_engine(runs: Sequence[ServingRun], engine: str) -> list[ServingRun]:
    """Return the runs to which the factor of `engine` is fitted."""
    return [run for run in runs if _factor_engine(run) == engine or not engine]


def fitted(folder: Path) -> Iterator[FittedFile]:
    """Yield defaults.yaml and defaults/ENGINE.yaml."""
    runs = runs_with_defaults(folder)
    errors = errors_by_slowdown(runs)
    unseen = left_out(runs, errors)
    for engine in ("", *OWN):
        seen = _runs_of_engine(runs, engine)
        names = dict.fromkeys(f"{_model(run)} on {run.gpu} ({run.engine})" for run in seen)
        profile = DefaultsEfficiency(
            slowdown=fit(seen, errors),
            **deviations([pair for pair in unseen if _factor_engine(pair.run) == engine]),
            fitted_on=f"{len(seen)} runs of serving_as_started.csv ({', '.join(names)}) "
            "by python -m evidence.fit --only defaults; deviations of models left out",
        )
        file = f"defaults/{engine}.yaml" if engine else "defaults.yaml"
        yield FittedFile(file=file, fields=dataclasses.asdict(profile))


def deviations(unseen: Sequence[Predicted | PredictedPool]) -> dict[str, float]:
    """Return the standard deviation of each figure over held-out runs."""
    return {
        f"{what}_log_sd": round_timing(conformal_sd(log_ratios(unseen, what))) for what in FIGURES
    }


def _model(run: ServingRun) -> str:
    return catalogue_model(run.model).name


HOPS = {"handover_s": (0.1, 0.0, 5.0)}
"""Initial value and bounds of the hops between pools, in seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedPool:
    """A run and its prediction."""

    run: PoolRun
    costs: PoolCosts

    @property
    def ttft_s(self) -> float:
        return float(self.costs.ttft_s[0])

    @property
    def tpot_s(self) -> float:
        return float(self.costs.tpot_s[0])

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return float(self.costs.request_rate_per_second[0])


def runs_with_replicas(folder: Path) -> list[PoolRun]:
    """Return the runs with separate pools whose numbers of replicas are known."""
    return [run for run in pool_runs(folder) if run.replicas is not None]


def predict_pools(runs: Sequence[PoolRun], *, handover_s: float) -> list[PredictedPool]:
    """Return the predictions for all runs with these hops between pools."""
    return [PredictedPool(run=run, costs=_costs(run, handover_s)) for run in runs]


def _costs(run: PoolRun, handover_s: float) -> PoolCosts:
    engine = engine_efficiency(engine=run.engine, version=run.version, silicon=gpu(run.gpu).silicon)
    load = InferenceWorkload(
        input_length=run.input_length,
        output_length=run.output_length,
        concurrency=run.concurrency,
        precision=run.precision,
        engine=run.engine,  # type: ignore[arg-type]
    )
    machine = cluster(ClusterQuery(gpu=run.gpu, num_gpus=16))
    case: ServingCase = serving_case(
        model=catalogue_model(run.model), cluster=machine, workload=load, engine=engine
    )
    case = dataclasses.replace(case, **client_arrivals("inferencemax", engine=engine))
    pools = []
    for config, replicas in zip((run.prefill, run.decode), run.replicas or (), strict=True):
        size = config.attention_data_parallel_size * replicas
        limits = {
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
        }
        placed = dataclasses.replace(config, data_parallel_size=size, **limits)
        pools.append(ServingCandidates.from_configs([placed], concurrency=[run.concurrency]))
    return pool_costs(
        prefill=case, decode=case, prefillers=pools[0], decoders=pools[1], handover_s=handover_s
    )


def fit_handover(runs: Sequence[PoolRun]) -> float:
    """Return the seconds of the hops between pools, fitted to the runs' TTFT by robust least
    squares.
    """
    found = solve(lambda values: log_ratios(predict_pools(runs, **values), "ttft"), HOPS)
    return round_timing(found["handover_s"])


def pools_left_out(folder: Path) -> list[PredictedPool]:
    """Return the runs of each engine and each length, predicted with hops fitted to the remaining
    runs.
    """
    parts = fitting.split_by_key(
        runs_with_replicas(folder), lambda run: (run.engine, run.input_length)
    )
    return [
        pair
        for _, members, others in parts
        for pair in predict_pools(members, handover_s=fit_handover(others))
    ]


def fitted_pools(folder: Path) -> Iterator[FittedFile]:
    """Yield pools.yaml: the hops between pools. The other constants were fitted without these
    runs.
    """
    runs = runs_with_replicas(folder)
    names = [f"{run.model} on {run.gpu} ({run.engine})" for run in runs]
    profile = PoolEfficiency(
        handover_s=fit_handover(runs),
        **deviations(pools_left_out(folder)),
        fitted_on=f"{len(runs)} pairs of pools ({', '.join(dict.fromkeys(names))}) by "
        "python -m evidence.fit --only pools; deviations of engines and lengths left out",
    )
    yield FittedFile(file="pools.yaml", fields=dataclasses.asdict(profile))
