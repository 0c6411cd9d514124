"""The table of deployments for a search."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hp_tool.cost.arrays import FloatArray
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.domain.serving import ServingConfig
from hp_tool.loop.search.serving import penalty
from hp_tool.loop.search.table import CandidateTable
from hp_tool.questions.serving.estimates import bounded_values
from hp_tool.questions.serving.problem import CostedRows, ServingProblem


def serving_candidates(
    problem: ServingProblem, configs: Sequence[ServingConfig]
) -> ServingCandidates:
    """Return deployments under the problem's load."""
    return ServingCandidates.from_configs(
        configs, concurrency=[problem.concurrency or 1] * len(configs)
    )


def serving_table(rows: CostedRows) -> CandidateTable:
    """Return the cost model's predictions of deployments: seconds of the penalised latency by part,
    and memory.
    """
    problem, candidates, costs = rows.problem, rows.candidates, rows.costs
    parts = {
        **costs.parts,
        "beyond_targets": costs.request_latency_s * penalty(bounded_values(rows)),
    }
    memory = costs.bytes
    per_replica = np.maximum(in_flight_of(rows) / candidates.schedulers, 1.0)
    passes = problem.output_length + np.ceil(
        costs.running * problem.input_length / candidates.max_num_batched_tokens
    )
    occupied = memory.capacity - memory.kv_capacity
    occupied = (
        occupied
        + costs.running * (problem.input_length + problem.output_length) * memory.kv_per_token
    )
    return CandidateTable(
        axes={
            "tensor_parallel_size": tuple(candidates.tensor_parallel_size.tolist()),
            "max_num_seqs": tuple(candidates.max_num_seqs.tolist()),
        },
        parts_s=parts,
        layer_passes=per_replica / costs.running * passes * problem.model.num_hidden_layers,
        memory_bytes=occupied - memory.overhead,
        usable_bytes=memory.capacity - memory.overhead,
        device_bytes=problem.cluster.gpu.memory_bytes - memory.overhead,
        features=_features(problem, candidates),
    )


def in_flight_of(rows: CostedRows) -> FloatArray:
    """Return (n,) requests over all devices: those of a closed load, or by Little's law those of a
    rate.
    """
    return (
        rows.candidates.concurrency.astype(np.float64) if rows.in_flight is None else rows.in_flight
    )


def _features(problem: ServingProblem, candidates: ServingCandidates) -> dict[str, Any]:
    """Return the features of the residual model; names and scales equal those of training for equal
    quantities.
    """
    same = np.ones(len(candidates))
    return {
        "tensor_parallel": np.log2(candidates.tensor_parallel_size),
        "micro_batch": np.log2(candidates.max_num_seqs),
        "devices": same * np.log2(problem.cluster.num_gpus),
        "hidden_size": same * np.log2(problem.model.hidden_size),
        "layers": same * np.log2(problem.model.num_hidden_layers),
    }
