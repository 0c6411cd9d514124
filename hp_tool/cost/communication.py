"""Collectives and point-to-point transfers on two levels: an NVLink domain, and the network between domains."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.cost.candidates import FloatArray, IntArray
from hp_tool.cost.elementwise import anywhere, maximum, minimum, sqrt, where
from hp_tool.domain.efficiency import EfficiencyProfile, Link
from hp_tool.domain.hardware import ClusterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The ring collectives of one group of ranks for each candidate; arrays of shape (n,)."""

    latency_s: FloatArray
    """Zero for a group of one."""
    bandwidth: FloatArray | float
    """Bytes a second that each member sends."""
    ramp_bytes: FloatArray | float

    def seconds(self, wire_bytes: FloatArray) -> FloatArray:
        """Seconds to send `wire_bytes` from each member: S (n-1)/n for all-gather and reduce-scatter of S bytes in all,
        twice that for all-reduce (NCCL's bus-bandwidth convention); zero bytes for a group of one.
        """
        return self.latency_s + (wire_bytes + sqrt(wire_bytes * self.ramp_bytes)) / self.bandwidth


def ring(
    *, group_size: IntArray | FloatArray, stride: IntArray | FloatArray | int, cluster: ClusterSpec, profile: EfficiencyProfile
) -> Ring:
    """The ring over `group_size` ranks that are `stride` apart (Megatron's order: tensor parallel innermost).

    Members of one NVLink domain: k = domain / stride, at least 1. Across domains each of the k drives its own network
    port, so k rings share the load (NCCL's multi-ring): bandwidth min(NVLink, k x network).
    """
    k = minimum(maximum(cluster.nvlink_domain_size // stride, 1), group_size)
    inside, outside = profile.gpu.nvlink, profile.framework.network
    fast = inside.bandwidth_fraction * local_bandwidth(cluster)
    latency = (group_size > 1) * inside.latency_s + inside.latency_per_peer_s * (k - 1.0)
    crosses = k < group_size
    if not anywhere(crosses):
        return Ring(latency_s=latency, bandwidth=fast, ramp_bytes=inside.ramp_bytes)
    slow = outside.bandwidth_fraction * cluster.inter_node_bandwidth_bytes_per_second * k
    hops = (group_size / k - 1.0) * (outside.latency_per_peer_s + cluster.inter_node_latency_s)
    return Ring(
        latency_s=latency + crosses * (outside.latency_s + hops),
        bandwidth=where(crosses, minimum(fast, slow), fast),
        ramp_bytes=where(crosses, outside.ramp_bytes, inside.ramp_bytes),
    )


def tensor_ring(*, group_size: IntArray, cluster: ClusterSpec, profile: EfficiencyProfile) -> Ring:
    """The tensor-parallel group's ring: neighbouring ranks."""
    return ring(group_size=group_size, stride=1, cluster=cluster, profile=profile)


def send_seconds(
    message_bytes: FloatArray, *, distance: IntArray, cluster: ClusterSpec, profile: EfficiencyProfile
) -> FloatArray:
    """Seconds to send one message to the rank `distance` further on; all ranks send at once, each over its own link."""
    near = _transfer(message_bytes, profile.gpu.nvlink, local_bandwidth(cluster))
    network = cluster.inter_node_bandwidth_bytes_per_second
    far = _transfer(message_bytes, profile.framework.network, network) + cluster.inter_node_latency_s
    # The receiver sits in another domain exactly where a domain holds no more ranks than the distance.
    return where(distance >= cluster.nvlink_domain_size, far, near)


def all_to_all_seconds(
    wire_bytes: FloatArray, *, group_size: IntArray, stride: IntArray, cluster: ClusterSpec, profile: EfficiencyProfile
) -> FloatArray:
    """Seconds in which each member sends `wire_bytes` spread evenly over the others: what stays in the NVLink domain and
    what crosses the network travel at the same time; the slower decides. Zero bytes for a group of one.
    """
    k = minimum(maximum(cluster.nvlink_domain_size // stride, 1), group_size)
    inside, outside = profile.gpu.all_to_all, profile.framework.network
    away = wire_bytes * ((group_size - k) / maximum(group_size - 1, 1))
    near = (wire_bytes - away) / (inside.bandwidth_fraction * local_bandwidth(cluster))
    far = away / (outside.bandwidth_fraction * cluster.inter_node_bandwidth_bytes_per_second)
    latency = (group_size > 1) * inside.latency_s + (group_size > k) * (outside.latency_s + cluster.inter_node_latency_s)
    return latency + maximum(near, far)


def _transfer(message_bytes: FloatArray, link: Link, bandwidth: float) -> FloatArray:
    return link.latency_s + message_bytes / (link.bandwidth_fraction * bandwidth)


def local_bandwidth(cluster: ClusterSpec) -> float:
    """Per-direction bandwidth to a neighbour in the domain: NVLink, or PCIe where there is none."""
    return cluster.gpu.nvlink_bandwidth_bytes_per_second or cluster.gpu.pcie_bandwidth_bytes_per_second
