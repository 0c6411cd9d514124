"""Serving rows of the second harvest: one replica, prefill and decoding apart, and all requests
queued at once.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.accuracy.data import rows
from benchmarks.accuracy.serving_runs import (
    Served,
    ServingRun,
    config_of,
    runs,
    serving_run,
    told,
)
from evidence.table import Row
from hp_tool.catalog import model as catalogue_model
from hp_tool.domain.serving import ServingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolRun(Served):
    """One measured pair of pools."""

    prefill: ServingConfig
    decode: ServingConfig
    replicas: tuple[int, int] | None
    """Of prefill and of decoding; None: not told."""

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return self.concurrency / self.latency_s


LATER = ("inference_measured_2", "inference_measured_3", "inference_measured_4")
UNTOLD = {"trtllm": "1.1", "vllm": "0.12.0"}
"""Versions that stand for one that is not told, of runs of October and November 2025: those nearest
to that month.
"""
DYNAMO = {"0.8.1.post1": "1.2.0rc6"}
"""Versions of TensorRT-LLM by those of the Dynamo that ran it."""
NAMED = {"gpt-oss-dev": "1.1"}
"""Versions that a table names by a branch."""


def later_runs(folder: Path) -> list[ServingRun]:
    """Rows of inference_measured_2.csv to _4.csv on one replica, by versions as UNTOLD and NAMED
    have them.
    """
    return [
        _settled(serving_run(row))
        for name in LATER
        for row in rows(folder, name)
        if not row["disaggregated"]
    ]


def _settled(run: ServingRun) -> ServingRun:
    version = NAMED.get(run.version, run.version) or UNTOLD.get(run.engine, "")
    return dataclasses.replace(run, version=version, **_launch(run))


def _launch(run: ServingRun) -> dict[str, Any]:
    """What public scripts set that started these runs (InferenceMAX).

    vLLM: max_num_seqs 256 for MiniMax (minimaxm2.5_fp8_h100.sh). TensorRT-LLM:
    batch_wait_timeout_iters 20 with prompts and answers of 1,024 tokens on fewer than 8 B200
    (October 2025, 70b_fp8_b200_trt); timeout_iters 60 of attention_dp_config with attention in
    parallel over data.
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
    """Every run of a dense model on one replica: closed loads of both files, and offline ones."""
    everything = [*runs(folder), *later_runs(folder), *queued_runs(folder)]
    return [run for run in everything if catalogue_model(run.model).num_experts is None]


def pool_runs(folder: Path) -> list[PoolRun]:
    """Rows of inference_measured_2.csv and _3 with pools of their own, each run once: where two
    listings have the same latencies, the one that tells the number of replicas.
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
    """Every row of inference_trtllm_throughput and _2: all requests queued at once on one replica,
    throughput alone measured.
    """
    names = ("inference_trtllm_throughput", "inference_trtllm_throughput_2")
    return [_queued_run(row) for name in names for row in rows(folder, name)]


def _pool_run(row: Row) -> PoolRun:
    replicas, stated = (row["prefill_replicas"], row["decode_replicas"]), told(row)
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
