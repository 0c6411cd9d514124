"""A cluster that is slower than its datasheet by known factors, and reports of trainings on it."""

from __future__ import annotations

import json
from typing import Any

from hp_tool.questions import schema, training

COMPUTE, COMMUNICATION = 1.3, 1.8
MEMORY = 1.05
COMMUNICATION_PARTS = (
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline_p2p",
    "data_parallel",
)

QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16, "gpus_per_node": 8},
    "training": {"sequence_length": 4096, "global_batch_size": 32, "precision": "bf16"},
}
CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "recompute": "selective"},
    {"tensor_parallel_size": 4, "pipeline_parallel_size": 1},
    {"tensor_parallel_size": 8, "pipeline_parallel_size": 1},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "recompute": "selective"},
    {"tensor_parallel_size": 1, "pipeline_parallel_size": 4, "recompute": "full"},
    {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
)
OTHER_MODEL = QUERY | {
    "model": "llama-3-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64, "gpus_per_node": 8},
    "parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 4, "recompute": "full"},
}


def true_step_s(query: dict[str, Any]) -> float:
    """Seconds a step of the query's configuration takes on this machine."""
    parts = training.estimate(query=schema.parse_query(query), with_fixes=False).time.parts_s
    return sum(
        seconds * (COMMUNICATION if name in COMMUNICATION_PARTS else COMPUTE)
        for name, seconds in parts.items()
    )


def report(
    parallel: dict[str, Any], *, query: dict[str, Any] = QUERY, **changes: Any
) -> dict[str, Any]:
    """What a training with this configuration would report."""
    asked = query | {"parallel": parallel}
    allocated = training.estimate(
        query=schema.parse_query(asked), with_fixes=False
    ).memory.allocated_bytes
    measurement = {
        "status": "ok",
        "step_s": true_step_s(asked),
        "peak_memory_bytes": int(MEMORY * allocated),
    }
    return {"query": query, "parallel": parallel, "measurement": measurement | changes}


def lines(**changes: Any) -> str:
    """Reports of all configurations, one JSON object a line."""
    return "".join(json.dumps(report(parallel, **changes)) + "\n" for parallel in CONFIGURATIONS)
