"""Collectives and point-to-point transfers on two levels: an NVLink domain, and the network between domains."""

from __future__ import annotations

import numpy as np

from hp_tool.cost.candidates import FloatArray, IntArray
from hp_tool.domain.efficiency import EfficiencyProfile, Link
from hp_tool.domain.hardware import ClusterSpec


def peers_in_domain(cluster: ClusterSpec, *, group_size: IntArray, stride: IntArray) -> FloatArray:
    """How many members of a group share one NVLink domain, for ranks `stride` apart (Megatron's order: tp innermost).

    Shapes (n,). At least 1; a group whose stride exceeds the domain has one member in each.
    """
    return np.clip(cluster.nvlink_domain_size // stride, 1, group_size).astype(np.float64)


def ring_seconds(
    wire_bytes: FloatArray, *, group_size: IntArray, stride: IntArray, cluster: ClusterSpec, profile: EfficiencyProfile
) -> FloatArray:
    """Seconds of a ring collective that sends `wire_bytes` from each member: S (n-1)/n for all-gather and reduce-scatter
    of S bytes in all, twice that for all-reduce (NCCL's bus-bandwidth convention). Zero for a group of one.

    Across domains each of the k members in a domain drives its own network port, so k rings share the load
    (NCCL's multi-ring): W / min(NVLink, k x network).
    """
    n = group_size.astype(np.float64)
    k = peers_in_domain(cluster, group_size=group_size, stride=stride)
    inside, outside = profile.gpu.nvlink, profile.framework.network
    crosses = k < n
    fast = inside.bandwidth_fraction * local_bandwidth(cluster)
    slow = outside.bandwidth_fraction * cluster.inter_node_bandwidth_bytes_per_second * k
    ramp = np.where(crosses, outside.ramp_bytes, inside.ramp_bytes)
    bandwidth = np.where(crosses, np.minimum(fast, slow), fast)
    latency = inside.latency_s + inside.latency_per_peer_s * (k - 1.0)
    latency = latency + crosses * (
        outside.latency_s + (n / k - 1.0) * (outside.latency_per_peer_s + cluster.inter_node_latency_s)
    )
    return np.where(n > 1.0, latency + (wire_bytes + np.sqrt(wire_bytes * ramp)) / bandwidth, 0.0)


def send_seconds(
    message_bytes: FloatArray, *, distance: IntArray, cluster: ClusterSpec, profile: EfficiencyProfile
) -> FloatArray:
    """Seconds to send one message to the rank `distance` further on; all ranks send at once, each over its own link."""
    # Neighbours are in another domain exactly where a domain holds no more ranks than their distance.
    crosses = distance >= cluster.nvlink_domain_size
    inside, outside = profile.gpu.nvlink, profile.framework.network
    near = _transfer(message_bytes, inside, local_bandwidth(cluster))
    far = _transfer(message_bytes, outside, cluster.inter_node_bandwidth_bytes_per_second) + cluster.inter_node_latency_s
    return np.where(crosses, far, near)


def _transfer(message_bytes: FloatArray, link: Link, bandwidth: float) -> FloatArray:
    return link.latency_s + message_bytes / (link.bandwidth_fraction * bandwidth)


def local_bandwidth(cluster: ClusterSpec) -> float:
    """Per-direction bandwidth to a neighbour in the domain: NVLink, or PCIe where there is none."""
    return cluster.gpu.nvlink_bandwidth_bytes_per_second or cluster.gpu.pcie_bandwidth_bytes_per_second
