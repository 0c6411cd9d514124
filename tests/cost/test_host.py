"""The host sets the pace where layers are small, and CUDA graphs take it out of the way."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hp_tool.catalog import cluster, gpu, model
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.host import host_load, launches
from hp_tool.cost.lora import added_launches
from hp_tool.cost.pipeline_stages import stage_of
from hp_tool.domain.graphs import MODULES_WITHOUT_EXPERTS, recorded_modules
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.workload import LoraSpec, TrainingWorkload
from hp_tool.questions.training import estimate
from tests.cost.cases import case_of


def step(
    *, name: str = "h100-sxm-80gb", sequence: int = 512, cuda_graphs: bool = False
) -> Estimate:
    """Llama 3 8B at TP 8: few tokens make small layers."""
    return estimate(
        query=Query(
            kind="training",
            model="llama-3-8b",
            cluster=ClusterQuery(gpu=name, num_gpus=8),
            training=TrainingWorkload(
                sequence_length=sequence, global_batch_size=8, cuda_graphs=cuda_graphs
            ),
            parallel=ParallelQuery(tensor_parallel_size=8, micro_batch_size=1),
        )
    )


def parts(found: Estimate) -> dict[str, float]:
    assert found.time is not None
    return found.time.parts_s


def test_small_layers_take_what_their_host_takes() -> None:
    host = efficiency_profile(
        gpu=gpu("h100-sxm-80gb"), framework="megatron-core"
    ).framework.host_launch_s
    found = parts(step())
    device = sum(found[part] for part in ("compute", "tensor_parallel", "overhead"))
    assert found["overhead"] > 0.0
    # 8 micro-batches of 32 layers with 41 kernels and collectives each; the ends add a little
    assert device == pytest.approx(8 * 32 * 41 * host, rel=0.1)


def test_large_layers_never_wait() -> None:
    assert parts(step(sequence=65536))["overhead"] == 0.0


def test_graphs_leave_the_device_alone() -> None:
    bound, free = parts(step()), parts(step(cuda_graphs=True))
    assert free["overhead"] == 0.0
    assert {name: value for name, value in free.items() if name != "overhead"} == pytest.approx(
        {name: value for name, value in bound.items() if name != "overhead"}
    )


def test_graphs_change_nothing_else_in_the_profile() -> None:
    plain, graphs = (
        efficiency_profile(
            gpu=gpu("h100-sxm-80gb"), framework="megatron-core", cuda_graphs=on
        ).framework
        for on in (False, True)
    )
    assert graphs == dataclasses.replace(
        plain, host_launch_s=0.0, expert_overhead_s=0.0, expert_launch_s=0.0
    )


def test_graphs_of_modules_leave_the_experts_to_the_host() -> None:
    card = gpu("h100-sxm-80gb")
    plain, layers, routers = (
        efficiency_profile(
            gpu=card,
            framework="megatron-core",
            cuda_graphs=bool(modules),
            cuda_graph_modules=modules,
        ).framework
        for modules in (
            None,
            ("attn", "moe_router", "moe_preprocess"),
            ("moe_router", "moe_preprocess"),
        )
    )
    assert plain.expert_launch_s > 0.0
    assert layers == dataclasses.replace(plain, host_launch_s=0.0, expert_overhead_s=0.0)
    assert routers == dataclasses.replace(plain, expert_overhead_s=0.0)
    only_router = efficiency_profile(
        gpu=card, framework="megatron-core", cuda_graphs=True, cuda_graph_modules=("moe_router",)
    )
    assert only_router.framework == plain, "the host still reads the counts"


@pytest.mark.parametrize(
    ("training", "modules"),
    [
        ({"framework_version": "26.04"}, MODULES_WITHOUT_EXPERTS),
        ({"framework_version": "0.17.1"}, MODULES_WITHOUT_EXPERTS),
        ({}, MODULES_WITHOUT_EXPERTS),
        ({"framework_version": "26.06"}, None),
        ({"framework_version": "core_v0.18.0"}, None),
        ({"framework_version": "25.09", "expert_capacity_factor": 1.0}, None),  # fixed shapes
        ({"framework_version": "26.06", "cuda_graph_modules": ("attn",)}, ("attn",)),
        ({"cuda_graphs": None}, None),
    ],
)
def test_what_graphs_hold_of_experts_follows_the_release(
    training: dict[str, Any], modules: tuple[str, ...] | None
) -> None:
    workload = TrainingWorkload(
        **{"sequence_length": 4096, "global_batch_size": 8, "cuda_graphs": True} | training
    )
    assert recorded_modules(workload, model("qwen3-30b-a3b")) == modules
    assert recorded_modules(workload, model("llama-3-8b")) == workload.cuda_graph_modules


def test_experts_recomputation_collectives_and_adapters_launch_more() -> None:
    """Dense: 3 + 5 elementwise kernels, 2 matmuls and their 4 in the backward pass, the core twice;
    4 + 5 and 6 in the MLP; with experts 16 + 20 and 6 in its place. Tensor parallelism adds 4
    collectives forward and 6 backward.
    """
    dense, experts = model("llama-3-8b"), model("qwen3-30b-a3b")
    ten = stage_of(dense, [10.0])
    assert launches(dense, ten, tensor_parallel_size=1) == (120.0, 190.0)
    assert sum(launches(experts, stage_of(experts, [10.0]), tensor_parallel_size=1)) == 580.0
    assert launches(dense, ten, tensor_parallel_size=1, recomputed_fraction=1.0) == (120.0, 310.0)
    assert launches(dense, ten, tensor_parallel_size=8) == (160.0, 250.0)
    alone = Candidates.alone(ParallelConfig())
    two = LoraSpec(rank=16, target_modules=("linear_qkv", "linear_proj"))
    # Two pairs of A and B, each with a scaling and an addition; four weight gradients less.
    assert added_launches(model("llama-3-8b"), two, alone) == (8.0, 8.0)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "num_gpus", "each_us"),
    [
        (4, 2, 8, 1),  # one node: no stall
        (8, 1, 16, 1),  # no group spans nodes
        (16, 1, 16, 1 + 16 * 1),  # 31 us over 31 launches, for each of 16 ranks
        (8, 2, 16, 1 + 8 * 3),  # 93 us over 31 launches, for each of 8 ranks
        (16, 2, 32, 1 + 16 * (1 + 3)),  # both
    ],
)
def test_stalls_of_a_layer_are_spread_over_its_launches_and_add_up_over_tensor_parallel_ranks(
    tensor: int, pipeline: int, num_gpus: int, each_us: int
) -> None:
    """A dense layer has 12 kernels forward and 19 backward: 31. 4 and 6 tensor-parallel collectives
    are launched besides.

    Ten layers launch 160 and 250. A launch takes 1 us; the device is busy for 0.1 ms in either
    pass.
    """
    machine = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=num_gpus))
    workload = TrainingWorkload(sequence_length=512, global_batch_size=8)
    case = case_of(model=model("llama-3-8b"), workload=workload, cluster=machine)
    framework = dataclasses.replace(
        case.profile.framework,
        host_launch_s=1e-6,
        host_tensor_stall_s=31e-6,
        host_pipeline_stall_s=93e-6,
    )
    case = dataclasses.replace(case, profile=dataclasses.replace(case.profile, framework=framework))
    waits = host_load(
        case=case,
        candidates=Candidates.alone(
            ParallelConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
        ),
        layers=stage_of(case.model, [10.0]),
        recomputed_fraction=0.0,
        forward_s=1e-4,
        backward_s=1e-4,
    ).waits()
    assert waits == pytest.approx((160 * each_us * 1e-6 - 1e-4, 250 * each_us * 1e-6 - 1e-4))


@pytest.mark.parametrize(
    ("training", "launched"),
    [
        ({}, (120, 190)),
        # one pair: 4 kernels forward, 6 backward; 4 weight gradients fall away
        ({"lora": LoraSpec(rank=16, target_modules=("linear_qkv",))}, (120 + 40, 190 + 20)),
        # eager: two RMSNorms (5, 9), the rotary embedding (9, 13) and the gate (1, 2)
        ({"kernel_fusion": False}, (120 + 200, 190 + 330)),
        ({"kernel_fusion": False, "attention": "unfused"}, (120 + 260, 190 + 380)),
    ],
)
def test_adapters_and_kernels_that_are_not_fused_are_launched_too(
    training: dict[str, Any], launched: tuple[int, int]
) -> None:
    """Ten layers; a launch takes 1 us, and the device is busy for 0.1 ms in either pass."""
    workload = TrainingWorkload(sequence_length=512, global_batch_size=8, **training)
    case = case_of(model=model("llama-3-8b"), workload=workload)
    framework = dataclasses.replace(case.profile.framework, host_launch_s=1e-6)
    case = dataclasses.replace(case, profile=dataclasses.replace(case.profile, framework=framework))
    waits = host_load(
        case=case,
        candidates=Candidates.alone(ParallelConfig()),
        layers=stage_of(case.model, [10.0]),
        recomputed_fraction=0.0,
        forward_s=1e-4,
        backward_s=1e-4,
    ).waits()
    assert waits == pytest.approx([count * 1e-6 - 1e-4 for count in launched])
