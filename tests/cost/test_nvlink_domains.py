"""Racks of 72: how groups lie in them, and that no count of GPUs makes a cliff."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.catalog import cluster, model
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import Machine
from hp_tool.cost.network import Group, dense_group, domains, expert_group, group_ring
from hp_tool.cost.training import TrainingCosts, training_costs
from hp_tool.domain.hardware import ClusterQuery, ClusterSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError
from tests.cost.cases import case_of
from tests.cost.test_primitives import plain_profile

LLAMA, QWEN = model("llama-3-70b"), model("qwen3-30b-a3b")
MORE_NVLINK = (4, 8, 12, 16, 24, 32, 36, 48, 64, 72, 96, 128, 144, 288)


def racks(num_gpus: int, **query: object) -> ClusterSpec:
    return cluster(
        ClusterQuery(gpu="gb200-nvl72", num_gpus=num_gpus, gpus_per_node=min(4, num_gpus), **query)
    )  # type: ignore[arg-type]


def layout(t: int = 1, c: int = 1, p: int = 1, d: int = 1, **more: int) -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=t,
        context_parallel_size=c,
        pipeline_parallel_size=p,
        data_parallel_size=d,
        **more,
    )


def costs(config: ParallelConfig, machine: ClusterSpec, *, micro_batches: int = 8) -> TrainingCosts:
    spec = QWEN if config.expert_parallel_size > 1 else LLAMA
    workload = TrainingWorkload(
        sequence_length=8192, global_batch_size=config.data_parallel_size * micro_batches
    )
    return training_costs(
        case=case_of(model=spec, workload=workload, cluster=machine),
        candidates=Candidates.alone(config),
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (layout(t=8, d=128), 72),
        (layout(d=1024, expert_parallel_size=32), 64),
        (layout(d=1024, expert_parallel_size=64), 64),
        (layout(t=4, c=8, d=32), 64),
        (layout(t=4, d=10, p=16), 40),  # a stage's replicas stay in one rack
        (
            layout(d=1024, expert_parallel_size=128),
            72,
        ),  # no rack holds the experts: the rest as if there were none
    ],
)
def test_a_job_uses_what_holds_its_inner_groups(config: ParallelConfig, expected: int) -> None:
    candidate = Candidates.alone(config)
    devices = (
        config.tensor_parallel_size * config.context_parallel_size * config.pipeline_parallel_size
    )
    machine = racks(devices * config.data_parallel_size)
    assert domains(candidate, cluster=machine).size == expected
    assert domains(candidate, cluster=replace(machine, nvlink_segment_gpus=36)).size == 36


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (lambda c, where: expert_group(c, "ep", cluster=where), 64),
        (lambda c, where: dense_group(c, "tp", cluster=where), 4),
        (
            lambda c, where: dense_group(c, "cp", "dp", cluster=where),
            16,
        ),  # 256 replicas over 16 racks
        (lambda c, where: expert_group(c, "dp", cluster=where), 1),
    ],
)
def test_members_of_groups_in_a_rack(group: object, expected: int) -> None:
    config = layout(t=4, d=256, expert_parallel_size=64)
    found: Group = group(Candidates.alone(config), racks(1024))  # type: ignore[operator]
    assert found.in_domain == expected


def test_a_group_larger_than_a_rack_is_spread_evenly() -> None:
    """257 groups of 4 over 15 racks: 17 or 18 in each, not 18 and a rack with 5."""
    replicas = dense_group(Candidates.alone(layout(t=4, d=257)), "dp", cluster=racks(1028))
    assert replicas.in_domain == 257 // 15


def test_nodes_are_as_they_are() -> None:
    """Devices of one server are not chosen one by one: replicas of 2 GPUs on 3 nodes of 8 by two
    stages share a node.
    """
    node = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=24))
    assert dense_group(Candidates.alone(layout(t=2, d=6, p=2)), "dp", cluster=node).in_domain == 2


@given(
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((1, 1, 2, 4)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 3, 5, 8, 9, 10, 16, 18, 32)),
    st.sampled_from((1, 1, 4, 8, 32, 64)),
)
def test_more_nvlink_never_slows_anything(t: int, c: int, p: int, d: int, ep: int) -> None:
    devices = 4 * t * c * p * d
    config = layout(
        t=t, c=c, p=p, d=4 * d, expert_parallel_size=ep if t * c * 4 * d % ep == 0 else 1
    )
    step_s = [
        float(costs(config, racks(devices, nvlink_domain_size=size)).step_s)
        for size in MORE_NVLINK
        if size <= devices
    ]
    assert step_s == pytest.approx(sorted(step_s, reverse=True), rel=1e-9)


@pytest.mark.parametrize(
    "config", [layout(t=4), layout(t=8, p=2), layout(t=2, c=4, p=4), layout(t=4, p=4)]
)
@pytest.mark.parametrize("micro_batches", [4, 16])
def test_one_more_replica_makes_no_cliff(config: ParallelConfig, micro_batches: int) -> None:
    """At the same work per GPU."""
    inner = (
        config.tensor_parallel_size * config.context_parallel_size * config.pipeline_parallel_size
    )
    steps = {
        d: float(
            costs(
                replace(config, data_parallel_size=d), racks(inner * d), micro_batches=micro_batches
            ).step_s
        )
        for d in (*range(2, 40), *range(64, 67), *range(127, 131), *range(255, 259))
    }
    for d, step_s in steps.items():
        if d + 1 in steps:
            assert steps[d + 1] == pytest.approx(step_s, rel=0.03), d


def test_a_pipeline_inside_one_server_never_uses_the_network() -> None:
    """Its tied embedding's gradient included."""
    tied = replace(LLAMA, tie_word_embeddings=True)
    workload = TrainingWorkload(sequence_length=4096, global_batch_size=16)
    config = Candidates.alone(layout(p=8))
    node = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=8))
    fast, slow = (
        training_costs(
            case=case_of(
                model=tied,
                workload=workload,
                cluster=replace(node, inter_node_bandwidth_bytes_per_second=bandwidth),
            ),
            candidates=config,
        ).step_s
        for bandwidth in (50e9, 1e6)
    )
    assert fast == slow


def test_a_segment_of_broken_nodes_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        racks(144, nvlink_segment_gpus=6)
    assert caught.value.field == "cluster.nvlink_segment_gpus"


@pytest.mark.parametrize(("replicas", "stride", "ports"), [(128, 1, 18), (18, 8, 9), (4, 36, 2)])
def test_a_ring_between_racks_is_no_faster_than_one_members_nvlink(
    replicas: int, stride: int, ports: int
) -> None:
    """Each of the rings passes all members in a rack, whose NVLink carries 18 ports' traffic."""
    machine = racks(144)
    profile = plain_profile(machine)
    config = Candidates.alone(layout(t=stride, d=replicas))
    ring = group_ring(
        machine=Machine(cluster=machine, profile=profile),
        group=dense_group(config, "dp", cluster=machine),
    )
    slowest = 0.5 * ports * machine.inter_node_bandwidth_bytes_per_second
    assert float(ring.bandwidth) == pytest.approx(slowest)
    assert slowest <= 0.5 * machine.gpu.nvlink_bandwidth_bytes_per_second  # type: ignore[operator]


def test_a_ring_between_racks_passes_every_rank() -> None:
    """128 replicas in two racks: 127 hops, one of them between racks."""
    machine = racks(128)
    profile = plain_profile(machine)
    network = replace(profile.framework.network, latency_per_peer_s=2e-6)
    profile = replace(profile, framework=replace(profile.framework, network=network))
    ring = group_ring(
        machine=Machine(cluster=machine, profile=profile),
        group=dense_group(Candidates.alone(layout(d=128)), "dp", cluster=machine),
    )
    expected = 1e-6 + 1e-5 + 127 * 2e-6 + machine.inter_node_latency_s
    assert float(ring.latency_s) == pytest.approx(expected)
