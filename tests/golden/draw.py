"""Draw golden queries from lists of values, so that as many pairs of values as possible meet in
some query.

`python -m tests.golden.draw` drew those in `queries/` whose id begins with train or serve. They are
data: for a new feature append queries, and leave those that are there.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import hp_tool
from hp_tool.errors import HpToolError

Drawn = tuple[dict[str, Any], dict[str, str]]
"""A query, and the value that each of its axes has."""
SEED = 20250101

ODD_LATENT = {
    "num_hidden_layers": 12,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "head_dim": 192,
    "intermediate_size": 5504,
    "vocab_size": 102400,
    "gated_mlp": True,
    "normalization": "rmsnorm",
    "tie_word_embeddings": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
}
ODD_EXPERTS = {
    "num_hidden_layers": 14,
    "hidden_size": 2560,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": 160,
    "intermediate_size": 6912,
    "vocab_size": 50304,
    "gated_mlp": True,
    "normalization": "rmsnorm",
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 1536,
    "num_shared_experts": 1,
    "shared_expert_gate": True,
    "shared_expert_intermediate_size": 2048,
    "first_k_dense_replace": 2,
    "query_key_norm": "head",
    "n_group": 4,
    "topk_group": 2,
}
DRAFTING = {
    "num_hidden_layers": 23,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 11008,
    "vocab_size": 128000,
    "gated_mlp": True,
    "normalization": "rmsnorm",
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}
MODELS = [
    "gpt3-6.7b",
    "gpt3-175b",
    "gpt-22b",
    "gpt2-xl",
    "llama-2-13b",
    "llama-3-8b",
    "llama-3-70b",
    "llama-3.1-405b",
    "qwen2.5-7b",
    "qwen3-14b",
    "falcon-180b",
    "gpt-j-6b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "gpt-oss-20b",
    "megatron-bert-3.9b",
    "bert-large",
    "t5-11b",
    "t5-v1.1-xl",
    ODD_LATENT,
    ODD_EXPERTS,
    DRAFTING,
]
MINE = {
    "name": "mine",
    "memory_bytes": 60_000_000_000,
    "memory_bandwidth_bytes_per_second": 2.5e12,
    "peak_flops_per_second": {"bf16": 5e14, "fp16": 5e14, "fp8": 1e15},
    "pcie_bandwidth_bytes_per_second": 3.2e10,
    "nvlink_bandwidth_bytes_per_second": 2e11,
    "inter_node_bandwidth_bytes_per_second": 3e10,
    "power_w": 600.0,
    "host_memory_bytes": 2e11,
    "host_memory_bandwidth_bytes_per_second": 3e10,
    "price_per_hour": 2.0,
}
CLUSTERS: list[dict[str, Any]] = [
    {"gpu": "v100-sxm-32gb"},
    {"gpu": "a100-sxm-40gb"},
    {"gpu": "a100-sxm-80gb"},
    {"gpu": "h100-sxm-80gb"},
    {"gpu": "h100-pcie-80gb"},
    {"gpu": "h200-sxm-141gb"},
    {"gpu": "b200-sxm-180gb"},
    {"gpu": "gb200-nvl72"},
    {"gpu": "h800-sxm-80gb"},
    {"gpu": "l40s-48gb"},
    {"gpu": MINE},
    {"node_type": "aws-p4d.24xlarge"},
    {
        "gpu": "h100-sxm-80gb",
        "network_topology": "rail_optimized",
        "nodes_per_leaf": 4,
        "network_oversubscription": 4.0,
    },
    {
        "gpu": "h100-sxm-80gb",
        "gpus_per_node": 4,
        "nvlink_domain_size": 4,
        "inter_node_bandwidth_bytes_per_second": 1.25e10,
    },
    {"two": ["a100-sxm-80gb", "h100-sxm-80gb"]},
    {"two": ["h100-sxm-80gb", "h200-sxm-141gb"]},
]
TRAINING: dict[str, list[Any]] = {
    "sequence_length": [512, 2048, 4096, 8192, 32768],
    "precision": ["bf16", "fp16", "fp8", "mxfp8", "nvfp4", "fp32"],
    "framework": ["megatron-core", "megatron-core", "torch-fsdp", "nanotron"],
}
RARE: dict[str, list[Any]] = {
    "framework_version": ["0.12", "0.16.1", "26.02.01"],
    "task": [
        {"task": "sft"},
        {"task": "lora", "lora": {"rank": 16}},
        {"task": "lora", "lora": {"rank": 64, "target_modules": ["q_proj", "v_proj"]}},
        {"frozen": ["embedding", "output_layer"]},
    ],
    "optimizer": [{"optimizer": "sgd"}, {"optimizer": "muon"}],
    "states": [
        {"optimizer_precision": "bf16", "exp_avg_sq_precision": "fp16"},
        {"master_precision": "remainder"},
        {"gradient_precision": "bf16"},
        {"parameter_precision": "fp8"},
        {"parameter_precision": "fp32"},
        {"master_precision": "none"},
    ],
    "offload": [
        {"offload": "optimizer"},
        {"offload": "optimizer", "offload_fraction": 0.5},
        {"offload": "activations", "offload_fraction": 0.25},
    ],
    "lengths": [
        {"sequence_lengths": "synthetic-code"},
        {"sequence_lengths": "synthetic-code", "packed": True},
        {"sequence_lengths": "synthetic-long-sft", "packed": True},
        {"decoder_sequence_length": 256},
    ],
    "attention": [
        {"attention": "unfused"},
        {"attention": "unfused", "dropout": 0.1},
        {"dropout": 0.1},
    ],
    "fp8_recipe": [{"fp8_recipe": "tensorwise"}, {"fp8_recipe": "blockwise"}],
    "head": [{"cross_entropy": "fused"}, {"attention_mask_flops": "causal"}],
    "experts": [{"expert_imbalance": 1.3}, {"expert_capacity_factor": 1.25}],
    "overlap": [
        {"overlap": {"tensor_parallel": False, "data_parallel": False}},
        {"overlap": {"tensor_parallel": True, "data_parallel": True}},
        {"overlap": {"context_parallel": False, "pipeline_parallel": False}},
        {"overlap": {"expert_parallel": True}},
        {"overlap": {"expert_parallel": False, "pipeline_parallel": True}},
        {"cuda_graphs": True},
    ],
    "total": [{"total_tokens": 1e12}, {"total_tokens": 1e12, "reliability": {}}],
}
PARALLEL: dict[str, list[Any]] = {
    "tensor_parallel_size": [1, 1, 2, 4, 8, 16],
    "pipeline_parallel_size": [1, 1, 2, 4, 8, 16],
    "context_parallel_size": [1, 1, 1, 2, 4],
    "micro_batch_size": [1, 1, 2, 4],
    "zero_stage": [None, 0, 1, 2, 3],
    "recompute": [
        None,
        "selective",
        "full",
        {"granularity": "full", "method": "uniform", "num_layers": 2},
        {"granularity": "full", "method": "block", "num_layers": 1},
        {"granularity": "selective", "modules": ["core_attn", "mlp"]},
        {"granularity": "selective", "modules": ["layernorm", "moe_act"]},
        {"granularity": "selective", "modules": ["mla_up_proj", "moe"]},
        "per_op",
        "per_layer",
    ],
}
RARELY: dict[str, list[Any]] = {
    "virtual_pipeline_parallel_size": [2, 3, 4],
    "pipeline_schedule": ["gpipe", "zb-h1", "zbv", "dualpipe"],
    "rank_order": ["tp-cp-ep-pp-dp", "tp-pp-cp-ep-dp", "tp-ep-cp-dp-pp"],
    "context_parallel_communication": ["all_gather", "a2a", "a2a+p2p"],
    "data_parallel_shard_size": [2, 4],
    "sequence_parallel": [False],
    "moe_token_dispatcher_type": ["flex", "alltoall"],
}
EXPERTS = {"expert_parallel_size": [1, 2, 4, 8, 16], "expert_tensor_parallel_size": [1, 1, 2]}
SERVED = [
    "llama-3-8b",
    "llama-3-70b",
    "llama-3.1-405b",
    "qwen3-32b",
    "gpt3-6.7b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "mistral-7b",
    ODD_LATENT,
    ODD_EXPERTS,
]
INFERENCE: dict[str, list[Any]] = {
    "engine": [
        {"engine": "vllm"},
        {"engine": "vllm", "engine_version": "0.11.0"},
        {"engine": "sglang"},
        {"engine": "sglang", "engine_version": "0.5.1.post1"},
        {"engine": "trtllm"},
        {"engine": "megatron-core"},
    ],
    "precision": ["bf16", "fp16", "fp8", "mxfp8", "nvfp4", "int8", "int4"],
    "kv_cache_precision": [None, None, "bf16", "fp8"],
    "lengths": [
        {"input_length": prompt, "output_length": answer}
        for prompt, answer in ((128, 128), (1000, 1000), (4000, 500), (500, 4000), (32000, 1000))
    ],
    "load": [
        {"concurrency": 1},
        {"concurrency": 8},
        {"concurrency": 64},
        {"concurrency": 512},
        {"concurrency": 4096},
        {"concurrency": 64, "load": {"arrival": "burst"}},
        {"concurrency": 8, "load": {"arrival": "closed"}},
        {"request_rate_per_second": 0.5},
        {"request_rate_per_second": 8.0, "load": {"arrival": "poisson"}},
    ],
}
INFERENCE_RARE: dict[str, list[Any]] = {
    "prefix_cache_hit_rate": [0.5, 0.95],
    "speculative": [
        {"num_speculative_tokens": 3, "acceptance_rate": 0.7, "draft_cost_fraction": 0.05},
        {"num_speculative_tokens": 1, "acceptance_rate": 0.9},
    ],
}
SERVING: dict[str, list[Any]] = {
    "tensor_parallel_size": [1, 2, 4, 8],
    "pipeline_parallel_size": [1, 1, 1, 2, 4],
    "attention_data_parallel_size": [1, 1, 1, 2, 4],
    "max_num_seqs": [None, None, 16, 1024],
    "max_num_batched_tokens": [None, None, 512, 16384],
}
TARGETS = [
    None,
    None,
    {"ttft_s": 1.0, "tpot_s": 0.03},
    {"tpot_p99_s": 0.02},
    {"request_latency_s": 5.0, "ttft_p90_s": 0.5},
]


class Draws:
    """Values of axes by chance, remembered with their axes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.axes: dict[str, str] = {}

    def of(self, axis: str, values: list[Any]) -> Any:
        value = self.random.choice(values)
        self.axes[axis] = json.dumps(value)
        return value

    def laid(self, axes: dict[str, list[Any]], *, chance: float = 1.0) -> dict[str, Any]:
        """A mapping with a value of each axis, or of those that chance takes; a mapping as a value
        is many keys at once.
        """
        laid: dict[str, Any] = {}
        for axis, values in axes.items():
            if self.random.random() >= chance:
                continue
            value = self.of(axis, values)
            whole = isinstance(value, dict) and axis not in ("recompute", "speculative")
            laid |= value if whole else {} if value is None else {axis: value}
        return laid

    def cluster(self, num_gpus: int) -> dict[str, Any]:
        cluster = dict(self.of("cluster", CLUSTERS))
        kinds = cluster.pop("two", None)
        if kinds is None:
            return cluster | {"num_gpus": num_gpus}
        return {"stages": [{"gpu": gpu, "num_gpus": max(num_gpus // 2, 1)} for gpu in kinds]}


def training(seed: int) -> Drawn:
    """A training query of one configuration, legal or not."""
    draws = Draws(seed)
    model = draws.of("model", MODELS)
    parallel = draws.laid(PARALLEL) | draws.laid(RARELY, chance=0.12)
    if (
        "qwen3-30b" in str(model)
        or "mixtral" in str(model)
        or "deepseek" in str(model)
        or "experts" in str(model)
    ):
        parallel |= draws.laid(EXPERTS)
    ranks = (
        parallel["tensor_parallel_size"]
        * parallel["pipeline_parallel_size"]
        * parallel["context_parallel_size"]
    )
    replicas = draws.of("replicas", [1, 2, 4, 8, 16, 64])
    batch = (
        parallel["micro_batch_size"] * replicas * draws.of("micro_batches", [1, 2, 8, 16, 32, 96])
    )
    work = draws.laid(TRAINING) | draws.laid(RARE, chance=0.12)
    return {
        "kind": "training",
        "model": model,
        "cluster": draws.cluster(ranks * replicas + draws.of("spare", [0] * 40 + [8])),
        "training": {"global_batch_size": batch} | work,
        "parallel": parallel,
    }, draws.axes


def serving(seed: int) -> Drawn:
    """A serving query of one configuration, legal or not."""
    draws = Draws(seed)
    model = draws.of("model", SERVED)
    parallel = draws.laid(SERVING)
    if any(word in str(model) for word in ("a3b", "mixtral", "deepseek", "experts", "oss")):
        parallel |= draws.laid({"expert_parallel_size": [1, 2, 4, 8]})
    ranks = (
        parallel["tensor_parallel_size"]
        * parallel["pipeline_parallel_size"]
        * parallel["attention_data_parallel_size"]
    )
    query = {
        "kind": "inference",
        "model": model,
        "cluster": draws.cluster(ranks * draws.of("replicas", [1, 1, 2, 4])),
        "inference": draws.laid(INFERENCE) | draws.laid(INFERENCE_RARE, chance=0.25),
        "parallel": parallel,
    }
    targets = draws.of("targets", TARGETS)
    return query | ({} if targets is None else {"targets": targets}), draws.axes


def chosen(
    draw: Callable[[int], Drawn], *, pool: int, number: int, infeasible: float
) -> list[dict[str, Any]]:
    """Of `pool` drawn queries that can be answered `number`, each the one that adds most pairs of
    values not met before; a share of them, `infeasible`, does not fit or is illegal.
    """
    left: dict[bool, list[tuple[dict[str, Any], frozenset[Any]]]] = {True: [], False: []}
    for seed in range(SEED, SEED + pool):
        query, axes = draw(seed)
        try:
            answer = hp_tool.estimate(query)
        except HpToolError:
            continue
        pairs = frozenset(itertools.combinations(sorted(axes.items()), 2))
        left[answer.estimate.feasible].append((query, pairs))
    met: set[Any] = set()
    queries = []
    for place in range(number):
        rows = left[(place * infeasible) % 1.0 < 1.0 - infeasible]
        best = max(range(len(rows)), key=lambda row: len(rows[row][1] - met))
        query, pairs = rows.pop(best)
        met |= pairs
        queries.append(query)
    sys.stderr.write(f"{number} of {sum(map(len, left.values())) + number}: {len(met)} pairs\n")
    return queries


if __name__ == "__main__":
    kinds = (("train", training, 12_000, 290, 0.3), ("serve", serving, 2_500, 94, 0.25))
    for name, draw, pool, number, infeasible in kinds:
        for place, query in enumerate(
            chosen(draw, pool=pool, number=number, infeasible=infeasible)
        ):
            print(json.dumps({"id": f"{name}-{place:03d}"} | query, separators=(",", ":")))
