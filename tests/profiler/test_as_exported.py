"""A run is configured as the exported command configures the training, field by field; what its
host lacks is named.
"""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

import pytest

from hp_tool.domain.measurement import Fidelity, Hardware, Measurement, ProfileRequest
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.records import RunRecord
from hp_tool.domain.states import RunState
from hp_tool.domain.switches import drop_unavailable, megatron_switches
from hp_tool.formats.tools import megatron_lm
from hp_tool.loop.tuning.problem import build_problem
from hp_tool.loop.tuning.training_result import TuningProblem
from hp_tool.questions import schema
from hp_tool.questions.training.setup import training_setup
from tests.conftest import skip_or_fail

pytestmark = pytest.mark.components

GPU = "h100-sxm-80gb"
QUERIES: dict[str, dict[str, Any]] = {
    "dense": {
        "model": "llama-3-8b",
        "parallel": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    },
    "interleaved": {
        "model": "llama-3-8b",
        "parallel": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 4,
            "virtual_pipeline_parallel_size": 2,
        },
    },
    "recomputed": {
        "model": "gpt-22b",
        "training": {"sequence_length": 2048},
        "parallel": {"tensor_parallel_size": 8, "recompute": "full"},
    },
    "switched": {
        "model": "llama-3-8b",
        "training": {
            "overlap": {
                "data_parallel": False,
                "tensor_parallel": False,
                "pipeline_parallel": False,
            },
            "cuda_graphs": True,
            "cross_entropy": "in_place",
        },
        "parallel": {"tensor_parallel_size": 2, "zero_stage": 0},
    },
    "context": {
        "model": "llama-3-8b",
        "parallel": {
            "context_parallel_size": 2,
            "context_parallel_communication": "a2a",
            "tensor_parallel_size": 2,
        },
    },
    "experts": {
        "model": "qwen3-30b-a3b",
        "training": {"cross_entropy": "fused"},
        "parallel": {"expert_parallel_size": 8, "tensor_parallel_size": 1},
    },
    "experts of a recipe": {
        "model": "qwen3-30b-a3b",
        "training": {"recipe": "megatron-bridge-26.02", "cuda_graphs": False},
        "parallel": {
            "expert_parallel_size": 16,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
        },
    },
    "latent": {
        "model": "deepseek-v2-lite",
        "training": {"cross_entropy": "fused"},
        "parallel": {
            "expert_parallel_size": 8,
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 1,
        },
    },
}
OURS = {
    "activation_func",  # as gated_linear_unit
    "params_dtype",
    "pipeline_dtype",  # as bf16
    "deallocate_pipeline_outputs",  # always, in pretrain_gpt.py
    "moe_router_load_balancing_type",
    "moe_router_force_load_balancing",  # a few steps would not balance the router
    "fp8",
    "fp8_recipe",
    "fp16",  # not asked for here
}
"""Fields that a run sets for itself."""


def meaning(flags: megatron_lm.Flags) -> dict[str, Any]:
    """Fields of Megatron Core's classes as megatron/training/arguments.py sets them from these
    flags.
    """

    def on(name: str) -> bool:
        return name in flags

    def number(name: str, default: int | None = None) -> int | None:
        return int(flags[name][0]) if on(name) else default

    def word(name: str, default: str | None = None) -> str | None:
        return flags[name][0] if on(name) else default

    gated, interleaved = on("swiglu"), on("num-virtual-stages-per-pipeline-rank")
    beside = interleaved and not on("no-overlap-p2p-communication")
    rotary = word("position-embedding-type") == "rope"
    found: dict[str, Any] = {
        **{
            field: number(field.replace("_", "-"))
            for field in (
                "num_layers",
                "hidden_size",
                "num_attention_heads",
                "kv_channels",
                "ffn_hidden_size",
                "tensor_model_parallel_size",
                "pipeline_model_parallel_size",
                "recompute_num_layers",
                "mtp_num_layers",
            )
        },
        "num_query_groups": number("num-query-groups", number("num-attention-heads")),
        "gated_linear_unit": gated,
        "normalization": word("normalization"),
        "add_bias_linear": not on("disable-bias-linear"),
        "add_qkv_bias": on("add-qkv-bias") or not on("disable-bias-linear"),
        "qk_layernorm": on("qk-layernorm"),
        "hidden_dropout": float(word("hidden-dropout") or 0.1),
        "attention_dropout": float(word("attention-dropout") or 0.1),
        "bf16": on("bf16"),
        "virtual_pipeline_model_parallel_size": number("num-virtual-stages-per-pipeline-rank"),
        "context_parallel_size": number("context-parallel-size", 1),
        "cp_comm_type": word("cp-comm-type", "p2p"),
        "sequence_parallel": on("sequence-parallel"),
        "attention_backend": word("attention-backend"),
        "recompute_granularity": word("recompute-granularity"),
        "recompute_method": word("recompute-method"),
        "recompute_modules": flags.get("recompute-modules"),
        "account_for_embedding_in_pipeline_split": on("account-for-embedding-in-pipeline-split"),
        "account_for_loss_in_pipeline_split": on("account-for-loss-in-pipeline-split"),
        # What is overlapped and fused.
        "overlap_grad_reduce": on("overlap-grad-reduce"),
        "overlap_param_gather": on("overlap-param-gather"),
        "tp_comm_overlap": on("tp-comm-overlap"),
        "overlap_p2p_comm": beside,
        "batch_p2p_comm": not beside,
        "overlap_moe_expert_parallel_comm": on("overlap-moe-expert-parallel-comm"),
        "apply_rope_fusion": rotary and not on("no-rope-fusion"),
        "bias_activation_fusion": gated or not on("disable-bias-linear"),
        "bias_dropout_fusion": not on("no-bias-dropout-fusion"),
        "masked_softmax_fusion": not on("no-masked-softmax-fusion"),
        "gradient_accumulation_fusion": not on("no-gradient-accumulation-fusion"),
        "cross_entropy_loss_fusion": on("cross-entropy-loss-fusion"),
        "cross_entropy_fusion_impl": word("cross-entropy-fusion-impl", "native"),
        "cuda_graph_impl": word("cuda-graph-impl", "none"),
        "cuda_graph_scope": word("cuda-graph-scope"),
        "use_distributed_optimizer": on("use-distributed-optimizer"),
        "grad_reduce_in_fp32": on("accumulate-allreduce-grads-in-fp32")
        or (on("bf16") and not on("grad-reduce-in-bf16")),
    }
    if on("multi-latent-attention"):
        for field in (
            "q_lora_rank",
            "kv_lora_rank",
            "qk_head_dim",
            "qk_pos_emb_head_dim",
            "v_head_dim",
        ):
            found[field] = number(field.replace("_", "-"))
        found["rope_type"] = word("rope-type", "yarn")
    if on("num-experts"):
        layers, freq = found["num_layers"], word("moe-layer-freq", "1")
        found |= {
            "num_moe_experts": number("num-experts"),
            "moe_router_topk": number("moe-router-topk", 2),
            "moe_ffn_hidden_size": number("moe-ffn-hidden-size"),
            "moe_shared_expert_intermediate_size": number("moe-shared-expert-intermediate-size"),
            "moe_shared_expert_gate": False,
            "moe_layer_freq": [1] * layers if freq == "1" else eval(str(freq)),
            "moe_router_num_groups": number("moe-router-num-groups"),
            "moe_router_group_topk": number("moe-router-group-topk"),
            "moe_token_dispatcher_type": word("moe-token-dispatcher-type", "allgather"),
            "moe_expert_capacity_factor": word("moe-expert-capacity-factor"),
            "moe_grouped_gemm": on("moe-grouped-gemm"),
            "moe_permute_fusion": on("moe-permute-fusion"),
            "expert_model_parallel_size": number("expert-model-parallel-size", 1),
            "expert_tensor_parallel_size": number(
                "expert-tensor-parallel-size", found["tensor_model_parallel_size"]
            ),
        }
    return found


def planned(config: ParallelConfig) -> RunRecord:
    return RunRecord(
        id="r",
        search_id="s",
        number=0,
        digest="",
        attempt=0,
        state=RunState.INTENDED,
        parallel=config,
        fidelity=Fidelity(),
        predicted={},
        job_name="r",
        token=0,
        created_at=datetime.now(UTC),
    )


def asked(name: str) -> tuple[TuningProblem, ProfileRequest, megatron_lm.Flags]:
    """What a search over this query would run first, and what is exported of the same
    configuration.
    """
    changes = QUERIES[name]
    query = {
        "kind": "training",
        "cluster": {"gpu": GPU, "num_gpus": 16, "gpus_per_node": 8},
        **changes,
        "training": {
            "sequence_length": 4096,
            "global_batch_size": 64,
            **changes.get("training", {}),
        },
        "parallel": {"micro_batch_size": 1, **changes["parallel"]},
        "search": {"launcher": "slurm"},
    }
    problem = build_problem(
        query=schema.parse_query(query), query_json=query, hardware=Hardware(gpu=GPU, num_gpus=16)
    )
    assert isinstance(problem, TuningProblem)
    config = problem.search.candidates.config(0)
    request = problem.search.request(planned(config))
    return problem, request, megatron_lm.flags(training_setup(problem.training, config))


@pytest.fixture(autouse=True)
def _megatron() -> None:
    try:
        from hp_tool.cluster.profiler import model  # noqa: F401
    except ImportError:
        skip_or_fail(
            component="MEGATRON",
            reason="torch and megatron-core (the profiler extra) are not installed",
        )


@pytest.mark.parametrize("name", QUERIES)
def test_a_run_is_configured_as_the_exported_command_is(name: str) -> None:
    from hp_tool.cluster.profiler.model import OF_DDP, ddp_fields, transformer_fields

    _, request, flags = asked(name)
    wanted = megatron_switches(
        model=request.model,
        workload=request.training,
        parallel=request.parallel,
        dispatcher=request.parallel.moe_token_dispatcher_type or "alltoall",
        nvlink_domain_size=request.nvlink_domain_size,
    )
    run = transformer_fields(request, run=wanted, cuda=True) | ddp_fields(request)
    run["attention_backend"] = run["attention_backend"].name
    exported = meaning(flags)
    compared = (run.keys() | exported.keys()) - OURS
    assert compared >= {"num_layers", "apply_rope_fusion", *OF_DDP}
    usual = {
        "cuda_graph_scope": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
    }
    differing = {
        field: (run.get(field, usual.get(field)), exported.get(field, usual.get(field)))
        for field in compared
        if run.get(field, usual.get(field)) != exported.get(field, usual.get(field))
    }
    assert differing == {}


def test_what_a_host_lacks_is_named_and_the_measurement_is_of_another_software() -> None:
    problem, request, _ = asked("experts")
    from hp_tool.cluster.profiler.support import supported_overlaps

    run, differences = supported_overlaps(
        request
    )  # this host has neither Transformer Engine nor Apex
    assert differences["apply_rope_fusion"] == ("transformer-engine",)
    assert differences["gradient_accumulation_fusion"] == ("transformer-engine", "apex")
    assert not run["apply_rope_fusion"] and run["overlap_grad_reduce"]
    record = planned(problem.search.candidates.config(0))
    whole = problem.search.new_measurement(
        run=record, measurement=Measurement(status="ok", step_s=1.0)
    )
    lacking = problem.search.new_measurement(
        run=record, measurement=Measurement(status="ok", step_s=1.0, differences=differences)
    )
    assert whole.cluster_key == problem.series.cluster_key
    assert lacking.cluster_key == f"{problem.series.cluster_key}/without apex, transformer-engine"


def test_nothing_that_a_host_lacks_stays_on() -> None:
    _, request, _ = asked("switched")
    everything = megatron_switches(
        model=request.model, workload=request.training, parallel=request.parallel
    )
    run, differences = drop_unavailable(
        everything, lacking=("cuda", "transformer-engine", "apex", "deep-ep")
    )
    assert (run["cuda_graph_impl"], run["cross_entropy_fusion_impl"]) == ("none", "native")
    assert {name for name in run if run[name] != everything[name]} == differences.keys()
    assert drop_unavailable(everything, lacking=()) == (everything, {})


def test_tokens_are_spread_evenly_where_the_query_is_about_an_even_load() -> None:
    problem, request, _ = asked("experts")
    assert request.balanced_routing
    search = problem.search
    record = planned(search.candidates.config(0))
    uneven = dataclasses.replace(
        search, training=dataclasses.replace(search.training, expert_imbalance=1.4)
    )
    assert not uneven.request(record).balanced_routing
    asked_for = dataclasses.replace(
        uneven, settings=dataclasses.replace(search.settings, balanced_routing=True)
    )
    assert asked_for.request(record).balanced_routing
    assert not asked("dense")[1].balanced_routing
