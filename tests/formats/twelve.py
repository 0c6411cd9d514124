"""Twelve trainings, and the deployments among them, each with one thing that a tool may have no
word for.
"""

from __future__ import annotations

from typing import Any

H100, H200, A100, B200 = "h100-sxm-80gb", "h200-sxm-141gb", "a100-sxm-80gb", "b200-sxm-180gb"
EIGHT = {"tensor_parallel_size": 8}


def _training(
    model: str,
    *,
    gpu: str = H100,
    gpus: int = 64,
    length: int = 4096,
    parallel: dict[str, Any] | None = None,
    **training: Any,
) -> dict[str, Any]:
    work = {"sequence_length": length, "global_batch_size": 128, **training}
    return {
        "kind": "training",
        "model": model,
        "cluster": {"gpu": gpu, "num_gpus": gpus},
        "training": work,
        "parallel": {"micro_batch_size": 1, **(parallel or {})},
    }


def _deployment(
    model: str,
    *,
    gpu: str = H100,
    length: int = 1000,
    parallel: dict[str, Any] | None = None,
    **inference: Any,
) -> dict[str, Any]:
    load = {"input_length": length, "output_length": 200, "concurrency": 16, **inference}
    return {
        "kind": "inference",
        "model": model,
        "cluster": {"gpu": gpu, "num_gpus": 8},
        "inference": load,
        "parallel": {"attention_data_parallel_size": 1, **(parallel or EIGHT)},
    }


TRAININGS: dict[str, dict[str, Any]] = {
    "dense": _training("llama-3-70b"),
    "mixture": _training(
        "qwen3-30b-a3b", parallel={"expert_parallel_size": 8, "virtual_pipeline_parallel_size": 1}
    ),
    "latent": _training("deepseek-v2-lite", parallel={"expert_parallel_size": 8}),
    "context": _training("llama-3-8b", length=131072, parallel={"context_parallel_size": 8}),
    "fp8": _training("llama-3-8b", precision="fp8"),
    "lora": _training("llama-3-8b", gpus=8, task="lora", lora={"rank": 16, "dropout": 0.05}),
    "uneven": _training("llama-3.1-405b", gpus=512, parallel={"pipeline_parallel_size": 16}),
    "blackwell": _training("llama-3-8b", gpu=B200, gpus=32, parallel={"tensor_parallel_size": 2}),
    "h100": _training("llama-3-8b", gpus=8),
    "a100": _training("gpt3-13b", gpu=A100, length=2048, parallel={"tensor_parallel_size": 4}),
    "offload": _training("llama-3-8b", gpus=8, offload="optimizer"),
    "hybrid": _training(
        "gpt-oss-20b", parallel={"expert_parallel_size": 8, "pipeline_parallel_size": 1}
    ),
}
"""`hybrid` has layers with and without a window; models with recurrent layers are refused by
name.
"""
DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "dense": _deployment("llama-3-70b"),
    "mixture": _deployment(
        "qwen3-30b-a3b", parallel={"attention_data_parallel_size": 8, "expert_parallel_size": 8}
    ),
    "latent": _deployment("deepseek-v2-lite", parallel={**EIGHT, "expert_parallel_size": 8}),
    "context": _deployment("llama-3.1-8b", length=100_000),
    "fp8": _deployment("qwen3-32b", precision="fp8", kv_cache_precision="fp8"),
    "uneven": _deployment(
        "llama-3.1-405b",
        gpu=H200,
        precision="fp8",
        parallel={"tensor_parallel_size": 2, "pipeline_parallel_size": 4},
    ),
    "blackwell": _deployment("llama-3-70b", gpu=B200, parallel={"tensor_parallel_size": 2}),
    "h100": _deployment("qwen3-32b", parallel={"tensor_parallel_size": 2}),
    "a100": _deployment("llama-3-8b", gpu=A100, parallel={"tensor_parallel_size": 1}),
    "hybrid": _deployment("gpt-oss-20b", precision="mxfp4", parallel={"tensor_parallel_size": 2}),
}
"""Context parallelism, adapters and offload are no part of a query of serving."""
