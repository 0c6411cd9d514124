"""Collectives and point-to-point transfers on two levels: an NVLink domain, and the network between domains."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.cost.arrays import BoolArray, Column, FloatArray, IntArray, anywhere, maximum, minimum, sqrt, where
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.topology import (
    Group,
    dense_group,
    detour_latency,
    exchange_slowdown,
    forwarded_bytes,
    group_size,
    line,
    local_bandwidth,
    ring_slowdown,
    send_slowdown,
    sharing,
)
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
    in_domain: BoolArray | bool = True
    """All members share an NVLink domain."""

    def seconds(self, wire_bytes: FloatArray) -> FloatArray:
        """Seconds to send `wire_bytes` from each member: S (n-1)/n for all-gather and reduce-scatter of S bytes in all,
        twice that for all-reduce (NCCL's bus-bandwidth convention); zero bytes for a group of one.
        """
        return self.latency_s + (wire_bytes + sqrt(wire_bytes * self.ramp_bytes)) / self.bandwidth


def ring(
    *, group_size: IntArray | FloatArray, stride: IntArray | FloatArray | int, cluster: ClusterSpec, profile: EfficiencyProfile
) -> Ring:
    """The ring over `group_size` ranks that are `stride` apart."""
    return group_ring(group=line(group_size, stride), cluster=cluster, profile=profile)


def group_ring(*, group: Group, cluster: ClusterSpec, profile: EfficiencyProfile) -> Ring:
    """The ring over the ranks of a group.

    k members share an NVLink domain. Across domains each of the k drives its own network port, so k rings share the load
    (NCCL's multi-ring): bandwidth min(NVLink, k x network).
    """
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


def tensor_ring(*, candidates: Candidates, cluster: ClusterSpec, profile: EfficiencyProfile) -> Ring:
    """The tensor-parallel group's ring."""
    return group_ring(group=dense_group(candidates, "tp", order=cluster.rank_order), cluster=cluster, profile=profile)


def send_seconds(
    message_bytes: FloatArray, *, distance: IntArray, crosses: Column, cluster: ClusterSpec, profile: EfficiencyProfile
) -> FloatArray:
    """Seconds to send one message to the rank `distance` further on, into another NVLink domain where `crosses`; all ranks
    send at once, each over its own link.
    """
    inside = profile.gpu.nvlink
    near = _transfer(message_bytes, inside, local_bandwidth(cluster))
    network = cluster.inter_node_bandwidth_bytes_per_second / send_slowdown(distance, cluster=cluster)
    hop = cluster.inter_node_latency_s + detour_latency(line(2, distance), cluster, inside)
    return where(crosses, _transfer(message_bytes, profile.framework.network, network) + hop, near)


def all_to_all_seconds(wire_bytes: FloatArray, *, group: Group, cluster: ClusterSpec, profile: EfficiencyProfile) -> FloatArray:
    """Seconds in which each member sends `wire_bytes` spread evenly over the others. Zero bytes for a group of one."""
    size = group_size(group)
    k = sharing(group, block=cluster.nvlink_domain_size)
    away = wire_bytes * ((size - k) / maximum(size - 1, 1))
    return exchange_seconds(wire_bytes - away, away, group=group, cluster=cluster, profile=profile)


def exchange_seconds(
    near_bytes: FloatArray, away_bytes: FloatArray, *, group: Group, cluster: ClusterSpec, profile: EfficiencyProfile
) -> FloatArray:
    """Seconds in which each member sends `near_bytes` inside its NVLink domain and `away_bytes` out of it: both travel at
    the same time, and the slower decides.
    """
    size = group_size(group)
    k = sharing(group, block=cluster.nvlink_domain_size)
    inside, outside = profile.gpu.all_to_all, profile.framework.network
    near = (near_bytes + forwarded_bytes(away_bytes, in_domain=k, cluster=cluster)) / (
        inside.bandwidth_fraction * local_bandwidth(cluster)
    )
    network = outside.bandwidth_fraction * cluster.inter_node_bandwidth_bytes_per_second
    far = away_bytes * exchange_slowdown(group, in_domain=k, cluster=cluster) / network
    latency = (size > 1) * inside.latency_s + (size > k) * (outside.latency_s + cluster.inter_node_latency_s)
    seconds: FloatArray = latency + maximum(near, far)
    return seconds


def _transfer(message_bytes: FloatArray, link: Link, bandwidth: float) -> FloatArray:
    return link.latency_s + message_bytes / (link.bandwidth_fraction * bandwidth)
