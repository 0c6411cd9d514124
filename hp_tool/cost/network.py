"""Groups of ranks on the network: their places, the effect of its topology on their traffic, and the seconds of collectives.

Ranks are numbered through the parallel dimensions in an order, innermost first, as in Megatron Core's RankGenerator. Dense
layers form the grid t c d p, experts the grid e_t e_p (t c d / (e_p e_t)) p over the same ranks: both in the same order, the
former without ep, the latter without cp.
"""

import math
from dataclasses import dataclass

import numpy as np

from hp_tool.cost.arrays import Bools, Floats, Ints, anywhere, gcd, maximum, minimum, where
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import Machine, TrainingCase
from hp_tool.domain.efficiency import Link
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.errors import InputError


@dataclass(frozen=True, slots=True)
class Axis:
    """`size` ranks at a distance of `stride`; plain numbers, or arrays of shape (n,)."""

    size: Ints
    stride: Ints


Group = tuple[Axis, ...]
"""The ranks of one group: all combinations of its axes, innermost first. Neighbouring dimensions form one axis."""


DIMENSIONS = ("tp", "cp", "ep", "dp", "pp")


def checked_order(order: str) -> str:
    """The full order of DIMENSIONS for a query's rank_order. Raises InputError.

    cp and ep follow tp if left out (Megatron-LM's --use-tp-pp-dp-mapping is tp-cp-ep-pp-dp).
    """
    named = order.split("-")
    if len(set(named)) < len(named) or not {"tp", "dp", "pp"} <= set(named) <= set(DIMENSIONS):
        raise InputError(
            f"rank_order {order[:80]!r} must name each of tp, dp, pp (and cp, ep) once, innermost first, as in tp-cp-ep-dp-pp",
            field="parallel.rank_order",
        )
    place = named.index("tp") + 1
    named[place:place] = [name for name in ("cp", "ep") if name not in named]
    return "-".join(named)


def dense_group(candidates: Candidates, *names: str, order: str) -> Group:
    """The group over the dimensions `names` (tp, cp, dp, pp) of attention and dense layers."""
    c = candidates
    sizes: dict[str, Ints] = {
        "tp": c.tensor_parallel_size,
        "cp": c.context_parallel_size,
        "dp": c.data_parallel_size,
        "pp": c.pipeline_parallel_size,
    }
    return _group(sizes, names, order)


def expert_group(candidates: Candidates, *names: str, order: str) -> Group:
    """The group over the dimensions `names` of experts: tp (experts' tensor parallelism), ep, dp (their replicas), pp."""
    c = candidates
    ranks = c.tensor_parallel_size * c.context_parallel_size * c.data_parallel_size
    sizes: dict[str, Ints] = {
        "tp": c.expert_tensor_parallel_size,
        "ep": c.expert_parallel_size,
        "dp": maximum(ranks // (c.expert_parallel_size * c.expert_tensor_parallel_size), 1),
        "pp": c.pipeline_parallel_size,
    }
    return _group(sizes, names, order)


def line(size: Ints, stride: Ints) -> Group:
    """`size` ranks at a distance of `stride`."""
    return (Axis(size, stride),)


def group_size(group: Group) -> Ints:
    """Ranks in the group."""
    return math.prod((axis.size for axis in group), start=1)


def split(group: Group, parts: Ints) -> tuple[Group, Group]:
    """(one of `parts` equal parts of the group, the ranks with the same place in each part).

    The outermost axis is divided, into single ranks if it has fewer than `parts`.
    """
    last = group[-1]
    parts = minimum(parts, last.size)
    size = last.size // parts
    return (*group[:-1], Axis(size, last.stride)), line(parts, last.stride * size)


def sharing(group: Group, *, block: int) -> Ints:
    """Members of a group within one block of `block` consecutive ranks (an NVLink domain, the devices under a leaf).

    If groups do not fit into blocks evenly, some straddle an edge, and all wait for them: the count is that of the ranks on the
    short side, gcd(block, extent) / stride per axis.
    """
    counts = (_in_block(axis, block) for axis in group)
    return math.prod(counts, start=1)


def _group(sizes: dict[str, Ints], names: tuple[str, ...], order: str) -> Group:
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


def _in_block(axis: Axis, block: int) -> Ints:
    extent = axis.size * axis.stride
    return maximum(gcd(block, extent) // axis.stride, 1)


# Effects of the network's topology on traffic between nodes: leaf switches, oversubscription, rails.
#
# Ports connect to leaves: a fat tree's leaf has every port of nodes_per_leaf nodes, a rail-optimised network's leaf one port
# (rail) of each of them. Above the leaves there is 1/network_oversubscription of the bandwidth below, shared evenly by all
# traffic at the same time. All groups of a kind communicate at once; so do all ranks that send.


def local_bandwidth(cluster: ClusterSpec) -> float:
    """Per-direction bandwidth to a neighbour in the domain: NVLink, or PCIe without NVLink."""
    return cluster.gpu.nvlink_bandwidth_bytes_per_second or cluster.gpu.pcie_bandwidth_bytes_per_second


def ring_slowdown(group: Group, *, in_domain: Ints, cluster: ClusterSpec) -> Floats:
    """Factor (at least 1) by which oversubscription slows a ring across leaves.

    A ring enters and leaves each leaf once, whatever its members there: with j domains of the group under a leaf, 1/j of the
    leaf's ports send upwards, and 1/oversubscription of their bandwidth exists: max(1, oversubscription / j).
    """
    if not _oversubscribed(cluster):
        return 1.0
    in_leaf = maximum(sharing(group, block=_leaf_devices(cluster)), in_domain)
    return where(in_leaf < group_size(group), maximum(cluster.network_oversubscription * in_domain / in_leaf, 1.0), 1.0)


def send_slowdown(distance: Ints, *, cluster: ClusterSpec) -> Floats:
    """The same factor if every rank sends `distance` ranks on: the share distance / leaf of them, at most all, goes upwards."""
    if not _oversubscribed(cluster):
        return 1.0
    upwards = minimum(distance / _leaf_devices(cluster), 1.0)
    return maximum(cluster.network_oversubscription * upwards, 1.0)


def exchange_slowdown(group: Group, *, in_domain: Ints, cluster: ClusterSpec) -> Floats:
    """The same factor for an all-to-all: of what leaves the domain (size - k), the share (size - j k) leaves the leaf.

    Without NVLink nothing forwards to the right rail, and the (k - 1)/k that change rails go upwards too.
    """
    if not _oversubscribed(cluster):
        return 1.0
    size, over = group_size(group), cluster.network_oversubscription
    in_leaf = maximum(sharing(group, block=_leaf_devices(cluster)), in_domain)
    upwards = (size - in_leaf) / maximum(size - in_domain, 1)
    if _changes_rails(cluster) and not cluster.gpu.nvlink_bandwidth_bytes_per_second:
        upwards = maximum(upwards, 1.0 - 1.0 / in_domain)
    return maximum(over * upwards, 1.0)


def forwarded_bytes(away_bytes: Floats, *, in_domain: Ints, cluster: ClusterSpec) -> Floats:
    """Bytes of an all-to-all that cross NVLink before the network.

    On rails each message first goes to the neighbour on its receiver's rail (NCCL's PXN), one of the k in the domain; 1/k start
    there.
    """
    if not _changes_rails(cluster) or not cluster.gpu.nvlink_bandwidth_bytes_per_second:
        return 0.0
    return away_bytes * (1.0 - 1.0 / in_domain)


def detour_latency(group: Group, cluster: ClusterSpec, inside: Link) -> Floats:
    """Additional seconds of a message between neighbours on different rails: one hop over NVLink."""
    if not _changes_rails(cluster):
        return 0.0
    off_rail = group[-1].stride % cluster.gpus_per_node != 0
    return where(off_rail, inside.latency_s, 0.0) if anywhere(off_rail) else 0.0


def _oversubscribed(cluster: ClusterSpec) -> bool:
    return cluster.nodes_per_leaf is not None and cluster.network_oversubscription > 1.0


def _changes_rails(cluster: ClusterSpec) -> bool:
    return cluster.network_topology == "rail_optimized"


def _leaf_devices(cluster: ClusterSpec) -> int:
    return (cluster.nodes_per_leaf or cluster.num_nodes) * cluster.gpus_per_node


# Collectives and point-to-point transfers on two levels: an NVLink domain, and the network between domains.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The ring collectives of one group of ranks per candidate; shape (n,)."""

    latency_s: Floats
    """Zero for a group of one."""
    bandwidth: Floats
    """Bytes per second that each member sends."""
    ramp_bytes: Floats
    in_domain: Bools = True
    """Whether all members share an NVLink domain."""

    def seconds(self, wire_bytes: Floats) -> Floats:
        """Seconds to send `wire_bytes` from each member; zero bytes for a group of one.

        An all-gather or reduce-scatter of S bytes in total sends S (n-1)/n, an all-reduce twice that (NCCL's bus-bandwidth
        convention).
        """
        product = wire_bytes * self.ramp_bytes
        mean = np.sqrt(product) if isinstance(product, np.ndarray) else math.sqrt(product)
        return self.latency_s + (wire_bytes + mean) / self.bandwidth


def ring(*, group_size: Ints, stride: Ints, machine: Machine) -> Ring:
    """The ring over `group_size` ranks at a distance of `stride`."""
    return group_ring(machine=machine, group=line(group_size, stride))


def group_ring(*, group: Group, machine: Machine) -> Ring:
    """The ring over the ranks of a group.

    k members share an NVLink domain. Across domains each of the k uses its own network port, so k rings share the load (NCCL's
    multi-ring): bandwidth min(NVLink, k x network).
    """
    cluster, profile = machine.cluster, machine.profile
    size = group_size(group)
    k = sharing(group, block=cluster.nvlink_domain_size)
    inside, outside = profile.gpu.nvlink, profile.framework.network
    fast = inside.bandwidth_fraction * local_bandwidth(cluster)
    latency = (size > 1) * inside.latency_s + inside.latency_per_peer_s * (k - 1.0)
    crosses = k < size
    if not anywhere(crosses):
        return Ring(latency_s=latency, bandwidth=fast, ramp_bytes=inside.ramp_bytes)
    slow = outside.bandwidth_fraction * cluster.inter_node_bandwidth_bytes_per_second * k
    slow = slow / ring_slowdown(group, in_domain=k, cluster=cluster)
    hop = outside.latency_per_peer_s + cluster.inter_node_latency_s + (k == 1) * detour_latency(group, cluster, inside)
    return Ring(
        latency_s=latency + crosses * (outside.latency_s + (size / k - 1.0) * hop),
        bandwidth=where(crosses, minimum(fast, slow), fast),
        ramp_bytes=where(crosses, outside.ramp_bytes, inside.ramp_bytes),
        in_domain=k == size,
    )


def tensor_ring(*, candidates: Candidates, case: TrainingCase) -> Ring:
    """The tensor-parallel group's ring."""
    return group_ring(machine=case, group=dense_group(candidates, "tp", order=case.cluster.rank_order))


def send_seconds(message_bytes: Floats, *, distance: Ints, crosses: Bools, machine: Machine) -> Floats:
    """Seconds to send one message to the rank `distance` further on, into another NVLink domain where `crosses`.

    All ranks send at once, each over its own link.
    """
    cluster, profile = machine.cluster, machine.profile
    inside = profile.gpu.nvlink
    near = _transfer(message_bytes, inside, local_bandwidth(cluster))
    network = cluster.inter_node_bandwidth_bytes_per_second / send_slowdown(distance, cluster=cluster)
    hop = cluster.inter_node_latency_s + detour_latency(line(2, distance), cluster, inside)
    return where(crosses, _transfer(message_bytes, profile.framework.network, network) + hop, near)


def all_to_all_seconds(wire_bytes: Floats, *, group: Group, machine: Machine) -> Floats:
    """Seconds in which each member sends `wire_bytes` spread evenly over the others; zero bytes for a group of one."""
    size = group_size(group)
    k = sharing(group, block=machine.cluster.nvlink_domain_size)
    away = wire_bytes * ((size - k) / maximum(size - 1, 1))
    return exchange_seconds(wire_bytes - away, away, machine=machine, group=group)


def exchange_seconds(near_bytes: Floats, away_bytes: Floats, *, group: Group, machine: Machine) -> Floats:
    """Seconds in which each member sends `near_bytes` inside its NVLink domain and `away_bytes` out of it.

    Both travel at the same time, and the slower decides.
    """
    cluster, profile = machine.cluster, machine.profile
    size = group_size(group)
    k = sharing(group, block=cluster.nvlink_domain_size)
    inside, outside = profile.gpu.all_to_all, profile.framework.network
    near = (near_bytes + forwarded_bytes(away_bytes, in_domain=k, cluster=cluster)) / (
        inside.bandwidth_fraction * local_bandwidth(cluster)
    )
    network = outside.bandwidth_fraction * cluster.inter_node_bandwidth_bytes_per_second
    far = away_bytes * exchange_slowdown(group, in_domain=k, cluster=cluster) / network
    latency = (size > 1) * inside.latency_s + (size > k) * (outside.latency_s + cluster.inter_node_latency_s)
    seconds: Floats = latency + maximum(near, far)
    return seconds


def _transfer(message_bytes: Floats, link: Link, bandwidth: Floats) -> Floats:
    return link.latency_s + message_bytes / (link.bandwidth_fraction * bandwidth)
