"""Among which ranks ZeRO divides parameters, gradients and optimizer states, and which ranks repeat them."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.cost.block import Column
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.communication import ring
from hp_tool.cost.elementwise import anywhere, maximum, minimum, where
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec

PREFETCHED_LAYERS = 1
"""ZeRO 3: layers whose weights are gathered while the one before them computes (FSDP2's implicit prefetch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """`shards` ranks, `stride` apart, divide what `replicas` such groups hold alike. Hybrid sharding (HSDP) has the shard
    group inside and its replicas outside: FSDP2's two-dimensional mesh, Megatron's num_distributed_optimizer_instances.
    """

    shards: Column
    replicas: Column
    stride: Column

    def replica_seconds(self, gradient_bytes: Column, *, cluster: ClusterSpec, profile: EfficiencyProfile) -> Column:
        """All-reduce of a rank's shard of `gradient_bytes` over the replicas: 2 G / N (r - 1) / r bytes on the wire."""
        if not anywhere(self.replicas > 1):
            return 0.0
        group = ring(group_size=self.replicas, stride=self.stride * self.shards, cluster=cluster, profile=profile)
        return group.seconds(2.0 * gradient_bytes / self.shards * (1.0 - 1.0 / self.replicas))


def sharding(candidates: Candidates, *, copies: Column, stride: Column) -> Sharding:
    """How the `copies` ranks that hold the same parameters divide their states: all of them, or with
    data_parallel_shard_size S in d / S groups (each of S c ranks: context-parallel ranks hold the same parameters too).
    """
    size = candidates.data_parallel_shard_size
    if not anywhere(size > 0):
        return Sharding(shards=copies, replicas=1, stride=stride)
    replicas = where(size > 0, candidates.data_parallel_size // maximum(size, 1), 1)
    return Sharding(shards=copies // replicas, replicas=replicas, stride=stride)


def fully_sharded_seconds(
    *, gather: Column, reduce: Column, forward: Column, backward: Column, layers: Column, overlap: float
) -> Column:
    """Exposed seconds of ZeRO 3 in one micro-batch, whose weights are gathered for either pass and whose gradients are
    reduced behind the backward one (arXiv 2304.11277 section 3.3).

    Layer by layer, the gather of the next one hides behind the running one; the first gather of a pass, and the last
    reduction, have nothing to hide behind: of the L layers' communication at most the share (L - 1) / L is hidden.
    """
    hidden = overlap * maximum(1.0 - 1.0 / layers, 0.0)
    return exposed(gather, behind=forward, overlap=hidden) + exposed(gather + reduce, behind=backward, overlap=hidden)


def exposed(seconds: Column, *, behind: Column, overlap: Column) -> Column:
    """What is left of communication that runs beside `behind` seconds of compute, of which the share `overlap` is used."""
    return seconds - overlap * minimum(seconds, behind)
