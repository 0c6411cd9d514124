"""ZeRO over a part of the replicas, and weights gathered layer by layer, against hand-made clusters
and timelines.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.catalog import cluster, model
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.legality import has_indivisible_shards
from hp_tool.cost.zero import fully_sharded_seconds
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.training import estimate, recommend
from tests.cost.cases import Problem, columns, problems
from tests.cost.test_primitives import NETWORK, NVLINK, plain_profile

STATES = ("weights", "gradients", "optimizer")
zero_stages = st.sampled_from((1, 2, 3))


@given(problems(replicas=8), zero_stages, st.sampled_from((1, 2, 4)))
def test_states_are_those_of_a_cluster_of_one_shard_group(
    case: tuple[Problem, ParallelConfig], zero: int, size: int
) -> None:
    problem, config = case
    config = replace(config, zero_stage=zero)
    hybrid, whole = (
        problem.costs([replace(config, data_parallel_shard_size=shards)]).memory_parts
        for shards in (size, 0)
    )
    gpus = problem.cluster.num_gpus * size // 8
    fewer = replace(
        problem,
        cluster=replace(problem.cluster, num_gpus=gpus),
        workload=replace(
            problem.workload, global_batch_size=problem.workload.global_batch_size * size // 8
        ),
    )
    alone = fewer.costs([replace(config, data_parallel_size=size)]).memory_parts
    for name in STATES:
        assert hybrid[name][0] == pytest.approx(alone[name][0], rel=1e-12)
        assert hybrid[name][0] >= whole[name][0]


@given(problems(replicas=8), zero_stages)
def test_one_shard_group_of_all_replicas_is_plain_zero(
    case: tuple[Problem, ParallelConfig], zero: int
) -> None:
    problem, config = case
    config = replace(config, zero_stage=zero)
    plain, spelled = (
        columns(problem.costs([replace(config, data_parallel_shard_size=size)])) for size in (0, 8)
    )
    for name, column in plain.items():
        np.testing.assert_array_equal(column, spelled[name], err_msg=name)


@given(problems(replicas=8), zero_stages, st.sampled_from((1, 2, 4, 8)), st.floats(0, 1))
def test_a_slower_network_never_makes_hybrid_sharding_faster(
    case: tuple[Problem, ParallelConfig], zero: int, size: int, overlap: float
) -> None:
    problem, config = case
    framework = replace(problem.profile.framework, data_parallel_overlap=overlap)
    problem = replace(problem, profile=replace(problem.profile, framework=framework))
    config = replace(config, zero_stage=zero, data_parallel_shard_size=size)
    rate = problem.cluster.inter_node_bandwidth_bytes_per_second
    slower = replace(
        problem, cluster=replace(problem.cluster, inter_node_bandwidth_bytes_per_second=rate / 2)
    )
    assert slower.costs([config]).step_s[0] >= problem.costs([config]).step_s[0] * (1 - 1e-12)


def test_only_shards_of_gradients_cross_the_network() -> None:
    """8 ranks a node, ZeRO 1 in each node: of P parameters 4 P 7/8 bytes are scattered and 2 P 7/8
    gathered over NVLink, and each rank all-reduces 4 P / 8 with its two peers in the other nodes.
    """
    machine = cluster(ClusterQuery(gpu="a100-sxm-80gb", num_gpus=24, inter_node_latency_s=0.0))
    shape = ModelSpec(
        num_hidden_layers=12,
        hidden_size=4096,
        num_attention_heads=32,
        vocab_size=1024,
        position_embedding="rotary",
    )
    problem = Problem(
        model=shape,
        cluster=machine,
        profile=plain_profile(machine),
        workload=TrainingWorkload(sequence_length=2048, global_batch_size=24),
    )
    config = ParallelConfig(data_parallel_size=24, zero_stage=1, data_parallel_shard_size=8)
    costs = problem.costs([config])
    parameters = costs.memory_parts["weights"][0] / 2
    inside = parameters * (4 + 2) * 7 / 8 / (NVLINK / 2) + 2e-6
    across = 2 * parameters * 4 / 8 * 2 / 3 / (NETWORK / 2) + 1.1e-5
    assert costs.parts["data_parallel"][0] == pytest.approx(inside + across, rel=1e-6)
    flat = problem.costs([replace(config, data_parallel_shard_size=0)]).parts["data_parallel"][0]
    assert costs.parts["data_parallel"][0] != flat


@given(
    layers=st.integers(1, 12),
    gather=st.floats(0.01, 10),
    reduce=st.floats(0.01, 10),
    forward=st.floats(0.01, 10),
    backward=st.floats(0.01, 10),
)
def test_exposed_gathers_are_those_of_a_timeline(
    layers: int, gather: float, reduce: float, forward: float, backward: float
) -> None:
    """One link, one processor, layers one by one, the next layer gathered meanwhile: what the pass
    takes beyond compute.
    """

    def wait_s(communication: float, compute: float) -> float:
        ready, now = communication / layers, 0.0
        for layer in range(layers):
            start = max(ready, now)
            now = start + compute / layers
            # One layer ahead and no more: its gather starts when this layer does.
            ready = start + communication / layers if layer < layers - 1 else ready
        return now - compute

    found = fully_sharded_seconds(
        gather=gather,
        reduce=reduce,
        forward=forward,
        backward=backward,
        layers=float(layers),
        overlap=1.0,
    )
    expected = wait_s(gather, forward) + wait_s(gather + reduce, backward)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_sizes_of_shard_groups_are_an_axis_and_results_can_be_asked_again() -> None:
    query = Query(
        kind="training",
        model="llama-3-8b",
        cluster=ClusterQuery(gpu="h100-sxm-80gb", num_gpus=32),
        training=TrainingWorkload(sequence_length=8192, global_batch_size=128),
        parallel=ParallelQuery(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            micro_batch_size=1,
            recompute="full",
            zero_stage=3,
            data_parallel_shard_size=(8, 16, 32),
        ),
    )
    found = recommend(query=query).recommendations
    assert {row.parallel.data_parallel_shard_size for row in found} == {8, 16, 0}
    for row in found:
        again = estimate(query=Configuration.from_row(row, query=query).query)
        assert (
            again.parallel == row.parallel
            and again.time == row.estimate.time
            and again.memory == row.estimate.memory
        )
    assert Candidates.from_configs([row.parallel for row in found]).config(0) == found[0].parallel


@pytest.mark.parametrize("replicas", [1, 3, 4, 6])
def test_any_divisor_of_the_replicas_is_a_shard_group(replicas: int) -> None:
    sizes = range(1, 8)
    configs = [
        ParallelConfig(data_parallel_size=replicas, data_parallel_shard_size=size) for size in sizes
    ]
    broken = has_indivisible_shards(model("llama-3-8b"), Candidates.from_configs(configs))
    assert [size for size, is_broken in zip(sizes, broken, strict=True) if not is_broken] == [
        size for size in sizes if replicas % size == 0
    ]


def test_experts_too_must_divide_among_the_replicas() -> None:
    """16 replicas in groups of 8, of which 8 hold the same experts: two copies would need 2 x 8
    ranks.
    """
    machine = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=16))
    query = Query(
        kind="training",
        model="mixtral-8x7b",
        cluster=ClusterQuery(gpu="h100-sxm-80gb", num_gpus=machine.num_gpus),
        training=TrainingWorkload(sequence_length=4096, global_batch_size=64),
        parallel=ParallelQuery(
            expert_parallel_size=8, data_parallel_shard_size=4, recompute="full"
        ),
    )
    found = estimate(query=query)
    assert [reason.code for reason in found.reasons] == [
        "shards_not_divisible"
    ] and "same experts" in found.reasons[0].message
    assert (
        estimate(
            query=replace(query, parallel=replace(query.parallel, data_parallel_shard_size=8))
        ).memory
        is not None
    )
