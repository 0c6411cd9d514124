"""Kernels of 2019: what is not fused passes over memory on its own, keeps what it kept, and takes
longer.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hp_tool.catalog import cluster, gpu, model
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.cost.attention import attention_time
from hp_tool.cost.block import BlockTime, shapes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.layer import layer_time
from hp_tool.cost.mlp import mlp_time
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.questions.training import estimate

UNFUSED = TrainingWorkload(
    sequence_length=1024,
    global_batch_size=8,
    precision="fp16",
    attention="unfused",
    dropout=0.1,
    kernel_fusion=False,
)
FUSED = replace(UNFUSED, kernel_fusion=True)
ROW = Candidates.alone(ParallelConfig(tensor_parallel_size=8, micro_batch_size=8))


def case(workload: TrainingWorkload) -> TrainingCase:
    return TrainingCase(
        model=model("gpt2-8.3b"),
        cluster=cluster(ClusterQuery(node_type="dgx-2h", num_gpus=8)),
        workload=workload,
        profile=efficiency_profile(gpu=gpu("v100-sxm3-32gb-h"), framework="megatron-core"),
    )


def blocks(workload: TrainingWorkload) -> tuple[BlockTime, BlockTime]:
    one = case(workload)
    s = shapes(case=one, candidates=ROW)
    return attention_time(case=one, candidates=ROW, s=s), mlp_time(case=one, s=s)


def test_each_pass_moves_the_tensors_that_the_code_of_2019_touches() -> None:
    """TP 8, 8 x 1,024 tokens, h = 3,072 with 4 of 32 heads: passes by hand, 2 bytes an element read
    and written.
    """
    profile = case(UNFUSED).profile
    scores, hidden, local = 8192 * 1024 * 4, 8192 * 3072, 8192 * 3072 / 8

    def seconds(elements: float, kernels: float = 0.0) -> float:
        rate = profile.gpu.memory_fraction * 900e9 / profile.framework.elementwise_traffic_factor
        return 4 * elements / rate + kernels * profile.gpu.kernel_overhead_s

    (attention, mlp), (fused, fused_mlp) = blocks(UNFUSED), blocks(FUSED)
    assert attention.core - fused.core == pytest.approx(seconds(3 * scores + 3 * local, 6))
    assert attention.core_backward - fused.core_backward == pytest.approx(
        seconds(2 * scores + 3 * local, 5)
    )
    # a bias of queries, keys and values, one of the output, and dropout
    assert attention.elementwise - fused.elementwise == pytest.approx(
        seconds(3 * local + 2 * hidden)
    )
    assert mlp.elementwise - fused_mlp.elementwise == pytest.approx(seconds(4 * local + 2 * hidden))
    assert attention.elementwise_backward == fused.elementwise_backward


def found(name: str, workload: TrainingWorkload) -> Estimate:
    query = Query(
        kind="training",
        model=name,
        cluster=ClusterQuery(gpu="a100", num_gpus=8),
        training=workload,
        parallel=ParallelQuery(
            tensor_parallel_size=1 if "gpt" in name else 2, recompute="full", zero_stage=1
        ),
    )
    return estimate(query=query, with_fixes=False)


@pytest.mark.parametrize("name", ["gpt3-1.3b", "t5-large", "mixtral-8x7b"])
def test_fusion_saves_time_and_no_memory(name: str) -> None:
    workload = replace(FUSED, decoder_sequence_length=256) if name.startswith("t5") else FUSED
    fused, unfused = (found(name, replace(workload, kernel_fusion=on)) for on in (True, False))
    assert fused.time and unfused.time and fused.memory == unfused.memory
    assert 1.02 < unfused.time.step_s / fused.time.step_s < 2.0  # launches decide small models


def test_a_gather_beside_a_matmul_costs_half_of_what_a_reduction_does() -> None:
    one, config = (
        case(FUSED),
        ParallelConfig(tensor_parallel_size=8, micro_batch_size=8, sequence_parallel=True),
    )
    sharded = Candidates.alone(config)

    def backward(overlap: float) -> float:
        framework = replace(one.profile.framework, tensor_parallel_overlap=overlap)
        profile = replace(one.profile, framework=framework)
        return float(
            layer_time(case=replace(one, profile=profile), candidates=sharded).tensor_backward
        )

    gather = 2.0 * float(shapes(case=one, candidates=sharded).gather_s)
    assert [backward(share) for share in (0.0, 0.5, 1.0)] == pytest.approx(
        [2.5 * gather, 1.75 * gather, gather]
    )
