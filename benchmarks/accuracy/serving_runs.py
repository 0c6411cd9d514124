"""Measured serving runs (one replica, separate prefill and decoding, and all requests queued at
once), and their predictions as arrays grouped by common properties.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.data import rows
from evidence.table import Row
from hp_tool.catalog import cluster, gpu
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.efficiency import engine_efficiency, gpu_efficiency
from hp_tool.cost.parameters import active_parameters
from hp_tool.cost.precision import ELEMENT_BYTES
from hp_tool.cost.serving.candidates import ServingCandidates, ServingCase
from hp_tool.cost.serving.engine import ServingCosts, serving_costs
from hp_tool.cost.serving.load import offline_costs
from hp_tool.cost.serving.weights import weight_format
from hp_tool.domain.clients import CLIENTS
from hp_tool.domain.engines import EngineEfficiency
from hp_tool.domain.familiarity import Index, Setting, group_settings
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.serving import ServingConfig
from hp_tool.questions.serving.intervals import serving_setting
from hp_tool.questions.serving.problem import client_arrivals, serving_case, with_device_defaults

ALIASES = {
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen/Qwen3-235B-A22B",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
LIMITED_FROM = 1.5
Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """Properties that all runs have: software, model, load and latencies."""

    engine: str
    version: str
    model: str
    gpu: str
    precision: str
    input_length: int
    output_length: int
    concurrency: int
    ttft_s: float
    """Seconds to first token; NaN if only throughput was measured."""
    tpot_s: float

    @property
    def latency_s(self) -> float:
        return self.ttft_s + (self.output_length - 1) * self.tpot_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingRun(Served):
    """One measured configuration. With a closed load, throughput is concurrency x output / (TTFT +
    (output - 1) TPOT) / GPUs.
    """

    config: ServingConfig
    kv_cache_precision: str | None = None
    """Precision of the KV cache; None: the engine's default."""
    max_num_seqs: int | None = None
    """Maximum number of concurrent requests of one scheduler, if the run sets it."""
    batch_wait_iterations: float = 0.0
    """As in EngineEfficiency, if the run sets it."""
    equal_lengths: bool = True
    """Whether all requests have the same lengths; False if the lengths are means, as with
    InferenceMAX's client.
    """
    queued_throughput: float | None = None
    """Output tokens per second and GPU if `concurrency` requests are queued at once (offline)."""

    @property
    def num_gpus(self) -> int:
        config = self.config
        return (
            config.tensor_parallel_size
            * config.pipeline_parallel_size
            * config.attention_data_parallel_size
        )

    @property
    def throughput(self) -> float:
        if self.queued_throughput is not None:
            return self.queued_throughput
        return self.concurrency * self.output_length / self.latency_s / self.num_gpus

    @property
    def group(self) -> tuple[object, ...]:
        """Return all properties except the parallelism, which the user chooses."""
        load = self.input_length, self.output_length, self.concurrency
        return (self.engine, self.version, self.model, self.gpu, self.precision, *load)

    @property
    def series(self) -> tuple[object, ...]:
        """Return the properties that identify the runs that one person measured together."""
        return self.group[:5]

    @property
    def fitted(self) -> bool:
        """Return whether constants are fitted to this run: the first byte of the SHA-256 of its
        group's fields, joined by |, is even.
        """
        return hashlib.sha256("|".join(map(str, self.group)).encode()).digest()[0] % 2 == 0


def runs(folder: Path) -> list[ServingRun]:
    """Return every row with a known model on one replica without separate pools."""
    return [serving_run(row) for row in rows(folder, "inference_measured")]


def served_fields(row: Row) -> dict[str, Any]:
    """Return the fields of Served for a row: software, model, load and latencies.

    InferenceMAX's client draws lengths from 0.8 to 1 times the requested ones.
    """
    drawn = row["client"] == "inferencemax"
    shorter = CLIENTS["inferencemax"].mean_length if drawn else 1.0
    return {
        **{name: row[name] for name in ("engine", "gpu", "precision", "concurrency")},
        "version": row["engine_version"] or "",
        "model": ALIASES.get(row["model"], row["model"]),
        **{name: round(shorter * row[name]) for name in ("input_length", "output_length")},
        **{name: math.nan if row[name] is None else row[name] for name in ("ttft_s", "tpot_s")},
    }


def config_of(row: Row, pool: str = "") -> ServingConfig:
    """Return the layout of a row, or of one of its pools."""
    d = row[f"{pool}attention_data_parallel_size"] or 1
    sizes = [f"{axis}_parallel_size" for axis in ("tensor", "pipeline", "expert")]
    return ServingConfig(
        **{name: row[f"{pool}{name}"] or 1 for name in sizes},
        attention_data_parallel_size=d,
        data_parallel_size=d,
    )


def serving_run(row: Row) -> ServingRun:
    """Return one row under a closed load."""
    equal = row["client"] != "inferencemax"
    return ServingRun(**served_fields(row), equal_lengths=equal, config=config_of(row))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Runs that differ only in parallelism and concurrency, as one input of the cost model."""

    runs: Sequence[ServingRun]
    case: ServingCase
    candidates: ServingCandidates

    def costs(self, engine: EngineEfficiency) -> ServingCosts:
        release, gpu = self.runs[0].version or None, self.case.cluster.gpu
        engine = with_device_defaults(engine, gpu=gpu, release=release, model=self.case.model)
        configured = dataclasses.replace(
            self.candidates,
            max_num_seqs=np.array([run.max_num_seqs or engine.max_num_seqs for run in self.runs]),
            max_num_batched_tokens=np.full(len(self.runs), engine.max_num_batched_tokens),
        )
        waited = dataclasses.replace(
            engine, batch_wait_iterations=self.runs[0].batch_wait_iterations
        )
        client = "genai-bench" if self.runs[0].equal_lengths else "inferencemax"
        case = dataclasses.replace(
            self.case, engine=waited, **client_arrivals(client, engine=engine)
        )
        if self.runs[0].queued_throughput is not None:
            return offline_costs(
                case=case,
                candidates=configured,
                num_prompts=configured.concurrency.astype(np.float64),
            )
        return serving_costs(case=case, candidates=configured)


def cached_series(runs: Sequence[ServingRun]) -> set[tuple[object, ...]]:
    """Return the series with a run that was faster than its prompts' FLOPs and its tokens' bytes
    allow at the rates of isolated kernels. Most of its prompts must have been in a prefix cache,
    which the rows do not mention.
    """
    return {
        run.series
        for run in runs
        if run.queued_throughput is None and run.latency_s < _least_latency(run)
    }


def _least_latency(run: ServingRun) -> float:
    device, shape = gpu(run.gpu), catalogue_model(run.model)
    stored, compute = weight_format(run.precision, gpu=device)  # type: ignore[arg-type]
    kernels = gpu_efficiency(device)
    roof = (kernels.thin_matmul or kernels.matmul)[compute]
    active = active_parameters(shape) - shape.vocab_size * shape.hidden_size
    prefill = (
        2.0
        * active
        * run.input_length
        * run.concurrency
        / (roof.peak_fraction * device.peak_flops_per_second[compute])
    )
    cache = 2.0 * shape.num_hidden_layers * shape.kv_heads * shape.head_size * ELEMENT_BYTES["fp8"]
    read = stored * active + run.concurrency * run.input_length * cache
    decode = (
        (run.output_length - 1)
        * read
        / (roof.bandwidth_fraction * device.memory_bandwidth_bytes_per_second)
    )
    return (prefill + decode) / run.num_gpus


def by_constants(runs: Sequence[ServingRun]) -> list[tuple[EngineEfficiency, list[ServingRun]]]:
    """Return the runs with the catalogue's constants for their engine, version and die."""
    grouped: dict[tuple[str, str, str | None], list[ServingRun]] = defaultdict(list)
    for run in runs:
        grouped[(run.engine, run.version, gpu(run.gpu).silicon)].append(run)
    return [
        (engine_efficiency(engine=name, version=version or None, silicon=silicon), members)
        for (name, version, silicon), members in grouped.items()
    ]


def batches(chosen: Sequence[ServingRun], engine: EngineEfficiency) -> list[Batch]:
    """Return the runs in batches, each of which is predicted in one call."""
    grouped: dict[tuple[object, ...], list[ServingRun]] = defaultdict(list)
    for run in chosen:
        lengths = run.input_length, run.output_length
        alike = run.model, run.gpu, run.precision, run.kv_cache_precision, *lengths
        settings = run.queued_throughput is None, run.batch_wait_iterations, run.equal_lengths
        grouped[(*alike, *settings)].append(run)
    batched = []
    loads = ("input_length", "output_length", "concurrency", "precision", "kv_cache_precision")
    for members in grouped.values():
        first = members[0]
        load = InferenceWorkload(**{name: getattr(first, name) for name in (*loads, "engine")})
        machine = cluster(ClusterQuery(gpu=first.gpu, num_gpus=8))
        case = serving_case(
            model=catalogue_model(first.model), cluster=machine, workload=load, engine=engine
        )
        candidates = ServingCandidates.from_configs(
            [run.config for run in members], concurrency=[run.concurrency for run in members]
        )
        batched.append(Batch(runs=members, case=case, candidates=candidates))
    return batched


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicted:
    """A run and its prediction."""

    run: ServingRun
    ttft_s: float
    tpot_s: float
    throughput: float
    kv_limited: bool
    fits: bool
    index: Index | None = None
    """Runs to which the constants were fitted; None: all measured runs of the catalog."""
    whole_wave_s: float
    """Seconds to prefill as many prompts as there are concurrent requests, if all of them fit."""

    @property
    def really_limited(self) -> bool:
        """Return whether the measured request waited for free KV cache. Nothing else delays the
        first token by so much more than the prefill of all concurrent prompts.
        """
        return self.run.ttft_s > LIMITED_FROM * self.whole_wave_s


def setting_of(run: ServingRun) -> Setting:
    """Return the properties by which a run is compared with a query."""
    return serving_setting(
        engine=run.engine,
        release=run.version,
        gpu=gpu(run.gpu),
        model=catalogue_model(run.model),
        precision=run.precision,
        load="closed" if run.queued_throughput is None else "offline",
    )


def index_of(runs: Sequence[ServingRun]) -> Index:
    """Return an index in which only these runs are measured."""
    return group_settings(map(setting_of, runs))


def predict(
    prepared: Sequence[Batch], engine: EngineEfficiency, *, index: Index | None = None
) -> list[Predicted]:
    """Return the predictions for every run of every batch. `index`: runs to which the constants
    were fitted.
    """
    pairs = []
    for batch in prepared:
        costs = batch.costs(engine)
        pairs += [
            Predicted(
                run=run,
                ttft_s=float(costs.ttft_s[i]),
                tpot_s=float(costs.tpot_s[i]),
                throughput=float(costs.output_tokens_per_second_per_gpu[i]),
                kv_limited=bool(costs.kv_limited[i]),
                fits=bool(costs.fits[i]),
                index=index,
                whole_wave_s=float(costs.prompt_s[i]) * run.concurrency,
            )
            for i, run in enumerate(batch.runs)
        ]
    return pairs


FIGURES = {"ttft": "ttft_s", "tpot": "tpot_s", "throughput": "throughput"}
"""Attributes of a run and of its prediction, by the name of the figure."""


def log_ratios(pairs: Sequence[Any], what: str) -> Floats:
    """Return ln(predicted / measured) of one of FIGURES; NaN if it was not measured.

    Args:
        pairs: Predictions with their `run`, which is of one replica or of pools.
        what: The figure.
    """
    field = FIGURES[what]
    return np.array([np.log(getattr(pair, field) / getattr(pair.run, field)) for pair in pairs])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolRun(Served):
    """A measured pair of a prefill and a decoding pool."""

    prefill: ServingConfig
    decode: ServingConfig
    replicas: tuple[int, int] | None
    """Numbers of prefill and decoding replicas; None: not stated."""

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return self.concurrency / self.latency_s


LATER = ("inference_measured_2", "inference_measured_3", "inference_measured_4")
ASSUMED_VERSIONS = {"trtllm": "1.1", "vllm": "0.12.0"}
"""Assumed engine versions of runs of October and November 2025 that state none: the versions
nearest to that month.
"""
DYNAMO = {"0.8.1.post1": "1.2.0rc6"}
"""TensorRT-LLM version by the Dynamo version that ran it."""
VERSIONS_BY_BRANCH = {"gpt-oss-dev": "1.1"}
"""Version by the branch name that a table gives instead."""


def later_runs(folder: Path) -> list[ServingRun]:
    """Return the rows of inference_measured_2.csv to _4.csv on one replica, with versions from
    UNTOLD and NAMED.
    """
    return [
        _with_version(serving_run(row))
        for name in LATER
        for row in rows(folder, name)
        if not row["disaggregated"]
    ]


def _with_version(run: ServingRun) -> ServingRun:
    version = VERSIONS_BY_BRANCH.get(run.version, run.version) or ASSUMED_VERSIONS.get(
        run.engine, ""
    )
    return dataclasses.replace(run, version=version, **_launch(run))


def _launch(run: ServingRun) -> dict[str, Any]:
    """Return the settings in the public scripts that started these runs (InferenceMAX).

    vLLM: max_num_seqs 256 for MiniMax (minimaxm2.5_fp8_h100.sh). TensorRT-LLM:
    batch_wait_timeout_iters 20 with prompts and answers of 1,024 tokens on fewer than 8 B200
    (October 2025, 70b_fp8_b200_trt); timeout_iters 60 of attention_dp_config with data-parallel
    attention.
    """
    if run.engine == "vllm" and "MiniMax" in run.model:
        return {"max_num_seqs": 256}
    if run.engine != "trtllm" or run.equal_lengths:
        return {}
    if run.config.attention_data_parallel_size > 1:
        return {"batch_wait_iterations": 60.0}
    short = run.input_length < 1024 and run.output_length < 1024 and not run.version
    waits = run.gpu.startswith("b200") and short and run.config.tensor_parallel_size < 8
    return {"batch_wait_iterations": 20.0} if waits else {}


def dense_runs(folder: Path) -> list[ServingRun]:
    """Return every run of a dense model on one replica: the closed loads of both files, and the
    offline loads.
    """
    everything = [*runs(folder), *later_runs(folder), *queued_runs(folder)]
    return [run for run in everything if catalogue_model(run.model).num_experts is None]


def pool_runs(folder: Path) -> list[PoolRun]:
    """Return the rows of inference_measured_2.csv and _3 with separate pools, each run once. If two
    listings have the same latencies, the one with the number of replicas is returned.
    """
    listed = [row for name in LATER for row in rows(folder, name) if row["disaggregated"]]
    listed.sort(key=lambda row: not row["decode_replicas"])
    once = {
        (
            row["input_length"],
            row["output_length"],
            row["concurrency"],
            f"{1e3 * row['ttft_s']:.8g}"[:8],
            f"{1e3 * row['tpot_s']:.8g}"[:6],
        ): row
        for row in reversed(listed)
    }
    return [_pool_run(row) for row in reversed(once.values())]


def queued_runs(folder: Path) -> list[ServingRun]:
    """Return every row of inference_trtllm_throughput and _2: all requests queued at once on one
    replica, with only the throughput measured.
    """
    names = ("inference_trtllm_throughput", "inference_trtllm_throughput_2")
    return [_queued_run(row) for name in names for row in rows(folder, name)]


def _pool_run(row: Row) -> PoolRun:
    replicas, stated = (row["prefill_replicas"], row["decode_replicas"]), served_fields(row)
    return PoolRun(
        **{
            **stated,
            "version": DYNAMO.get(stated["version"], stated["version"]),
            "model": catalogue_model(row["model"]).name,
        },
        prefill=config_of(row, "prefill_"),
        decode=config_of(row, "decode_"),
        replicas=replicas if all(replicas) else None,
    )


def _queued_run(row: Row) -> ServingRun:
    return dataclasses.replace(
        serving_run(row),
        kv_cache_precision=row["kv_cache_precision"],
        queued_throughput=row["output_tokens_per_second_per_gpu"],
    )
