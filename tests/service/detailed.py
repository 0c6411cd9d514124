"""Queries of one configuration that say what most leave out."""

from __future__ import annotations

from typing import Any

LAYERS = {"granularity": "full", "method": "block", "num_layers": 4}


def _asked(*, training: dict[str, Any], parallel: dict[str, Any], **more: Any) -> dict[str, Any]:
    query = {
        "kind": "training",
        "model": "llama-3-70b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
    }
    batch = {"sequence_length": 8192, "global_batch_size": 576}
    return query | {"training": batch | training, "parallel": parallel} | more


DETAILED: dict[str, dict[str, Any]] = {
    "rack": _asked(
        cluster={"gpu": "gb200-nvl72", "num_gpus": 144, "nvlink_segment_gpus": 36},
        training={
            "framework_version": "0.15",
            "parameter_precision": "bf16",
            "gradient_precision": "bf16",
            "cross_entropy": "fused",
            "cuda_graphs": True,
            "activation_func_fp8_input_store": True,
            "optimizer": "muon",
        },
        parallel={
            "tensor_parallel_size": 4,
            "zero_stage": 3,
            "recompute": {"granularity": "selective", "modules": ["layernorm", "mlp"]},
        },
    ),
    "experts": _asked(
        model="mixtral-8x7b",
        training={"framework_version": "25.04", "global_batch_size": 512},
        parallel={
            "tensor_parallel_size": 2,
            "expert_parallel_size": 4,
            "expert_tensor_parallel_size": 2,
            "moe_token_dispatcher_type": "flex",
            "data_parallel_shard_size": 8,
            "recompute": {"granularity": "selective", "modules": ["moe_act", "layernorm"]},
        },
    ),
    "adapters": _asked(
        training={
            "task": "lora",
            "lora": {"rank": 16, "dropout": 0.1, "target_modules": ["linear_qkv", "linear_proj"]},
            "frozen_precision": "fp8",
            "activation_func_fp8_input_store": False,
        },
        parallel={"tensor_parallel_size": 8, "recompute": LAYERS},
    ),
    "fsdp": _asked(
        training={"framework": "torch-fsdp", "cross_entropy": "chunked"},
        parallel={"tensor_parallel_size": 1, "zero_stage": 3, "recompute": "per_layer"},
    ),
    "recipe": _asked(
        model="qwen3-30b-a3b",
        cluster={"gpu": "gb200-nvl72", "num_gpus": 8},
        training={
            "recipe": "megatron-bridge-26.06",
            "precision": "mxfp8",
            "global_batch_size": 512,
        },
        parallel={"expert_parallel_size": 8, "micro_batch_size": 1},
    ),
    "adapters of a recipe": _asked(
        training={
            "recipe": "mlperf-training-5.0",
            "task": "lora",
            "frozen_precision": "nf4",
            "global_batch_size": 64,
        },
        parallel={"tensor_parallel_size": 8},
    ),
    "unusual": _asked(
        cluster={"gpu": "h100-sxm-80gb", "num_gpus": 64, "price_per_gpu_hour": 2.5},
        training={
            "total_tokens": 1e12,
            "reliability": {},
            "overlap": {"tensor_parallel": False},
            "task": "sft",
        },
        constraints={"memory_headroom_fraction": 0.1},
        parallel={
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": 2,
            "pipeline_schedule": "zb-h1",
            "rank_order": "tp-cp-ep-pp-dp",
        },
    ),
}
