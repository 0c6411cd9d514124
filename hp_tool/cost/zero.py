"""Among which ranks ZeRO divides parameters, gradients and optimizer states, and which ranks repeat them."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.cost.arrays import Column, anywhere, maximum, where
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.collectives import group_ring
from hp_tool.cost.topology import Group, group_size, line, split
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec

PREFETCHED_LAYERS = 1
"""ZeRO 3: layers whose weights are gathered while the one before them computes (FSDP2's implicit prefetch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The ranks of `shard_group` divide what all groups along `replica_group` hold alike. Hybrid sharding (HSDP) has the shard
    group inside and its replicas outside: FSDP2's two-dimensional mesh, Megatron's num_distributed_optimizer_instances.
    """

    shard_group: Group
    replica_group: Group

    @property
    def shards(self) -> Column:
        return group_size(self.shard_group)

    def replica_seconds(self, gradient_bytes: Column, *, cluster: ClusterSpec, profile: EfficiencyProfile) -> Column:
        """All-reduce of a rank's shard of `gradient_bytes` over the replicas: 2 G / N (r - 1) / r bytes on the wire."""
        replicas = group_size(self.replica_group)
        if not anywhere(replicas > 1):
            return 0.0
        group = group_ring(group=self.replica_group, cluster=cluster, profile=profile)
        return group.seconds(2.0 * gradient_bytes / self.shards * (1.0 - 1.0 / replicas))


def sharding(candidates: Candidates, *, group: Group) -> Sharding:
    """How the ranks of `group`, which hold the same parameters, divide their states: all of them, or with
    data_parallel_shard_size S in d / S groups (each of S c ranks: context-parallel ranks hold the same parameters too).
    """
    size = candidates.data_parallel_shard_size
    if not anywhere(size > 0):
        return Sharding(shard_group=group, replica_group=line(1, 1))
    replicas = where(size > 0, candidates.data_parallel_size // maximum(size, 1), 1)
    shard_group, replica_group = split(group, replicas)
    return Sharding(shard_group=shard_group, replica_group=replica_group)
