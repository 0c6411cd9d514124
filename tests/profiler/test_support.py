"""What the profiler refuses, and says so by name."""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.cluster.profiler.support import check_training
from hp_tool.domain.parallel import Recompute
from hp_tool.domain.workload import OverlapSpec
from hp_tool.errors import InputError, UnsupportedError
from tests.profiler.requests import DEEPSEEK, LLAMA, MOE, request

GATHERED = {"context_parallel_size": 2, "context_parallel_communication": "all_gather"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": LLAMA},
        {"model": {**LLAMA, "attention_bias": True, "mlp_bias": False}},
        {
            "model": {
                **LLAMA,
                "attention_bias": True,
                "attention_output_bias": False,
                "mlp_bias": False,
            }
        },
        {"model": {**LLAMA, "query_key_norm": "head", "sliding_window": 32}},
        {"model": {"position_embedding_offset": 2}},
        {"model": DEEPSEEK},
        {"model": MOE, "parallel": {"expert_parallel_size": 2, "data_parallel_size": 2}},
        {
            "model": {**MOE, "num_nextn_predict_layers": 1},
            "parallel": {"moe_token_dispatcher_type": "flex"},
        },
        # Each of 2 expert ranks has 3 of 6 experts; 2 tensor ranks split every one of them.
        {
            "model": {**MOE, "num_experts": 6},
            "parallel": {
                "tensor_parallel_size": 2,
                "data_parallel_size": 2,
                "expert_parallel_size": 2,
                "expert_tensor_parallel_size": 2,
            },
        },
        {"training": {"cuda_graphs": True, "overlap": OverlapSpec(data_parallel=False)}},
        {"parallel": GATHERED},
        {"parallel": {"recompute": Recompute(granularity="full", method="block", num_layers=2)}},
        {
            "training": {
                "precision": "bf16",
                "parameter_precision": "bf16",
                "gradient_precision": "bf16",
            }
        },
    ],
)
def test_what_it_runs(changes: dict[str, Any]) -> None:
    check_training(request(**changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": {"num_experts": 8}}, "experts with biases"),
        ({"model": {**MOE, "router_bias": True}}, "router_bias: True"),
        ({"model": MOE, "training": {"cuda_graphs": True}}, "cuda_graphs of a model with experts"),
        (
            {"training": {"overlap": OverlapSpec(context_parallel=False)}},
            "training.overlap.context_parallel: False",
        ),
        ({"training": {"optimizer_precision": "bf16"}}, "optimizer states in 16 bits on a CPU"),
        (
            {
                "training": {"overlap": OverlapSpec(pipeline_parallel=False)},
                "parallel": {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2},
            },
            "interleaving over two stages without",
        ),
        (
            {"model": {**DEEPSEEK, "position_embedding": "none"}},
            "latent attention without rotary positions",
        ),
        (
            {
                "model": MOE,
                "parallel": {"recompute": Recompute(granularity="selective", modules=("moe_act",))},
            },
            "moe_act without",
        ),
        ({"model": {"architecture": "encoder"}}, "architecture: encoder"),
        ({"model": {"position_embedding": "relative"}}, "position_embedding: relative"),
        ({"model": {"attention_bias": False, "mlp_bias": True}}, "mlp_bias without attention_bias"),
        ({"model": {"attention_output_bias": False, "mlp_bias": True}}, "attention_output_bias"),
        ({"model": {"sliding_window": 16}}, "a sliding_window shorter than sequence_length"),
        ({"model": {"norms_per_layer": 4}}, "norms_per_layer: 4"),
        ({"model": {"norm_vectors": "none"}}, "norm_vectors: none"),
        ({"model": {"query_key_norm": "all_heads"}}, "query_key_norm: all_heads"),
        ({"model": {"attention_sinks": True}}, "attention_sinks: True"),
        ({"model": {"embedding_norm": True}}, "embedding_norm: True"),
        ({"model": {"output_bias": True}}, "output_bias: True"),
        ({"training": {"precision": "fp8"}}, "precision fp8 without Transformer Engine"),
        ({"training": {"precision": "nvfp4"}}, "precision: nvfp4"),
        (
            {"training": {"activation_func_fp8_input_store": True}},
            "training.activation_func_fp8_input_store: True",
        ),
        ({"model": {"v_head_dim": 8}}, "model.v_head_dim: 8"),
        ({"parallel": {"rank_order": "tp-cp-ep-pp-dp"}}, "parallel.rank_order: tp-cp-ep-pp-dp"),
        ({"training": {"framework": "nanotron"}}, "framework: nanotron"),
        ({"training": {"framework": "internevo"}}, "framework: internevo"),
        ({"training": {"offload": "optimizer"}}, "offload: optimizer"),
        ({"training": {"offload_fraction": 0.5}}, "offload_fraction: 0.5"),
        ({"training": {"optimizer": "muon"}}, "optimizer: muon"),
        ({"training": {"exp_avg_sq_precision": "fp16"}}, "exp_avg_sq_precision: fp16"),
        ({"training": {"master_precision": "remainder"}}, "master_precision: remainder"),
        (
            {"parallel": {"context_parallel_size": 2}},
            "context parallelism by p2p on a CPU; all_gather is run",
        ),
        (
            {"parallel": {"context_parallel_size": 2}, "gpu": "h100-sxm-80gb"},
            "by p2p without Transformer Engine",
        ),
        ({"parallel": GATHERED, "training": {"attention": "unfused"}}, "with unfused attention"),
        ({"parallel": {"expert_parallel_size": 2}}, "expert parallelism of a dense model"),
        ({"parallel": {"zero_stage": 3}}, "zero_stage: 3"),
        ({"parallel": {"data_parallel_shard_size": 2}}, "data_parallel_shard_size"),
        ({"parallel": {"recompute": "per_op"}}, "recompute: per_op"),
        ({"model": {"vocab_size": 255}, "parallel": {"tensor_parallel_size": 2}}, "vocab_size 255"),
    ],
)
def test_what_it_does_not_run(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        check_training(request(**changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_gpus": 4}, "is not num_gpus 4"),
        ({"parallel": {"micro_batch_size": 3}}, "not divisible by 3"),
        ({"parallel": GATHERED, "training": {"sequence_length": 30}}, "not divisible by 2 x CP 2"),
        (
            {"model": MOE, "parallel": {"expert_parallel_size": 2}},
            "not divisible by expert groups of 2",
        ),
        (
            {"model": {"max_position_embeddings": 16}},
            "sequence_length above max_position_embeddings 16",
        ),
        ({"steps": 0}, "steps must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_together(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        check_training(request(**changes))
