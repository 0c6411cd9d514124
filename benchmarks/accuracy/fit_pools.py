"""Fit what separate pools for prefill and decoding add: `python -m evidence.fit --only pools`.

Writes hp_tool/catalog/data/efficiency/pools.yaml: one constant, from the first tokens of the pools
of inference_measured_2.csv and _3 whose numbers of replicas are told, on top of the engines' and
experts' constants, which saw none of them. Deviations are those of lengths and engines left out of
the fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path

from benchmarks.accuracy import fitting
from benchmarks.accuracy.fitting import conformal_sd
from benchmarks.accuracy.serving_rows import PoolRun, pool_runs
from benchmarks.accuracy.serving_runs import FIGURES, log_ratios
from benchmarks.accuracy.timed_kernels import solve
from evidence.fitted_file import FittedFile
from hp_tool.catalog import cluster, gpu
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.efficiency import engine_efficiency
from hp_tool.cost.serving.candidates import ServingCandidates, ServingCase
from hp_tool.cost.serving.disaggregated import PoolCosts, pool_costs
from hp_tool.domain.engines import PoolEfficiency
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.loop.calibration.microbenchmarks import short
from hp_tool.questions.serving.problem import arrivals, serving_case

COMMAND = "python -m evidence.fit --only pools"
HOPS = {"handover_s": (0.1, 0.0, 5.0)}
"""Start and bounds of the hops between pools."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedPool:
    """A run beside what the model says of it."""

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


def told(folder: Path) -> list[PoolRun]:
    """Pools whose numbers of replicas are known."""
    return [run for run in pool_runs(folder) if run.replicas is not None]


def predicted(runs: Sequence[PoolRun], *, handover_s: float) -> list[PredictedPool]:
    """Every run with these hops."""
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
    case = dataclasses.replace(case, **arrivals("inferencemax", engine=engine))
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


def fit(runs: Sequence[PoolRun]) -> float:
    """Return the hops' seconds that these runs give, by robust least squares on their first
    tokens.
    """
    found = solve(lambda values: log_ratios(predicted(runs, **values), "ttft"), HOPS)
    return short(found["handover_s"])


def left_out(runs: Sequence[PoolRun]) -> dict[Hashable, list[PredictedPool]]:
    """Return the runs of each engine and length, by hops that saw the others."""
    parts = fitting.left_out(runs, lambda run: (run.engine, run.input_length))
    return {key: predicted(members, handover_s=fit(others)) for key, members, others in parts}


def fitted(folder: Path) -> Iterator[FittedFile]:
    runs = told(folder)
    unseen = [pair for pairs in left_out(runs).values() for pair in pairs]
    sds = {f"{what}_log_sd": short(conformal_sd(log_ratios(unseen, what))) for what in FIGURES}
    names = ", ".join(dict.fromkeys(f"{run.model} on {run.gpu} ({run.engine})" for run in runs))
    profile = PoolEfficiency(
        handover_s=fit(runs),
        **sds,
        fitted_on=f"{len(runs)} pairs of pools ({names}) by {COMMAND}; deviations of engines and "
        "lengths left out",
    )
    yield FittedFile(file="pools.yaml", fields=dataclasses.asdict(profile))
