"""Matmuls, rings and schedules against arithmetic done by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hp_tool.catalog import cluster, gpu
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import Machine
from hp_tool.cost.network import adjacent_group, group_ring, send_seconds
from hp_tool.cost.roofline import matmul_seconds, peak_flops
from hp_tool.cost.schedules.bubble import chunks_in_flight
from hp_tool.domain.efficiency import EfficiencyProfile, Link, Roofline
from hp_tool.domain.hardware import ClusterQuery, ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError
from tests.cost.cases import Problem

NVLINK, NETWORK = 300e9, 25e9
"""Bytes a second in each direction on A100."""


def plain_profile(machine: ClusterSpec) -> EfficiencyProfile:
    """Half of every peak, latencies of 1 us inside and 10 us outside, nothing hidden and no other
    loss.
    """
    shipped = efficiency_profile(gpu=machine.gpu, framework="megatron-core")
    inside = Link(bandwidth_fraction=0.5, latency_s=1e-6, latency_per_peer_s=0.0, ramp_bytes=0.0)
    outside = Link(bandwidth_fraction=0.5, latency_s=1e-5, latency_per_peer_s=0.0, ramp_bytes=0.0)
    roof = Roofline(peak_fraction=0.5, bandwidth_fraction=0.5, overhead_s=1e-6)
    return EfficiencyProfile(
        gpu=replace(shipped.gpu, nvlink=inside, matmul={"bf16": roof}, attention=roof),
        framework=replace(
            shipped.framework,
            fp32_accumulation={},
            network=outside,
            matmul_slowdown=1.0,
            tensor_parallel_overlap=0.0,
            data_parallel_overlap=0.0,
            pipeline_overlap=0.0,
        ),
    )


@pytest.fixture
def machine() -> ClusterSpec:
    return cluster(ClusterQuery(gpu="a100-sxm-80gb", num_gpus=64, inter_node_latency_s=0.0))


def test_a_large_matmul_is_bound_by_arithmetic_a_thin_one_by_memory(machine: ClusterSpec) -> None:
    profile = plain_profile(machine)
    large = matmul_seconds(
        8192.0, 8192.0, 8192.0, machine=Machine(cluster=machine, profile=profile), precision="bf16"
    )
    assert float(large) == pytest.approx(1e-6 + 2 * 8192**3 / (0.5 * 312e12))
    thin = matmul_seconds(
        1.0, 8192.0, 8192.0, machine=Machine(cluster=machine, profile=profile), precision="bf16"
    )
    traffic = 2 * (8192 + 8192**2 + 8192)
    assert float(thin) == pytest.approx(
        1e-6 + traffic / (0.5 * machine.gpu.memory_bandwidth_bytes_per_second)
    )


def test_precision_without_hardware_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        peak_flops(gpu("a100-sxm-80gb"), precision="fp8")
    assert caught.value.code == "precision_unsupported"


@pytest.mark.parametrize(
    ("group", "stride", "latency", "bandwidth"),
    [
        (1, 1, 0.0, NVLINK / 2),
        (8, 1, 1e-6, NVLINK / 2),  # one NVLink domain
        (8, 8, 1e-5 + 1e-6, NETWORK / 2),  # one rank a node: its own port each
        (16, 4, 1e-5 + 1e-6, NETWORK / 2 * 2),  # two ranks a node drive two ports
        (16, 1, 1e-5 + 1e-6, NETWORK / 2 * 8),  # all eight do
    ],
)
def test_rings_inside_and_across_nodes(
    machine: ClusterSpec, group: int, stride: int, latency: float, bandwidth: float
) -> None:
    sizes, strides = (
        np.array([group, 64]),
        np.array([stride, 1]),
    )  # the second row makes some ring cross nodes
    found = group_ring(
        machine=Machine(cluster=machine, profile=plain_profile(machine)),
        group=adjacent_group(sizes, stride=strides, cluster=machine),
    )
    assert found.latency_s[0] == pytest.approx(latency, abs=1e-15)
    assert found.bandwidth[0] == pytest.approx(bandwidth)
    assert found.seconds(np.array([1e9, 1e9]))[0] == pytest.approx(latency + 1e9 / bandwidth)


@pytest.mark.parametrize(
    ("group", "stride", "topology", "microseconds"),
    [
        (8, 1, "fat_tree", 1 + 7 * 2),  # one NVLink domain: 7 peers
        (32, 1, "fat_tree", 1 + 10 + 31 * 5 + 3 * 3),  # 4 domains: 3 of 31 hops are between them
        (4, 8, "fat_tree", 1 + 10 + 3 * (5 + 3)),  # one rank a node
        (4, 8, "rail_optimized", 1 + 10 + 3 * (5 + 3)),  # on one rail
        (
            4,
            12,
            "rail_optimized",
            1 + 10 + 3 * (5 + 3 + 1),
        ),  # from rail to rail: each hop first crosses NVLink
        (
            16,
            4,
            "rail_optimized",
            1 + 10 + 15 * 5 + 7 * 3,
        ),  # two ranks a node, each on its own rail
    ],
)
def test_a_ring_waits_for_its_peers_and_for_every_hop_between_domains(
    group: int, stride: int, topology: str, microseconds: int
) -> None:
    """NVLink: 1 us and 2 us per further peer. Network: 10 us, 5 us for each hop of the ring, and 3
    us of the wire for those between domains.
    """
    machine = cluster(
        ClusterQuery(
            gpu="a100-sxm-80gb", num_gpus=64, inter_node_latency_s=3e-6, network_topology=topology
        )  # type: ignore[arg-type]
    )
    plain = plain_profile(machine)
    profile = replace(
        plain,
        gpu=replace(plain.gpu, nvlink=replace(plain.gpu.nvlink, latency_per_peer_s=2e-6)),
        framework=replace(
            plain.framework, network=replace(plain.framework.network, latency_per_peer_s=5e-6)
        ),
    )
    members = adjacent_group(group, stride=stride, cluster=machine)
    assert group_ring(
        machine=Machine(cluster=machine, profile=profile), group=members
    ).latency_s == pytest.approx(1e-6 * microseconds)


def test_the_slow_approach_to_full_bandwidth(machine: ClusterSpec) -> None:
    profile = plain_profile(machine)
    ramped = replace(
        profile, gpu=replace(profile.gpu, nvlink=replace(profile.gpu.nvlink, ramp_bytes=1e6))
    )
    found = group_ring(
        machine=Machine(cluster=machine, profile=ramped),
        group=adjacent_group(np.array([8]), cluster=machine),
    )
    assert found.seconds(np.array([4e6]))[0] == pytest.approx(1e-6 + (4e6 + 2e6) / (NVLINK / 2))


def test_stages_a_node_apart_send_over_the_network(machine: ClusterSpec) -> None:
    distance, crosses = np.array([4, 8]), np.array([False, True])
    seconds = send_seconds(
        np.array([1e6, 1e6]),
        machine=Machine(cluster=machine, profile=plain_profile(machine)),
        distance=distance,
        crosses=crosses,
    )
    assert seconds == pytest.approx([1e-6 + 1e6 / (NVLINK / 2), 1e-5 + 1e6 / (NETWORK / 2)])


@pytest.mark.parametrize(
    ("p", "v", "m", "first", "last"),
    [
        (1, 1, 8, 1, 1),
        (4, 1, 8, 4, 1),  # 1F1B: p - r micro-batches
        (4, 1, 2, 2, 1),  # no more than there are
        (4, 2, 8, 2 * 3 + 4 + 1, 4 + 1),  # interleaved: 2(p-r-1) + (v-1)p + 1 chunks
        (4, 3, 4, 12, 9),  # no more than m v chunks
    ],
)
def test_chunks_in_flight(p: int, v: int, m: int, first: int, last: int) -> None:
    config = ParallelConfig(pipeline_parallel_size=p, virtual_pipeline_parallel_size=v)
    candidates = Candidates.from_configs([config])
    for from_end, expected in ((p - 1, first), (0, last)):
        found = chunks_in_flight(
            candidates, from_end=np.array([from_end]), micro_batches=np.array([float(m)])
        )
        assert found[0] == expected


def _piped(machine: ClusterSpec, **parallel: int) -> dict[str, float]:
    """Time parts of a model whose layers outweigh its ends by far, on p = 4 stages of 2 replicas of
    8 ranks.
    """
    shape = ModelSpec(
        num_hidden_layers=48,
        hidden_size=8192,
        num_attention_heads=64,
        vocab_size=64,
        position_embedding="rotary",
    )
    problem = Problem(
        model=shape,
        cluster=machine,
        profile=plain_profile(machine),
        workload=TrainingWorkload(sequence_length=2048, global_batch_size=32),
    )
    config = ParallelConfig(
        tensor_parallel_size=8, pipeline_parallel_size=4, data_parallel_size=2, **parallel
    )
    return {name: float(seconds[0]) for name, seconds in problem.costs([config]).parts.items()}


@pytest.mark.parametrize("v", (1, 2, 3))
def test_the_bubble_is_its_share_of_the_ideal_time(machine: ClusterSpec, v: int) -> None:
    """(p-1)/(v m) of what the stages work, and the pipeline's filling by transfers (arXiv
    2104.04473 section 2.2).
    """
    parts = _piped(machine, virtual_pipeline_parallel_size=v)
    ideal = parts["compute"] + parts["attention"] + parts["tensor_parallel"]
    transfers = 2 * 3 * (1e-5 + 2048 * 8192 * 2 / 8 / (NETWORK / 2))
    assert parts["pipeline_bubble"] - transfers == pytest.approx(3 / (v * 16) * ideal, rel=0.01)


def test_each_chunk_sends_its_share_of_the_activations(machine: ClusterSpec) -> None:
    """Two messages of s b h 2 / t bytes per micro-batch and chunk."""
    message = 1e-5 + 2048 * 8192 * 2 / 8 / (NETWORK / 2)
    for v in (1, 2):
        assert _piped(machine, virtual_pipeline_parallel_size=v)["pipeline_p2p"] == pytest.approx(
            2 * 16 * v * message
        )


def test_gradients_cross_the_network_once(machine: ClusterSpec) -> None:
    """ZeRO 1: fp32 gradients scattered and 16-bit weights gathered, 6 bytes a parameter; ZeRO 0
    all-reduces 8.
    """
    layers = 12 * (12 * 8192**2 / 8 + (4 + 3) * 8192 / 8 + 6 * 8192)
    parameters = layers + 64 * 8192 / 8 + 2 * 8192
    for zero, size in ((1, 6.0), (0, 8.0)):
        found = _piped(machine, zero_stage=zero)["data_parallel"]
        wire = parameters * size / 2
        assert found == pytest.approx(wire / (NETWORK / 2), rel=1e-3)
