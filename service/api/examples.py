"""A body for every operation that takes one, as /openapi.json shows it; a test sends each and expects it to be taken."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "name": "gpt-tiny",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 1024,
}
ESTIMATE: dict[str, Any] = {
    "kind": "training",
    "model": "gpt-22b",
    "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 8},
    "training": {"sequence_length": 2048, "global_batch_size": 4},
    "parallel": {"tensor_parallel_size": 8, "micro_batch_size": 4, "recompute": "selective"},
}
RECOMMENDATION: dict[str, Any] = {name: part for name, part in ESTIMATE.items() if name != "parallel"}
SEARCH: dict[str, Any] = {
    "kind": "training",
    "model": TINY,
    "cluster": {"gpu": "cpu", "num_gpus": 2},
    "training": {"sequence_length": 128, "global_batch_size": 8, "precision": "fp32"},
    "search": {"budget_runs": 4, "run_timeout_s": 120.0},
}
MEASUREMENT: dict[str, Any] = {
    "query": {name: part for name, part in SEARCH.items() if name != "search"},
    "parallel": {"tensor_parallel_size": 2},
    "measurement": {"status": "ok", "step_s": 0.25},
}
BUDGET: dict[str, Any] = {"budget_runs": 8}
SIZING: dict[str, Any] = {"cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64}, "days": 7.0}
KEY: dict[str, Any] = {"owner": "ada", "scope": "submit", "lifetime_s": 7_776_000.0, "gpu_seconds_per_day": 36_000.0}
MODEL: dict[str, Any] = {"name": "gpt-tiny", "spec": TINY}
CLUSTER: dict[str, Any] = {
    "name": "lab",
    "spec": {
        "gpu": "h100-sxm-80gb",
        "gpus_per_node": 8,
        "num_gpus": 64,
        "fabric": "1 x 200 Gb/s",
        "inter_node_bandwidth_bytes_per_second": 25e9,
    },
}
EXPORT: dict[str, Any] = {"result": ESTIMATE, "format": "megatron-lm"}
IMPORT: dict[str, Any] = {
    "command": "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 "
    "--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64 --bf16 "
    "--tensor-model-parallel-size 2 --vocab-size 51200",
    "num_gpus": 8,
    "overrides": {"cluster.gpu": "a100-sxm-80gb"},
}
