"""Leaves, oversubscription and rails: by hand, and the direction in which each moves every
candidate of a space.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.catalog import cluster, gpu, model
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import Machine
from hp_tool.cost.network import (
    adjacent_group,
    all_to_all_seconds,
    exchange_slowdown,
    group_ring,
    ring_slowdown,
    send_seconds,
    send_slowdown,
    with_local_ramp,
)
from hp_tool.domain.hardware import ClusterQuery, ClusterSpec
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError
from hp_tool.space import default_axes, legal_chunks
from tests.cost.cases import Problem
from tests.cost.test_primitives import plain_profile

EXACT = 1e-12
ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "tp-dp-cp-ep-pp", "pp-tp-cp-ep-dp", "dp-tp-cp-ep-pp")


def machine(**said: object) -> ClusterSpec:
    """16 nodes of 8 H100."""
    return cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=128, **said))  # type: ignore[arg-type]


LEAVES = machine(nodes_per_leaf=4, network_oversubscription=4.0)


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (8, 1, 1.0),  # one node
        (32, 1, 1.0),  # one leaf
        (128, 1, 1.0),  # four nodes under each leaf share the one crossing: 4 / 4
        (16, 8, 1.0),  # the same, one rank a node
        (8, 16, 2.0),  # two nodes under each leaf: 4 / 2
        (4, 32, 4.0),  # one
    ],
)
def test_rings_across_leaves(size: int, stride: int, expected: float) -> None:
    group = adjacent_group(size, stride=stride, cluster=LEAVES)
    in_domain = max(min(8 // stride, size), 1)
    assert ring_slowdown(group, in_domain=in_domain, cluster=LEAVES) == expected
    slow = group_ring(machine=Machine(cluster=LEAVES, profile=plain_profile(LEAVES)), group=group)
    fast = group_ring(
        machine=Machine(cluster=machine(), profile=plain_profile(LEAVES)), group=group
    )
    assert slow.bandwidth == pytest.approx(fast.bandwidth / expected)


@pytest.mark.parametrize(("distance", "expected"), [(8, 1.0), (16, 2.0), (32, 4.0), (64, 4.0)])
def test_sends_across_leaves(distance: int, expected: float) -> None:
    """Of 32 ranks under a leaf the last `distance` send upwards, over a quarter of the ports."""
    assert send_slowdown(distance, cluster=LEAVES) == expected


def test_exchanges_across_leaves() -> None:
    # 64 ranks in two leaves: 56 outside the node, 32 of them outside the leaf, at a quarter of the
    # bandwidth.
    assert exchange_slowdown(
        adjacent_group(64, cluster=LEAVES), in_domain=8, cluster=LEAVES
    ) == pytest.approx(4 * 32 / 56)
    assert exchange_slowdown(adjacent_group(32, cluster=LEAVES), in_domain=8, cluster=LEAVES) == 1.0


def test_rails_take_a_hop_over_nvlink_to_other_rails() -> None:
    plain, rails = machine(), machine(network_topology="rail_optimized")
    profile = plain_profile(plain)
    hop = profile.gpu.nvlink.latency_s

    def send(where: ClusterSpec, distance: int) -> float:
        return float(
            send_seconds(
                1e6,
                machine=Machine(cluster=where, profile=profile),
                distance=distance,
                crosses=True,
            )
        )

    assert send(rails, 16) == send(plain, 16)  # the same local rank two nodes on
    assert send(rails, 12) == pytest.approx(send(plain, 12) + hop)
    # Exchanges put 7/8 of what leaves the node on NVLink as well, which is felt where NVLink is the
    # slower of the two.
    slow = replace(plain.gpu, nvlink_bandwidth_bytes_per_second=20e9)
    one, other = (replace(where, gpu=slow) for where in (plain, rails))
    group = adjacent_group(16, cluster=one)
    near, away = 7 / 15 * 1e9, 8 / 15 * 1e9
    seconds = [
        float(all_to_all_seconds(1e9, machine=Machine(cluster=c, profile=profile), group=group))
        for c in (one, other)
    ]
    reached = 20e9 * profile.gpu.all_to_all.bandwidth_fraction
    assert seconds[1] - seconds[0] == pytest.approx(
        (near + 7 / 8 * away) / reached - max(near / reached, away / 25e9)
    )
    assert group_ring(machine=Machine(cluster=other, profile=profile), group=group) == group_ring(
        machine=Machine(cluster=one, profile=profile), group=group
    )


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (
            {"network_oversubscription": 0.5, "nodes_per_leaf": 4},
            "cluster.network_oversubscription",
        ),
        ({"network_oversubscription": 2.0}, "cluster.nodes_per_leaf"),
        ({"nodes_per_leaf": 0}, "cluster.nodes_per_leaf"),
    ],
)
def test_a_network_that_is_none_is_refused(said: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as caught:
        machine(**said)
    assert caught.value.field == field


def spaces(name: str) -> tuple[Problem, Candidates]:
    """Every legal candidate of a dense or sparse model on 128 H100."""
    where = machine()
    problem = Problem(
        model=model(name),
        cluster=where,
        workload=TrainingWorkload(sequence_length=16384, global_batch_size=128),
        profile=efficiency_profile(gpu=where.gpu, framework="megatron-core"),
    )
    query = ParallelQuery(
        micro_batch_size=1, recompute="none", expert_tensor_parallel_size=(1, 2), zero_stage=(1, 3)
    )
    chunks = legal_chunks(axes=default_axes(query=query, case=problem), case=problem)
    return problem, Candidates.concatenate([chunk.candidates for chunk in chunks])


@pytest.fixture(scope="module")
def cases() -> dict[str, tuple[Problem, Candidates]]:
    return {name: spaces(name) for name in ("llama-3-8b", "mixtral-8x7b")}


@given(
    name=st.sampled_from(("llama-3-8b", "mixtral-8x7b")),
    order=st.sampled_from(ORDERS),
    topology=st.sampled_from(("fat_tree", "rail_optimized")),
    leaf=st.sampled_from((1, 2, 3, 8)),
    over=st.floats(1.0, 16.0),
    change=st.sampled_from(("oversubscription", "bandwidth", "latency")),
    factor=st.floats(1.0, 8.0),
)
def test_a_slower_network_never_makes_a_step_faster(
    cases: dict[str, tuple[Problem, Candidates]],
    name: str,
    order: str,
    topology: str,
    leaf: int,
    over: float,
    change: str,
    factor: float,
) -> None:
    problem, candidates = cases[name]
    if problem.model.num_experts and not order.endswith("pp"):
        order = "tp-dp-cp-ep-pp"
    here = replace(
        problem.cluster,
        rank_order=order,
        network_topology=topology,
        nodes_per_leaf=leaf,
        network_oversubscription=over,
    )
    worse = {
        "oversubscription": {"network_oversubscription": over * factor},
        "bandwidth": {
            "inter_node_bandwidth_bytes_per_second": here.inter_node_bandwidth_bytes_per_second
            / factor
        },
        "latency": {"inter_node_latency_s": here.inter_node_latency_s * factor},
    }[change]
    before = replace(problem, cluster=here).costs(candidates).step_s
    after = replace(problem, cluster=replace(here, **worse)).costs(candidates).step_s
    assert np.all(np.isfinite(before)) and np.all(after >= before * (1 - EXACT))
    full = (
        replace(problem, cluster=replace(here, network_oversubscription=1.0))
        .costs(candidates)
        .step_s
    )
    assert np.all(before >= full * (1 - EXACT))


@pytest.mark.parametrize("order", ORDERS)
def test_a_row_in_any_order_depends_on_nothing_but_its_configuration(
    cases: dict[str, tuple[Problem, Candidates]], order: str
) -> None:
    """Distances inside a layer follow from sizes outside of it where dp or pp come first."""
    for problem, candidates in cases.values():
        if problem.model.num_experts and not order.endswith("pp"):
            continue
        here = replace(problem, cluster=replace(problem.cluster, rank_order=order))
        together = here.costs(candidates).step_s
        for row in range(0, len(candidates), max(len(candidates) // 40, 1)):
            alone = here.costs(candidates.take(np.array([row]))).step_s[0]
            assert alone == pytest.approx(together[row], rel=EXACT)


def test_a_card_without_nvlink_ramps_up_in_proportion_to_its_link() -> None:
    kernels = plain_profile(LEAVES).gpu
    bridged, nvlink = gpu("l40s-48gb"), gpu("h100-sxm-80gb")
    assert with_local_ramp(kernels, gpu=nvlink) is kernels
    scaled = with_local_ramp(
        replace(kernels, nvlink=replace(kernels.nvlink, ramp_bytes=495e6)), gpu=bridged
    )
    assert scaled.nvlink.ramp_bytes == pytest.approx(32e6)  # 32 of 495 GB/s
    assert scaled.nvlink.bandwidth_fraction == kernels.nvlink.bandwidth_fraction
    host_copies = replace(bridged, peer_to_peer=False)
    halved = with_local_ramp(
        replace(kernels, nvlink=replace(kernels.nvlink, ramp_bytes=495e6)), gpu=host_copies
    )
    assert halved.nvlink.ramp_bytes == pytest.approx(16e6)
