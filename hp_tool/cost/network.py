"""Groups of ranks on the network: placement, topology effects, and seconds of collectives.

Ranks are numbered through the parallel dimensions in an order, innermost first, as in Megatron
Core's RankGenerator. Dense layers form the grid t c d p, and experts form the grid e_t e_p (t c d /
(e_p e_t)) p over the same ranks. Both grids use the same order; the dense grid has no ep, and the
expert grid has no cp.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from hp_tool.cost.arrays import Bools, Floats, Ints, anywhere, gcd, lcm, maximum, minimum, where
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import Machine, TrainingCase
from hp_tool.domain.efficiency import GpuEfficiency, Link
from hp_tool.domain.hardware import ClusterSpec, GpuSpec
from hp_tool.errors import InputError


@dataclass(frozen=True, slots=True)
class Axis:
    """`size` ranks at a distance of `stride` from each other: plain numbers, or arrays of shape
    (n,).
    """

    size: Ints
    stride: Ints


@dataclass(frozen=True, slots=True)
class Domain:
    """NVLink domains of a job: blocks of `size` consecutive ranks, starting with the first rank."""

    size: Ints
    together: Ints = 1
    """Number of consecutive ranks, in complete nodes, that are always in the same domain: the
    innermost groups.
    """
    of_several_nodes: bool = False
    """Whether a domain is a rack whose nodes are allocated individually. Groups too large for one
    rack are then spread evenly over several racks.
    """

    def sharing(self, axis: Axis) -> Ints:
        """Return the number of members of an axis that share a domain; the minimum if domains
        differ.
        """
        counted = axis_members_in_block(axis, self.size)
        if not self.of_several_nodes:
            return counted
        extent = axis.size * axis.stride
        return where(extent > self.size, maximum(axis.size // -(-extent // self.size), 1), counted)


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one communication group: all combinations of its axes, innermost first.

    Adjacent dimensions form one axis.
    """

    axes: tuple[Axis, ...]
    domain: Domain

    @property
    def size(self) -> Ints:
        """Number of ranks in the group."""
        return math.prod((axis.size for axis in self.axes), start=1)

    @property
    def in_domain(self) -> Ints:
        """Return the number of members that share an NVLink domain; the minimum if domains
        differ.
        """
        return math.prod((self.domain.sharing(axis) for axis in self.axes), start=1)


DIMENSIONS = ("tp", "cp", "ep", "dp", "pp")


def checked_order(order: str) -> str:
    """Return the complete order of DIMENSIONS for a query's rank_order.

    If the order omits cp and ep, they are inserted after tp (Megatron-LM's --use-tp-pp-dp-mapping
    is tp-cp-ep-pp-dp).

    Raises:
        InputError: A dimension is missing or repeated.
    """
    names = order.split("-")
    if len(set(names)) < len(names) or not {"tp", "dp", "pp"} <= set(names) <= set(DIMENSIONS):
        raise InputError(
            f"rank_order {order[:80]!r} must name each of tp, dp, pp (and cp, ep) once, innermost "
            "first, as in tp-cp-ep-dp-pp",
            field="parallel.rank_order",
        )
    place = names.index("tp") + 1
    names[place:place] = [name for name in ("cp", "ep") if name not in names]
    return "-".join(names)


def dense_group(candidates: Candidates, *names: str, cluster: ClusterSpec) -> Group:
    """Return the group of attention and dense layers over the dimensions `names` (of tp, cp, dp,
    pp).
    """
    return Group(
        _axes(_dense_sizes(candidates), names, cluster.rank_order),
        domains(candidates, cluster=cluster),
    )


def expert_group(candidates: Candidates, *names: str, cluster: ClusterSpec) -> Group:
    """Return the group of the experts over the dimensions `names`.

    The dimensions are tp (tensor parallelism of the experts), ep, dp (the replicas of the experts),
    and pp.
    """
    return Group(
        _axes(_expert_sizes(candidates), names, cluster.rank_order),
        domains(candidates, cluster=cluster),
    )


def adjacent_group(size: Ints, *, cluster: ClusterSpec, stride: Ints = 1) -> Group:
    """Return a group of `size` ranks at a distance of `stride`, the innermost group of a job."""
    return Group((Axis(size, stride),), _domains_of_extent(cluster, size * stride))


def domains(candidates: Candidates, *, cluster: ClusterSpec) -> Domain:
    """Return the NVLink domains of a job.

    The job uses all devices of its nodes. In a rack, it uses cluster.nvlink_segment_gpus devices.
    By default, this number is a multiple of the innermost groups: the largest nested groups of
    dense layers and of experts that fit into a rack. For groups of 8 and of 32, it uses 64 of 72
    devices.
    """
    if (
        cluster.nvlink_segment_gpus is not None
        or cluster.nvlink_domain_size <= cluster.gpus_per_node
    ):
        return _domains_of_extent(cluster, 1)
    largest = cluster.nvlink_domain_size
    inner: list[Ints] = []
    for sizes in (_dense_sizes(candidates), _expert_sizes(candidates)):
        extent: Ints = 1
        fitting: Ints = 1
        for name in cluster.rank_order.split("-"):
            extent = extent * sizes.get(name, 1)
            fitting = where(extent <= largest, extent, fitting)
        inner.append(fitting)
    both = lcm(*inner)
    return _domains_of_extent(cluster, where(both <= largest, both, maximum(*inner)))


def _domains_of_extent(cluster: ClusterSpec, extent: Ints) -> Domain:
    """Return domains that contain a whole number of groups of `extent` adjacent ranks, in complete
    nodes if possible.
    """
    size, per_node = cluster.nvlink_domain_size, cluster.gpus_per_node
    if size <= per_node:
        return Domain(size)
    if cluster.nvlink_segment_gpus is not None:
        return Domain(cluster.nvlink_segment_gpus, together=per_node, of_several_nodes=True)
    in_nodes = lcm(extent, per_node)
    unit = where(in_nodes <= size, in_nodes, where(extent <= size, extent, per_node))
    return Domain(size // unit * unit, together=unit, of_several_nodes=True)


def _dense_sizes(c: Candidates) -> dict[str, Ints]:
    return {
        "tp": c.tensor_parallel_size,
        "cp": c.context_parallel_size,
        "dp": c.data_parallel_size,
        "pp": c.pipeline_parallel_size,
    }


def _expert_sizes(c: Candidates) -> dict[str, Ints]:
    ranks = c.tensor_parallel_size * c.context_parallel_size * c.data_parallel_size
    return {
        "tp": c.expert_tensor_parallel_size,
        "ep": c.expert_parallel_size,
        "dp": maximum(ranks // (c.expert_parallel_size * c.expert_tensor_parallel_size), 1),
        "pp": c.pipeline_parallel_size,
    }


def split(group: Group, parts: Ints) -> tuple[Group, Group]:
    """Return (one of `parts` equal parts of the group, the ranks at the same position in each
    part).

    The outermost axis is divided. If it has fewer than `parts` members, it is divided into single
    ranks.
    """
    *inner, last = group.axes
    parts = minimum(parts, last.size)
    size = last.size // parts
    part = Group((*inner, Axis(size, last.stride)), group.domain)
    return part, Group((Axis(parts, last.stride * size),), group.domain)


def members_in_block(group: Group, *, block: int) -> Ints:
    """Return the number of members of a group within one block of `block` consecutive ranks, such
    as those below one leaf switch.
    """
    return math.prod((axis_members_in_block(axis, block) for axis in group.axes), start=1)


def axis_members_in_block(axis: Axis, block: Ints) -> Ints:
    """Return the number of members of an axis within one block of consecutive ranks.

    If groups do not fit into blocks evenly, some groups span two blocks, and all other groups wait
    for these. The result is then the smaller number of ranks in either block, gcd(block, extent) /
    stride.
    """
    return maximum(gcd(block, axis.size * axis.stride) // axis.stride, 1)


def _axes(sizes: dict[str, Ints], names: tuple[str, ...], order: str) -> tuple[Axis, ...]:
    axes: list[Axis] = []
    stride: Ints = 1
    open_axis = False
    for name in order.split("-"):
        if name not in sizes:
            continue
        if name in names:
            if open_axis:
                axes[-1] = Axis(axes[-1].size * sizes[name], axes[-1].stride)
            else:
                axes.append(Axis(sizes[name], stride))
        open_axis = name in names
        stride = stride * sizes[name]
    return tuple(axes)


# Effects of the network's topology on traffic between nodes: leaf switches, oversubscription,
# rails.
#
# Ports connect to leaves: a fat tree's leaf has every port of nodes_per_leaf nodes, a
# rail-optimised network's leaf one port (rail) of each of them. Above the leaves there is
# 1/network_oversubscription of the bandwidth below, shared evenly by all traffic at the same time.
# All groups of a kind communicate at once; so do all ranks that send.


TIMED_NVLINK_BYTES_PER_SECOND = 495e9
"""Bandwidth of the links on which bandwidth ramps were timed: the geometric mean of A100, H100 and
B200.
"""


def local_bandwidth(gpu: GpuSpec) -> float:
    """Return the per-direction bandwidth to another device of the same host: NVLink, else PCIe.

    Without peer-to-peer access, it is half of the PCIe bandwidth, because messages are written to
    host memory and then read from it.
    """
    return gpu.nvlink_bandwidth_bytes_per_second or gpu.pcie_bandwidth_bytes_per_second * (
        1.0 if gpu.peer_to_peer else 0.5
    )


def with_local_ramp(kernels: GpuEfficiency, *, gpu: GpuSpec) -> GpuEfficiency:
    """Return the constants with the bandwidth ramp of intra-host collectives adapted to this card's
    link.

    `ramp_bytes` is the number of bytes that NCCL's channels have in flight. NCCL opens channels in
    proportion to a link's bandwidth, so a card without NVLink needs only the fraction B_pcie /
    B_nvlink of these bytes.

    Source: NVIDIA/nccl, src/graph/search.cc (speedArrayIntra: the speed of one channel, by which a
    link's bandwidth is divided).
    """
    if gpu.nvlink_bandwidth_bytes_per_second or gpu.kind != "gpu":
        return kernels
    link = kernels.nvlink
    scale = local_bandwidth(gpu) / TIMED_NVLINK_BYTES_PER_SECOND
    ramped = dataclasses.replace(link, ramp_bytes=scale * link.ramp_bytes)
    return dataclasses.replace(kernels, nvlink=ramped)


def ring_slowdown(group: Group, *, in_domain: Ints, cluster: ClusterSpec) -> Floats:
    """Return the factor (at least 1) by which oversubscription slows a ring across leaves.

    A ring enters and leaves each leaf once. With j domains of the group below a leaf, 1/j of the
    leaf's ports send upwards, and 1/oversubscription of their bandwidth is available. The factor is
    max(1, oversubscription / j).
    """
    if not _is_oversubscribed(cluster):
        return 1.0
    in_leaf = maximum(members_in_block(group, block=_leaf_devices(cluster)), in_domain)
    return where(
        in_leaf < group.size,
        maximum(cluster.network_oversubscription * in_domain / in_leaf, 1.0),
        1.0,
    )


def send_slowdown(distance: Ints, *, cluster: ClusterSpec) -> Floats:
    """Return the slowdown (at least 1) caused by oversubscription if every rank sends to the rank
    `distance` positions later.

    The fraction min(distance / leaf, 1) of the messages leaves the leaf switch.
    """
    if not _is_oversubscribed(cluster):
        return 1.0
    upwards = minimum(distance / _leaf_devices(cluster), 1.0)
    return maximum(cluster.network_oversubscription * upwards, 1.0)


def exchange_slowdown(group: Group, *, in_domain: Ints, cluster: ClusterSpec) -> Floats:
    """Return the slowdown (at least 1) of an all-to-all caused by oversubscription.

    Of the traffic that leaves the NVLink domain (size - k), the part (size - j k) leaves the leaf
    switch. Without NVLink, no neighbour forwards messages to the right rail, so the fraction (k -
    1)/k that changes rails leaves the leaf, too.
    """
    if not _is_oversubscribed(cluster):
        return 1.0
    size, over = group.size, cluster.network_oversubscription
    in_leaf = maximum(members_in_block(group, block=_leaf_devices(cluster)), in_domain)
    upwards = (size - in_leaf) / maximum(size - in_domain, 1)
    if _is_rail_optimized(cluster) and not cluster.gpu.nvlink_bandwidth_bytes_per_second:
        upwards = maximum(upwards, 1.0 - 1.0 / in_domain)
    return maximum(over * upwards, 1.0)


def forwarded_bytes(away_bytes: Floats, *, in_domain: Ints, cluster: ClusterSpec) -> Floats:
    """Return the bytes of an all-to-all that cross NVLink before they enter the network.

    On a rail-optimised network, each message first moves to the GPU in its domain that is on the
    receiver's rail (NCCL's PXN). With k GPUs in the domain, 1/k of the messages already start on
    this GPU.
    """
    if not _is_rail_optimized(cluster) or not cluster.gpu.nvlink_bandwidth_bytes_per_second:
        return 0.0
    return away_bytes * (1.0 - 1.0 / in_domain)


def detour_latency(group: Group, cluster: ClusterSpec, inside: Link) -> Floats:
    """Return the additional seconds of a message between adjacent ranks on different rails: the
    latency of one hop over NVLink.
    """
    if not _is_rail_optimized(cluster):
        return 0.0
    off_rail = group.axes[-1].stride % cluster.gpus_per_node != 0
    return where(off_rail, inside.latency_s, 0.0) if anywhere(off_rail) else 0.0


def _is_oversubscribed(cluster: ClusterSpec) -> bool:
    return cluster.nodes_per_leaf is not None and cluster.network_oversubscription > 1.0


def _is_rail_optimized(cluster: ClusterSpec) -> bool:
    return cluster.network_topology == "rail_optimized"


def _leaf_devices(cluster: ClusterSpec) -> int:
    return (cluster.nodes_per_leaf or cluster.num_nodes) * cluster.gpus_per_node


# Collectives and point-to-point transfers on two levels: an NVLink domain, and the network between
# domains.


MEASURED_PEERS = 16
"""Largest NVLink domain in which measurements showed more latency with each additional rank. The
switches of a rack reduce in the network.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Ring collectives of one group of ranks per candidate; shape (n,)."""

    latency_s: Floats
    """Seconds of latency; zero for a group of one."""
    bandwidth: Floats
    """Bytes per second that each member sends."""
    ramp_bytes: Floats
    in_domain: Bools = True
    """Whether all members are in one NVLink domain."""
    inner: Ring | None = None
    """The part of an inter-rack ring that is inside a rack and may be slower. None if there is no
    such part.
    """

    def seconds(self, wire_bytes: Floats, *, pieces: Floats = 1.0) -> Floats:
        """Return the seconds for each member to send `wire_bytes`; a group of one sends none.

        In an all-gather or reduce-scatter of S bytes in total, each member sends S (n-1)/n bytes;
        in an all-reduce, twice that (NCCL's bus-bandwidth convention). The `pieces` are sent in
        sequence. Each has its own latency and ramp-up to full bandwidth.
        """
        seconds = _ramped_bytes(wire_bytes, pieces * self.ramp_bytes) / self.bandwidth
        if self.inner is not None:
            seconds = maximum(
                seconds,
                _ramped_bytes(wire_bytes, pieces * self.inner.ramp_bytes) / self.inner.bandwidth,
            )
        return pieces * self.latency_s + seconds


def _ramped_bytes(wire_bytes: Floats, ramp_bytes: Floats) -> Floats:
    """Return W + sqrt(W ramp_bytes): the number of bytes that would take the same time at full
    bandwidth.
    """
    product = wire_bytes * ramp_bytes
    return wire_bytes + (
        np.sqrt(product) if isinstance(product, np.ndarray) else math.sqrt(product)
    )


def group_ring(*, group: Group, machine: Machine) -> Ring:
    """Return the ring collectives over the ranks of a group.

    k members share an NVLink domain. Across domains, up to k rings share the load, each with a
    separate network port. Every ring also passes through all k members, so all rings together
    cannot exceed the NVLink bandwidth of one member: bandwidth = min(near, f min(NVLink, k x
    network)). f is the achievable fraction of the bandwidth of the slowest link in a ring over the
    network. Without this bound, the 64 ports of a rack would make the network faster than NVLink.

    A chunk visits every rank of its ring. In rings over the network, each of the n - 1 hops adds
    the overhead of NCCL's proxy, even inside a domain, and n / k - 1 of the hops cross the network.

    Source: NVIDIA/nccl, src/graph: search.cc (ncclTopoFollowPath takes a ring's bandwidth from
    every link on its way), tuning.cc (ncclTopoTuneModel: "Inter-node rings still have to launch
    nsteps * net overhead").
    """
    cluster, profile = machine.cluster, machine.profile
    size, k = group.size, group.in_domain
    inside, outside = profile.gpu.nvlink, profile.framework.network
    fast = inside.bandwidth_fraction * local_bandwidth(cluster.gpu)
    peers = minimum(k, MEASURED_PEERS) if group.domain.of_several_nodes else k
    latency = (size > 1) * inside.latency_s + inside.latency_per_peer_s * (peers - 1.0)
    crosses = k < size
    near = Ring(latency_s=latency, bandwidth=fast, ramp_bytes=inside.ramp_bytes)
    if not anywhere(crosses):
        return near
    ports = cluster.inter_node_bandwidth_bytes_per_second * k
    slow = outside.bandwidth_fraction * minimum(
        local_bandwidth(cluster.gpu), ports / ring_slowdown(group, in_domain=k, cluster=cluster)
    )
    crossing = cluster.inter_node_latency_s + (k == 1) * detour_latency(group, cluster, inside)
    lap = (
        inside.latency_s
        + outside.latency_s
        + (size - 1.0) * outside.latency_per_peer_s
        + (size / k - 1.0) * crossing
    )
    return Ring(
        latency_s=where(crosses, lap, latency),
        bandwidth=where(crosses, minimum(fast, slow), fast),
        ramp_bytes=where(crosses, outside.ramp_bytes, inside.ramp_bytes),
        in_domain=k == size,
        inner=near if group.domain.of_several_nodes else None,
    )


def tree_latency(ring: Ring, *, group: Group, machine: Machine) -> Floats:
    """Return the latency of an all-reduce in seconds.

    Across domains, this is the latency of NCCL's double binary tree, up and down, with a chain of
    the members in each domain. Inside one domain, it is the ring's latency.

    Source: NVIDIA/nccl, src/graph/tuning.cc (ncclTopoTuneModel): 2 ((k - 1) intra + log2(n / k)
    inter).
    """
    size, k = group.size, group.in_domain
    inside, outside = machine.profile.gpu.nvlink, machine.profile.framework.network
    levels = np.log2(maximum(size / k, 1.0))
    level_s = outside.latency_s + machine.cluster.inter_node_latency_s
    tree = inside.latency_s + 2.0 * ((k - 1.0) * outside.latency_per_peer_s + levels * level_s)
    return where(k < size, tree, ring.latency_s)


def tensor_ring(*, candidates: Candidates, case: TrainingCase) -> Ring:
    """Return the ring collectives of the tensor-parallel group."""
    return group_ring(machine=case, group=dense_group(candidates, "tp", cluster=case.cluster))


def send_seconds(
    message_bytes: Floats, *, distance: Ints, crosses: Bools, machine: Machine
) -> Floats:
    """Return the seconds to send one message to the rank `distance` positions later.

    If `crosses`, that rank is in another NVLink domain. All ranks send at once, each over its own
    link.
    """
    cluster, profile = machine.cluster, machine.profile
    inside = profile.gpu.nvlink
    near = _transfer(message_bytes, inside, local_bandwidth(cluster.gpu))
    network = cluster.inter_node_bandwidth_bytes_per_second / send_slowdown(
        distance, cluster=cluster
    )
    hop = cluster.inter_node_latency_s + detour_latency(
        adjacent_group(2, stride=distance, cluster=cluster), cluster, inside
    )
    return where(crosses, _transfer(message_bytes, profile.framework.network, network) + hop, near)


def all_to_all_seconds(wire_bytes: Floats, *, group: Group, machine: Machine) -> Floats:
    """Return the time in seconds of an all-to-all in which each member sends `wire_bytes` in total,
    spread evenly over the others.

    A group of one sends nothing.
    """
    size, k = group.size, group.in_domain
    away = wire_bytes * ((size - k) / maximum(size - 1, 1))
    return exchange_seconds(wire_bytes - away, away, machine=machine, group=group)


def exchange_seconds(
    near_bytes: Floats,
    away_bytes: Floats,
    *,
    group: Group,
    machine: Machine,
    fraction: float | None = None,
) -> Floats:
    """Return the time in seconds of an exchange in which each member sends `near_bytes` inside its
    NVLink domain and `away_bytes` to other domains.

    Both parts run concurrently, so the slower one determines the time. `fraction` is the fraction
    of NVLink bandwidth that libraries other than NCCL reach.
    """
    cluster, profile = machine.cluster, machine.profile
    size, k = group.size, group.in_domain
    inside, outside = profile.gpu.all_to_all, profile.framework.network
    near = (near_bytes + forwarded_bytes(away_bytes, in_domain=k, cluster=cluster)) / (
        (fraction or inside.bandwidth_fraction) * local_bandwidth(cluster.gpu)
    )
    network = outside.bandwidth_fraction * cluster.inter_node_bandwidth_bytes_per_second
    far = away_bytes * exchange_slowdown(group, in_domain=k, cluster=cluster) / network
    latency = (size > 1) * inside.latency_s + (size > k) * (
        outside.latency_s + cluster.inter_node_latency_s
    )
    seconds: Floats = latency + maximum(near, far)
    return seconds


def _transfer(message_bytes: Floats, link: Link, bandwidth: Floats) -> Floats:
    return link.latency_s + message_bytes / (link.bandwidth_fraction * bandwidth)
