"""What the network's topology does to traffic between nodes: leaf switches, oversubscription, rails.

Ports hang on leaves: a fat tree's leaf holds every port of nodes_per_leaf nodes, a rail-optimised network's leaf one port
(rail) of each of them. Above the leaves there is 1/network_oversubscription of the bandwidth below, shared evenly by
whatever leaves at the same time. All groups of a kind communicate at once; so do all ranks that send.
"""

from __future__ import annotations

from hp_tool.cost.elementwise import Column, anywhere, maximum, minimum, where
from hp_tool.cost.placement import Group, group_size, sharing
from hp_tool.domain.efficiency import Link
from hp_tool.domain.hardware import ClusterSpec


def local_bandwidth(cluster: ClusterSpec) -> float:
    """Per-direction bandwidth to a neighbour in the domain: NVLink, or PCIe where there is none."""
    return cluster.gpu.nvlink_bandwidth_bytes_per_second or cluster.gpu.pcie_bandwidth_bytes_per_second


def ring_slowdown(group: Group, *, in_domain: Column, cluster: ClusterSpec) -> Column:
    """Share of its ports' bandwidth that a ring across leaves loses, as a factor of at least 1.

    A ring enters and leaves each leaf once, however many members it has there: with j domains of the group under a leaf,
    1/j of the leaf's ports send upwards, and 1/oversubscription of their bandwidth exists: max(1, oversubscription / j).
    """
    if not _oversubscribed(cluster):
        return 1.0
    in_leaf = maximum(sharing(group, block=_leaf_devices(cluster)), in_domain)
    return where(in_leaf < group_size(group), maximum(cluster.network_oversubscription * in_domain / in_leaf, 1.0), 1.0)


def send_slowdown(distance: Column, *, cluster: ClusterSpec) -> Column:
    """The same of every rank sending `distance` ranks on: a share distance / leaf of them, at most all, goes upwards."""
    if not _oversubscribed(cluster):
        return 1.0
    upwards = minimum(distance / _leaf_devices(cluster), 1.0)
    return maximum(cluster.network_oversubscription * upwards, 1.0)


def exchange_slowdown(group: Group, *, in_domain: Column, cluster: ClusterSpec) -> Column:
    """The same of an all-to-all: of what leaves the domain (size - k), the share (size - j k) leaves the leaf. Without NVLink
    nothing forwards to the right rail, and the (k - 1)/k that change rails climb as well.
    """
    if not _oversubscribed(cluster):
        return 1.0
    size, over = group_size(group), cluster.network_oversubscription
    in_leaf = maximum(sharing(group, block=_leaf_devices(cluster)), in_domain)
    upwards = (size - in_leaf) / maximum(size - in_domain, 1)
    if _changes_rails(cluster) and not cluster.gpu.nvlink_bandwidth_bytes_per_second:
        upwards = maximum(upwards, 1.0 - 1.0 / in_domain)
    return maximum(over * upwards, 1.0)


def forwarded_bytes(away_bytes: Column, *, in_domain: Column, cluster: ClusterSpec) -> Column:
    """Bytes of an all-to-all that cross NVLink before the network: on rails each message first goes to the neighbour on its
    receiver's rail (NCCL's PXN), one of the k in the domain; 1/k are there already.
    """
    if not _changes_rails(cluster) or not cluster.gpu.nvlink_bandwidth_bytes_per_second:
        return 0.0
    return away_bytes * (1.0 - 1.0 / in_domain)


def detour_latency(group: Group, cluster: ClusterSpec, inside: Link) -> Column:
    """Seconds more for a message between neighbours on different rails: one hop over NVLink to the right one."""
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
