"""Random rankings whose rows are written for other tools, read again and predicted."""

from __future__ import annotations

import random
from typing import Any

from hp_tool.formats.exchange.export import supported_axes
from hp_tool.formats.registry import get_format
from hp_tool.questions import schema

TOOLS = {
    "megatron-lm": "megatron-core",
    "megatron-lm-yaml": "megatron-core",
    "slurm": "megatron-core",
    "kubernetes": "megatron-core",
    "nemo": "megatron-core",
    "torchtitan": "torch-fsdp",
    "torchtitan-python": "torch-fsdp",
    "accelerate": "torch-fsdp",
    "trl": "hf-trainer",
    "axolotl": "hf-trainer",
    "llama-factory": "hf-trainer",
    "deepspeed": "deepspeed",
    "nanotron": "nanotron",
    "verl": "megatron-core",
}
"""Formats of trainings that are also read, and the framework that each is asked for."""
ENGINES = ("vllm", "sglang", "trtllm", "llm-d")
"""Formats of deployments that are also read."""
MODELS = (
    "llama-3-8b",
    "llama-3-70b",
    "gpt3-6.7b",
    "qwen3-14b",
    "llama-2-13b",
    "mistral-7b",
    "qwen2.5-7b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "gpt-oss-20b",
)
DENSE = MODELS[:7]
OWN_MODELS = {
    "deepspeed": ("llama-3.2-1b", "llama-3.2-3b", "qwen2.5-1.5b", "llama-3-8b"),
    **dict.fromkeys(
        ("trl", "axolotl", "llama-factory"),
        ("llama-3.2-1b", "qwen2.5-1.5b", "llama-3-8b", "mistral-7b", "qwen3-14b", "llama-3-70b"),
    ),
    "torchtitan": ("llama-3-8b", "llama-3-70b"),
    "torchtitan-python": ("llama-3-8b", "llama-3.2-3b"),
    "nanotron": ("llama-3-8b", "llama-2-13b", "mistral-7b"),
}
"""Models of the tools that run, or fit, few others."""
LENGTHS = (2048, 4096, 8192, 32768, 131072)
OWN_LENGTHS = dict.fromkeys(("deepspeed", "trl", "axolotl", "llama-factory"), LENGTHS[:3])
"""Sequences of the tools that do not split longer ones."""
CLUSTERS = (
    "a100-sxm-80gb",
    "h100-sxm-80gb",
    "h200-sxm-141gb",
    "b200-sxm-180gb",
    "gb200-nvl72",
    "mi300x-192gb",
)
RARE: tuple[tuple[str, Any], ...] = (
    ("training.precision", "fp8"),
    ("training.precision", "fp16"),
    ("training.precision", ["bf16", "fp8"]),
    ("training.fp8_recipe", "tensorwise"),
    ("training.attention", "unfused"),
    ("training.dropout", 0.1),
    ("training.task", "sft"),
    ("training.optimizer", "sgd"),
    ("training.gradient_precision", "bf16"),
    ("training.optimizer_precision", "bf16"),
    ("training.master_precision", "fp16"),
    ("training.parameter_precision", "fp32"),
    ("training.cross_entropy", "fused"),
    ("training.cuda_graphs", True),
    ("training.kernel_fusion", False),
    ("training.offload", "optimizer"),
    ("training.offload", "activations"),
    ("training.expert_capacity_factor", 1.25),
    ("training.overlap", {"data_parallel": False}),
    ("training.overlap", {"tensor_parallel": False}),
    ("training.framework_version", "26.04"),
    ("training.recipe", "megatron-bridge-26.06"),
    ("training.total_tokens", 1e12),
    ("training.lora", {"rank": 16}),
    ("training.lora", {"rank": 8, "dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}),
    ("training.frozen_precision", "nf4"),
    ("training.packed", True),
    ("training.optimizer", "muon"),
    ("training.exp_avg_sq_precision", "fp8"),
    ("training.master_precision", "remainder"),
    ("training.cross_entropy", "in_place"),
    ("training.cuda_graph_modules", ["attn"]),
    ("training.offload_fraction", 0.5),
    ("training.gradient_reduction", "run"),
    ("training.gated_product", "recomputed"),
    ("training.attention_mask_flops", "causal"),
    ("training.overlap", {"pipeline_parallel": False}),
    ("training.overlap", {"expert_parallel": True}),
    ("training.overlap", {"context_parallel": False}),
    ("training.precision", "mxfp8"),
    ("training.expert_imbalance", 1.2),
    ("parallel.rank_order", "tp-cp-ep-pp-dp"),
    ("parallel.pipeline_schedule", "1f1b"),
    ("parallel.virtual_pipeline_parallel_size", 2),
    ("parallel.pipeline_parallel_size", [4, 8]),
    ("parallel.recompute", "full"),
    ("parallel.recompute", "selective"),
    ("parallel.recompute", {"granularity": "full", "method": "block", "num_layers": 3}),
    ("parallel.recompute", {"granularity": "selective", "modules": ["layernorm", "core_attn"]}),
    ("parallel.context_parallel_communication", "a2a"),
    ("parallel.context_parallel_communication", "a2a+p2p"),
    ("parallel.moe_token_dispatcher_type", "flex"),
    ("parallel.zero_stage", [0, 1]),
    ("parallel.data_parallel_shard_size", 8),
    ("parallel.moe_token_dispatcher_type", "alltoall"),
    ("parallel.context_parallel_communication", "all_gather"),
    ("parallel.context_parallel_size", [2, 4]),
    ("parallel.expert_tensor_parallel_size", 2),
    ("parallel.sequence_parallel", False),
    ("objective", "min_gpus"),
    ("constraints.memory_headroom_fraction", 0.15),
)
RARE_SERVED: tuple[tuple[str, Any], ...] = (
    ("inference.precision", "fp8"),
    ("inference.kv_cache_precision", "fp8"),
    ("inference.concurrency", 512),
    ("inference.request_rate_per_second", 4.0),
    ("inference.prefix_cache_hit_rate", 0.5),
    ("targets.tpot_s", 0.05),
    ("parallel.max_num_seqs", 96),
    ("parallel.max_num_batched_tokens", 4096),
    ("parallel.pipeline_parallel_size", [1, 2]),
    ("parallel.attention_data_parallel_size", [1, 2, 4, 8]),
    ("parallel.expert_parallel_size", [1, 8]),
    ("constraints.memory_headroom_fraction", 0.15),
    ("inference.memory_fraction", 0.95),
    ("objective", "min_gpus"),
    ("objective", "tpot"),
    ("inference.two_batch_overlap", True),
    ("inference.kv_cache_precision", "bf16"),
    ("inference.precision", "nvfp4"),
    ("inference.precision", "int4"),
    ("inference.engine_settings", "defaults"),
    ("inference.speculative", {"num_speculative_tokens": 3, "acceptance_rate": 0.7}),
    (
        "inference.speculative",
        {
            "num_speculative_tokens": 2,
            "acceptance_rate": 0.6,
            "draft_cost_fraction": 0.05,
            "draft_model": "some/model-EAGLE3",
        },
    ),
    ("parallel.redundant_experts", 16),
    ("parallel.tensor_parallel_size", [2, 4]),
    ("inference.expert_imbalance", 1.3),
)


def training(seed: int, *, format: str) -> dict[str, Any]:
    """A query of a ranking of what the format's tool runs."""
    draw = random.Random(f"{format} {seed}")
    framework = draw.choice(("megatron-core", "torch-fsdp")) if format == "verl" else TOOLS[format]
    query: dict[str, Any] = {
        "kind": "training",
        "model": draw.choice(
            OWN_MODELS.get(format) or (MODELS if framework == "megatron-core" else DENSE)
        ),
        "cluster": {"gpu": draw.choice(CLUSTERS), "num_gpus": draw.choice((8, 16, 64, 72, 256))},
        "training": {
            "sequence_length": draw.choice(OWN_LENGTHS.get(format) or LENGTHS),
            "global_batch_size": draw.choice((32, 64, 256, 504)),
            "framework": framework,
        },
        "parallel": {},
    }
    if (loss := get_format(format).loss) is not None:
        query["training"]["cross_entropy"] = loss
    for path, value in draw.sample(RARE, k=draw.choice((0, 0, 1, 1, 2, 3))):
        schema.set_paths(query, {path: value})
    work = query["training"]
    if "frozen_precision" in work:
        work.setdefault("lora", {"rank": 8, "target_modules": ["q_proj", "v_proj"]})
    if "lora" in work:
        work["task"] = "lora"
    if "cuda_graph_modules" in work:
        work["cuda_graphs"] = True
    if "offload_fraction" in work:
        work.setdefault("offload", "optimizer")
    if (
        0 in supported_axes(format, schema.parse_query(query)).get("zero_stage", ())
        and draw.random() < 0.5
    ):
        query["parallel"].setdefault("zero_stage", 0)
    query["parallel"] = {
        **{
            name: list(value) if isinstance(value, tuple) else value
            for name, value in supported_axes(format, schema.parse_query(query)).items()
        },
        **query["parallel"],
    }
    return query


def serving(seed: int, *, format: str) -> dict[str, Any]:
    """A query of a ranking of deployments by the format's engine."""
    draw = random.Random(f"{format} {seed}")
    query: dict[str, Any] = {
        "kind": "inference",
        "model": draw.choice(MODELS),
        "cluster": {"gpu": draw.choice(CLUSTERS[:4]), "num_gpus": draw.choice((1, 2, 8, 16))},
        "inference": {
            "engine": {"llm-d": "vllm"}.get(format, format),
            "input_length": draw.choice((128, 1000, 4000)),
            "output_length": draw.choice((128, 1000)),
        },
        "parallel": {},
    }
    schema.set_paths(
        query,
        dict(draw.choice(((("inference.concurrency", 64),), (("inference.concurrency", 8),), ()))),
    )
    for path, value in draw.sample(RARE_SERVED, k=draw.choice((0, 1, 1, 2, 3))):
        schema.set_paths(query, {path: value})
    if "request_rate_per_second" in query["inference"]:
        query["inference"].pop("concurrency", None)
    return query


def leaves(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Each value by its dotted path; mappings too."""
    found: dict[str, Any] = {}
    for name, value in mapping.items():
        found[prefix + name] = value
        if isinstance(value, dict):
            found |= leaves(value, f"{prefix}{name}.")
    return found
